"""How tensors lie: split among ranks, in a memory format, in DDP's buckets. A copy holds none of that."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def gathered(value: Any) -> Any:
    """The same with each DTensor put together, one at a time, on rank 0's CPU; None in its place on other ranks."""
    if hasattr(value, "full_tensor"):
        whole = value.full_tensor()
        return whole.cpu() if dist.get_rank() == 0 else None
    if isinstance(value, dict):
        put_together: Any = type(value)((key, gathered(each)) for key, each in value.items())
        if hasattr(value, "_metadata"):
            put_together._metadata = value._metadata
        return put_together
    return type(value)(gathered(each) for each in value) if type(value) in (list, tuple) else value


def split_as(value: Any, live: Any) -> Any:
    """This rank's part of a whole tensor, where `live`, of the same shape, is split."""
    if not hasattr(live, "to_local") or hasattr(value, "to_local") or getattr(value, "shape", None) != live.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, live.device_mesh, live.placements, src_data_rank=None)  # each rank has it whole


def laid_out(state: dict[str, Any], parameters: dict[Any, torch.Tensor]) -> dict[str, Any]:
    """The optimizer state with each tensor in the memory format of its parameter: `parameters` has the same keys.

    A checkpoint may have been written in the other format, by a method that does not take channels_last. The fused
    kernels pass through a parameter and its state as both lie in memory: where the formats differ they pair wrong
    elements, without a word.
    """
    def fit(value: Any, parameter: torch.Tensor) -> Any:
        if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
            return value
        if value.stride() == parameter.stride():
            return value
        return torch.empty_strided(parameter.shape, parameter.stride(), dtype=value.dtype).copy_(value)

    fitted = {
        key: {name: fit(value, parameters[key]) for name, value in values.items()} if key in parameters else values
        for key, values in state["state"].items()
    }
    return {**state, "state": fitted}


def fix_bucket_order(items: dict[str, Any]) -> list[str]:
    """Let each DDP module settle its buckets now, as it would do after its first backward pass. All ranks call this.

    Other buckets mean another order of sums at three or more ranks: the first step after a resume would use the first
    buckets, where the uninterrupted run used the rebuilt ones. So a backward pass of zeros tells DDP the parameters in
    one order, the last first, at every start. Returns the names of items for which that can't be done.
    """
    unfixed = []
    for name, item in items.items():
        for ddp in item.modules() if isinstance(item, nn.Module) else ():
            if not isinstance(ddp, DistributedDataParallel) or (ddp.find_unused_parameters and not ddp.static_graph):
                continue  # the latter never rebuilds its buckets
            parameters = [p for p in ddp.module.parameters() if p.requires_grad]
            if ddp.static_graph or any(getattr(p, "_post_accumulate_grad_hooks", None) for p in parameters):
                unfixed.append(name)
                continue
            module = ddp.module
            try:
                ddp.module = _Zero(parameters)
                ddp(torch.zeros(())).backward()
            finally:
                ddp.module = module
            for parameter in parameters:
                parameter.grad = None
    return unfixed


class _Zero(nn.Module):
    """A loss of zero that depends on all parameters."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self._parameters_of_another = parameters  # in a list: they are not registered

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for parameter in self._parameters_of_another:
            total = total + (parameter * 0).real.float().sum().cpu()
        return total
