"""`rankup status` of runs that train, were killed, have finished, or report no steps."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from rankup.agent.ends import End
from rankup.agent.status_files import StatusFile
from rankup.cli import main
from rankup.env.rank_env import RankEnv
from rankup.observe.goodput import read_reports
from rankup.places.files import write_json
from tests.observe.test_goodput import report
from tests.rigs.containers import rank_of, wait_for
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import MAIN, ROOT, environ_of, environment

LAUNCH = ("launch", "--nproc=3", MAIN, "--workload", "tests.rigs.faulting_workload:build", "--batch-size", "9",
          "--epochs", "2", "--tensorboard=false", "--name", "run")


def status(*words: str | Path) -> str:
    """Run `status`. Return what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["status", *map(str, words)]) == 0
    return out.getvalue()


def as_json(*words: str | Path) -> Any:
    return json.loads(status(*words, "--json"))


def test_status_follows_a_run_through_a_kill_to_its_end(forks: Forks, tmp_path: Path) -> None:
    """Rank 1 hangs in step 4 of 14 and the others wait for it. Then it is killed, and the job restarts and finishes."""
    go, there = tmp_path / "go", tmp_path / "there"
    probe = {"where": "loss", "call": 6, "rank": 1, "tell": str(there), "until": str(go), "sleep_s": 0}
    with forks.running(*LAUNCH, "--run-dir", tmp_path, env={"PROBE": json.dumps(probe)}) as job:
        wait_for("rank 1 in its step", there.exists)
        run = tmp_path / "run"

        def stands() -> dict[str, Any] | None:
            found: dict[str, Any] = as_json("run", "--run-dir", tmp_path)
            known = len(found["ranks"]) == 3 and found["step"] == 3
            return found if known and [rank["waiting"] for rank in found["ranks"]] == [True, False, True] else None

        found = wait_for("ranks 0 and 2 waiting for rank 1", stands)
        assert (found["state"], found["silent"], found["total_steps"], found["restarts"]) == ("running", False, 14, [])
        assert [(rank["rank"], rank["phase"], rank["step"]) for rank in found["ranks"]] == [
            (0, "step", 3), (1, "step", 3), (2, "step", 3)
        ]
        assert all(rank["host"] for rank in found["ranks"])
        assert found["remaining_s"] > 0
        assert sum(found["goodput"]["shares"].values()) == pytest.approx(1, abs=0.001)
        text = status(run)
        assert re.search(r"^state +running$", text, re.MULTILINE)
        assert re.search(r"^step +3 of 14 \(21%\), .* samples/s, about .* left$", text, re.MULTILINE)
        assert len(re.findall(r"^[02] .* step, waits for others", text, re.MULTILINE)) == 2

        command = [sys.executable, MAIN, "status", str(run), "--watch"]
        watching = subprocess.Popen(command, env=environment(), cwd=ROOT, stdout=subprocess.PIPE, text=True)
        (victim,) = [each for each in psutil.Process(job.processes[0].pid).children(recursive=True)
                     if rank_of(each) == 1]
        victim.kill()
        go.touch()  # for the new rank 1
        assert job.wait() == [0], job.output
        last_screen = watching.communicate(timeout=120)[0]
        assert (watching.returncode, len(re.findall("^state +finished", last_screen, re.MULTILINE))) == (0, 1)

    found = as_json(run)
    assert (found["state"], found["code"], found["step"], found["remaining_s"]) == ("finished", 0, 14, None)
    assert [rank["state"] for rank in found["ranks"]] == ["finished"] * 3
    (restart,) = found["restarts"]
    assert restart["code"] == 171
    assert found["goodput"]["attempts"] == 2
    text = status(run)
    assert re.search(r"^state +finished, \d+ s ago$", text, re.MULTILINE)
    assert re.search(r"restarts \(1\)\n.* after step 3: lost a peer at step 3: rank 1 on ", text)


