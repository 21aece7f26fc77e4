"""`status` of runs that train, were killed, have finished, and of runs that report no steps."""

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

from rankup.agent.ends import End, StatusFile
from rankup.env.rank_env import RankEnv
from rankup.observe.goodput import read_reports
from rankup.observe.status import as_text, look, look_at_all
from rankup.observe.status import overview as _overview
from rankup.observe.status import screen as _screen
from rankup.places.files import write_json
from tests.observe.test_goodput import report
from tests.rigs.containers import rank_of, wait_for
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import MAIN, ROOT, ended, environ_of, environment, start

LAUNCH = (
    "launch", "--nproc=3", MAIN, "--workload", "tests.rigs.faulting_workload:build",
    "--batch-size", "9", "--epochs", "2", "--tensorboard=false", "--progress", "none", "--name", "run",
)


def screen(run: dict[str, Any], *, now: float) -> str:
    return as_text(_screen(run, now=now))


def overview(runs: list[dict[str, Any]], *, where: str) -> str:
    return as_text(_overview(runs, where=where))


def status(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """The command, in a process of its own, as from another terminal."""
    command = [sys.executable, MAIN, "status", *map(str, words)]
    return subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=120)


def as_json(*words: str | Path) -> Any:
    done = status(*words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def process_of(rank: int, launcher: int) -> psutil.Process:
    (found,) = [process for process in psutil.Process(launcher).children(recursive=True) if rank_of(process) == rank]
    return found


def test_status_of_a_run_while_it_trains_after_a_kill_and_at_its_end(forks: Forks, tmp_path: Path) -> None:
    """Rank 1 stands still in step 4 of 14 while the others wait for it; then it is killed, and all go on."""
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
        text = status(run).stdout
        assert re.search(r"^state +running$", text, re.MULTILINE)
        assert re.search(r"^step +3 of 14 \(21%\), .* samples/s, about .* left$", text, re.MULTILINE)
        assert len(re.findall(r"step, waits for others", text)) == 2

        command = [sys.executable, MAIN, "status", str(run), "--watch"]
        watching = subprocess.Popen(command, env=environment(), cwd=ROOT, stdout=subprocess.PIPE, text=True)
        process_of(1, job.processes[0].pid).kill()
        go.touch()  # for the one in its place
        assert job.wait() == [0], job.output
        last_screen = watching.communicate(timeout=120)[0]
        assert (watching.returncode, len(re.findall("^state +finished", last_screen, re.MULTILINE))) == (0, 1)

    found = as_json(run)
    assert (found["state"], found["code"], found["step"], found["remaining_s"]) == ("finished", 0, 14, None)
    assert [rank["state"] for rank in found["ranks"]] == ["finished"] * 3
    (restart,) = found["restarts"]
    assert restart["code"] == 171
    assert "rank 1 on " in restart["why"]
    assert found["goodput"]["attempts"] == 2
    text = status(run).stdout
    assert re.search(r"^state +finished, \d+ s ago$", text, re.MULTILINE)
    assert re.search(r"restarts \(1\)\n  .* after step 3: lost a peer at step 3: rank 1", text)


def test_status_of_a_run_that_was_killed_without_a_word(tmp_path: Path) -> None:
    now = stage(tmp_path / "run")
    found = look(tmp_path / "run", now=now + 215)
    assert found["state"] == "running"
    assert found["silent"]
    assert found["last_sign_s"] > 200
    text = screen(found, now=now + 215)
    assert "no sign of life for 3 min 3" in text
    assert "left" not in text
    assert re.search(r"^0-39 +here +12 +step +none for 3 min", text, re.MULTILINE)
    assert "no sign of life for 3 min" in overview([found], where="runs")
    assert "running" in screen(look(tmp_path / "run", now=now), now=now)


def stage(run: Path, *, attempts: int = 1) -> float:
    """What a run leaves that trains at this moment, after some attempts that nobody wrote an end for."""
    now = time.time()
    write_json(run / "run.json", {"run": "r"})
    for number in range(attempts):
        own = report(0, 12, began=now - 100 + number, lasted_s=100 - number, steps=50)
        ranks = [{"rank": rank, "host": "here", "phase": "step", "step": 12, "waiting": False, "for_s": 0.1,
                  "seen": now} for rank in range(40)]
        replace(own, attempt=f"a-{number}", ranks=ranks, remaining_s=30.0).write(run, f"{number}")
    file = StatusFile(run, RankEnv(attempt=f"a-{attempts - 1}"))
    file.write_summary([])
    return now


def test_status_says_that_no_rank_wrote_down_why_it_ended(tmp_path: Path) -> None:
    now = stage(tmp_path / "run", attempts=8)
    text = screen(look(tmp_path / "run", now=now), now=now)
    assert "attempt  8: a-7" in text
    assert "restarts (7, the last ones)" in text
    assert text.count("after step 12: no rank wrote down why: killed, or the machine was lost") == 5
    # An attempt that finished the run was not restarted: more epochs were asked for
    replace(read_reports(tmp_path / "run")[0], finished=True).write(tmp_path / "run", "0")
    assert len(look(tmp_path / "run", now=now)["restarts"]) == 6


def test_status_gives_ranks_that_stand_alike_one_row(tmp_path: Path) -> None:
    now = stage(tmp_path / "run")
    found = look(tmp_path / "run", now=now)
    found["ranks"][7] |= {"waiting": True, "for_s": 75.0}
    found["ranks"][20]["seen"] -= 60
    found["ranks"][21]["host"] = "there"
    rows = screen(found, now=now).split("last sign of life\n")[1].splitlines()
    assert [re.split("  +", row) for row in rows] == [
        ["0-6", "here", "12", "step", "now"], ["7", "here", "12", "step, waits for others, for 1 min 15 s", "now"],
        ["8-19", "here", "12", "step", "now"], ["20", "here", "12", "step", "none for 1 min"],
        ["21", "there", "12", "step", "now"], ["22-39", "here", "12", "step", "now"],
    ]


def test_status_of_a_run_that_reports_no_steps(tmp_path: Path) -> None:
    """Of somebody's own script: only how its ranks ended is known."""
    file = StatusFile(tmp_path / "own", RankEnv(world_size=2, attempt="a-1"))
    file.write_summary([])
    now = time.time()
    text = screen(look(tmp_path / "own", now=now), now=now)
    assert "state    running: it starts, or it runs code that reports no steps\n" in text
    assert "attempt  a-1\n" in text
    file.write_summary([End(0, "node0", 171, "lost rank 1"), End(1, "node1", 1, "KeyError: 'x'")])
    text = screen(look(tmp_path / "own", now=now + 65), now=now + 65)
    assert "state    failed with exit code 1, 1 min 5 s ago: KeyError: 'x'\n" in text
    assert re.search(r"^1 +node1 +failed with exit code 1$", text, re.MULTILINE)


def test_status_of_somebody_elses_script_while_it_runs(tmp_path: Path) -> None:
    script, go = tmp_path / "job.py", tmp_path / "go"
    script.write_text(f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.05)\n")
    command = (sys.executable, MAIN, "launch", "--nproc=2", "--run-dir", tmp_path, "--name=own", script)
    with ended(start(*command)) as job:
        found = wait_for("both ranks in the script", lambda: both_in_the_script(tmp_path))
        assert (found["state"], found["total_steps"], found["goodput"]) == ("running", None, None)
        assert {rank["phase"] for rank in found["ranks"]} == {"script"}
        text = status(tmp_path / "own").stdout
        assert re.search(r"^state +running$", text, re.MULTILINE)
        assert re.search(r"^1 +\S+ +script +now$", text, re.MULTILINE)
        attempt = found["attempt"]
        process_of_script(job.processes[0].pid).kill()
        wait_for("another attempt", lambda: as_json(tmp_path / "own")["attempt"] != attempt)
        go.touch()
        assert job.wait() == [0], job.output
    found = as_json("own", "--run-dir", tmp_path)
    assert (found["state"], found["goodput"]) == ("finished", None)
    text = status(tmp_path / "own").stdout
    assert re.search(r"after \d+ s: SIGKILL: .*\(exit code 137\)", text), text


def process_of_script(launcher: int) -> psutil.Process:
    return next(child for child in psutil.Process(launcher).children(recursive=True) if "RANK" in environ_of(child.pid))


def both_in_the_script(folder: Path) -> Any:
    """What status says, once both ranks have come to the script."""
    found = as_json("own", "--run-dir", folder) if (folder / "own" / "status.json").exists() else {}
    return found if [rank.get("phase") for rank in found.get("ranks", [])] == ["script"] * 2 else None


def test_status_of_all_runs_is_a_line_each_and_the_newest_first(tmp_path: Path) -> None:
    now = stage(tmp_path / "training", attempts=2)
    StatusFile(tmp_path / "old", RankEnv()).write_summary([End(0, "here", 2, "no")])
    os.utime(tmp_path / "old" / "status.json", (now - 7200, now - 7200))
    (tmp_path / "no run").mkdir()
    lines = overview(look_at_all(tmp_path, now=now), where=str(tmp_path)).splitlines()
    assert [re.split("  +", line)[:4] for line in lines] == [
        ["run", "state", "step", "speed"], ["training", "running", "12/100", "1 images/s"],
        ["old", "failed with exit code 2, 2 h ago"],
    ]
    header = status("--run-dir", tmp_path).stdout.splitlines()[0].split()
    assert header[:4] == lines[0].split()[:4]  # the run may be silent by now
    assert overview([], where="runs") == "no runs in runs\n"


def test_status_of_a_run_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    stage(tmp_path / "digits-cnn")
    done = status("digits-cn", "--run-dir", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: RUN must be a run in {tmp_path}/ or its folder, got digits-cn. Did you mean digits-cnn?\n"
    )
    assert "unexpected argument" in status("digits-cnn", "more", "--run-dir", tmp_path).stderr
