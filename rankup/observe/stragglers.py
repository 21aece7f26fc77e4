"""Slow ranks: each rank measures its steps, and rank 0 compares the ranks and logs which one keeps the others waiting.

All ranks end a step together, so the duration of a step does not show which rank is slow. The slow rank is the one that
begins last to wait for the others in the exchange of gradients. A backward pass first computes and then waits. In
between, when autograd's engine has nothing left to compute, it calls a callback of ours. DDP waits in a callback that
it adds later. FSDP, Horovod and a batch norm over all ranks also wait elsewhere (in forward, in the optimizer). That
time counts as computing here. With these, a rank that loads data slowly is found, but one that computes slowly is not.

The measurements travel with the sum of the metrics at each report: each rank has its own elements in the summed vector,
to which the other ranks add zeros.

Other work on a machine slows different ranks at different times. A rank is therefore called slow only after ROW windows
in a row in which both measures say so: its own part of a step takes LEAST longer, and it waits that much less. With
random variations of 8 %, no healthy rank was called slow in 20,000 windows of 2, 3, 4 and 16 ranks.
"""

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from rankup.group.group import Group

DATA, COMPUTE, WAITING = range(3)
PARTS = ("data", "compute", "waiting")
LEAST = 0.08  # the least slowdown that counts, as a share of the other ranks' own time
ROW = 10  # windows in a row until a rank is called slow
WINDOW_S = 5.0  # the reports of this time are combined, because a short time says little about a busy machine


# Measured by each rank ------------------------------------------------------------------------------------------------


class StepClock:
    """A clock that adds up the seconds of each part of a step. The loop marks the ends of parts, at about 5 µs a step.

    On a GPU the host only queues work, so the marks are events in the GPU's queue, and nothing waits for the events. A
    process without other ranks is not compared: it has no callbacks and no events.

    `link`: what replaces torch's exchange of gradients, or None. Its `waited_s`: the seconds that this rank has waited
    there for other ranks so far.
    """

    def __init__(self, device: torch.device, *, world_size: int) -> None:
        self._device, self._compared = device, world_size > 1
        self._queues = self._compared and device.type == "cuda"
        self.link: Any = None
        self._seconds = [0.0, 0.0, 0.0]
        self._lap_s, self._linked_s = time.perf_counter(), 0.0
        self.backward_seen = False
        self._events: deque[tuple[int | None, torch.Event]] = deque()  # each with the part that it ends

    def start(self) -> None:
        """Begin a step. The time between steps (evaluation, saves, reports) does not count."""
        self._lap_s = time.perf_counter()

    def has_batch(self) -> float:
        """Note that this rank has its batch and begins to compute. Return for how many seconds it waited."""
        began_s = self._lap_s
        self.mark(DATA)
        if self._queues:
            self._record(None)
        return self._lap_s - began_s

    def mark(self, part: int) -> None:
        """Count the time since the last mark as `part`: the host's time, or on a GPU the time of the queued work."""
        if self._queues and part != DATA:
            self._record(part)
            self._read()
            return
        now_s = time.perf_counter()
        took_s, self._lap_s = now_s - self._lap_s, now_s
        if self.link is not None:
            linked_s, self._linked_s = self.link.waited_s - self._linked_s, self.link.waited_s
            if part == COMPUTE:
                took_s -= linked_s
                self._seconds[WAITING] += linked_s
        self._seconds[part] += took_s

    def split_backward(self, loss: torch.Tensor) -> None:
        """Tell computing from waiting in the backward pass of `loss`. Call `mark(WAITING)` after that pass."""
        # The engine accepts callbacks only while it runs, and calls them in order. Our hook runs first of all, because
        # it is on the gradient of the loss, so DDP's callback comes later
        if self._compared:
            loss.register_hook(self._backward_began)  # type: ignore[no-untyped-call]

    def watch(self, module: nn.Module) -> None:
        """Do the same for each backward pass through `module`, for any loss."""

        def after_forward(module: nn.Module, inputs: Any, output: Any) -> None:  # a result would replace the output
            if torch.compiler.is_compiling():  # the loop has compiled `module` itself
                return
            for each in tree_leaves(output):
                if isinstance(each, torch.Tensor) and each.requires_grad:
                    self.split_backward(each)
                    return

        if self._compared:
            module.register_forward_hook(after_forward)

    def end_of_backward(self) -> None:
        """Note that the step's backward passes are over. After the last one had computed, this rank only waited."""
        self.mark(WAITING if self.backward_seen else COMPUTE)
        self.backward_seen = False

    def take(self) -> list[float]:
        """Return the seconds of DATA, COMPUTE and WAITING since the last call. On a GPU only finished work counts; at a
        report all work is finished."""
        self._read()
        taken, self._seconds = self._seconds, [0.0, 0.0, 0.0]
        return taken

    def _backward_began(self, gradient: torch.Tensor) -> None:
        Variable._execution_engine.queue_callback(self._computed)

    def _computed(self) -> None:
        self.backward_seen = True
        self.mark(COMPUTE)

    def _record(self, part: int | None) -> None:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        self._events.append((part, event))

    def _read(self) -> None:
        while len(self._events) > 1 and self._events[1][1].query():
            _, began = self._events.popleft()
            part, ended = self._events[0]
            if part is not None:  # None: the event begins a step, and the time before it does not count
                self._seconds[part] += began.elapsed_time(ended) / 1000


