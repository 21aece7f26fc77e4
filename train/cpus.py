"""How many CPUs this process may really use. os.cpu_count() sees the machine, not the container's share of it."""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def cpu_quota(root: Path = Path("/"), *, num_affine: int | None = None) -> float | None:
    """CPUs granted to this process (1.5 is possible): the least of its cgroups' quotas (v1 and v2) and its affinity.

    None where neither is known. `root` and `num_affine` replace the file system's root and the affinity, for tests.
    """
    grants = list(_quotas(root))
    if num_affine is None and hasattr(os, "sched_getaffinity"):
        num_affine = len(os.sched_getaffinity(0))
    if num_affine is not None:
        grants.append(float(num_affine))
    return min((grant for grant in grants if grant != float("inf")), default=None)


def _quotas(root: Path) -> Iterator[float]:
    cgroups = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        # A parent may grant less than the group itself. Inside a container the path may be the host's and not exist:
        # the walk then ends at the mount point, which is the container's own group.
        parts = PurePosixPath(path.strip("/")).parts
        groups = [PurePosixPath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
        if not controllers:
            yield from (_quota(*_read(cgroups / group / "cpu.max").split()) for group in groups)
        elif "cpu" in controllers.split(","):
            mounts = [cgroups / "cpu", cgroups / controllers]
            for folder in (mount / group for mount in mounts for group in groups):
                yield _quota(*_read(folder / "cpu.cfs_quota_us").split(), *_read(folder / "cpu.cfs_period_us").split())


def _quota(quota_us: str = "max", period_us: str = "100000") -> float:
    """"max" (v2) and "-1" (v1) mean no limit."""
    return float("inf") if quota_us in {"max", "-1"} else int(quota_us) / int(period_us)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
