"""What the ranks send each other at a report, and what rank 0 makes of it: values for the metrics, once a window."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rankup.observe import rank_reports
from rankup.observe.rank_reports import WIDTH, RankReports
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
        row += torch.tensor(self.other, dtype=torch.float64)
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
