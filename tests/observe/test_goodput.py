"""Goodput says where the time of a run went, including killed attempts, resumes and the time between them."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from rankup.agent.status_files import Report
from rankup.observe.goodput import KINDS, duration, goodput, one_line, read_reports
from rankup.places.files import write_json
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import probe, result

SETTINGS = ("train", "--workload", "tests.rigs.faulting_workload:build", "--batch-size", "8", "--epochs", "2",
            "--save-every-steps", "5", "--tensorboard=false", "--name", "run")


def report(first_step: int, step: int, *, began: float, lasted_s: float, **seconds: float) -> Report:
    """Return a report of an attempt. Seconds that are not given count as its start."""
    spent = {"start": lasted_s - sum(seconds.values()), **seconds}
    return Report(run="r", attempt=f"a-{began:g}", began=began, time=began + lasted_s, first_step=first_step, step=step,
                  total_steps=100, finished=False, seconds=spent, unit="images", per_s=0.033, ranks=[])


HUNG = replace(report(0, 10, began=0, lasted_s=50, steps=45, data=5), open_s=40)
FINISHED = replace(report(0, 10, began=0, lasted_s=10, steps=10), finished=True)


@pytest.mark.parametrize(("attempts", "wall_s", "shares"), [
    ([report(0, 10, began=0, lasted_s=20, steps=10, data=2, evaluation=1, saves=3)], 20, {
        "steps": 0.5, "data": 0.1, "evaluation": 0.05, "saves": 0.15, "lost steps": 0, "start": 0.2, "join": 0,
        "waiting": 0}),
    # 4 of 10 steps are done twice, so their time and the time of their data is lost
    ([report(0, 10, began=0, lasted_s=20, steps=10, data=10), report(6, 20, began=30, lasted_s=20, steps=14)],
     50, {"lost steps": 0.4 * 20 / 50, "waiting": 10 / 50, "steps": (0.6 * 10 + 14) / 50}),
    # The second attempt resumes from a rescue. The rescue is gone later, so the third resumes from the checkpoint of 4
    ([report(0, 10, began=0, lasted_s=10, steps=10), report(10, 20, began=10, lasted_s=10, steps=10),
      report(4, 24, began=20, lasted_s=20, steps=20)], 40, {"lost steps": (6 + 10) / 40, "steps": (4 + 20) / 40}),
    # An attempt that finished no step has lost its time, unless it still runs
    ([report(0, 0, began=0, lasted_s=10, steps=5)], 10, {"steps": 0.5}),
    ([report(0, 0, began=0, lasted_s=10, steps=5), report(0, 10, began=10, lasted_s=10, steps=10)],
     20, {"lost steps": 0.25}),
    # A step that was never finished has lost its time
    ([HUNG], 50, {"steps": 0.9}),
    ([HUNG, report(8, 20, began=50, lasted_s=10, steps=10)], 60, {"lost steps": (40 + 0.2 * 10) / 60}),
    # After a finished run the time until more epochs are asked for is no waiting
    ([FINISHED, report(10, 20, began=86400, lasted_s=10, steps=10)], 20, {"waiting": 0, "steps": 1}),
    # The clocks of the two machines differ
    ([report(0, 10, began=100, lasted_s=10, steps=10), report(10, 20, began=105, lasted_s=5, steps=5)],
     15, {"waiting": 0, "steps": 1}),
])
def test_goodput_counts_each_step_once(attempts: list[Report], wall_s: float, shares: dict[str, float]) -> None:
    found = goodput(attempts)
    assert (found["wall_s"], found["attempts"], found["share"]) == (wall_s, len(attempts), found["shares"]["steps"])
    assert {kind: found["shares"][kind] for kind in shares} == pytest.approx(shares, abs=0.0001)


def test_reports_of_an_earlier_run_and_damaged_reports_are_skipped(tmp_path: Path) -> None:
    write_json(tmp_path / "run.json", {"run": "r"})
    kept = [report(10, 20, began=9, lasted_s=1), report(0, 10, began=1, lasted_s=1)]
    for each in [*kept, replace(kept[0], run="of an earlier run", attempt="b")]:
        each.write(tmp_path)
    (tmp_path / "status" / "half").mkdir()
    (tmp_path / "status" / "half" / "progress-0a.json").write_text('{"run": "r", "att')
    assert read_reports(tmp_path) == [kept[1], kept[0]]


def test_goodput_line_has_readable_times_and_shares() -> None:
    texts = {0: "0 s", 59.6: "1 min", 200: "3 min 20 s", 3600: "1 h", 7500: "2 h 5 min", 90000: "1 d 1 h"}
    assert {seconds: duration(seconds) for seconds in texts} == texts
    found = goodput([report(0, 10, began=0, lasted_s=200, steps=150, data=20, saves=0.5)])
    assert one_line(found) == "75% of 3 min 20 s in 1 attempt: start 15%, data 10%"


def test_goodput_counts_the_lost_steps_of_a_killed_and_resumed_run(forks: Forks, tmp_path: Path) -> None:
    """The run is killed in step 14, after its report names step 13 and after the checkpoint of step 10."""
    words, run = (*SETTINGS, "--run-dir", str(tmp_path)), tmp_path / "run"

    def reported() -> bool:
        there = (run / "checkpoints" / "step-00000010").exists()
        return there and any(each.step == 13 for each in read_reports(run))

    with forks.running(*words, env=probe("loss", 16, sleep_s=1000)) as job:
        job.wait_until(reported, "report")
        job.processes[0].signal("SIGKILL")
        assert job.wait() == [-signal.SIGKILL], job.output
    output = forks.ends(*words)
    assert "resumed from step-00000010" in output

    first, second = read_reports(run)
    assert [(each.first_step, each.step, each.finished) for each in (first, second)] == [(0, 13, False), (10, 16, True)]
    # The kernel gives the start of a process in hundredths of a second
    assert first.began <= first.time <= second.began + 0.02 <= second.time
    found = result(run)["goodput"]
    assert found["attempts"] == 2
    assert tuple(found["shares"]) == KINDS
    assert sum(found["shares"].values()) == pytest.approx(1, abs=0.001)
    assert min(found["shares"][kind] for kind in ("steps", "lost steps", "start")) > 0
    assert goodput([first, second]) == found  # which `status` shows
    # The kinds of time add up to the life of rank 0's process
    assert first.time - first.began == pytest.approx(sum(first.seconds.values()), abs=0.1)
    assert f"  goodput         {found['share']:.0%} of " in output
    assert f"  next            rankup status {run}\n" in output

    assert "is finished" in forks.ends(*words)  # starting a finished run adds no time
    assert goodput(read_reports(run)) == found
