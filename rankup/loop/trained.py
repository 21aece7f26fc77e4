"""What trains beside the objects that `job.track` got: the DDP modules around them, and other optimizers.

Many loops track a bare module and train its DDP wrapper. DDP decides in which order gradients are summed, so rankup has
to know every wrapper of a tracked parameter.
"""

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from rankup.errors import UserError
from rankup.group.group import Group
from rankup.loop.tracked import FILLED_IN_PLACE, Tracked
from rankup.observe.stragglers import StepClock
from rankup.state.tree import place_of

HOLD_NO_OPTIMIZER = (nn.Module, Optimizer, LRScheduler, torch.amp.GradScaler, torch.Tensor, dict, list)
# The DDP modules of this process, oldest first, and those since the last call of `take_new`
_made: "weakref.WeakKeyDictionary[DistributedDataParallel, None]" = weakref.WeakKeyDictionary()
new: list["weakref.ref[DistributedDataParallel]"] = []


def _note(module: nn.Module, name: str, submodule: Any) -> None:
    """Note a DDP module when its constructor registers the module inside it."""
    if isinstance(module, DistributedDataParallel) and module not in _made:
        _made[module] = None
        new.append(weakref.ref(module))


register_module_module_registration_hook(_note)


class Wrappers:
    """Treats DDP modules that train tracked parameters as if `track` had got them."""

    def __init__(self, group: Group, tracked: Tracked, clock: StepClock) -> None:
        self._group, self._tracked, self._clock = group, tracked, clock
        self.adopted = weakref.WeakSet[DistributedDataParallel]()

    def adopt(self, *, late: bool = False, begun: bool = True) -> None:
        """Adopt the wrappers of tracked parameters that were made since the last call. All ranks call this. `late`: the
        backward pass of a step is over, of the first step unless `begun`."""
        group, items, unfixed = self._group, self._tracked.items, set[str]()
        for ddp, name in wrappers_of(items).items():
            if ddp in self.adopted:
                continue
            # torch's `replicate` makes its DDP module in the first forward pass
            if late and not begun and group.world_size > 1 and not isinstance(ddp.module, nn.ParameterList):
                raise UserError(
                    f"track: it must be called after DistributedDataParallel has wrapped {name}, got an earlier call. "
                    "Move the call down."
                )
            self.adopted.add(ddp)
            self._tracked.adopt(ddp)
            self._clock.watch(next((each for each in items.values() if getattr(each, "_orig_mod", None) is ddp), ddp))
            if late or not fix_bucket_order(ddp):
                unfixed.add(name)
        if unfixed and group.world_size > 1:
            names = ", ".join(sorted(unfixed))
            group.log.info(f"track  a resume changes the last bits of {names}: DDP fixes its order of sums too late")

    def warn_of_hooks(self) -> None:
        """Log which communication hooks have a state of their own, such as PowerSGD's error."""
        for hook in [hook for ddp in self.adopted for hook, state in ddp._comm_hooks if hasattr(state, "iter")]:
            name = hook.__qualname__
            self._group.log.info(f"track  a resume changes the weights: no copy holds the state of DDP's {name}")


def wrappers_of(items: dict[str, Any]) -> dict[DistributedDataParallel, str]:
    """Return the DDP modules in `items` or around their parameters, in the same order on all ranks, with the name of
    an item that each of them trains.

    A newer wrapper replaces an older one of the same parameters, which may be garbage that only some ranks have freed.
    """
    names = _names(items)
    found = {
        each: name for name, item in items.items() if isinstance(item, nn.Module) for each in item.modules()
        if isinstance(each, DistributedDataParallel)
    }
    covered = {id(parameter) for each in found for parameter in each.parameters()}
    for ddp in reversed([each for each in _made if hasattr(each, "reducer")]):  # its constructor has not failed
        trained = [parameter for parameter in ddp.parameters() if parameter.requires_grad]
        own, known = {id(each) for each in trained}, {names.get(place_of(each), "") for each in trained} - {""}
        if ddp not in found and not own <= covered and known:
            found[ddp] = min(known)
        covered |= own
    return found


def _names(items: dict[str, Any]) -> dict[tuple[Any, ...], str]:
    """Return the name of an item for each tensor that a copy holds or an optimizer trains, by its place in memory. A
    module's name comes before others: messages name it."""
    leaves = {}
    for name, item in items.items():
        if isinstance(item, nn.Module):
            leaves[name] = [*item.parameters()]
        elif isinstance(item, Optimizer):
            leaves[name] = [each for group in item.param_groups for each in group["params"]]
        else:
            leaves[name] = tree_leaves(item if isinstance(item, FILLED_IN_PLACE) else item.state_dict())
    ordered = sorted(leaves, key=lambda name: isinstance(items[name], nn.Module))
    return {place_of(each): name for name in ordered for each in leaves[name] if isinstance(each, torch.Tensor)}


