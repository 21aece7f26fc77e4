"""Which rank keeps the others waiting: each rank measures its steps, rank 0 compares the ranks and says who is slow.

All ranks end a step together, so the length of a step does not tell who is slow. What tells is when each rank arrives
where it waits for the others, at the exchange of gradients. Backward does both, it computes and then waits, and the
moment between the two is seen by a callback of autograd's engine: it is called when backward has nothing left to
compute. DDP waits for the exchange in a callback that it adds later.

FSDP, Horovod and a batch norm over all ranks wait elsewhere too (in forward, in the optimizer): that counts as
computing here. With them a rank that is slow to get its data shows, one that computes slowly does not.

What the ranks measured travels with the sum of the values at each report. Each rank has places of its own in the vector
that is summed, and the others add zeros there: no message more than the values, such as the loss, need anyway.

A machine that does other work too slows now this rank and now that one. So a rank is called slow only after ROW windows
in a row in which both measures say so: its own part of a step takes LEAST longer, and it waits that much less. With ups
and downs of 8 % chance alone called no healthy rank slow in 20,000 windows of 2, 3, 4 and 16 ranks.
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from rankup.group.group import Group

DATA, COMPUTE, WAITING = range(3)
PARTS = ("data", "compute", "waiting")
LEAST = 0.08  # of the median's own time
ROW = 10  # windows in a row until a rank is called slow, and until it is said to keep up again
WINDOW_S = 5.0  # of the reports that are looked at together: short ones say little of a busy machine
WINDOW_S_PER_RANK = 0.05  # longer for many ranks: each has values to write, and TensorBoard takes 50 µs for a value
WIDTH = len(PARTS)  # numbers of one rank


# Measured by each rank ------------------------------------------------------------------------------------------------


class StepClock:
    """Adds up the seconds of each part. The loop says when a part ends; it costs about 5 µs a step.

    On the CPU everything is done when the call returns, so the host's clock is right. For a GPU the host only queues
    work and goes on: marks are events in that queue, and nothing waits for them.

    `link`: through it two ranks of one host exchange gradients in the middle of backward. Its `waited_s` says how long
    this rank has waited there so far.
    """

    def __init__(self, device: torch.device, *, world_size: int) -> None:
        """With a `world_size` of 1 it measures nothing: one process is compared with nobody."""
        self._device, self._on = device, world_size > 1
        self._queues = device.type == "cuda"
        self.link: Any = None
        self._seconds = [0.0, 0.0, 0.0]
        self._lap_s = self._linked_s = 0.0
        self._backward_seen = False
        self._events: deque[tuple[int | None, torch.Event]] = deque()  # with the part that each one ends

    def start(self) -> None:
        """A step begins. What was between the steps (evaluation, saves, reports) counts nowhere."""
        self._lap_s = time.perf_counter()

    def lap(self, part: int) -> None:
        """What the host did since the last call was `part`."""
        now_s = time.perf_counter()
        took_s, self._lap_s = now_s - self._lap_s, now_s
        if self.link is not None:
            linked_s, self._linked_s = self.link.waited_s - self._linked_s, self.link.waited_s
            if part == COMPUTE:
                took_s -= linked_s
                self._seconds[WAITING] += linked_s
        self._seconds[part] += took_s

    def has_batch(self) -> None:
        """This rank has its batch, and computing begins."""
        self.lap(DATA)
        if self._on and self._queues:
            self._record(None)

    def mark(self, part: int) -> None:
        """The work that was given to the device since the last mark was `part`."""
        if not self._on:
            return
        if self._queues:
            self._record(part)
            self._read()
        else:
            self.lap(part)

    def split_backward(self, loss: torch.Tensor) -> None:
        """Call it before backward of this loss, and `mark(WAITING)` after it."""
        # The engine takes callbacks only while it runs, and calls them in the order in which they came. The gradient
        # of the loss is the first of all, so DDP's callback comes later
        if self._on:
            loss.register_hook(self._backward_began)  # type: ignore[no-untyped-call]

    def watch(self, module: nn.Module) -> None:
        """The same for each backward pass through `module`, whatever the loss is."""

        def after_forward(module: nn.Module, inputs: Any, output: Any) -> None:  # what it returned would be the output
            self._split_backward_of(output)

        if self._on:
            module.register_forward_hook(after_forward)

    def _split_backward_of(self, output: Any) -> bool:
        """Of the first tensor in what a module returned that has a gradient. Whether there is one."""
        if isinstance(output, torch.Tensor):
            if output.requires_grad:
                self.split_backward(output)
            return output.requires_grad
        values = output.values() if isinstance(output, dict) else output if isinstance(output, tuple | list) else ()
        return any(self._split_backward_of(value) for value in values)

    def end_of_backward(self) -> None:
        """All backward passes of the step are over: what came after the last one's own work was a wait."""
        self.mark(WAITING if self._backward_seen else COMPUTE)
        self._backward_seen = False

    def _backward_began(self, gradient: torch.Tensor) -> None:
        Variable._execution_engine.queue_callback(self._computed)

    def _computed(self) -> None:
        self._backward_seen = True
        self.mark(COMPUTE)

    def take(self) -> list[float]:
        """Seconds of DATA, COMPUTE and WAITING since the last call. On a GPU: of what it is done with.

        A report has waited for the GPU anyway.
        """
        self._read()
        taken, self._seconds = self._seconds, [0.0, 0.0, 0.0]
        return taken if self._on else [0.0, 0.0, 0.0]

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


