"""How much of its CPUs, memory, disk and GPU a node uses: of what a container or job grants where there is a limit."""

import math
import time
from pathlib import Path

import psutil
import torch

from rankup.agent.limits import cpu_time, memory_available, memory_limit

NAMES = ("cpu_percent", "memory_percent", "disk_free_gb", "disk_read_mb_per_s", "disk_write_mb_per_s")
GPU_NAMES = ("gpu_percent", "gpu_memory_percent")


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
