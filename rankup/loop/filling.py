"""Putting a copy's values back exactly: into the tensors, dicts and lists that the script and its optimizers hold, and
into optimizers without the casts that torch makes."""

import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from rankup.state.tree import MAPPINGS, decode, encode, place_of, view_of

KINDS = "rankup_kinds"  # the item of a copy that holds, by tracked item, what `kinds_of` returns


def mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return `value` with `change(tensor)` in place of each tensor in its dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in MAPPINGS.values():
        # Not of pairs: a Counter would count them
        made: Any = type(value)({key: mapped(each, change) for key, each in value.items()})
        if hasattr(value, "_metadata"):
            made._metadata = value._metadata
        return made
    return type(value)(mapped(each, change) for each in value) if type(value) in (list, tuple) else value


def copied(state: Any, device: torch.device) -> Any:
    """Return a copy of a state. Tensors on a GPU are copied to the host: the GPU may have no room for a second state.
    A DTensor's part stays where it is."""
    tensors = [each for each in tree_leaves(state) if isinstance(each, torch.Tensor)] if device.type == "cuda" else []
    on_gpu = [each for each in tensors if each.device.type == "cuda" and not hasattr(each, "to_local")]
    return deepcopy(state, {id(each): each.detach().cpu() for each in on_gpu})


def kinds_of(value: Any, path: str = "") -> dict[str, list[str]]:
    """Return, by path, what a copy's tensors don't show: the device and the kind ("trained parameter", "parameter",
    "trained" or "") of each tensor in a dict or list that has a kind or is not on the CPU."""
    if isinstance(value, torch.Tensor):
        trained = value.requires_grad and value.is_leaf
        kind = " ".join(["trained"] * trained + ["parameter"] * isinstance(value, nn.Parameter))
        return {path: [value.device.type, kind]} if kind or value.device.type != "cpu" else {}
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    return {key: kind for name, each in entries for key, kind in kinds_of(each, f"{path}{name}.").items()}


def gathered(value: Any) -> Any:
    """Return `value` with each DTensor gathered on rank 0's CPU, one at a time. Other ranks get None in its place."""
    def whole(tensor: Any) -> Any:
        if not hasattr(tensor, "full_tensor"):
            return tensor
        found = tensor.full_tensor()
        return found.cpu() if dist.get_rank() == 0 else None

    return mapped(value, whole)


def laid_out(value: Any, live: Any) -> Any:
    """Return the tensor `value` of a copy in the memory format of `live`, and only this rank's part if `live` is split.

    A copy may have been written in another memory format. Fused optimizer kernels walk through a parameter and its
    state in memory order: if the two formats differ, the kernels silently pair the wrong elements.
    """
    if not isinstance(value, torch.Tensor) or hasattr(value, "to_local") or value.shape != getattr(live, "shape", None):
        return value
    if value.stride() != live.stride():
        value = torch.empty_strided(live.shape, live.stride(), dtype=value.dtype).copy_(value)
    if not hasattr(live, "to_local"):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, live.device_mesh, live.placements, src_data_rank=None)  # each rank has the whole


