"""The live objects that a user gives to `job.track`: how to put them into a copy, and how to restore them.

A copy holds a module's state_dict under the names of the bare module, without the prefixes of DDP, DataParallel and
torch.compile. It holds the state_dict of any other object with state_dict and load_state_dict, and a dict, list or
tensor itself.

A copy holds the state of the last commit, although objects may have changed since then: forward passes change buffers,
and many loops step a scheduler once per epoch, between two steps. Therefore `commit` copies buffers, schedulers and the
optimizers' settings. Everything else may change only inside `job.step` and `job.change`.
"""

import hashlib
import json
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from rankup.errors import UserError
from rankup.loop.changes import options_of
from rankup.loop.filling import KINDS, Filling, cloned, gathered, kinds_of, laid_out, load_optimizer, mapped
from rankup.loop.unkept import Flags, flags_of
from rankup.state.saver import check_devices
from rankup.state.tree import ITEM, TensorFile, encode, place_of

BUCKET_BYTES = 250 * 2**20  # DDP's own value: buffers up to this total size are sent as one
CHECKS = 20  # only the first checks look at all objects: a mistake in a loop shows in every step
LARGE_BYTES = 64 * 2**20  # compute no digests of larger tensors; parameters are checked without digests
FILLED_IN_PLACE = (dict, list, torch.Tensor)
WRAPPERS = (DistributedDataParallel, DataParallel)
CPU = torch.device("cpu")


