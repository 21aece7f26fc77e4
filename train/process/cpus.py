"""How many CPUs this process may really use. os.cpu_count() sees the machine, not the container's share of it."""

import os
from collections.abc import Iterator
from pathlib import Path

from train.process.limits import folders, read


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
    # A parent may grant less than the group itself
    for folder, version in folders("cpu", root):
        if version == 2:
            yield _quota(*read(folder / "cpu.max").split())
        else:
            yield _quota(*read(folder / "cpu.cfs_quota_us").split(), *read(folder / "cpu.cfs_period_us").split())


def _quota(quota_us: str = "max", period_us: str = "100000") -> float:
    """"max" (v2) and "-1" (v1) mean no limit."""
    return float("inf") if quota_us in {"max", "-1"} else int(quota_us) / int(period_us)

