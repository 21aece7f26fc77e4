"""What the ranks measure beside the training, and how rank 0 gets it: with the sum of the values at each report.

Each rank has places of its own in the vector that is summed, and the others add zeros there: no message more than the
values, such as the loss, need anyway. Rank 0 puts the reports of some seconds together: short ones say little of a
busy machine, and TensorBoard takes 50 µs for a value.
"""

import math
import time
from collections.abc import Sequence

import torch

from rankup.group.group import Group
from rankup.observe.step_clock import StepClock
from rankup.observe.stragglers import PARTS, Stragglers, Window

WINDOW_S = 5.0  # of the reports that are looked at together
WINDOW_S_PER_RANK = 0.05  # longer for many ranks: each has values to write
WIDTH = len(PARTS)  # numbers of one rank


class RankReports:
    """Sends what this rank measured, and on rank 0 makes entries for the metrics and words on slow ranks of it."""

    def __init__(self, group: Group, clock: StepClock, *, step: int, load: Sequence[float] = ()) -> None:
        """`step`: where the run is. `load`: see `Window`."""
        self.group, self._clock, self.load = group, clock, load
        self._window_s = max(WINDOW_S, WINDOW_S_PER_RANK * group.world_size)
        # Rank 0's
        self._hosts: list[str] = []
        self._stragglers: Stragglers | None = None
        self._seconds = torch.zeros(group.world_size, WIDTH, dtype=torch.float64)
        self._began_s, self._first, self._saving = -math.inf, step + 1, False

    def exchange(
        self, values: Sequence[float], *, step: int, saving: bool
    ) -> tuple[list[float], dict[str, float]]:
        """All ranks call this at a report, with as many `values`, once these have come from the device.

        Returns the means of the ranks' values, and values for the line in the metrics: on rank 0, once a window, else
        none. `saving`: rank 0 writes a copy beside the training.
        """
        group, count = self.group, len(values)
        numbers = torch.zeros(count + WIDTH * group.world_size, dtype=torch.float64)
        numbers[:count] = torch.tensor(values, dtype=torch.float64)
        ranks = numbers[count:].view(group.world_size, WIDTH)
        ranks[group.rank] = torch.tensor(self._clock.take(), dtype=torch.float64)
        group.sum(numbers)
        means = [number / group.world_size for number in numbers[:count].tolist()]
        return means, self._looked_at(ranks, step, saving) if group.is_rank0 else {}

    def _looked_at(self, ranks: torch.Tensor, step: int, saving: bool) -> dict[str, float]:
        self._seconds += ranks
        self._saving |= saving
        now_s = time.monotonic()
        if now_s - self._began_s < self._window_s:
            return {}
        self._hosts = self._hosts or list(self.group.hosts)
        window = Window(self._first, step, (self._seconds / (step + 1 - self._first)).tolist(), self.load)
        values = {}
        if self.group.world_size > 1:
            values = {
                f"ranks/{name}_s/{rank}": round(own[part], 6)
                for rank, own in enumerate(window.seconds) for part, name in enumerate(PARTS)
            }
            self._judge(window)
        self._seconds.zero_()
        self._began_s, self._first, self._saving = now_s, step + 1, saving
        return values

    def _judge(self, window: Window) -> None:
        """Say what there is to say. The first window is of set-up and first steps; in a save rank 0 works for two."""
        if self._stragglers is None:
            self._stragglers = Stragglers(self._hosts)
        elif not self._saving:
            for line in self._stragglers.look(window):
                self.group.log.info(line)