# Compared by rank 0 ---------------------------------------------------------------------------------------------------


def gaps(seconds: torch.Tensor) -> list[float]:
    """Return how much each rank delays the others by both measures, as a share of their own time: 0.18 for 18 %.
    `seconds`: the seconds of each part of a step, float [ranks, parts]."""
    own, waits = seconds[:, :WAITING].sum(1).tolist(), seconds[:, WAITING].tolist()
    pairs = zip(own, medians_of_others(own), waits, medians_of_others(waits), strict=True)
    return [min(mine - theirs, their_wait - wait) / max(theirs, 1e-9) for mine, theirs, wait, their_wait in pairs]


def medians_of_others(values: list[float]) -> list[float]:
    """Return for each value the median of all other values. With two ranks it is the other rank's value."""
    ranked, last = sorted(values), len(values) - 2  # `last`: the place of the last value among the others

    def median_without(value: float) -> float:  # without a list of the others, of which there may be a thousand
        place = bisect_left(ranked, value)
        low, high = (ranked[middle + (middle >= place)] for middle in (last // 2, (last + 1) // 2))
        return (low + high) / 2

    return [median_without(value) for value in values]


class RankReports:
    """Sends this rank's measurements, and on rank 0 logs which ranks are slow.

    `load`: each rank's samples relative to its exact share of the batch. If three ranks share 4 samples, the first one
    takes 2 (a load of 1.5), and is not called slow because of that. Empty: all ranks take their exact share.
    """

    def __init__(self, group: Group, clock: StepClock, *, step: int) -> None:
        """`step`: the last finished step."""
        self.group, self._clock = group, clock
        self.load: Sequence[float] = ()
        self._names: list[str] = []  # at the last report
        # On rank 0: the sums of the open window, and the time and the first step of that window
        self._seconds = torch.zeros(group.world_size, len(PARTS), dtype=torch.float64)
        self._began_s, self._first, self._saved = -math.inf, step + 1, False
        # The newest windows: the first step, the seconds of a step, and the gaps
        self._windows = deque[tuple[int, torch.Tensor, list[float]]](maxlen=ROW)
        self._called = set[int]()  # the ranks that were called slow in the log

    def exchange(self, values: Mapping[str, float], *, step: int, saving: bool) -> dict[str, float]:
        """Return the means of all ranks' `values` by name. All ranks call this at a report, after the values have come
        from the device. `saving`: rank 0 writes a copy in the background. This extra work would hide a slow rank.

        Raises UserError on all ranks if the names differ between ranks."""
        group, own, names = self.group, self._clock.take(), sorted(values)
        if group.world_size == 1:
            return {**values}
        ordered = torch.tensor([values[name] for name in names], dtype=torch.float64)
        # The first number counts the ranks with other names than at the last report. Their values travel later
        end = 1 + len(self._names)
        numbers = torch.zeros(end + self._seconds.numel(), dtype=torch.float64)
        if names == self._names:
            numbers[1:end] = ordered
        else:
            numbers[0] = 1.0
        seconds = numbers[end:].view_as(self._seconds)
        seconds[group.rank] = torch.tensor(own, dtype=torch.float64)
        group.sum(numbers)
        total = numbers[1:end]
        if numbers[0]:
            given = ", ".join(filter(None, names)) or "none"
            group.must_match("job.step: the names of the values", given, remedy="Give equal names, in each step.")
            self._names, total = names, group.sum(ordered)
        self._seconds += seconds
        self._saved |= saving
        now_s = time.monotonic()
        if group.is_rank0 and now_s - self._began_s >= WINDOW_S:
            if not self._saved:
                for line in self.look(self._first, self._seconds / (step + 1 - self._first)):
                    group.log.info(line)
            self._seconds.zero_()
            self._began_s, self._first, self._saved = now_s, step + 1, saving
        return dict(zip(names, (total / group.world_size).tolist(), strict=True))

    def look(self, first: int, seconds: torch.Tensor) -> list[str]:
        """Return the lines to log after a window of steps that began at `first`, none in a healthy job. `seconds`: as
        in `gaps`."""
        window = seconds.clone()
        if self.load:
            window[:, :WAITING] /= torch.tensor(self.load)[:, None]
        self._windows.append((first, window, gaps(window)))
        rows = zip(*(found for *_, found in self._windows), strict=True)
        slow = {rank for rank, row in enumerate(rows) if len(row) == ROW and min(row) >= LEAST}
        new, self._called = sorted(slow - self._called), self._called | slow
        if not new:
            return []
        usual = torch.stack([seconds for _, seconds, _ in self._windows]).median(0).values
        share = gaps(usual)
        return [f"rank {rank} ({self.group.hosts[rank]}) {self._how_slow(rank, usual, share[rank])}" for rank in new]

    def _how_slow(self, rank: int, usual: torch.Tensor, share: float) -> str:
        """Describe the slowdown, and the part of a step in which the rank loses most compared with the median. `usual`:
        the seconds of a usual window, as in `gaps`. `share`: this rank's gap in it."""
        median = usual.median(0).values
        part = int((usual[rank] - median)[:WAITING].argmax())
        others = "the median" if self.group.world_size > 2 else "the other"
        return (
            f"is {100 * share:.0f} % slower than {others}, since step {self._windows[0][0]}: {PARTS[part]} "
            f"takes {1000 * usual[rank, part]:.3g} ms of a step, median {1000 * median[part]:.3g}"
        )
