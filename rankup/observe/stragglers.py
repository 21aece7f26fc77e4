"""Which rank keeps the others waiting: each rank measures its steps, rank 0 compares the ranks and says who is slow.

All ranks end a step together, so the length of a step does not tell who is slow. What tells is when each rank arrives
where it waits for the others, at the exchange of gradients. Backward computes and then waits, and autograd's engine
calls a callback of ours between the two: when it has nothing left to compute. DDP waits in a callback that it adds
later. FSDP, Horovod and a batch norm over all ranks wait elsewhere too (in forward, in the optimizer): that counts as
computing here. With them a rank that is slow to get its data shows, one that computes slowly does not.

What the ranks measured travels with the sum of the values at each report: each rank has places of its own in the vector
that is summed, where the others add zeros.

A machine that does other work too slows now this rank and now that one. So a rank is called slow only after ROW windows
in a row in which both measures say so: its own part of a step takes LEAST longer, and it waits that much less. With ups
and downs of 8 % chance alone called no healthy rank slow in 20,000 windows of 2, 3, 4 and 16 ranks.
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from rankup.group.group import Group

DATA, COMPUTE, WAITING = range(3)
PARTS = ("data", "compute", "waiting")
LEAST = 0.08  # of the median's own time
ROW = 10  # windows in a row until a rank is called slow
WINDOW_S = 5.0  # of the reports that are looked at together: short ones say little of a busy machine


# Measured by each rank ------------------------------------------------------------------------------------------------


class StepClock:
    """Adds up the seconds of each part. The loop says when a part ends; it costs about 5 µs a step.

    For a GPU the host only queues work and goes on: marks are events in that queue, and nothing waits for them. One
    process is compared with nobody: it has no callbacks and no events.

    `link`: through it two ranks of one host exchange gradients in the middle of backward. Its `waited_s` says how long
    this rank has waited there so far.
    """

    def __init__(self, device: torch.device, *, world_size: int) -> None:
        self._device, self._compared = device, world_size > 1
        self._queues = self._compared and device.type == "cuda"
        self.link: Any = None
        self._seconds = [0.0, 0.0, 0.0]
        self._lap_s, self._linked_s = time.perf_counter(), 0.0
        self._backward_seen = False
        self._events: deque[tuple[int | None, torch.Event]] = deque()  # with the part that each one ends

    def start(self) -> None:
        """A step begins. What was between the steps (evaluation, saves, reports) counts nowhere."""
        self._lap_s = time.perf_counter()

    def has_batch(self) -> float:
        """This rank has its batch, and computing begins. Returns for how many seconds it waited."""
        began_s = self._lap_s
        self.mark(DATA)
        if self._queues:
            self._record(None)
        return self._lap_s - began_s

    def mark(self, part: int) -> None:
        """What was done since the last mark was `part`: by the host, or on a GPU by what was given to it."""
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
        """Call it before backward of this loss, and `mark(WAITING)` after it."""
        # The engine takes callbacks only while it runs, and calls them in the order in which they came. The gradient
        # of the loss is the first of all, so DDP's callback comes later
        if self._compared:
            loss.register_hook(self._backward_began)  # type: ignore[no-untyped-call]

    def watch(self, module: nn.Module) -> None:
        """The same for each backward pass through `module`, whatever the loss is."""

        def after_forward(module: nn.Module, inputs: Any, output: Any) -> None:  # what it returned would be the output
            for each in tree_leaves(output):
                if isinstance(each, torch.Tensor) and each.requires_grad:
                    self.split_backward(each)
                    return

        if self._compared:
            module.register_forward_hook(after_forward)

    def end_of_backward(self) -> None:
        """All backward passes of the step are over: what came after the last one's own work was a wait."""
        self.mark(WAITING if self._backward_seen else COMPUTE)
        self._backward_seen = False

    def take(self) -> list[float]:
        """Seconds of DATA, COMPUTE and WAITING since the last call. On a GPU: of what it is done with, which is all at
        a report."""
        self._read()
        taken, self._seconds = self._seconds, [0.0, 0.0, 0.0]
        return taken

    def _backward_began(self, gradient: torch.Tensor) -> None:
        Variable._execution_engine.queue_callback(self._computed)

    def _computed(self) -> None:
        self._backward_seen = True
        self.mark(COMPUTE)

    def _record(self, part: int | None) -> None:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        self._events.append((part, event))

    def _read(self) -> None:
        while len(self._events) > 1 and self._events[1][1].query():
            _, began = self._events.popleft()
            part, ended = self._events[0]
            if part is not None:  # None: before the step, which is no work
                self._seconds[part] += began.elapsed_time(ended) / 1000


