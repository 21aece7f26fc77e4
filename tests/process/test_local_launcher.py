"""What `launch` does with ranks that end in every way, and with the signals it gets itself. The ranks are fakes."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.process.test_log import fill
from tests.rigs.fake_launch import launching, starts, wait_for_file
from tests.rigs.fork_server import Forks
from train.process.status import job_of


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["finish", "exit 0"], 0),
        (["exit 1", "exit 1"], 1),
        (["exit 2", "exit 2"], 2),
        (["exit 143", "exit 143"], 143),
        # A fault is not worth a second try, whoever's exit was seen first
        (["exit 171", "exit 1"], 1),
        (["exit 2", "exit 171"], 2),
        (["exit 143", "exit 171"], 143),
    ],
)
def test_launch_keeps_the_code_of_the_cause_and_starts_that_rank_once(
    words: list[str], code: int, forks: Forks, tmp_path: Path
) -> None:
    with launching(forks, tmp_path, [words], "--max-restarts=1") as job:
        assert job.wait() == [code], job.output
    again = {start["LOCAL_RANK"] for start in starts(tmp_path) if start["RANKUP_RESTART"] != "0"}
    assert again <= {str(rank) for rank, word in enumerate(words) if word == "exit 171"}
    assert job.output.count("restarted (") == len(again)
    assert "Traceback" not in job.output


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["exit 171", "signal SIGKILL"], 137),
        (["exit 171", "signal SIGSEGV"], 139),
        (["exit 170", "exit 170"], 170),
        (["exit 171", "exit 171"], 171),
        (["exit 0", "exit 171"], 171),
    ],
)
def test_launch_gives_up_after_restarts_without_progress(
    words: list[str], code: int, forks: Forks, tmp_path: Path
) -> None:
    with launching(forks, tmp_path, [words], "--max-restarts=2") as job:
        assert job.wait() == [code], job.output
    assert max(int(start["RANKUP_RESTART"]) for start in starts(tmp_path)) == 2
    assert "restarted (2 of 2 attempts without progress)" in job.output
    assert "gave up after 2 restarts without progress" in job.output
    assert "Traceback" not in job.output


def test_lost_rank_alone_is_started_again_and_told_how_it_ended(forks: Forks, tmp_path: Path) -> None:
    plan = [["save", "signal SIGKILL", "save"], ["exit 1", "save", "exit 1"]]
    with launching(forks, tmp_path, plan) as job:
        for name in ("ready-0-0", "ready-0-2", "ready-1-1"):
            wait_for_file(tmp_path / name)
        job.processes[0].signal("SIGTERM")
        assert job.wait() == [143], job.output
    first, _, third, again = starts(tmp_path)
    assert [start["RANK"] for start in (first, third, again)] == ["0", "2", "1"]
    assert again["MASTER_PORT"] == first["MASTER_PORT"]
    assert (again["RANKUP_ENDED"], again["RANKUP_RESTART"]) == ("137", "1")
    assert "RANKUP_ENDED" not in first
    assert re.search(r"rank 1 ended with 137 \(SIGKILL: .*\), restarted \(1 of 3 attempts", job.output)


@pytest.mark.parametrize("reader", ["gone", "asleep"])
def test_launch_whose_output_nobody_reads_restarts_a_lost_rank(reader: str, forks: Forks, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reading = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with launching(forks, tmp_path, [["save"], ["finish"]], preload="tests.rigs.fake_rank:use_pipe") as job:
        wait_for_file(tmp_path / "ready-0-0")
        if reader == "gone":
            os.close(reading)
        else:
            writing = os.open(tmp_path / "pipe", os.O_WRONLY)
            fill(writing)
        os.kill(starts(tmp_path)[0]["pid"], signal.SIGKILL)
        assert job.wait() == [0]
    assert [start["RANKUP_RESTART"] for start in starts(tmp_path)] == ["0", "1"]


def test_restart_that_helps_ends_with_0(forks: Forks, tmp_path: Path) -> None:
    plan = [["exit 171", "signal SIGKILL"], ["exit 171", "exit 171"], ["finish", "exit 0"]]
    with launching(forks, tmp_path, plan, "--max-restarts=5") as job:
        assert job.wait() == [0], job.output


def test_restarts_are_counted_anew_after_a_new_step(forks: Forks, tmp_path: Path) -> None:
    """Step 5 is new, and so is 6; to reach 6 again is no progress."""
    plan = [[f"step {step}, exit 171"] for step in (5, 6, 7, 8, 8, 3)]
    with launching(forks, tmp_path, plan, "--max-restarts=2") as job:
        assert job.wait() == [171], job.output
    assert len(starts(tmp_path)) == 6
    assert job.output.count("restarted (0 of 2 attempts without progress)") == 4
    assert job.output.count("restarted (1 of 2 attempts without progress)") == 1


def test_ranks_that_were_killed_after_the_others_had_finished_look_at_the_run_once_more(
    forks: Forks, tmp_path: Path
) -> None:
    plan = [["finish", "save 171"], ["finish", "exit 0"]]
    with launching(forks, tmp_path, plan, preload="tests.rigs.fake_rank:use_impatiently") as job:
        assert job.wait() == [0], job.output
    assert [start["RANKUP_RESTART"] for start in starts(tmp_path)] == ["0", "0", "1", "1"]
    assert "rank 1 did not end within 0.5 s after the others: killed" in job.output


def test_ranks_are_told_who_they_are_and_which_attempt_it_is(forks: Forks, tmp_path: Path) -> None:
    plan = [["exit 171", "exit 171"], ["save", "save"]]
    line = ("--nnodes=2", "--node-rank=1", "--master-addr=node0", "--master-port=12345", "--lr=0.5", "--fresh")
    with launching(forks, tmp_path, plan, *line) as job:
        for rank in (0, 1):
            wait_for_file(tmp_path / f"ready-1-{rank}")
        job.processes[0].signal("SIGTERM")
        assert job.wait() == [143], job.output
    given = starts(tmp_path)
    for name, values in {
        "RANK": ["2", "3", "2", "3"], "LOCAL_RANK": ["0", "1", "0", "1"], "WORLD_SIZE": ["4"] * 4,
        "LOCAL_WORLD_SIZE": ["2"] * 4, "GROUP_RANK": ["1"] * 4, "GROUP_WORLD_SIZE": ["2"] * 4,
        "MASTER_ADDR": ["node0"] * 4, "MASTER_PORT": ["12345"] * 4, "RANKUP_RESTART": ["0", "0", "1", "1"],
    }.items():
        assert [start[name] for start in given] == values, name
    attempts = [start["RANKUP_ATTEMPT"] for start in given]
    assert attempts[0] == attempts[1] != attempts[2] == attempts[3]
    assert len({job_of(attempt) for attempt in attempts}) == 1
    assert given[0]["arguments"] == ["train", *(w for w in given[0]["arguments"] if w.startswith("--"))]
    assert {"--lr=0.5", "--fresh=true"} <= set(given[0]["arguments"])


@pytest.mark.parametrize("status", [None, {"attempt": "yesterdays", "state": "finished"}, {"state": "running"}])
def test_success_is_what_this_attempt_wrote_down(status: dict[str, str] | None, forks: Forks, tmp_path: Path) -> None:
    with launching(forks, tmp_path, [["exit 0", "exit 0"]]) as job:
        if status is not None:
            (tmp_path / "run" / "status.json").write_text(json.dumps(status))
        assert job.wait() == [1], job.output
    assert "status.json does not say that attempt" in job.output


@pytest.mark.parametrize("first", ["exit 171", "finish"])
def test_rank_that_does_not_end_after_the_others_is_killed_and_tried_again(
    first: str, forks: Forks, tmp_path: Path
) -> None:
    plan = [[first, "stop", "stubborn"], ["finish", "exit 0", "exit 0"]]
    with launching(forks, tmp_path, plan, preload="tests.rigs.fake_rank:use_impatiently") as job:
        assert job.wait() == [0], job.output
    for rank in (1, 2):
        assert f"rank {rank} did not end within 0.5 s after the others: killed" in job.output
        assert f"rank {rank} ended with 171, restarted" in job.output


# Signals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_signal_is_passed_on_and_ends_with_143_and_no_restart(name: str, forks: Forks, tmp_path: Path) -> None:
    with launching(forks, tmp_path, [["save", "save"]]) as job:
        for rank in (0, 1):
            wait_for_file(tmp_path / f"ready-0-{rank}")
        job.processes[0].signal(name)
        assert job.wait() == [143], job.output
    assert f"{name}: passed on to 2 ranks" in job.output
    assert len(starts(tmp_path)) == 2


@pytest.mark.parametrize(("words", "code"), [(["save 171", "save 137"], 143), (["save", "save 1"], 1)])
def test_stop_request_while_ranks_fail_is_not_followed_by_a_restart(
    words: list[str], code: int, forks: Forks, tmp_path: Path
) -> None:
    with launching(forks, tmp_path, [words]) as job:
        for rank in (0, 1):
            wait_for_file(tmp_path / f"ready-0-{rank}")
        job.processes[0].signal("SIGTERM")
        assert job.wait() == [code], job.output
    assert not list(tmp_path.glob("start-1-*"))


def test_rank_that_can_not_stop_does_not_keep_the_others_end(forks: Forks, tmp_path: Path) -> None:
    with launching(forks, tmp_path, [["save", "stop"]], preload="tests.rigs.fake_rank:use_impatiently") as job:
        for rank in (0, 1):
            wait_for_file(tmp_path / f"ready-0-{rank}")
        job.processes[0].signal("SIGTERM")
        assert job.wait() == [143], job.output


def test_hangup_does_not_end_a_launch_under_nohup(forks: Forks, tmp_path: Path) -> None:
    """nohup has decided that the hang-up is ignored, and the launcher leaves it so."""
    with launching(forks, tmp_path, [["save", "save"]], preload="tests.rigs.fake_rank:use_under_nohup") as job:
        wait_for_file(tmp_path / "ready-0-1")
        job.processes[0].signal("SIGHUP")
        time.sleep(0.5)
        assert job.processes[0].code is None, job.output
        job.processes[0].signal("SIGTERM")
        assert job.wait() == [143], job.output


def test_nothing_is_left_in_the_folder_for_temporary_files(forks: Forks, tmp_path: Path) -> None:
    with launching(forks, tmp_path, [["exit 171", "exit 171"], ["finish", "exit 0"]]) as job:
        assert job.wait() == [0], job.output
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(("torchelastic", "rankup"))] == []
