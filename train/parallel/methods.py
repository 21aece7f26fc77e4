"""The methods of parallel training. The loop calls the hooks of `Method` and does not know which method it has."""

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
    """A method by which several ranks train one model. The loop calls the hooks in the order below. Hooks that a
    subclass does not override work as in one process: this class itself is the method none. `plain` is the user's
    module without wrappers."""

    # Whether each rank holds all weights and the whole optimizer state. If not, a lost rank costs steps
    replicates_state: ClassVar[bool] = True

    def __init__(self, config: Config, group: Group) -> None:
        self.config, self.group = config, group
        # What replaces torch's exchange of gradients, if anything. Its `waited_s` is the time that it waited so far
        self.exchange: Any = None

    def running(self) -> AbstractContextManager["Method"]:
        """Return a context manager that yields this method, and runs what the method needs during the run. Raises
        JoinError, and UserError if the method can't work here."""
        return nullcontext(self)

    def split(self, plain: nn.Module) -> None:
        """Split the parameters over the ranks, in place, and move this rank's parts to the device."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module that trains together with the other ranks. `model` may be compiled already."""
        return model

    def wrap_optimizer(self, plain: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer that the loop steps."""
        return optimizer

    def micro_batch(self, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Wrap forward and backward of one micro-batch. Ranks exchange gradients only in the `last` micro-batch of a
        step. In the others, gradients add up locally."""
        return nullcontext()

    def wait_for_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Wait, after the backward passes of a step, until the gradients are averaged. Raises if a rank is lost."""

    def step(self, plain: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        """Clip the averaged gradients, update the weights, and drop the gradients."""
        if self.config.clip_norm > 0:
            # `clip_norm` limits the true norm, so remove the loss scale first
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(plain.parameters(), self.config.clip_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


class DDP(Method):
    """DistributedDataParallel, one device for each rank."""

    def wrap(self, model: nn.Module) -> nn.Module:
        config, device = self.config, self.group.device
        # Harmless: a kernel with one input channel has two equivalent layouts, and backward picks the other one
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
        # torch 2.14 deprecates this name, but earlier versions do not know the new one
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        wrapped = DistributedDataParallel(
            model,
            # DDP refuses device_ids on a CPU. On a GPU they keep everything off cuda:0.
            device_ids=None if device.type == "cpu" else [device.index],
            # Gradients are views of the buckets that DDP sends. This saves the memory and the time of a copy
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # `job` broadcasts buffers at the end of a step
            find_unused_parameters=config.find_unused_parameters,
        )
        if config.compress != "none":
            wrapped.register_comm_hook(None, HOOKS[config.compress])
        elif self.group.world_size == 2 and device.type == "cpu":
            # With more than two ranks the sums would differ from gloo's, which ranks on several hosts use
            self.exchange = share_gradients(self.group)
            if self.exchange is not None:
                wrapped.register_comm_hook(self.exchange, average)
        return wrapped

    def micro_batch(self, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        assert isinstance(model, DistributedDataParallel)
        return nullcontext() if last else model.no_sync()


class DataParallelMethod(Method):
    """DataParallel: one process copies the module to each GPU in every step, and gathers the outputs on one GPU."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model over `device_ids`, in that order; with one device the model itself. Raises UserError."""
        device, given = self.group.device, self.config.device_ids
        if device.type == "cuda":
            count = torch.cuda.device_count()
            ids = [int(word) for word in given.split(",") if word] or list(range(count))
            if max(ids) >= count or len(set(ids)) != len(ids):
                got = f"got {given}. CUDA_VISIBLE_DEVICES numbers them anew, from 0."
                raise UserError(f"device_ids must name different ones of the {count} visible GPUs, {got}")
            if len(ids) > 1:
                return DataParallel(model, device_ids=ids)
        self.group.log.info(f"dp     one device ({device}): trains as one process does without DataParallel")
        return model


class FSDP(Method):
    """FSDP2, for models that are too large for one device. Each parameter is split along its first dimension."""

    replicates_state: ClassVar[bool] = False

    def split(self, plain: nn.Module) -> None:
        """Split each layer by itself, then the parameters that are in no layer."""
        mesh = init_device_mesh(self.group.device.type, (self.group.world_size,))
        bf16 = self.config.precision == "bf16"
        # Keep batch norms in fp32: their statistics are fp32, and torch has no kernel for that with bf16 weights
        norms = [module for module in plain.modules() if bf16 and isinstance(module, _BatchNorm)]
        # Each call moves the layer that it splits to the device, so at most one layer is whole there. By default FSDP2
        # keeps the root's own parameters gathered after forward, to save a gather in backward. An evaluation has no
        # backward, and they would stay gathered.
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
    """Return the layers that FSDP gathers one at a time: the children of `model`, or, if a child contains a list of
    modules, the layers of that child. Empty if two layers share a parameter: FSDP can put it into one layer only."""
    found: list[nn.Module] = []
    for child in model.children():
        lists = isinstance(child, nn.ModuleDict) or any(isinstance(module, nn.ModuleList) for module in child.modules())
        found += layers_of(child) if lists else [child]
    found = [layer for layer in found if next(layer.parameters(), None) is not None]
    held = [id(parameter) for layer in found for parameter in layer.parameters()]
    return found if len(held) == len(set(held)) else []
