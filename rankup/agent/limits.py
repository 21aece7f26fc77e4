"""What a container or a batch job grants and uses: the control groups (v1 and v2) of this process say it. No torch.

os.cpu_count() and psutil see the whole machine. `root` replaces the file system's root in each function, for tests.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")


def cpu_quota(root: Path = ROOT) -> float:
    """CPUs granted to this process (1.5 is possible): the least of its groups' quotas and its affinity."""
    return min([float(len(os.sched_getaffinity(0))), *_cpu_quotas(root)])


def memory_limit(root: Path = ROOT) -> int | None:
    """Bytes that this process may use, the least of its groups' limits; None where there is no limit."""
    return min((limit for limit, _ in _memory(root)), default=None)


def memory_left(root: Path = ROOT) -> int | None:
    """Bytes that this container or job may still take; None where there is no limit."""
    return min((max(0, limit - used) for limit, used in _memory(root)), default=None)


def memory_available() -> int:
    """Bytes that this process can take without swapping, of the machine and of its container or job."""
    import psutil  # 20 ms that others do without

    left, available = memory_left(), psutil.virtual_memory().available
    return available if left is None else min(available, left)


def oom_kills(root: Path = ROOT) -> int | None:
    """How many processes of this container or job the kernel has killed for memory so far; None if it does not say."""
    for folder, version in _groups("memory", root):
        counted = read(folder / ("memory.events" if version == 2 else "memory.oom_control"))
        if found := re.search(r"^oom_kill (\d+)$", counted, re.MULTILINE):
            return int(found[1])
    return None


def explain_sigkill(before: int | None) -> str:
    """Who may have sent it. `before`: what `oom_kills` returned when the process was started."""
    now = oom_kills()
    if now is None or before is None:
        return "if nobody sent it, the memory was not enough, or the limit of the container or job"
    if now == before:
        return "no out-of-memory kill was counted in this container or job: somebody sent it, or the machine ran out"
    were = "kills were" if now - before > 1 else "kill was"
    return (
        f"{now - before} out-of-memory {were} counted in this container or job meanwhile: give it more memory, or "
        "lower --num-workers or --batch-size"
    )


def read(path: str | Path) -> str:
    """The file's text, "" where it cannot be read. The kernel cuts a process's name, also within a character."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _cpu_quotas(root: Path) -> Iterator[float]:
    """The quota in CPUs of each group that has one."""
    for folder, version in _groups("cpu", root):
        if version == 2:
            quota, period = (read(folder / "cpu.max").split() or ["max", "1"])[:2]
        else:
            quota = read(folder / "cpu.cfs_quota_us").strip() or "-1"
            period = read(folder / "cpu.cfs_period_us").strip() or "100000"
        if quota not in ("max", "-1"):  # these mean no limit, in v2 and v1
            yield int(quota) / int(period)


def _memory(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and use in bytes of each group that has a limit. Files that were not touched of late are left out, as in
    Kubernetes' "working set": the kernel counts them as used, and a data set that was read once would fill any limit.
    """
    for folder, version in _groups("memory", root):
        names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit, used = (read(folder / name).strip() for name in names)
        if limit.isdigit() and int(limit) < 2**60:  # v1 writes 2**63 less a page where there is no limit
            entry = "inactive_file" if version == 2 else "total_inactive_file"
            cached = re.search(rf"^{entry} (\d+)$", read(folder / "memory.stat"), re.MULTILINE)
            yield int(limit), int(used or 0) - (int(cached[1]) if cached else 0)


def _groups(controller: str, root: Path) -> Iterator[tuple[Path, int]]:
    """Where this process's own group and each of its parents may lie, the own first, with the version: 1 or 2. Inside a
    container the path may be the host's, and does not exist: the mount point is then the container's own group."""
    mount = root / "sys/fs/cgroup"
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        parts = PurePosixPath(path.strip("/")).parts
        groups = [PurePosixPath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
        if not controllers:
            yield from ((mount / group, 2) for group in groups)
        elif controller in controllers.split(","):
            yield from ((place / group, 1) for place in (mount / controller, mount / controllers) for group in groups)