class Tracked:
    """The tracked objects by their names.

    `split`: whether tensors are split among ranks, so that no rank holds the whole state. `shared`: the modules'
    dictionaries of buffers that all ranks get from rank 0.
    """

    def __init__(self, *, share_all: bool = False, device: torch.device = CPU) -> None:
        """`share_all`: all modules get rank 0's buffers, not only modules in DDP. `device`: this rank's device."""
        self.items: dict[str, Any] = {}
        self.split = False
        self.shared: list[dict[str, Any]] = []
        self._share_all, self._device = share_all, device
        self._names: dict[str, dict[str, str]] = {}  # by module: live name -> bare name
        self._holders: dict[str, list[tuple[str, dict[str, Any]]]] = {}  # by module: prefixes and buffer dictionaries
        # The modules' parameters when they were tracked: FSDP2 registers others during a forward pass, and leaves the
        # root's in place if no backward pass follows
        self._parameters: dict[str, list[nn.Parameter]] = {}
        self._left_out: dict[str, dict[str, nn.Parameter]] = {}  # by module: what no copy holds, by live name
        self._paths: dict[int, str] = {}  # by the id of a parameter: its item and bare name
        self._schedulers: dict[str, LRScheduler] = {}
        self._optimizers: dict[str, Optimizer] = {}
        self._created = 0  # for how many parameters optimizers have a state that a copy can hold
        self.options: dict[str, Any] = {}  # of optimizers and schedulers when the run began, see `changes.Options`
        # As of the last commit
        self._buffers: dict[str, dict[str, torch.Tensor]] = {}
        self._schedules: dict[str, dict[str, Any]] = {}
        self._settings: dict[str, list[dict[str, Any]]] = {}
        self._seen: dict[str, Any] = {}  # what `_look` found at the last commit, during the first steps
        self._checks = CHECKS

    def add(self, items: dict[str, Any], *, only_trained: bool = False) -> None:
        """Track `items` too, of modules without the parameters that are not trained if `only_trained`. Raises UserError
        for a value that a copy can't hold. The message has the value's path."""
        for name, item in items.items():
            if name in self.items or not ITEM.fullmatch(name):
                raise UserError(f"track: a name must be new, of letters, digits and _, got {name}. Rename the item.")
            if not (isinstance(item, FILLED_IN_PLACE) or has_state(item)):
                encode({name: item})  # raises UserError if a dict of it can't be kept either
                if item is None:
                    raise UserError(f"track: {name} must be an object to keep, got None. Leave it out on all ranks.")
                raise UserError(
                    f"track: {name} must have state_dict and load_state_dict, or be a dict, a list or a tensor, got "
                    f"{type(item).__name__}, which can't be filled in place. Put it into a dict: {name}={{...}}."
                )
            for each in item.modules() if isinstance(item, nn.Module) else (item,):
                # torch's ZeroRedundancyOptimizer and fairscale's OSS; torch's FullyShardedDataParallel
                if hasattr(each, "consolidate_state_dict") or hasattr(each, "_fsdp_wrapped_module"):
                    raise UserError(
                        f"track: {name} must hold its whole state on each rank, got {type(each).__name__}, which "
                        "splits it. Use an optimizer of torch.optim, or FSDP2 (fully_shard), whose split rankup knows."
                    )
        self.items |= items
        self.options |= {
            name: options_of(item) for name, item in items.items() if isinstance(item, Optimizer | LRScheduler)
        }
        for name, item in items.items():
            if isinstance(item, nn.Module):
                every = item.named_parameters(remove_duplicate=False) if only_trained else ()
                if frozen := {key: each for key, each in every if not each.requires_grad}:
                    self._left_out[name] = frozen
                self._add_module(name, item)
            elif isinstance(item, LRScheduler):
                self._schedulers[name] = item
            elif isinstance(item, Optimizer):
                self._optimizers[name] = item
        tensors = encode(self._state_of(items))[1]
        check_devices(tensors, self._device)
        self.split |= any(hasattr(tensor, "to_local") for tensor in tensors.values())
        if self.split and self._left_out:
            raise UserError('track: only="trained" must come with modules that each rank holds whole, got split ones.')
        self.commit()

    def _add_module(self, name: str, module: nn.Module) -> None:
        wrapped = {
            f"{outer}.{inner}".lstrip(".")
            for outer, each in module.named_modules(remove_duplicate=False)
            for inner in ["module" if isinstance(each, WRAPPERS) else "_orig_mod"]
            if isinstance(getattr(each, inner, None), nn.Module)
        }

        def bare(path: str) -> str:
            parts = path.split(".")
            return ".".join(part for n, part in enumerate(parts, 1) if ".".join(parts[:n]) not in wrapped)

        state = module.state_dict()
        self._names[name] = {key: bare(key) for key in [*state, *getattr(state, "_metadata", {})]}
        self._paths |= {id(each): f"{name}.{bare(path)}" for path, each in module.named_parameters()}
        # Keep the modules' own dictionaries, because a forward pass may replace a buffer by another tensor
        if holders := [
            (f"{bare(path)}.".lstrip("."), each._buffers) for path, each in module.named_modules() if each._buffers
        ]:
            self._holders[name] = holders
        if self._share_all:
            self.shared += [held for _, held in holders]
        self._parameters[name] = [*module.parameters()]

    def adopt(self, ddp: DistributedDataParallel) -> None:
        """Share the buffers of the module inside `ddp`, in place of DDP."""
        if self._checks:
            self._seen = self._look()  # the constructor of DDP has sent rank 0's parameters, which changes none
        if ddp.broadcast_buffers and not self._share_all:
            ddp.broadcast_buffers = False  # `share_buffers` replaces it
            self.shared += [inner._buffers for inner in ddp.module.modules() if inner._buffers]

    def share_buffers(self) -> None:
        """Give all ranks rank 0's `shared` buffers. All ranks call this after their backward passes.

        DDP would do this before the next forward pass, with the same result for training. Until then, however, ranks
        would evaluate with different buffers, and only rank 0's state could be rescued.
        """
        buffers = [buffer for held in self.shared for buffer in held.values() if buffer is not None]
        if buffers:
            with torch.no_grad():
                dist._broadcast_coalesced(dist.group.WORLD, buffers, BUCKET_BYTES, 0)  # type: ignore[attr-defined, arg-type]

    # The last commit ------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """Copy everything that may change before the next commit. GPU copies are queued, and not waited for."""
        for name, holders in self._holders.items():
            live = [buffer for _, held in holders for buffer in held.values() if buffer is not None]
            kept = [*self._buffers.get(name, {}).values()]
            if [buffer.shape for buffer in live] != [buffer.shape for buffer in kept]:
                self._buffers[name] = {
                    f"{path}{key}": buffer.detach().clone()
                    for path, held in holders for key, buffer in held.items() if buffer is not None
                }
            elif live:
                with torch.no_grad():
                    torch._foreach_copy_(kept, live)
        for name, schedule in self._schedulers.items():
            self._schedules[name] = schedule.state_dict()
        for name, optimizer in self._optimizers.items():
            groups = self._settings.setdefault(name, [])
            groups.clear()
            for group in optimizer.param_groups:
                groups.append(settings := group.copy())
                if isinstance(settings.get("lr"), torch.Tensor):  # schedulers change a tensor in place
                    settings["lr"] = settings["lr"].clone()
        if self._checks:
            self._seen = self._look()

    def check_kept(self) -> None:
        """Raise UserError if a copy can't hold what optimizers have created since the last call. Most create their
        state in the first step that is not skipped. Otherwise the first save, after hours, would find out."""
        if (created := sum(len(optimizer.state) for optimizer in self._optimizers.values())) != self._created:
            self._created = created
            encode(self._state_of(self._optimizers))

    def changed_options(self, *, undo: bool = False) -> list[str]:
        """Return which options of optimizers have changed since the last commit, such as "sgd.lr: 0.1 -> 0.01", and
        restore them if `undo`. Does not look at tensors on a GPU, for which the host would have to wait."""
        found = []
        for name, optimizer in self._optimizers.items():
            for live, kept in zip(optimizer.param_groups, self._settings[name], strict=False):
                for key, value in kept.items():
                    if (now := live.get(key)) is value or key == "params" or _equal(now, value):
                        continue
                    found.append(f"{name}.{key}: {_number(value)} -> {_number(now)}")
                    if undo and isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor):
                        now.copy_(value)  # a scheduler may hold it
                    elif undo:
                        live[key] = value
        return [*dict.fromkeys(found)]  # groups are often alike

    def undo_schedules(self) -> None:
        """Restore schedulers, and what they set in optimizers, as of the last commit."""
        state = self.state()
        self.load({name: state[name] for name in (*self._schedulers, *self._optimizers)})

    def check_unchanged(self, *, after_epoch: bool = False) -> None:
        """Raise UserError if a tracked object has changed since the last commit. Call this before each step, and with
        `after_epoch` when the code after an epoch's last batch has run, which may step schedulers. Objects other than
        schedulers are checked only in the first steps."""
        changed = []
        for name, schedule in self._schedules.items():
            if not after_epoch and schedule.get("last_epoch") != getattr(self.items[name], "last_epoch", None):
                changed.append(name)
        if self._checks:
            self._checks -= 1
            changed += [name for name, now in self._look().items() if now != self._seen.get(name)]
        if changed:
            raise UserError(
                f"track: {changed[0]} must change only inside job.step, got a change between two steps, which a copy "
                "would lose. Move the change into the block or, after the last batch of an epoch, into job.change."
            )

    def end_checks(self) -> None:
        """Look at nothing from now on: the job has ended, and a notebook may train without it."""
        self._checks = 0

    @property
    def in_first_steps(self) -> bool:
        return self._checks > 0

    def unknown(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return those of `parameters` that are in no tracked module, dict or list, and are no tracked tensor."""
        modules = [each for item in self.items.values() if isinstance(item, nn.Module) for each in item.parameters()]
        others = [each for each in tree_leaves([*self.items.values()]) if isinstance(each, torch.Tensor)]
        known = {id(each) for each in chain(modules, others, *self._parameters.values())}
        known -= {id(each) for each in self.left_out()}  # code that trains them has unfrozen them since
        memory = {each.data_ptr() for each in others} - {0}  # a module's state_dict has other tensors with its memory
        return [each for each in parameters if id(each) not in known and each.data_ptr() not in memory]

    def _look(self) -> dict[str, Any]:
        """Return, by name, a value that changes with the item: for a module, torch's count of changes in place of each
        parameter; for others, except optimizers and schedulers, a digest, because they may replace their tensors."""
        found: dict[str, Any] = {}
        for name, item in self.items.items():
            if isinstance(item, nn.Module):
                found[name] = [each._version for each in (self._parameters[name] if self.split else item.parameters())]
            elif not isinstance(item, Optimizer | LRScheduler):
                tree, tensors = encode(self._state_of({name: item}))
                local = {key: t.to_local() if hasattr(t, "to_local") else t for key, t in tensors.items()}
                found[name] = _digest(tree, {key: t for key, t in local.items() if t.nbytes <= LARGE_BYTES})
        return found

    # A copy ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return what a copy holds, by name: the state of the last commit, unless a commit is under way. The tensors
        are live, not cloned. A DTensor is this rank's part, see `gathered`."""
        state = self._state_of(self.items)
        # By place, because a buffer may have several names: in a module that is registered twice, or in a dict
        kept = {
            place_of(buffer): self._buffers[name][path + key]
            for name in self._buffers for path, held in self._holders[name] for key, buffer in held.items()
            if buffer is not None and buffer.numel() and path + key in self._buffers[name]
        }
        for name, item in self.items.items() if kept else ():
            if not isinstance(item, Optimizer | LRScheduler):
                state[name] = mapped(state[name], lambda tensor: kept.get(place_of(tensor), tensor))
        state |= self._schedules
        for name, settings in self._settings.items():
            groups = zip(state[name]["param_groups"], settings, strict=True)
            state[name] = {**state[name], "param_groups": [{**kept, "params": live["params"]} for live, kept in groups]}
        return state

    def kinds(self) -> dict[str, Any]:
        """Return an item that a copy holds beside `state`, if any tensor needs it."""
        items = {name: item for name, item in self.items.items() if isinstance(item, FILLED_IN_PLACE)}
        found = {name: kinds for name, item in items.items() if (kinds := kinds_of(item))}
        return {KINDS: found} if found else {}

    def whole(self, name: str) -> Any:
        """Return one item's state, all ranks together: live tensors, or if any is split, whole ones on rank 0 alone."""
        state = self._state_of({name: self.items[name]})[name]
        return gathered(state) if self.split else state

    def built(self) -> dict[str, list[str]]:
        """Return for each scheduler its class, and for each optimizer also a digest of its parameters' names, in order
        and by group: torch's states of optimizers know only places in that order."""
        found = {name: [_class_of(item)] for name, item in self._schedulers.items()}
        for name, item in self._optimizers.items():
            paths = [[self._paths.get(id(each), "") for each in group["params"]] for group in item.param_groups]
            found[name] = [_class_of(item), hashlib.sha256(json.dumps(paths).encode()).hexdigest()[:16]]
        return found

    def flags(self) -> Flags:
        """Return which parameters and modules train, see `flags_of`."""
        return flags_of({name: self.items[name] for name in self._names}, self._names)

    def left_out(self) -> list[torch.Tensor]:
        """Return the parameters that no copy holds, because they are not trained."""
        return [each for frozen in self._left_out.values() for each in frozen.values()]

    def fingerprint(self) -> dict[str, str]:
        """Return a digest of each item by name. Ranks that hold equal items get equal digests."""
        return {name: _digest(*encode({name: state})) for name, state in self.state().items()}

    def fingerprint_of_rest(self) -> dict[str, str]:
        """Return digests of buffers, and of items other than modules and optimizers: nothing else compares these."""
        states = self.state()
        kinds = nn.Module | Optimizer
        rest = {name: state for name, state in states.items() if not isinstance(self.items[name], kinds)}
        for name, buffers in self._buffers.items():  # leave out non-persistent buffers, which a copy does not hold
            rest[f"the buffers of {name}"] = {key: each for key, each in buffers.items() if key in states[name]}
        return {name: _digest(*encode({name: each})) for name, each in rest.items()}

    def _state_of(self, items: dict[str, Any]) -> dict[str, Any]:
        return {
            name: _renamed(self._trained(name, item.state_dict()), self._names[name]) if isinstance(item, nn.Module)
            else item if isinstance(item, FILLED_IN_PLACE) else item.state_dict()
            for name, item in items.items()
        }

    def _trained(self, name: str, state: Any) -> Any:
        """Remove what no copy holds from a module's state_dict, with what quantized weights keep below their names."""
        frozen = self._left_out.get(name, {})
        for key in [key for key in state if key in frozen or key.rpartition(".")[0] in frozen] if frozen else ():
            del state[key]
        return state

    def load(self, state: dict[str, Any], filling: Filling | None = None) -> None:
        """Restore what `state` returned for these names. Items that are split also accept whole tensors. `filling`: of
        earlier calls for the same copy. Raises ValueError if names, shapes or types differ."""
        filling = filling or Filling()
        kinds = state.get(KINDS, {})
        for name in sorted(state.keys() - {KINDS}, key=lambda name: not isinstance(self.items[name], nn.Module)):
            try:
                self._load(name, self.items[name], state[name], filling, kinds.get(name, {}))
            except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:  # as torch does
                raise ValueError(f"{name}: {' '.join(str(error).split())[:300]}") from error
        self.commit()

    def _load(self, name: str, item: Any, values: Any, filling: Filling, kinds: Any) -> None:
        if isinstance(item, nn.Module):
            values = _renamed(values, {bare: key for key, bare in self._names[name].items()})
            whole = values
            if name in self._left_out:
                live = item.state_dict()
                if other := sorted(values.keys() ^ self._trained(name, live.copy()).keys()):
                    raise ValueError(f'only="trained" keeps other parameters here than in the copy, such as {other[0]}')
                whole = _renamed(values, {})
                whole.update((key, value) for key, value in live.items() if key not in values)
            if self.split:
                live = item.state_dict()
                whole = values = {key: laid_out(value, live.get(key)) for key, value in values.items()}
            filling.load_module(item, whole, values)
        elif isinstance(item, Optimizer):
            load_optimizer(item, values)
        elif isinstance(item, FILLED_IN_PLACE):
            filling.fill_item(item, values, kinds)
        else:
            item.load_state_dict(cloned(values))  # it may keep them, and with them the memory of the whole copy

    def make_room(self) -> None:
        """Make optimizers that have made no step create their state, so that a split copy can be read into it. This may
        change the weights, which must be loaded afterwards."""
        from torch.distributed.checkpoint.state_dict import _init_optim_state  # takes 0.2 s, and is rarely needed

        for optimizer in self._optimizers.values():
            _init_optim_state(optimizer)


def _equal(one: Any, two: Any) -> bool:
    """Return whether an option of an optimizer has not changed, as far as the host knows without waiting."""
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return one.device.type != "cpu" or torch.equal(one, two)
    return bool(one == two)


def _number(value: Any) -> str:
    return f"{value.tolist() if isinstance(value, torch.Tensor) else value}"


def has_state(item: Any) -> bool:
    return hasattr(item, "state_dict") and hasattr(item, "load_state_dict")


def _renamed(state: Any, names: dict[str, str]) -> Any:
    """Return a module's state dict under other names."""
    renamed = type(state)((names.get(key, key), value) for key, value in state.items())
    if hasattr(state, "_metadata"):  # holds the format versions of the modules
        renamed._metadata = {names.get(key, key): value for key, value in state._metadata.items()}
    return renamed


def _digest(tree: Any, tensors: dict[str, torch.Tensor]) -> str:
    total = hashlib.sha256(repr(tree).encode())
    for piece in TensorFile(tensors):
        total.update(piece)
    return total.hexdigest()[:16]


def _class_of(item: Any) -> str:
    inner = ", ".join(map(_class_of, getattr(item, "_schedulers", ())))
    return type(item).__qualname__ + (f"({inner})" if inner else "")
