"""Finds silent corruption: ranks that must hold equal states compare digests of them every few steps and before each
save. If the digests differ, all ranks end, and the next attempt resumes from the newest copy.

With three or more ranks, the majority shows which rank is wrong. With two ranks, one comparison can't tell. The next
attempt then compares after each step until it has passed the faulty one. If the fault comes again, a further attempt
shows which rank differs from its own earlier digest. `corruption.md` says what comparisons miss, and why `recompute`.
"""

import json
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from rankup.errors import PeerLost, UserError
from rankup.group.group import Group
from rankup.loop.trained import unwrapped
from rankup.places.files import open_regular, open_to_append
from rankup.seeds import derive_seed, seed_everything, state_kept
from rankup.state.run import Run
from rankup.state.tree import mesh_position
from rankup.timing import SHARE

FIRST = 10  # steps before the first comparison, and at least between two comparisons
RECORD = "disagreements.jsonl"  # in the folder of the run, after the first disagreement
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}  # by bytes per element


def digests_of(items: dict[str, Any]) -> dict[str, int]:
    """Return digests of all modules' parameters and all optimizers' tensors in `items`, by this rank's place in the
    mesh that splits the tensors: ranks at equal places hold equal parts. Waits for the device."""
    return digests_by_place(_tensors(items))


def digests_by_place(tensors: Iterable[Any]) -> dict[str, int]:
    by_place: dict[str, list[torch.Tensor]] = {}
    for tensor in tensors:
        place, local = list[int](), tensor
        if hasattr(tensor, "to_local"):
            place, local = mesh_position(tensor), tensor.to_local()
        by_place.setdefault(str(place), []).append(local)
    return {place: _digest(tensors) for place, tensors in by_place.items()}


def _tensors(items: dict[str, Any]) -> Iterator[Any]:
    for item in items.values():
        if isinstance(item, nn.Module):
            yield from item.parameters()
        elif isinstance(item, Optimizer):
            for group in item.param_groups:
                for parameter in group["params"]:
                    state = item.state.get(parameter, {})
                    yield from (state[name] for name in sorted(state) if isinstance(state[name], torch.Tensor))


def _gradients(module: nn.Module) -> Iterator[Any]:
    for tensor in module.parameters():
        if tensor.grad is not None:
            yield tensor.grad.to_dense() if tensor.grad.layout is torch.sparse_coo else tensor.grad


def _digest(tensors: list[torch.Tensor]) -> int:
    """Return a digest of 64 bits. `torch.hash_tensor` is the XOR of all elements: one flipped bit changes it. The odd
    factor of each tensor reveals two tensors that have been swapped."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.numel():
            bits = tensor.detach().contiguous().flatten().view(INTEGERS[tensor.element_size()])
            hashed = torch.hash_tensor(bits).view(torch.int64) * (2 * number + 1)
            by_device.setdefault(tensor.device, []).append(hashed)
    return sum(int(torch.stack(each).sum()) for each in by_device.values()) % 2**64


def odd_ones(values: Sequence[int]) -> list[int]:
    """Return the ranks whose value differs from the majority's, or all ranks if values differ without a majority."""
    (common, count), *_ = Counter(values).most_common()
    if count == len(values):
        return []
    return [rank for rank, value in enumerate(values) if value != common or 2 * count <= len(values)]


def differing(found: Sequence[dict[str, int]]) -> list[int]:
    """Return the ranks that differ from the other ranks at their place. `found`: each rank's `digests_of`."""
    at_place = defaultdict[str, list[tuple[int, int]]](list)
    for rank, digests in enumerate(found):
        for place, digest in digests.items():
            at_place[place].append((rank, digest))
    return sorted({each[n][0] for each in at_place.values() for n in odd_ones([digest for _, digest in each])})


