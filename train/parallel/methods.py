"""The methods of training in parallel, by what each decides. The loop calls these hooks and knows no method by name."""

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DataParallel, DistributedDataParallel

from rankup import Group, UserError

from ..config import Config
from .shared_gradients import average, share_gradients

HOOKS = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}


class Method:
    """A method by which several ranks train one model; the loop calls the hooks in the order below. What a subclass
    does not override works as in one process: this class itself is the method none. `plain` is the user's module
    without wrappers."""

    # Whether each rank holds all weights and the whole optimizer state. If not, a lost rank costs steps
    replicates_state: ClassVar[bool] = True

    def __init__(self, config: Config, group: Group) -> None:
        self.config, self.group = config, group
        # What exchanges gradients beside torch, in the middle of backward: its `waited_s` says how long it waited there
        self.exchange: Any = None

    def running(self) -> AbstractContextManager["Method"]:
        """Itself, with what has to be up for the length of the run. Raises JoinError, and UserError for what it can't
        do here."""
        return nullcontext(self)

    def split(self, plain: nn.Module) -> None:
        """Split the parameters over the ranks, in place, and move what this rank keeps to the device."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """The module whose forward and backward train with the other ranks; `model` may be compiled already."""
        return model

    def wrap_optimizer(self, plain: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer to step with."""
        return optimizer

    def micro_batch(self, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch, in every step. Gradients are exchanged in its `last` one
        only: before, they add up locally."""
        return nullcontext()

    def wait_for_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Until they are averaged, once the step's backward passes are over. A rank that is lost breaks this."""

    def step(self, plain: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        """Clip the averaged gradients, update the weights, and drop the gradients."""
        if self.config.clip_norm > 0:
            # Clipping compares with the true norm, so the loss scale has to be taken out first
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(plain.parameters(), self.config.clip_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


class DDP(Method):
    """DistributedDataParallel, one device for each rank."""

    def wrap(self, model: nn.Module) -> nn.Module:
        config, device = self.config, self.group.device
        # A kernel of one input channel can be laid out in two equal ways, and backward picks the other one: harmless
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
        # From 2.14 on it has another name beside, which torch before does not know
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        wrapped = DistributedDataParallel(
            model,
            # On the CPU device_ids must be absent; on a GPU they keep everything off cuda:0.
            device_ids=None if device.type == "cpu" else [device.index],
            # Gradients live in the buckets that are sent: one copy of all gradients less, in memory and in time
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # the job shares them, at the end of a step
            find_unused_parameters=config.find_unused_parameters,
        )
        if config.compress != "none":
            wrapped.register_comm_hook(None, HOOKS[config.compress])
        elif self.group.world_size == 2 and device.type == "cpu":
            # Not for more ranks: their sums would be others than gloo's, and than those of ranks on several hosts
            self.exchange = share_gradients(self.group)
            if self.exchange is not None:
                wrapped.register_comm_hook(self.exchange, average)
        return wrapped

    def micro_batch(self, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        assert isinstance(model, DistributedDataParallel)
        return nullcontext() if last else model.no_sync()


class DataParallelMethod(Method):
    """Copies the module to each GPU in every step and gathers the outputs on one, in one process."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model over `device_ids`, in that order, or as it is where there is one device. Raises UserError."""
        device, given = self.group.device, self.config.device_ids
        if device.type == "cuda":
            count = torch.cuda.device_count()
            ids = [int(word) for word in given.split(",") if word] or list(range(count))
            if max(ids) >= count or len(set(ids)) != len(ids):
                got = f"got {given}. CUDA_VISIBLE_DEVICES numbers them anew, from 0."
                raise UserError(f"device_ids must each name another one of the {count} visible GPUs, {got}")
            if len(ids) > 1:
                return DataParallel(model, device_ids=ids)
        self.group.log.info(f"dp     one device ({device}): trains as one process does without DataParallel")
        return model


class FSDP(Method):
    """FSDP2, for models too large for one device: each parameter is split along its first dimension."""

    replicates_state: ClassVar[bool] = False

    def split(self, plain: nn.Module) -> None:
        """Split each layer by itself, then what is left."""
        mesh = init_device_mesh(self.group.device.type, (self.group.world_size,))
        bf16 = self.config.precision == "bf16"
        # Batch norms keep their statistics in fp32, and torch has no kernel for these beside weights in bf16
        norms = [module for module in plain.modules() if bf16 and isinstance(module, _BatchNorm)]
        # Each call moves what it splits to the device first: no more than a layer is ever whole there. By default FSDP2
        # keeps the root's own parameters gathered after forward, which saves a gather in backward. An evaluation has no
        # backward: it would leave them whole.
        for part in dict.fromkeys([*norms, *layers_of(plain), plain]):
            precision = MixedPrecisionPolicy()
            if bf16 and part not in norms:
                precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            fully_shard(part, mesh=mesh, reshard_after_forward=True, mp_policy=precision)

    def micro_batch(self, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(last)
        return nullcontext()


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers to split and gather one after the other: the children, and in place of a child that holds a list of
    modules that list's members. Empty where two layers share a parameter: it would have to be in two places."""
    found: list[nn.Module] = []
    for child in model.children():
        lists = isinstance(child, nn.ModuleDict) or any(isinstance(module, nn.ModuleList) for module in child.modules())
        found += layers_of(child) if lists else [child]
    found = [layer for layer in found if next(layer.parameters(), None) is not None]
    held = [id(parameter) for layer in found for parameter in layer.parameters()]
    return found if len(held) == len(set(held)) else []
