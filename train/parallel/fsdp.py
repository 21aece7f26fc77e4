"""fsdp: each rank keeps a shard of every parameter, gradient and optimizer state (FSDP2).

A layer is gathered when it is needed, and let go again.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm

from rankup import UserError

from .method import Method


class FSDP(Method):
    """FSDP2, for models too large for one device. A parameter [N, ...] becomes a DTensor of which rank r holds the r-th
    of `world_size` slices along the first dimension."""

    replicates_state: ClassVar[bool] = False
    needs_process_group: ClassVar[bool] = True
    graph_ends_in_parameters: ClassVar[bool] = False  # it ends in the gathered copies

    def split(self, plain: nn.Module) -> None:
        """Split each layer by itself, then what is left. Raises UserError for parameters that can't be split."""
        scalars = [name for name, parameter in plain.named_parameters() if parameter.ndim == 0]
        if scalars:
            raise UserError(
                f"parallel fsdp needs parameters with at least one dimension, got {', '.join(scalars[:8])}. Use ddp."
            )
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