def test_status_of_an_unchanged_script_while_it_runs(forks: Forks, tmp_path: Path) -> None:
    script, go, own = tmp_path / "job.py", tmp_path / "go", tmp_path / "own"
    script.write_text(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit('RuntimeError: Connection closed by peer'))\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '1': sys.exit(200)\n"  # at once
        f"while not os.path.exists({str(go)!r}): time.sleep(0.05)\n"
    )

    def both_in_the_script() -> Any:
        found = as_json("own", "--run-dir", tmp_path) if (own / "status.json").exists() else {}
        return found if [rank.get("phase") for rank in found.get("ranks", [])] == ["script"] * 2 else None

    with forks.running("launch", "--nproc=2", "--run-dir", tmp_path, "--name=own", script) as job:
        found = wait_for("both ranks in the script", both_in_the_script)
        assert (found["state"], found["total_steps"], found["goodput"]) == ("running", None, None)
        assert re.search(r"^0-1 +\S+ +script\b.* now$", status(own), re.MULTILINE)
        children = psutil.Process(job.processes[0].pid).children(recursive=True)
        next(child for child in children if "RANK" in environ_of(child.pid)).kill()
        wait_for("the third attempt", lambda: as_json(own)["attempt"].endswith("-2"))
        go.touch()
        assert job.wait() == [0], job.output
    found = as_json(own)
    assert (found["state"], found["goodput"]) == ("finished", None)
    assert [restart["code"] for restart in found["restarts"]] == [137, 200]
    assert re.search(r"after \d+ s: SIGKILL: .*\(exit code 137\)", status(own))


def stage(run: Path, *, attempts: int = 1, ago_s: float = 0.0, odd: dict[int, dict[str, Any]] | None = None) -> None:
    """Write the files of a run of 40 ranks that trained `ago_s` ago, after attempts without a recorded end. `odd`:
    the ranks whose reports differ."""
    now = time.time() + 30 - ago_s  # in the future, so that no heartbeat gets old if this test is slow
    write_json(run / "run.json", {"run": "r"})
    for number in range(attempts):
        own = report(0, 12, began=now - 100 + number, lasted_s=100 - number, steps=50)
        ranks = [{"rank": rank, "host": "here", "phase": "step", "step": 12, "waiting": False, "for_s": 0.1,
                  "seen": now} for rank in range(40)]
        for rank, differs in (odd or {}).items():
            ranks[rank] |= differs
        replace(own, attempt=f"a-{number}", ranks=ranks, remaining_s=30.0).write(run)
    StatusFile(run, RankEnv(attempt=f"a-{attempts - 1}")).write_summary([])
    os.utime(run / "status.json", (now, now))


def test_status_shows_the_last_attempts_and_groups_equal_ranks(tmp_path: Path) -> None:
    run = tmp_path / "run"
    stage(run, attempts=8, odd={
        7: {"waiting": True, "for_s": 75.0}, 20: {"seen": time.time() - 3600}, 21: {"host": "there"},
    })
    text = status(run)
    rows = [re.split("  +", line) for line in text.split("last heartbeat\n")[1].split("\n\n")[0].splitlines()]
    assert rows == [
        ["0-6", "here", "12", "step", "now"], ["7", "here", "12", "step, waits for others, for 1 min 15 s", "now"],
        ["8-19", "here", "12", "step", "now"], ["20", "here", "12", "step", "none for 1 h"],
        ["21", "there", "12", "step", "now"], ["22-39", "here", "12", "step", "now"],
    ]
    assert "attempt  a-7" in text
    assert "restarts (7)" in text
    assert text.count("after step 12: no rank recorded why: it was killed, or its machine was lost") == 5
    # An attempt that finished the run counts as no restart: later more epochs were asked for
    replace(read_reports(run)[0], finished=True).write(run)
    assert len(json.loads(status(run, "--json"))["restarts"]) == 6


