"""What a container or a batch job grants and uses, not what the machine has."""

import os
from pathlib import Path

import pytest

from rankup.agent import limits
from rankup.agent.limits import cpu_quota, explain_sigkill, memory_left, oom_kills


def files(root: Path, contents: dict[str, str]) -> Path:
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        ({"proc/self/cgroup": "0::/job\n",
          "sys/fs/cgroup/job/memory.max": "1000\n", "sys/fs/cgroup/job/memory.current": "990\n",
          "sys/fs/cgroup/job/memory.stat": "anon 290\nfile 700\ninactive_file 600\n",
          "sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "9\n"}, 610),
        ({"proc/self/cgroup": "1:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "1000\n",
          "sys/fs/cgroup/memory/memory.usage_in_bytes": "990\n",
          "sys/fs/cgroup/memory/memory.stat": "inactive_file 5\ntotal_inactive_file 600\n"}, 610),
        ({"proc/self/cgroup": "1:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
          "sys/fs/cgroup/memory/memory.usage_in_bytes": "5\n"}, None),
    ],
)
def test_memory_left_is_that_of_the_container(tmp_path: Path, contents: dict[str, str], expected: int | None) -> None:
    assert memory_left(files(tmp_path, contents)) == expected


@pytest.mark.parametrize(
    ("contents", "affinity", "expected"),
    [
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 8, 1.5),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "800000 100000\n"}, 2, 2.0),
        ({"proc/self/cgroup": "0::/job/task\n", "sys/fs/cgroup/job/task/cpu.max": "max 100000\n",
          "sys/fs/cgroup/job/cpu.max": "200000 100000\n"}, 8, 2.0),
        ({"proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/x\n",
          "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us": "50000\n",
          "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us": "100000\n"}, 8, 0.5),
        ({"proc/self/cgroup": "1:cpu:/on/the/host\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000\n",
          "sys/fs/cgroup/cpu/cpu.cfs_period_us": "50000\n"}, 8, 2.0),
        ({"proc/self/cgroup": "1:cpu:/\n0::/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n"}, 3, 3.0),
        ({}, 4, 4.0),
    ],
    ids=["v2", "v2-affinity-less", "v2-parent", "v1", "v1-container", "v1-unlimited", "no-cgroup"],
)
def test_cpu_quota_is_the_least_granted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, contents: dict[str, str], affinity: int, expected: float
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(affinity)))
    assert cpu_quota(files(tmp_path, contents)) == expected


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/memory.events": "oom 5\noom_kill 3\n",
          "sys/fs/cgroup/memory.events": "oom 9\noom_kill 9\n"}, 3),
        # In a container: the path is the host's
        ({"proc/self/cgroup": "4:memory:/docker/abc\n", "sys/fs/cgroup/memory/memory.oom_control":
          "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"}, 2),
        ({"proc/self/cgroup": "0::/\n"}, None),
    ],
)
def test_memory_kills_are_counted_in_the_own_group(
    tmp_path: Path, contents: dict[str, str], expected: int | None
) -> None:
    assert oom_kills(files(tmp_path, contents)) == expected


@pytest.mark.parametrize(
    ("before", "now", "text"),
    [
        (None, 3, "if nobody sent it, the memory was not enough, or the limit of the container or job"),
        (3, None, "if nobody sent it, the memory was not enough, or the limit of the container or job"),
        (3, 3, "no out-of-memory kill was counted in this container or job: somebody sent it"),
        (3, 4, "1 out-of-memory kill was counted in this container or job meanwhile: give it more memory"),
    ],
)
def test_sigkill_is_explained_by_the_kills_that_were_counted_meanwhile(
    before: int | None, now: int | None, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "oom_kills", lambda: now)
    assert explain_sigkill(before).startswith(text)
