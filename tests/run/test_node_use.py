"""How much of a node is used: of a container's grant where it has one, and by node where there are several."""

import math
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from train.run import node_use
from train.run.node_use import NAMES, NodeUse, sample_gpu
from train.run.rank_reports import node_values

NAN = math.nan
NOTHING = [NAN] * 7


def test_a_sample_of_this_machine_is_plausible(tmp_path: Path) -> None:
    use = NodeUse(tmp_path)
    sum(number * number for number in range(10**6))  # the counters go on in hundredths of a second
    sample = dict(zip(NAMES, use.sample(), strict=True))
    assert 0 <= sample["cpu_percent"] <= 101
    assert 0 < sample["memory_percent"] < 100
    assert sample["disk_free_gb"] > 0
    assert not sample["disk_write_mb_per_s"] < 0
    assert all(math.isnan(value) for value in sample_gpu(torch.device("cpu")))


def test_a_container_uses_a_share_of_what_it_was_granted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1.5 CPUs for 10 seconds, of which it used 12 seconds."""
    now = SimpleNamespace(s=50.0, used_s=30.0)
    monkeypatch.setattr(node_use, "time", SimpleNamespace(monotonic=lambda: now.s))
    monkeypatch.setattr(node_use, "cpu_time", lambda: (now.used_s, 1.5))
    monkeypatch.setattr(node_use, "memory_limit", lambda: 10**9)
    monkeypatch.setattr(node_use, "memory_available", lambda: 4 * 10**8)
    use = NodeUse(tmp_path)
    now.s, now.used_s = 60.0, 42.0
    assert use.sample()[:2] == pytest.approx([80.0, 60.0])


def test_what_is_not_known_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "disk_io_counters", lambda: None)  # in some containers
    sample = dict(zip(NAMES, NodeUse(tmp_path / "missing").sample(), strict=True))
    unknown = {name for name, value in sample.items() if math.isnan(value)}
    assert unknown >= {"disk_free_gb", "disk_read_mb_per_s", "disk_write_mb_per_s"}


def test_values_are_those_of_each_node() -> None:
    ranks = [[50.0, 20.0, 7.5, 0.0, NAN, 90.0, 30.0], [*NOTHING[:5], 70.0, 40.0], [10.0, 2.0, 9.0, 0.0, 1.0, NAN, NAN]]
    assert node_values(["a", "a", "b"], ranks) == {
        "nodes/a/cpu_percent": 50.0, "nodes/a/memory_percent": 20.0, "nodes/a/disk_free_gb": 7.5,
        "nodes/a/disk_read_mb_per_s": 0.0, "nodes/a/gpu_percent": 80.0, "nodes/a/gpu_memory_percent": 40.0,
        "nodes/b/cpu_percent": 10.0, "nodes/b/memory_percent": 2.0, "nodes/b/disk_free_gb": 9.0,
        "nodes/b/disk_read_mb_per_s": 0.0, "nodes/b/disk_write_mb_per_s": 1.0,
    }
    assert node_values(["a"], [NOTHING]) == {}