def test_status_counts_the_steps_that_a_killed_attempt_finished_after_its_last_report(tmp_path: Path) -> None:
    run, now = tmp_path / "run", time.time()
    write_json(run / "run.json", {"run": "r"})
    report(0, 937, began=now - 40, lasted_s=20, steps=10).write(run)
    report(974, 980, began=now - 20, lasted_s=10, steps=5).write(run)  # resumed from memory
    report(900, 990, began=now - 10, lasted_s=10, steps=5).write(run)  # resumed from a checkpoint
    StatusFile(run, RankEnv(attempt=f"a-{now - 10:g}")).write_summary([])
    assert [each["step"] for each in as_json(run)["restarts"]] == [974, 980]


def test_status_of_a_finished_run_that_was_started_again_shows_no_rank_at_step_0(forks: Forks, tmp_path: Path) -> None:
    for _ in range(2):
        forks.ends(*LAUNCH, "--run-dir", tmp_path)
    text = status("run", "--run-dir", tmp_path)
    assert re.search(r"^step +14 of 14 \(100%\)", text, re.MULTILINE)
    assert re.search(r"^0-2 +\S+ +finished$", text, re.MULTILINE), text
    assert [rank["step"] for rank in as_json("run", "--run-dir", tmp_path)["ranks"]] == [None] * 3


def test_status_of_a_run_that_reports_no_steps(tmp_path: Path) -> None:
    """An unchanged script reports no steps, so `status` knows only how its ranks ended."""
    file = StatusFile(tmp_path / "own", RankEnv(world_size=2, attempt="a-1"))
    file.write_summary([])
    text = status(tmp_path / "own")
    assert "state    running: it is starting, or its code reports no steps\nattempt  a-1\n" in text
    file.write_summary([End(0, "node0", 171, "lost rank 1"), End(1, "node0", 1, "KeyError: 'x'")])
    text = status(tmp_path / "own")
    assert re.search(r"^state    failed with exit code 1, \d+ s ago: KeyError: 'x'$", text, re.MULTILINE)
    assert re.search(r"^1 +node0 +failed with exit code 1$", text, re.MULTILINE)


def test_status_of_all_runs_has_a_line_for_each_run_newest_first(tmp_path: Path) -> None:
    assert status("--run-dir", tmp_path) == f"no runs in {tmp_path}\n"
    stage(tmp_path / "training", attempts=2)
    stage(tmp_path / "killed", ago_s=215)
    StatusFile(tmp_path / "old", RankEnv()).write_summary([End(0, "here", 2, "no")])
    os.utime(tmp_path / "old" / "status.json", (time.time() - 7200,) * 2)
    (tmp_path / "no run").mkdir()
    lines = [re.split("  +", line)[:4] for line in status("--run-dir", tmp_path).splitlines()]
    assert lines[2][1].startswith("no heartbeat for 3 min")
    del lines[2]
    assert lines == [
        ["run", "state", "step", "speed"], ["training", "running", "12/100", "0.033 images/s"],
        ["old", "failed with exit code 2, 2 h ago"],
    ]
    text = status(tmp_path / "killed")
    assert "no heartbeat for 3 min " in text
    assert "left" not in text
    assert re.search(r"^0-39 +here +12 +step +none for 3 min", text, re.MULTILINE)


def test_status_of_a_damaged_run_gives_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    stage(run)
    assert main(["status", "x" * 300]) == 2  # the system refuses this name, as it would refuse another user's folder
    assert "RUN must be a run in runs/ or a run's folder, got xxx" in capsys.readouterr().err
    report = next(run.glob("status/*/progress-*.json"))
    for damaged, text in ((report, report.read_text().replace('"attempt": "', f'"attempt": "{"x" * 300}')),
                          (run / "status.json", '{"ranks": 7}')):
        damaged.write_text(text)
        assert main(["status", str(run)]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert f"status: {run} must hold files that a run has written, got a damaged status.json" in err