class Filling:
    """Fills tracked dicts, lists and tensors with a copy's values, without replacing what they hold: an optimizer or a
    variable of the script may hold the same tensor.

    Names that shared one tensor in the copy share one afterwards, and names that did not do not: `best["weights"]` may
    be the model's own weights at the start of a script, and weights of an earlier epoch in the copy. Fill modules
    first, because they keep their tensors in any case."""

    def __init__(self) -> None:
        self._got: dict[Any, Any] = {}  # from a live tensor's place to the place of the tensor that filled it
        self._put: dict[Any, torch.Tensor] = {}  # from the place of a copy's tensor to the live tensor with its values
        self._filled: dict[int, tuple[Any, Any]] = {}  # by id of a live dict or list: itself, and what filled it
        self._kinds: dict[str, list[str]] = {}  # of the item that is being filled
        self._kept: list[Any] = []  # a freed tensor's place could be used again

    def load_module(self, module: nn.Module, state: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Load `state` into `module`. `values`: those of it that a copy holds. Raises ValueError if one has another
        type than the module's, to which torch would cast it, and as torch does."""
        live = {**module.state_dict(), **dict(module.named_parameters(remove_duplicate=False))}
        pairs = {key: (live[key], value) for key, value in values.items()
                 if isinstance(value, torch.Tensor) and isinstance(live.get(key), torch.Tensor)}
        for key, (own, value) in pairs.items():
            if own.dtype != value.dtype:
                raise ValueError(f"{key} is {described(value)} there, {described(own)} here")
        module.load_state_dict(state)
        for own, value in pairs.values():
            self._note(own, value)

    def _note(self, live: torch.Tensor, value: torch.Tensor) -> None:
        if live.numel():  # tensors without elements may have one place
            self._got[place_of(live)] = place_of(value)
            self._put[place_of(value)] = live
            self._kept += [live, value]

    def fill_item(self, item: Any, value: Any, kinds: dict[str, list[str]]) -> None:
        """Fill a tracked item, which can't be replaced. Raises ValueError if its shape or type differs. `kinds`: what
        `kinds_of` returned."""
        self._kinds = kinds
        if isinstance(item, torch.Tensor):
            fits = isinstance(value, torch.Tensor) and (item.shape, item.dtype) == (value.shape, value.dtype)
            if fits:
                self._copy(item, value)
        else:
            fits = self.fill(item, value) is item
        if not fits:
            raise ValueError(f"{described(value)} there, {described(item)} here")

    def _copy(self, live: torch.Tensor, value: torch.Tensor) -> None:
        with torch.no_grad():
            live.copy_(laid_out(value, live))
        self._note(live, value)

    def fill(self, live: Any, value: Any, path: str = "") -> Any:
        """Return what `live` must be replaced by to hold `value`: `live` itself, filled, if possible. Raises ValueError
        if a tensor that is trained has another shape or type."""
        if isinstance(value, torch.Tensor):
            return self._fill_tensor(live, value, path)
        if type(value) is tuple:
            held = live if type(live) is tuple else ()
            return tuple(self.fill(_at(held, n), each, f"{path}{n}.") for n, each in enumerate(value))
        if type(value) is not list and type(value) not in MAPPINGS.values():
            return value
        again = id(live) in self._filled and not _alike(self._filled[id(live)][1], value)
        if again or type(live) is not type(value):
            live = type(value)()
        self._filled[id(live)] = live, value
        held, entries = live.copy(), value.copy()  # `live` may be `value`
        live.clear()
        if isinstance(live, list):
            live += [self.fill(_at(held, n), each, f"{path}{n}.") for n, each in enumerate(entries)]
            return live
        for key, each in entries.items():
            live[key] = self.fill(held.get(key), each, f"{path}{key}.")
        if hasattr(value, "_metadata"):
            live._metadata = value._metadata
        return live

    def _fill_tensor(self, live: Any, value: torch.Tensor, path: str) -> Any:
        is_tensor = isinstance(live, torch.Tensor) and place_of(live)
        if is_tensor and self._got.get(is_tensor) == place_of(value):
            return live  # under another name
        device, kind = self._kinds.get(path) or kinds_of(value).get("") or ["cpu", ""]
        if (shared := self._put.get(place_of(value))) is not None:
            return shared if shared.requires_grad == ("trained" in kind) else shared.detach()
        whole: Any = getattr(value, "whole", None)
        known = self._put.get(place_of(whole)) if whole is not None and not kind else None
        if known is not None and known.stride() == whole.stride():  # the loop has put the view here
            view = _view_in(known.detach(), value)
            live = live if is_tensor == place_of(view) else view
            self._note(live, value)
            return live
        free = is_tensor and is_tensor not in self._got
        if free and (live.shape, live.dtype) == (value.shape, value.dtype):
            self._copy(live, value)
        elif free and live.requires_grad and live.is_leaf:  # an optimizer may hold it
            raise ValueError(f"{path[:-1]} is {described(value)} there, {described(live)} here")
        elif whole is not None and not kind and known is None:
            live = _view_in(self._fill_tensor(None, whole, path).detach(), value)
            self._note(live, value)
        else:
            device = live.device if is_tensor else device if torch.cuda.is_available() else "cpu"
            made = value.detach().to(device, copy=True).requires_grad_("trained" in kind)
            live = nn.Parameter(made, made.requires_grad) if "parameter" in kind else made
            self._note(live, value)
        return live


def load_optimizer(optimizer: Optimizer, values: dict[str, Any]) -> None:
    """Restore an optimizer to what its state_dict returned. torch casts each tensor to the type of its parameter, which
    a state in float32 of parameters in bfloat16 does not survive, and breaks texts. So restore these a second time."""
    if len(values["param_groups"]) != len(optimizer.param_groups):
        raise ValueError(
            f"it has {len(optimizer.param_groups)} groups of parameters, and the copy has "
            f"{len(values['param_groups'])}. Add groups before job.track, such as layers that train later"
        )
    parameters = dict(enumerate(each for group in optimizer.param_groups for each in group["params"]))
    nodes, tensors = encode({"values": values})  # live values don't say which tensors are views of others
    values, clones = decode(nodes, tensors.__getitem__)["values"], Clones()
    views = {place_of(each.whole) for each in tree_leaves(values) if hasattr(each, "whole")}
    state = {
        key: {kind: clones.of(value, parameters[key].device) if key in parameters and _in_views(value, views)
              else laid_out(value, parameters.get(key)) for kind, value in kept.items()}
        if isinstance(kept, dict) else kept
        for key, kept in values["state"].items()
    }
    groups = [
        {key: clones.of(value, _device_of(own.get(key))) for key, value in saved.items()}
        # Keep this optimizer's own choice of `fused`: torch may have no fused kernel for tensors that are split now
        | {key: own[key] for key in ("fused",) if key in own}
        for saved, own in zip(values["param_groups"], optimizer.param_groups, strict=True)
    ]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Casting complex values")  # undone below
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    shown = optimizer.state_dict()["state"]
    fused = {id(each) for group in optimizer.param_groups if group.get("fused") for each in group["params"]}
    for key, parameter in parameters.items():
        live: Any = optimizer.state.get(parameter)
        if not (isinstance(live, dict) and isinstance(state.get(key), dict)):
            continue
        for kind, value in state[key].items():
            # An optimizer that shows something else than it holds, such as a packed state, restores it by itself
            same = kind in live and shown.get(key, {}).get(kind) is live[kind]
            if same and not (kind == "step" and id(parameter) in fused):  # fused kernels need their own type
                live[kind] = _exact(value, live[kind], parameter.device)
    files = {place_of(each)[0] for each in tree_leaves(values) if isinstance(each, torch.Tensor)}
    for held in [*optimizer.param_groups, *(each for each in optimizer.state.values() if isinstance(each, dict))]:
        for kind, live in [*held.items()]:
            if kind != "params" and any(_is_file(each, files) for each in tree_leaves(live)):
                held[kind] = mapped(live, lambda tensor: tensor.clone() if _is_file(tensor, files) else tensor)


def _is_file(value: Any, files: set[Any]) -> bool:
    """Return whether a tensor is in the memory of a copy's file, all of which it would keep. `files`: the storages of
    the copy's tensors; a tensor that has one of them for itself may keep it."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return False
    local: Any = value.to_local() if hasattr(value, "to_local") else value
    return place_of(local)[0] in files and local.untyped_storage().nbytes() > local.nbytes


class Clones:
    """Copies of values, with tensors of their own. Names that share a tensor, or memory, share it afterwards."""

    def __init__(self) -> None:
        self._made: dict[Any, torch.Tensor] = {}

    def of(self, value: Any, device: torch.device | None = None) -> Any:
        def clone(tensor: torch.Tensor) -> torch.Tensor:
            whole = getattr(tensor, "whole", tensor)
            if (place := place_of(whole)) not in self._made:
                self._made[place] = whole.to(device or whole.device, copy=True)
            return self._made[place] if whole is tensor else _view_in(self._made[place], tensor)

        return mapped(value, clone)


def cloned(value: Any) -> Any:
    return Clones().of(value)


def _view_in(whole: torch.Tensor, value: Any) -> torch.Tensor:
    """Return the view of `whole` that `value` is of the tensor whose copy `whole` is."""
    return view_of(whole, value.storage_offset() - value.whole.storage_offset(), value.shape, value.stride())


def _in_views(value: Any, views: set[Any]) -> bool:
    """Return whether a value is a view of another tensor, or one of those tensors, which are at `views`."""
    return isinstance(value, torch.Tensor) and (hasattr(value, "whole") or place_of(value) in views)


def _device_of(live: Any) -> torch.device | None:
    """Return the device of the first tensor in an option of an optimizer, such as `lr`, or None if there is none."""
    return next((each.device for each in tree_leaves(live) if isinstance(each, torch.Tensor)), None)


def _exact(value: Any, live: Any, device: torch.device) -> Any:
    """Return `value`, with its tensors on the devices of those in `live`, to which torch has turned it. Keep `live` if
    it is equal."""
    if isinstance(value, torch.Tensor):
        if not isinstance(live, torch.Tensor):
            return value.to(device)
        return live if (live.dtype, live.shape) == (value.dtype, value.shape) else value.to(live.device)
    if isinstance(value, dict):
        known = live if isinstance(live, dict) else {}
        return type(value)({key: _exact(each, known.get(key), device) for key, each in value.items()})
    if type(value) in (list, tuple):
        held = live if isinstance(live, list | tuple) else ()
        return type(value)(_exact(each, _at(held, n), device) for n, each in enumerate(value))
    return value


def described(value: Any) -> str:
    tensor = isinstance(value, torch.Tensor)
    return f"a {value.dtype} of shape {tuple(value.shape)}" if tensor else f"a {type(value).__name__}"


def _at(held: Any, index: int) -> Any:
    return held[index] if index < len(held) else None


def _alike(one: Any, two: Any) -> bool:
    """Return whether two values of a copy are equal, with the same tensors at the same places."""
    (nodes, tensors), (others, more) = encode({"value": one}), encode({"value": two})
    return nodes == others and [*map(place_of, tensors.values())] == [*map(place_of, more.values())]
