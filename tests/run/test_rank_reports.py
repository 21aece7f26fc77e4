"""What the ranks send each other at a report, and what rank 0 makes of it: values for the metrics, once a window."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rankup.observe.stragglers import ROW
from train.run import rank_reports
from train.run.rank_reports import WIDTH, RankReports

STEPS = 10  # between two reports


class Job:
    """Rank 0 or 1 of two, or the only rank, with a clock that the test sets. Each report is a window later."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, *, rank: int = 0, world_size: int = 2) -> None:
        self.now_s, self.step, self.said = 100.0, 0, []  # type: ignore[var-annotated]
        self.own, self.other = [0.1, 0.5, 0.4], [0.1, 0.5, 0.4]  # seconds of a report's steps
        monkeypatch.setattr(rank_reports, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        group: Any = SimpleNamespace(
            rank=rank, world_size=world_size, is_rank0=rank == 0, run_dir=folder, device=torch.device("cpu"),
            hosts=["node0", "node1"][:world_size], launch=SimpleNamespace(local_rank=0),
            sum=self.sum, log=SimpleNamespace(info=self.said.append),
        )
        clock: Any = SimpleNamespace(take=lambda: self.own)
        self.rank, self.reports = rank, RankReports(group, clock, step=0, load=[1.0] * world_size)

    def sum(self, numbers: torch.Tensor) -> torch.Tensor:
        """Adds what the other rank sends: a loss of 3, and its row."""
        if len(numbers) > 1 + WIDTH:
            numbers[0] += 3.0
            row = numbers[1:].view(2, WIDTH)[1 - self.rank]
            assert row.tolist() == [0.0] * WIDTH
            row += torch.tensor(self.other + [10.0] * 5 + [math.nan] * 2, dtype=torch.float64)
        return numbers

    def report(self, *, saving: bool = False, later_s: float = 5.0) -> dict[str, float]:
        self.step, self.now_s = self.step + STEPS, self.now_s + later_s
        mean, values = self.reports.exchange(torch.tensor(1.0).double(), step=self.step, saving=saving)
        assert mean == (2.0 if len(self.reports.group.hosts) == 2 else 1.0)
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


def test_other_ranks_send_and_have_nothing_to_write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert Job(monkeypatch, tmp_path, rank=1).report() == {}


def test_one_process_has_the_values_of_its_node_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    values = Job(monkeypatch, tmp_path, world_size=1).report()
    assert values
    assert all(name.startswith("nodes/node0/") for name in values)


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
