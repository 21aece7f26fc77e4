"""The plain model: on its device, in its precision, compiled, and the same on all ranks."""

import ctypes
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch import nn

from rankup import Group, UserError

from ..config import Config
from ..config.load import NOT_WITH
from ..data.samples import to_device
from ..workloads import Workload

VIEW_FAILED = "view size is not compatible"  # how torch's message begins


def prepare(workload: Workload, config: Config, group: Group, *, split: bool = False) -> nn.Module:
    """The workload's model on its device, in its memory format, with SyncBatchNorm if asked for. Raises UserError.

    `split`: the method splits the model, and moves the parts to the device: whole it may not fit there.

    The weights keep their values. The memory format depends on the settings and the model alone, so it is the same on
    all ranks, and when the run goes on.
    """
    model = workload.model
    if config.sync_bn:
        if group.device.type == "cpu":
            raise UserError("sync_bn must be false on a CPU, got true. torch's SyncBatchNorm needs an accelerator.")
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    if not split:
        model = model.to(group.device)
    if config.channels_last is True or (config.channels_last == "auto" and _gains_from_channels_last(model, config)):
        model = model.to(memory_format=torch.channels_last)
        # The models for images are known to work in it; nothing is known of your own
        if config.channels_last == "auto" and config.workload != "images" and _needs_contiguous(model, workload, group):
            model = model.to(memory_format=torch.contiguous_format)
            group.log.info(
                "channels_last is off: the model calls view() on what a convolution returned. With reshape() or "
                "flatten() in its place the model may run faster."
            )
    return model


def _gains_from_channels_last(model: nn.Module, config: Config) -> bool:
    """Whether the model has 2-D convolutions, whose kernels read all channels of a pixel together, and the method of
    training in parallel takes parameters in this memory format."""
    taken = "channels_last" not in NOT_WITH.get(config.parallel, {})
    return taken and any(isinstance(module, nn.Conv2d) for module in model.modules())


@torch.no_grad()
def _needs_contiguous(model: nn.Module, workload: Workload, group: Group) -> bool:
    """Whether a pass with two samples fails because the model calls view() where tensors are in NHWC now.

    Any other failure is left to the training, where it is reported as it is without this test.
    """
    batch = to_device(workload.train.batch(torch.arange(min(2, len(workload.train))), None), group.device)
    with eval_mode(model):  # a batch norm keeps its statistics
        try:
            workload.loss(model, batch)
        except Exception as error:
            return VIEW_FAILED in str(error)
    return False


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """The model in eval mode. Afterwards each module is as before: one that the user keeps in eval mode stays in it."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def autocast(config: Config, device: torch.device) -> AbstractContextManager[None]:
    """Around a forward pass: torch picks the type of each operation, and weights stay in fp32. Nothing with fp32."""
    if config.precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[config.precision])


def has_bf16(device: torch.device) -> bool:
    """Whether the device computes in bf16 itself. Others emulate it, which is slower than fp32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu":
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return False


def compile_model(model: nn.Module, device: torch.device) -> nn.Module:
    """The model through torch.compile. Raises UserError where the machine lacks what it needs.

    It has to happen inside DDP: around it, dynamo breaks the graph at DDP's own forward and leaves an nn.Sequential
    uncompiled without a word.
    """
    _check_compiler(device)
    compiled: nn.Module = torch.compile(model)  # type: ignore[assignment]
    return compiled


def _check_compiler(device: torch.device) -> None:
    """torch.compile writes C++ for the CPU: say in one line what a missing compiler would say in two hundred."""
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    missing = [] if shutil.which("g++") or shutil.which("clang++") or shutil.which("cl") else ["a C++ compiler"]
    missing += [] if header.exists() else [f"Python's headers ({header})"]
    if device.type in ("cpu", "cuda") and missing:
        raise UserError(f"compile needs {' and '.join(missing)} on this machine. Install it, or leave --compile out.")


def check_same_shapes(group: Group, model: nn.Module) -> None:
    """Raises UserError where ranks built different models, as with other code on one node. Before anything is
    exchanged: DDP would compare sizes only, and name a parameter by its number."""
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    for rank, other in enumerate(group.gather(shapes)):
        if other != shapes:
            name = next(n for n in [*shapes, *other] if shapes.get(n) != other.get(n))
            raise UserError(
                f"the model must be the same on all ranks, got {name} {shapes.get(name)} on rank {group.rank} and "
                f"{other.get(name)} on rank {rank} ({group.hosts[rank]}). Put the same code on all nodes."
            )


# glibc's malloc -----------------------------------------------------------------------------------------------------


# Numbers and names from malloc.h
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
TRIM_THRESHOLD = 512 * 2**20  # so much may lie unused at the heap's end; what is more goes back
TOP_PAD = 64 * 2**20  # asked of the kernel at a time; a page that is never touched costs nothing


def keep_freed_memory() -> None:
    """Set the process's malloc up for a loop that takes and frees the same blocks again and again.

    Costs up to TRIM_THRESHOLD bytes that another process could have used. ResNet-18 at batch 64 takes 6 % less time a
    step than with glibc's largest size for blocks in the heap, 32 MB (one thread, AMD EPYC), and a fifth more memory at
    its peak. Does nothing where malloc is not glibc's.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        # M_MMAP_MAX 0: no block gets a mapping of its own. A limit of size would let a block above it into the heap
        # only where a free piece happens to be large enough: batches of 38 MB were mapped in each step of some runs
        for parameter, value in (
            (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, TRIM_THRESHOLD), (M_TOP_PAD, TOP_PAD)
        ):
            mallopt(parameter, value)