@dataclass(frozen=True, slots=True)
class Window:
    """The steps from `first` on that are looked at together, and the mean seconds of each part of a step by rank.

    `load`: how much more than its exact part of the batch each rank takes; of 4 samples for three ranks the first takes
    2, and is not slow for that. Empty: all take theirs.
    """

    first: int
    seconds: Sequence[Sequence[float]]
    load: Sequence[float] = ()

    def gaps(self) -> list[float]:
        """By how much of the median's own time each rank holds up the others by both measures, 0.18 for 18 %."""
        loads = self.load or [1.0] * len(self.seconds)
        own = [(rank[DATA] + rank[COMPUTE]) / load for rank, load in zip(self.seconds, loads, strict=True)]
        waits = [rank[WAITING] for rank in self.seconds]
        pairs = zip(own, _others(own), waits, _others(waits), strict=True)
        return [min(mine - theirs, their_wait - wait) / max(theirs, 1e-9) for mine, theirs, wait, their_wait in pairs]


def _others(values: list[float]) -> list[float]:
    """For each value the median of all others. With itself a rank would be compared with a part of itself: of two
    ranks, by half of the difference."""
    return [statistics.median(values[:place] + values[place + 1 :]) for place in range(len(values))]


class RankReports:
    """Sends what this rank measured, and on rank 0 makes entries for the metrics and words on slow ranks of it."""

    def __init__(self, group: Group, clock: StepClock, *, step: int) -> None:
        """`step`: where the run is."""
        self.group, self._clock = group, clock
        self.load: Sequence[float] = ()  # see `Window`
        # Rank 0's: the sums of the window that is open, and when and with which step it began
        self._seconds = torch.zeros(group.world_size, WIDTH, dtype=torch.float64)
        self._began_s, self._first, self._saving = -math.inf, step + 1, False
        self._windows = deque[Window](maxlen=ROW)  # the newest
        self._rows = [0] * group.world_size  # of each rank: for how many windows it has been what it is not called
        self._called = set[int]()  # slow, in a line

    def exchange(
        self, values: Sequence[float], *, step: int, saving: bool
    ) -> tuple[list[float], dict[str, float]]:
        """All ranks call this at a report, with as many `values`, once these have come from the device.

        Returns the means of the ranks' values, and values for the line in the metrics: on rank 0, once a window, else
        none. `saving`: rank 0 writes a copy beside the training.
        """
        group, count = self.group, len(values)
        places = [[0.0] * WIDTH for _ in range(group.world_size)]
        places[group.rank] = self._clock.take()
        numbers = torch.tensor([*values, *chain(*places)], dtype=torch.float64)
        group.sum(numbers)
        ranks = numbers[count:].view(group.world_size, WIDTH)
        means = [number / group.world_size for number in numbers[:count].tolist()]
        return means, self._add(ranks, step, saving) if group.is_rank0 and group.world_size > 1 else {}

    def _add(self, ranks: torch.Tensor, step: int, saving: bool) -> dict[str, float]:
        self._seconds += ranks
        self._saving |= saving
        now_s = time.monotonic()
        if now_s - self._began_s < max(WINDOW_S, WINDOW_S_PER_RANK * self.group.world_size):
            return {}
        window = Window(self._first, (self._seconds / (step + 1 - self._first)).tolist(), self.load)
        # The first window is of set-up and first steps; in a save rank 0 works for two
        if self._began_s > -math.inf and not self._saving:
            for line in self.look(window):
                self.group.log.info(line)
        self._seconds.zero_()
        self._began_s, self._first, self._saving = now_s, step + 1, saving
        return {
            f"ranks/{name}_s/{rank}": round(own[part], 6)
            for rank, own in enumerate(window.seconds) for part, name in enumerate(PARTS)
        }

    def look(self, window: Window) -> list[str]:
        """What there is to say after this window: nothing in a healthy job."""
        self._windows.append(window)
        lines = []
        for rank, gap in enumerate(window.gaps()):
            self._rows[rank] = self._rows[rank] + 1 if (gap >= LEAST) != (rank in self._called) else 0
            if self._rows[rank] == ROW:
                self._called ^= {rank}
                self._rows[rank] = 0
                now = self._how_slow(rank) if rank in self._called else "keeps up again"
                lines.append(f"rank {rank} ({self.group.hosts[rank]}) {now}")
        return lines

    def _how_slow(self, rank: int) -> str:
        """And in which part of a step this rank loses most, with its own time and the median of all ranks."""
        def own_and_usual(part: int) -> tuple[float, float]:
            usual = (statistics.median_low(each[part] for each in window.seconds) for window in self._windows)
            return statistics.median(window.seconds[rank][part] for window in self._windows), statistics.median(usual)

        gap = statistics.median(window.gaps()[rank] for window in self._windows)
        times = {part: own_and_usual(part) for part in (DATA, COMPUTE)}
        part = max(times, key=lambda part: times[part][0] - times[part][1])
        own, usual = times[part]
        others = "the median" if self.group.world_size > 2 else "the other"
        return (
            f"is {100 * gap:.0f} % slower than {others}, since step {self._windows[0].first}: {PARTS[part]} takes "
            f"{1000 * own:.3g} ms of a step, median {1000 * usual:.3g}"
        )
