"""What the ranks measure beside the training, and how rank 0 gets it: with the sum of the values at each report.

Each rank has places of its own in the vector that is summed, and the others add zeros there: no message more than the
values, such as the loss, need anyway. Rank 0 puts the reports of some seconds together: short ones say little of a
busy machine, and TensorBoard takes 50 µs for a value.
"""

import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

from rankup.agent.limits import cpu_time, memory_available, memory_limit
from rankup.group.group import Group
from rankup.observe.step_clock import StepClock
from rankup.observe.stragglers import PARTS, Stragglers, Window

WINDOW_S = 5.0  # of the reports that are looked at together
WINDOW_S_PER_RANK = 0.05  # longer for many ranks: each has values to write
NAMES = ("cpu_percent", "memory_percent", "disk_free_gb", "disk_read_mb_per_s", "disk_write_mb_per_s")  # of a node
GPU_NAMES = ("gpu_percent", "gpu_memory_percent")
WIDTH = len(PARTS) + len(NAMES) + len(GPU_NAMES)  # numbers of one rank


class RankReports:
    """Sends what this rank measured, and on rank 0 makes entries for the metrics and words on slow ranks of it."""

    def __init__(self, group: Group, clock: StepClock, *, step: int, load: Sequence[float] = ()) -> None:
        """`step`: where the run is. `load`: see `Window`."""
        self.group, self._clock, self.load = group, clock, load
        self._window_s = max(WINDOW_S, WINDOW_S_PER_RANK * group.world_size)
        self._node = NodeUse(group.run_dir) if group.launch.local_rank == 0 else None
        self._use = torch.full((WIDTH - len(PARTS),), math.nan, dtype=torch.float64)
        self._sampled_s = -math.inf
        # Rank 0's
        self._hosts: list[str] = []
        self._stragglers: Stragglers | None = None
        self._seconds = torch.zeros(group.world_size, len(PARTS), dtype=torch.float64)
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
        ranks[group.rank, : len(PARTS)] = torch.tensor(self._clock.take(), dtype=torch.float64)
        ranks[group.rank, len(PARTS) :] = self._sampled()
        group.sum(numbers)
        means = [number / group.world_size for number in numbers[:count].tolist()]
        return means, self._looked_at(ranks, step, saving) if group.is_rank0 else {}

    def _sampled(self) -> torch.Tensor:
        """The use of this node and this GPU, not older than a window."""
        now_s = time.monotonic()
        if now_s - self._sampled_s >= self._window_s:
            self._sampled_s = now_s
            node = self._node.sample() if self._node is not None else [math.nan] * len(NAMES)
            self._use = torch.tensor(node + sample_gpu(self.group.device), dtype=torch.float64)
        return self._use

    def _looked_at(self, ranks: torch.Tensor, step: int, saving: bool) -> dict[str, float]:
        self._seconds += ranks[:, : len(PARTS)]
        self._saving |= saving
        now_s = time.monotonic()
        if now_s - self._began_s < self._window_s:
            return {}
        self._hosts = self._hosts or list(self.group.hosts)
        window = Window(self._first, step, (self._seconds / (step + 1 - self._first)).tolist(), self.load)
        values = node_values(self._hosts, ranks[:, len(PARTS) :].tolist())
        if self.group.world_size > 1:
            values |= {
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


def node_values(hosts: list[str], ranks: list[list[float]]) -> dict[str, float]:
    """Values for the metrics by node: its own, and of its ranks' GPUs the mean use and the fullest memory.

    `hosts` and `ranks` by rank; the latter are the values of NAMES, NaN but on the first rank of a node, and of
    GPU_NAMES.
    """
    values: dict[str, float] = {}
    for host in dict.fromkeys(hosts):
        mine = [use for use, name in zip(ranks, hosts, strict=True) if name == host]
        # Of two nodes that share a name, or of ranks that all take themselves for the first, the first one counts
        columns = [[value for value in column if not math.isnan(value)] for column in zip(*mine, strict=True)]
        chosen = [column[:1] for column in columns[: len(NAMES)]]
        busy, memory = columns[len(NAMES) :]
        chosen += [[statistics.mean(busy)] if busy else [], [max(memory)] if memory else []]
        for name, found in zip((*NAMES, *GPU_NAMES), chosen, strict=True):
            values |= {f"nodes/{host}/{name}": round(value, 3) for value in found}
    return values


class NodeUse:
    """Samples of the node that this process is on. A value that is not known here is NaN."""

    def __init__(self, folder: Path) -> None:
        """`folder`: what lies on the disk whose free space counts."""
        self.folder = folder
        self._before = _counters()

    def sample(self) -> list[float]:
        """The values of NAMES: rates and CPUs are means since the last call. The disk's rates are the machine's."""
        before, self._before = self._before, _counters()
        seconds, cpu_s, grant_s, read, written = (now - then for now, then in zip(self._before, before, strict=True))
        total = min(memory_limit() or math.inf, psutil.virtual_memory().total)
        return [
            100 * cpu_s / grant_s if grant_s > 0 else math.nan,
            100 * (1 - memory_available() / total),
            _free_gb(self.folder),
            read / seconds / 1e6,
            written / seconds / 1e6,
        ]


def sample_gpu(device: torch.device) -> list[float]:
    """The values of GPU_NAMES for this process's own GPU; NaN on the CPU.

    Its own alone: to ask for another one's memory would take half a gigabyte there, for a context.
    """
    if device.type != "cuda":
        return [math.nan, math.nan]
    free, total = torch.cuda.mem_get_info(device)
    try:
        busy = float(torch.cuda.utilization(device))
    except Exception:  # it needs nvidia-ml-py, and a driver that says it: not so for a part of a GPU (MIG)
        busy = math.nan
    return [busy, 100 * (1 - free / total)]


def _counters() -> list[float]:
    """Seconds on the clock, seconds of CPUs used and granted, bytes read and written, all since some time ago."""
    now_s = time.monotonic()
    found = cpu_time()
    if found is not None:
        used_s, cpus = found
        cpu_s, grant_s = used_s, cpus * now_s
    else:
        times = psutil.cpu_times()
        # Not `guest`: a virtual machine's time is in `user` already
        grant_s = sum(value for name, value in times._asdict().items() if not name.startswith("guest"))
        cpu_s = grant_s - times.idle - getattr(times, "iowait", 0.0)
    disks = psutil.disk_io_counters()
    read, written = (disks.read_bytes, disks.write_bytes) if disks else (math.nan, math.nan)
    return [now_s, cpu_s, grant_s, read, written]


def _free_gb(folder: Path) -> float:
    try:
        return psutil.disk_usage(str(folder)).free / 1e9
    except OSError:
        return math.nan