class Agreement:
    """Compares the states of the ranks. All ranks make the same calls at the same steps."""

    def __init__(self, group: Group, run: Run, items: dict[str, Any], *, every: int | None) -> None:
        """`items`: the tracked items. `every`: steps between two comparisons; 0 turns them off, None spaces them so
        that they take `SHARE` of the time."""
        self.deciding = threading.Lock()  # held while the ranks find out whether their states are sound
        self.wrong = False  # whether this rank's state may be wrong
        self.next = math.inf  # the next comparison is due at this step
        self.rest_at = math.inf  # the step after which `compare_rest` is due
        self.group, self._items, self._run, self._parts = group, items, run.lineage.run, run.parts
        self._path = group.run_dir / RECORD
        self._every = 0 if group.world_size == 1 else every
        self._earlier: dict[int, dict[str, Any]] = {}  # rows that earlier attempts left in the record, by step
        self._compared, self._since_s, self._cost_s = -1, 0.0, 0.0
        self._equal = False  # whether a comparison of this attempt has found equal states: the loop makes them so

    def begin(self, step: int) -> None:
        """Start to compare in a run that stands at `step`."""
        self._since_s, self._compared = time.monotonic(), step
        if self._every == 0:
            if self.group.world_size > 1 and self._items:
                self.group.log.info(
                    "track  compare_every_steps=0: ranks may differ, and a resume gives all of them the state of one"
                )
            return
        self.rest_at = step + FIRST
        earlier = self.group.broadcast(self._read() if self.group.is_rank0 else None)
        self._earlier = {row["step"]: row for row in earlier if row["step"] > step}
        self.next = step + (1 if self._earlier else self._every or FIRST)

    def _read(self) -> list[dict[str, Any]]:
        """Read the record's rows of this run with this number of ranks."""
        try:
            with open_regular(self._path) as file:
                rows = [json.loads(line) for line in file]
            return [{name: row[name] for name in ("step", "sound", "digests", "odd")} for row in rows
                    if row["run"] == self._run and len(row.get("digests", ())) == self.group.world_size]
        except (OSError, ValueError, LookupError, TypeError, RecursionError):  # the record only helps to name a rank
            return []

    def compare(self, step: int) -> None:
        """Compare the state of the last commit, of `step`. If it differs, raises PeerLost and names the wrong ranks."""
        if self._every == 0 or step == self._compared:
            return
        if self.group.device.type == "cuda":
            torch.cuda.synchronize(self.group.device)  # don't count work queued earlier as the cost of the comparison
        began_s = time.monotonic()
        own, steps = digests_of(self._items), step - self._compared
        step_s = max((began_s - self._since_s) / steps, 1e-6)
        # The last comparison's whole cost: for a small model, waiting for other ranks takes longer than the digest
        cost_s = max(self._cost_s, time.monotonic() - began_s)
        pause = self._every or max(FIRST, math.ceil(cost_s / SHARE / step_s))
        with self.deciding:
            found, pauses = zip(*self.group.gather([own, pause]), strict=True)
            if odd := differing(found):
                self._distrust()
        if len(odd) == self.group.world_size and not self._equal and (mistake := self._mistake(step)):
            raise UserError(mistake, printed_elsewhere=not self.group.is_rank0)
        self._equal = not odd
        values, sound = [sum(digests.values()) for digests in found], self._compared
        self._compared, self._since_s = step, time.monotonic()
        self._cost_s = self._since_s - began_s
        before = self._earlier.pop(step, None)
        self.next = step + (1 if self._earlier else max(pauses))
        if before is not None and before["sound"] == step - 1:
            # The states before this step were sound, so each rank's old digest must equal that of the repeated step
            before["odd"] = [rank for rank, value in enumerate(before["digests"]) if value != values[rank]]
        if odd:
            if before is not None and before["odd"] and len(odd) > 1:
                odd = before["odd"]
            what = "is not in the state of the other ranks" if len(odd) == 1 else "are in different states"
            if before is not None:
                what += (
                    ". They differed at this step before: a lasting fault, or machines of different kinds, for which "
                    "compare_every_steps=0 turns comparisons off"
                )
            raise self._lost(step, odd, f"after step {step}", what, digests=values, sound=sound)
        if before is not None and self.group.is_rank0:
            self.group.log.warning(
                f"silent corruption: step {step} was computed correctly this time. "
                f"{self._names(before['odd'], ' or ')} was "
                "wrong before: watch that machine, and run rankup doctor there"
            )

    def _mistake(self, step: int) -> str:
        """Return the mistake in the loop by which healthy ranks differ from each other after `step`, "" if there is no
        sign of one. All ranks call this before their next optimizer step."""
        modules = {name: item for name, item in self._items.items() if isinstance(item, nn.Module)}
        optimizers = {name: item for name, item in self._items.items() if isinstance(item, Optimizer)}
        weights = {name: digests_of({name: module}) for name, module in modules.items()}
        gradients = {name: digests_by_place(_gradients(module)) for name, module in modules.items()}
        # After a flipped bit only a few tensors of an optimizer differ, and DDP still gives all ranks equal gradients
        states = {name: [_digest([each]) for each in _tensors({name: item})] for name, item in optimizers.items()}
        found = self.group.gather([weights, gradients, states, unwrapped(self._items)])

        def differ(kind: int, name: str) -> bool:
            return bool(differing([each[kind][name] for each in found]))

        if apart := [name for name in modules if differ(0, name)]:
            for name in apart:
                no_gradient = not any(each[1][name] for each in found)
                if differ(1, name) or (no_gradient and name in found[0][3]):
                    return (
                        f"track: {name} must get the same gradients on all ranks, got other weights on each after step "
                        f"{step}: the ranks never averaged them. Wrap it in DistributedDataParallel and train the "
                        "wrapper. If ranks differ on purpose (local SGD), give compare_every_steps=0 to rankup.init."
                    )
            return ""
        for name in states:
            pairs = [*zip_longest(*(each[2][name] for each in found))]
            if 2 * sum(len({*pair}) > 1 for pair in pairs) > len(pairs):
                return (
                    f"track: {name} must hold its whole state on each rank, got other states of equal weights: "
                    f"{type(optimizers[name]).__name__} splits it. Use an optimizer of torch.optim, or FSDP2."
                )
        return ""

    def compare_rest(self, own: dict[str, str]) -> None:
        """Warn once per attempt of items that differ: a copy holds one rank's version. `own`: digests by name."""
        found = self.group.gather(own)
        odd = [name for name in own if len({each.get(name) for each in found}) > 1]
        if odd and self.group.is_rank0:
            self.group.log.warning(
                f"track: the ranks differ in {' and '.join(odd)}, and a resume gives all ranks the values of one. Make "
                "them equal before job.step ends, or don't track them"
            )

    def recompute(self, loss: Callable[[Any], torch.Tensor], batch: Any, *, step: int, split: bool) -> None:
        """Compare what every rank computes from rank 0's `batch`, see `Job.recompute`. `split`: whether FSDP2 has split
        a module. If a result differs, raises PeerLost, which names the wrong ranks."""
        if self.group.world_size == 1:
            return
        batch = self.group.broadcast_tensors(batch)
        first = self.group.gather(self._computed(loss, batch, step, split))
        if not (odd := odd_ones(first)):
            return
        second = self.group.gather(self._computed(loss, batch, step, split))
        unsteady = [rank for rank, value in enumerate(second) if value != first[rank]]
        if 2 * len(unsteady) > self.group.world_size:  # most machines can't be broken: the loss itself varies
            if self.group.is_rank0:
                self.group.log.warning(
                    "recompute: the loss must give the same bits each time, got other bits on most ranks. Call "
                    "torch.use_deterministic_algorithms(True)"
                )
            return
        with self.deciding:
            self._distrust()
        what = "computed other gradients from the same batch. Earlier steps may be wrong too: run rankup doctor there"
        raise self._lost(step, unsteady or odd, f"before step {step + 1}", what, computed=first, again=second)

    def _computed(self, loss: Callable[[Any], torch.Tensor], batch: Any, step: int, split: bool) -> int:
        """Return a digest of the loss and its gradients; if modules are `split`, of the loss alone, because FSDP2 sums
        gradients over ranks. Restores buffers and random state."""
        modules = [item for item in self._items.values() if isinstance(item, nn.Module)]
        parameters = [each for module in modules for each in module.parameters() if each.requires_grad and not split]
        with state_kept(self.group.device, modules), torch.set_grad_enabled(bool(parameters)):
            seed_everything(derive_seed(step), self.group.device)
            value = loss(batch)
            gradients = torch.autograd.grad(value, parameters, allow_unused=True) if parameters else ()
        return _digest([value, *(each for each in gradients if each is not None)])

    def _distrust(self) -> None:
        """Rescue nothing on this rank from now on, and drop its parts in memory. The caller holds `deciding`."""
        self.wrong = True
        self._parts.distrust()

    def _names(self, ranks: list[int], between: str = ", ") -> str:
        return between.join(f"rank {rank} on {self.group.hosts[rank]}" for rank in ranks)

    def _lost(self, step: int, odd: list[int], when: str, what: str, **more: Any) -> PeerLost:
        """Return the error for the ranks `odd`, which differ from the others. Rank 0 also adds a row to the record."""
        group = self.group
        row = {"run": self._run, "step": step, "odd": odd, **more, "hosts": [*group.hosts], "device": str(group.device),
               "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        if group.is_rank0:
            try:
                with open(open_to_append(self._path), "a", encoding="utf-8") as file:
                    file.write(f"{json.dumps(row)}\n")
            except OSError as error:  # the next attempt will not know of this disagreement
                group.log.warning(f"{self._path}: {error.strerror}")
        return PeerLost(
            f"silent corruption {when}: {self._names(odd)} {what}. The job goes on from the newest copy.",
            suspect=odd[0] if len(odd) == 1 else None,
        )
