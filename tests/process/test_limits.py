"""CPUs and memory of the container, not those of the machine."""

from pathlib import Path

import pytest

from train.process.limits import cpu_time, memory_left


def files(root: Path, contents: dict[str, str]) -> Path:
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        ({"proc/self/cgroup": "0::/job/task\n", "sys/fs/cgroup/job/task/cpu.max": "400000 100000\n",
          "sys/fs/cgroup/job/cpu.max": "150000 100000\n", "sys/fs/cgroup/job/task/cpu.stat": "usage_usec 1000000\n",
          "sys/fs/cgroup/job/cpu.stat": "usage_usec 2500000\nuser_usec 2000000\n"}, (2.5, 1.5)),
        ({"proc/self/cgroup": "3:cpu,cpuacct:/x\n", "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us": "50000\n",
          "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us": "100000\n",
          "sys/fs/cgroup/cpu,cpuacct/x/cpuacct.usage": "7500000000\n"}, (7.5, 0.5)),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n",
          "sys/fs/cgroup/cpu.stat": "usage_usec 2500000\n"}, None),
        ({}, None),
    ],
    ids=["v2-parent", "v1", "v2-unlimited", "no-cgroup"],
)
def test_cpu_time_is_that_of_the_group_with_the_least_quota(
    tmp_path: Path, contents: dict[str, str], expected: tuple[float, float] | None
) -> None:
    assert cpu_time(files(tmp_path, contents)) == expected


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        ({"proc/self/cgroup": "0::/job\n",
          "sys/fs/cgroup/job/memory.max": "1000\n", "sys/fs/cgroup/job/memory.current": "300\n",
          "sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "9\n"}, 700),
        ({"proc/self/cgroup": "0::/job\n",
          "sys/fs/cgroup/job/memory.max": "1000\n", "sys/fs/cgroup/job/memory.current": "990\n",
          "sys/fs/cgroup/job/memory.stat": "anon 290\nfile 700\ninactive_file 600\n"}, 610),
        ({"proc/self/cgroup": "1:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "1000\n",
          "sys/fs/cgroup/memory/memory.usage_in_bytes": "990\n",
          "sys/fs/cgroup/memory/memory.stat": "inactive_file 5\ntotal_inactive_file 600\n"}, 610),
        ({"proc/self/cgroup": "1:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
          "sys/fs/cgroup/memory/memory.usage_in_bytes": "5\n"}, None),
    ],
)
def test_memory_left_is_that_of_the_container(tmp_path: Path, contents: dict[str, str], expected: int | None) -> None:
    assert memory_left(files(tmp_path, contents)) == expected
