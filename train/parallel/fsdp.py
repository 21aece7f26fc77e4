"""fsdp: parameters, gradients and optimizer state split over the ranks (FSDP2), gathered layer by layer when they are needed."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from train.errors import ConfigError
from train.group.group import Group

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def shard(model: nn.Module, group: Group) -> None:
    """Split a model that is the same on all ranks, in place: each of its parts by itself, then what is left. Raises
    ConfigError for parameters that can't be split."""
    scalars = [name for name, parameter in model.named_parameters() if parameter.ndim == 0]
    if scalars:
        raise ConfigError(f"parallel fsdp needs parameters with at least one dimension, got {', '.join(scalars[:8])}. Use ddp.")
    mesh = init_device_mesh(group.device.type, (group.world_size,))
    for part in _parts(model):
        fully_shard(part, mesh=mesh)
    # Gathered anew for backward, also what stands outside the parts: less memory, and nothing left whole after evaluation
    fully_shard(model, mesh=mesh, reshard_after_forward=True)


def _parts(model: nn.Module) -> list[nn.Module]:
    """The layers that are gathered one after the other, those of a list inside a child too; none where two share a parameter,
    which has to be in one place."""
    found: list[nn.Module] = []
    for child in model.children():
        lists = isinstance(child, nn.ModuleDict) or any(isinstance(module, nn.ModuleList) for module in child.modules())
        found += _parts(child) if lists else [child]
    found = [part for part in found if next(part.parameters(), None) is not None]
    held = [id(parameter) for part in found for parameter in part.parameters()]
    return found if len(held) == len(set(held)) else []


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The plain state dict, on the CPU, for rank 0; the others get an empty one. All ranks call this."""
    if not is_sharded(model):
        return model.state_dict()
    return cast(dict[str, torch.Tensor], get_model_state_dict(model, options=WHOLE))


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a checkpoint holds of the optimizer, likewise."""
    if not is_sharded(model):
        return optimizer.state_dict()
    return get_optimizer_state_dict(model, optimizer, options=WHOLE)


def load_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Put it back, whichever way it was saved by; with fsdp each rank takes its part, whatever the number of ranks was. Raises
    ValueError and others."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    ordered = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    # A kernel that is there for whole parameters only: this way's own choice
    groups = [{**saved, "fused": own["fused"]} for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=True)]
    state = {"state": state["state"], "param_groups": groups}
    if is_sharded(model):
        named = _renamed(state, dict(enumerate(ordered)))
        set_optimizer_state_dict(model, optimizer, named, options=StateDictOptions(full_state_dict=True))
    else:
        optimizer.load_state_dict(_renamed(state, {name: number for number, name in enumerate(ordered)}))


def _renamed(state: dict[str, Any], names: dict[Any, Any]) -> dict[str, Any]:
    """torch numbers the parameters where they are whole and names them where they are split."""
    groups = [{**group, "params": [names.get(key, key) for key in group["params"]]} for group in state["param_groups"]]
    return {"state": {names.get(key, key): value for key, value in state["state"].items()}, "param_groups": groups}


def parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """For a sharded checkpoint: this rank's part of the tensors of model and optimizer, and what of the optimizer is no
    tensor. All ranks call this."""
    options = StateDictOptions(cpu_offload=True)
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=options)
    split: dict[bool, dict[str, Any]] = {True: {}, False: {}}
    for name, values in state["state"].items():
        for key, value in values.items():
            split[isinstance(value, torch.Tensor)].setdefault(name, {})[key] = value
    tensors = {"model": get_model_state_dict(model, options=options), "optimizer": split[True]}
    return tensors, {"state": split[False], "param_groups": state["param_groups"]}


def load_parts(
    model: nn.Module, optimizer: torch.optim.Optimizer, read_into: Callable[[dict[str, Any]], None], rest: dict[str, Any],
) -> None:
    """Put both back, whatever the number of ranks was: no rank reads more than its part. `read_into` fills the tensors that
    it is given from the checkpoint. Raises RuntimeError and others."""
    tensors, _ = parts(model, optimizer)
    read_into(tensors)
    names = tensors["optimizer"].keys() | rest["state"].keys()
    state = {name: {**rest["state"].get(name, {}), **tensors["optimizer"].get(name, {})} for name in names}
    whole: dict[str, Any] = {"state": state, "param_groups": rest["param_groups"]}
    set_model_state_dict(model, tensors["model"])
    set_optimizer_state_dict(model, optimizer, whole)