# Compared by rank 0 ---------------------------------------------------------------------------------------------------


def gaps(seconds: torch.Tensor) -> list[float]:
    """By how much of the others' own time each rank holds them up by both measures, 0.18 for 18 %. `seconds`: of each
    part of a step, float [ranks, parts]."""
    own, waits = seconds[:, :WAITING].sum(1).tolist(), seconds[:, WAITING].tolist()
    pairs = zip(own, _others(own), waits, _others(waits), strict=True)
    return [min(mine - theirs, their_wait - wait) / max(theirs, 1e-9) for mine, theirs, wait, their_wait in pairs]


def _others(values: list[float]) -> list[float]:
    """For each value the median of all others: of two ranks, the other one's."""
    return [statistics.median(values[:place] + values[place + 1 :]) for place in range(len(values))]


class RankReports:
    """Sends what this rank measured, and on rank 0 says which ranks are slow.

    `load`: how much more than its exact part of the batch each rank takes; of 4 samples for three ranks the first takes
    2, and is not slow for that. Empty: all take theirs.
    """

    def __init__(self, group: Group, clock: StepClock, *, step: int) -> None:
        """`step`: where the run is."""
        self.group, self._clock = group, clock
        self.load: Sequence[float] = ()
        # Rank 0's: the sums of the window that is open, and when and with which step it began
        self._seconds = torch.zeros(group.world_size, len(PARTS), dtype=torch.float64)
        self._began_s, self._first, self._saved = -math.inf, step + 1, False
        # The newest: the first step, the seconds of a step, and the gaps
        self._windows = deque[tuple[int, torch.Tensor, list[float]]](maxlen=ROW)
        self._called = set[int]()  # slow, in a line

    def exchange(self, values: Sequence[float], *, step: int, saving: bool) -> list[float]:
        """All ranks call this at a report, with as many `values`, once these have come from the device. Returns the
        ranks' means. `saving`: rank 0 writes a copy beside the training. It works for two then, which would hide a slow
        rank."""
        group, own = self.group, self._clock.take()
        if group.world_size == 1:
            return [*values]
        others = [[0.0] * len(PARTS) for _ in range(group.world_size)]
        others[group.rank] = own
        numbers = group.sum(torch.tensor([*values, *chain(*others)], dtype=torch.float64))
        self._seconds += numbers[len(values) :].view_as(self._seconds)
        self._saved |= saving
        now_s = time.monotonic()
        if group.is_rank0 and now_s - self._began_s >= WINDOW_S:
            if not self._saved:
                for line in self.look(self._first, self._seconds / (step + 1 - self._first)):
                    group.log.info(line)
            self._seconds.zero_()
            self._began_s, self._first, self._saved = now_s, step + 1, saving
        means: list[float] = (numbers[: len(values)] / group.world_size).tolist()
        return means

    def look(self, first: int, seconds: torch.Tensor) -> list[str]:
        """What there is to say after a window of steps from `first` on: nothing in a healthy job. `seconds`: see
        `gaps`."""
        window = seconds.clone()
        if self.load:
            window[:, :WAITING] /= torch.tensor(self.load)[:, None]
        self._windows.append((first, window, gaps(window)))
        rows = zip(*(found for *_, found in self._windows), strict=True)
        slow = {rank for rank, row in enumerate(rows) if len(row) == ROW and min(row) >= LEAST}
        new, self._called = sorted(slow - self._called), self._called | slow
        return [f"rank {rank} ({self.group.hosts[rank]}) {self._how_slow(rank)}" for rank in new]

    def _how_slow(self, rank: int) -> str:
        """And in which part of a step this rank loses most, with its own time and the median of all ranks."""
        usual = torch.stack([seconds for _, seconds, _ in self._windows]).median(0).values
        median = usual.median(0).values
        part = int((usual[rank] - median)[:WAITING].argmax())
        others = "the median" if self.group.world_size > 2 else "the other"
        return (
            f"is {100 * gaps(usual)[rank]:.0f} % slower than {others}, since step {self._windows[0][0]}: {PARTS[part]} "
            f"takes {1000 * usual[rank, part]:.3g} ms of a step, median {1000 * median[part]:.3g}"
        )
