"""What the ranks send each other at a report, and what rank 0 makes of it: values for the metrics, once a window."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from rankup.observe import rank_reports
from rankup.observe.rank_reports import NAMES, WIDTH, NodeUse, RankReports, node_values, sample_gpu
from rankup.observe.stragglers import ROW

STEPS = 10  # between two reports


class Job:
    """Rank 0 of two, with a clock that the test sets. Each report is a window later."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.now_s, self.step, self.said = 100.0, 0, []  # type: ignore[var-annotated]
        self.own, self.other = [0.1, 0.5, 0.4], [0.1, 0.5, 0.4]  # seconds of a report's steps
        monkeypatch.setattr(rank_reports, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        group: Any = SimpleNamespace(
            rank=0, world_size=2, is_rank0=True, run_dir=folder, device=torch.device("cpu"),
            hosts=["node0", "node1"], launch=SimpleNamespace(local_rank=0),
            sum=self.sum, log=SimpleNamespace(info=self.said.append),
        )
        clock: Any = SimpleNamespace(take=lambda: self.own)
        self.reports = RankReports(group, clock, step=0, load=[1.0] * 2)

    def sum(self, numbers: torch.Tensor) -> torch.Tensor:
        """Adds what the other rank sends: a loss of 3, and its row."""
        numbers[0] += 3.0
        row = numbers[1:].view(2, WIDTH)[1]
        assert row.tolist() == [0.0] * WIDTH
        row += torch.tensor(self.other + [10.0] * 5 + [math.nan] * 2, dtype=torch.float64)
        return numbers

    def report(self, *, saving: bool = False, later_s: float = 5.0) -> dict[str, float]:
        self.step, self.now_s = self.step + STEPS, self.now_s + later_s
        means, values = self.reports.exchange([1.0], step=self.step, saving=saving)
        assert means == [2.0]
        return values


def test_rank_0_has_the_values_of_all_ranks_once_a_window(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    job = Job(monkeypatch, tmp_path)
    job.other = [0.2, 0.7, 0.1]
    values = job.report()
    assert values["ranks/data_s/0"] == 0.01
    assert [values[f"ranks/{part}_s/1"] for part in ("data", "compute", "waiting")] == [0.02, 0.07, 0.01]
    assert values["nodes/node1/cpu_percent"] == 10.0
    assert values["nodes/node0/memory_percent"] > 0
    assert job.report(later_s=2.0) == {}
    job.other = [0.4, 0.9, 0.1]
    assert job.report(later_s=3.0)["ranks/data_s/1"] == 0.03  # of both reports


def test_first_window_and_saves_call_no_rank_slow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    job = Job(monkeypatch, tmp_path)
    job.own = [0.1, 0.9, 0.0]  # rank 0 writes a checkpoint beside its steps
    for number in range(4 * ROW):
        job.report(saving=number % 2 == 0)  # one that begins in a window, and ends in the next
    assert job.said == []
    for _ in range(ROW + 1):
        job.report()
    (line,) = job.said
    assert line.startswith("rank 0 (node0) is 67 % slower than the other, since step ")


# What a node uses ---------------------------------------------------------------------------------------------

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
    monkeypatch.setattr(rank_reports, "time", SimpleNamespace(monotonic=lambda: now.s))
    monkeypatch.setattr(rank_reports, "cpu_time", lambda: (now.used_s, 1.5))
    monkeypatch.setattr(rank_reports, "memory_limit", lambda: 10**9)
    monkeypatch.setattr(rank_reports, "memory_available", lambda: 4 * 10**8)
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