def unwrapped(items: dict[str, Any]) -> list[str]:
    """Return the names of modules with trained parameters that are in no DDP module and are not split by FSDP2."""
    covered = {id(parameter) for ddp in wrappers_of(items) for parameter in ddp.parameters()}
    stepped = set[int]().union(*(parameters_of(item) for item in items.values() if isinstance(item, Optimizer)))
    return [
        name for name, item in items.items() if isinstance(item, nn.Module) and any(
            each.requires_grad and id(each) in stepped - covered and not hasattr(each, "to_local")
            for each in item.parameters()
        )
    ]


def parameters_of(optimizer: Optimizer) -> set[int]:
    return {id(each) for group in optimizer.param_groups for each in group["params"]}


def fix_bucket_order(ddp: DistributedDataParallel) -> bool:
    """Make a DDP module rebuild its buckets now, instead of after its first backward pass. All ranks call this.

    With three or more ranks, other buckets mean another order of sums: the first step after a resume would use DDP's
    first buckets, but the uninterrupted run used the rebuilt ones. Therefore a backward pass of zeros at every start
    shows DDP the parameters in a fixed order, last first. Returns False if this is impossible.
    """
    if ddp.find_unused_parameters and not ddp.static_graph:
        return True  # then DDP never rebuilds buckets
    parameters = [p for p in ddp.module.parameters() if p.requires_grad]
    if ddp.static_graph or any(getattr(p, "_post_accumulate_grad_hooks", None) for p in parameters):
        return False
    module, ddp.module = ddp.module, nn.Identity()  # the sum below, not the model's graph, decides the order
    try:
        zero = ddp(torch.zeros(()))
        for parameter in parameters:
            zero = zero + (parameter * 0).real.float().sum().cpu()
        zero.backward()
    finally:
        ddp.module = module
    for parameter in parameters:
        parameter.grad = None
    return True


SCALED_STEP = torch.amp.GradScaler.step.__code__


def _scaler() -> Any:
    """Return the GradScaler that called the optimizer's step from which this is called, or None."""
    frame: Any = sys._getframe()
    for _ in range(8):  # hooks, torch's wrappers of a step, and the scaler's own methods
        if frame is None:
            break
        # A look at f_locals of the user's frame would keep its tensors alive: Python stores the dict in the frame
        if frame.f_code is SCALED_STEP:
            return frame.f_locals["self"]
        frame = frame.f_back
    return None


def watch_optimizers(tracked: Tracked, say: Callable[[str], None]) -> set[int]:
    """Look at each optimizer that steps during the first steps.

    Raises UserError in the step of a tracked optimizer that trains parameters of no tracked object: a resume would give
    it a state that belongs to other weights. Calls `say` once for each optimizer and GradScaler that is not tracked, if
    a restart would reset its state or its parameters. Returns the ids of these parameters and GradScalers, a set that
    grows.
    """
    said = set[int]()
    if any(not isinstance(item, HOLD_NO_OPTIMIZER) for item in tracked.items.values()):
        return said  # such an item may hold modules and optimizers
    optimizers = {name: item for name, item in tracked.items.items() if isinstance(item, Optimizer)}
    kept = {name: parameters_of(item) for name, item in optimizers.items()}
    this = weakref.ref(tracked)  # torch never removes the hook

    def look(optimizer: Optimizer, *_: Any) -> None:
        if (tracked := this()) is None or not tracked.in_first_steps:
            return
        own, kind = parameters_of(optimizer), type(optimizer).__name__
        trained = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
        lost = tracked.unknown(trained)
        name = next((name for name, known in kept.items() if known & own), None)
        if name is not None and lost:
            raise UserError(
                f"track: {name} must train only parameters of tracked objects, got {len(lost)} of {len(trained)} "
                "tensors that belong to none. Give job.track their module too."
            )
        scaler = _scaler()
        if scaler is not None and scaler.is_enabled() and id(scaler) not in {*said, *map(id, tracked.items.values())}:
            said.add(id(scaler))
            say("track: GradScaler works and is not tracked: a restart resets its scale, and the weights will differ")
        # A tracked optimizer may wrap the one that steps, as Accelerate's does
        known = any(
            each.state is optimizer.state or each.param_groups is optimizer.param_groups
            or getattr(each, "optimizer", None) is optimizer for each in optimizers.values()
        )
        if not known and (optimizer.state or lost) and said.isdisjoint(own):
            said.update(own)
            what = " and ".join(["its state"] * bool(optimizer.state) + ["its parameters"] * bool(lost))
            say(f"track: {kind} steps and is not tracked: a restart resets {what}, and the weights will differ")

    register_optimizer_step_post_hook(look)
    return said
