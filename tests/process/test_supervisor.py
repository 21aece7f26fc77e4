"""The supervisor and its fork server: who is killed or stopped, what is left, and what a forked rank finds."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.rigs import start_facts
from tests.rigs.fake_launch import launching, lives, starts, supervising, wait_for_file
from tests.rigs.faults import Launched
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import MAIN, ROOT, ended, environment, rank_env, result, start
from train.process import fork_server as fork_server_program
from train.process.proc import state_of


def fork_server(launcher: int) -> psutil.Process:
    """The only child of a supervisor."""
    (server,) = psutil.Process(launcher).children()
    return server


def wait_until(true: Callable[[], Any], what: str, *, timeout_s: float = 120) -> None:
    until_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < until_s, what
        time.sleep(0.02)


# Killed and stopped ---------------------------------------------------------------------------------------------


def test_killed_supervisor_takes_the_server_and_all_ranks_with_it(forks: Forks, tmp_path: Path) -> None:
    with launching(forks, tmp_path, [["save", "stubborn"]]) as job:
        for rank in (0, 1):
            wait_for_file(tmp_path / f"ready-0-{rank}")
        server = fork_server(job.processes[0].pid)
        job.processes[0].signal("SIGKILL")
        pids = [server.pid, *(start["pid"] for start in starts(tmp_path))]
        wait_until(lambda: not any(map(lives, pids)), "processes were left")


def test_killed_server_is_replaced_and_its_ranks_are_started_again(forks: Forks, tmp_path: Path) -> None:
    with launching(forks, tmp_path, [["parent", "stubborn"], ["finish", "exit 0"]]) as job:
        for rank in (0, 1):
            wait_for_file(tmp_path / f"ready-0-{rank}")
        first = psutil.Process(starts(tmp_path)[0]["pid"])
        family = [first, *first.children()]
        fork_server(job.processes[0].pid).kill()
        assert job.wait() == [0], job.output
    wait_until(lambda: not any(lives(process.pid) for process in family), "processes were left")
    assert "the process that forks the ranks was killed" in job.output
    assert [start.get("RANKUP_ENDED") for start in starts(tmp_path)] == [None, None, "137", "137"]


def test_what_a_lost_rank_has_started_ends_with_it(forks: Forks, tmp_path: Path) -> None:
    with launching(forks, tmp_path, [["parent"], ["finish"]]) as job:
        wait_for_file(tmp_path / "ready-0-0")
        rank = psutil.Process(starts(tmp_path)[0]["pid"])
        family = [rank, *rank.children()]
        assert len(family) == 2
        rank.kill()
        assert job.wait() == [0], job.output
    wait_until(lambda: not any(lives(process.pid) for process in family), "processes were left")


def test_server_kills_what_is_left_of_a_rank_before_it_gives_the_number_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """And goes on where it may not kill: a rank can have changed its user."""
    states = []

    def refuse(pid: int, _: int) -> None:
        states.append(state_of(pid))
        raise PermissionError

    monkeypatch.setattr(os, "killpg", refuse)
    ours, theirs = socket.socketpair()
    woken, wake = socket.socketpair()
    stdin, held = os.pipe()  # `cat` ends once it is closed, and not before
    actions = [(os.POSIX_SPAWN_DUP2, stdin, 0)]
    server = fork_server_program.Server(
        theirs, woken, lambda *_: os.posix_spawnp("cat", ["cat"], {}, file_actions=actions)
    )
    with ours, theirs, woken, wake:
        serving = threading.Thread(target=server.serve)
        serving.start()
        ours.sendall(b'{"start": 0, "name": "", "arguments": [], "env": {}}\n')
        pid = json.loads(ours.recv(4096))["pid"]
        os.close(stdin)
        os.close(held)
        wait_until(lambda: state_of(pid) in ("Z", ""), "it does not end")  # the server can already have seen the end
        wake.send(b"!")
        ours.settimeout(60)
        assert json.loads(ours.recv(4096)) == {"ended": 0, "code": 0}
        ours.close()
        serving.join()
    assert states == ["Z"]


@pytest.mark.parametrize("who", ["rank", "server"])
def test_stopped_process_is_killed_and_started_again(who: str, forks: Forks, tmp_path: Path) -> None:
    plan = [["save"], ["finish"]]
    with launching(forks, tmp_path, plan, preload="tests.rigs.fake_rank:use_settled") as job:
        wait_for_file(tmp_path / "ready-0-0")
        server = fork_server(job.processes[0].pid)
        (psutil.Process(starts(tmp_path)[0]["pid"]) if who == "rank" else server).suspend()
        assert job.wait() == [0], job.output
    named = {"rank": "rank 0", "server": "the process that forks the ranks"}[who]
    assert f"{named} has been stopped (SIGSTOP) for 0.3 s: killed" in job.output


def test_signals_before_the_first_rank_end_it_at_once(tmp_path: Path) -> None:
    """The server still imports torch."""
    with ended(start(sys.executable, MAIN, "launch", "--nproc=2", f"--run-dir={tmp_path}")) as job:
        launcher = psutil.Process(job.processes[0].pid)
        wait_until(launcher.children, "no server")
        server = fork_server(launcher.pid)
        launcher.send_signal(signal.SIGTERM)
        assert job.wait() == [143], job.output
    assert psutil.wait_procs([server], timeout=30)[1] == []
    assert "Traceback" not in job.output


def test_signal_while_a_killed_server_is_replaced_does_not_wait_for_its_imports(forks: Forks, tmp_path: Path) -> None:
    preload = "tests.rigs.fake_rank:use_slow_server"
    with launching(forks, tmp_path, [["save", "save"]], preload=preload) as job:
        for rank in (0, 1):
            wait_for_file(tmp_path / f"ready-0-{rank}")
        fork_server(job.processes[0].pid).kill()
        job.wait_for("rank 1 ended with 137")
        job.processes[0].signal("SIGTERM")
        assert job.wait(60) == [143], job.output
    assert len(starts(tmp_path)) == 2


def test_batch_system_that_signals_every_process_is_obeyed_once(forks: Forks, tmp_path: Path) -> None:
    with launching(forks, tmp_path, [["save", "save"]]) as job:
        for rank in (0, 1):
            wait_for_file(tmp_path / f"ready-0-{rank}")
        launcher = psutil.Process(job.processes[0].pid)
        for process in [launcher, *launcher.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):  # the signal that was passed on came first
                process.send_signal(signal.SIGTERM)
        assert job.wait() == [143], job.output
    assert len(starts(tmp_path)) == 2
    assert "Traceback" not in job.output


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root, and unshare")
def test_first_process_of_a_container_reaps_the_orphans_that_it_inherits(tmp_path: Path) -> None:
    line = (
        "import sys; sys.argv[0] = 'rankup'; from tests.rigs import fake_rank; fake_rank.use_settled();"
        "from train.main import entry; entry()"
    )
    (tmp_path / "run").mkdir()
    env = environment({"FAKE_RANKS": '[["parent"]]', "FAKE_FOLDER": str(tmp_path)})
    words = ("launch", "--nproc=1", f"--run-dir={tmp_path}", "--name=run")
    container = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", line, *words],
        env=env, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )
    try:
        wait_for_file(tmp_path / "ready-0-0")
        (first,) = psutil.Process(container.pid).children()

        # The orphan ends after 0.2 s, and is gone a moment later: server, rank and its child are left
        wait_until(lambda: len(first.children(recursive=True)) == 3, "the orphan was not reaped")
        assert all(lives(process.pid) for process in first.children(recursive=True))
        first.send_signal(signal.SIGKILL)
    finally:
        container.kill()
        container.wait(60)
        assert container.stdout is not None
        container.stdout.close()


# One rank fails for good ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("word", "code"), [("exit 1", 1), ("exit 2", 2), ("exit 171", 171), ("signal SIGKILL", 137)])
def test_ranks_that_wait_for_one_that_failed_are_told_to_leave(
    word: str, code: int, forks: Forks, tmp_path: Path
) -> None:
    """They would wait for it until the deadline of joining."""
    preload = "tests.rigs.fake_rank:use_settled"
    with launching(forks, tmp_path, [["save", word]], "--max-restarts=0", preload=preload) as job:
        assert job.wait(60) == [code], job.output
    assert "killed" not in job.output.replace("kill was counted", "")


def test_supervise_leaves_starting_again_to_torchrun_and_launch(tmp_path: Path) -> None:
    for env, name in (({"TORCHELASTIC_RUN_ID": "x"}, "torchrun"), ({"RANKUP_LAUNCH": "1"}, "launch")):
        given = rank_env(0, 1, 12345, GROUP_WORLD_SIZE="1", **env)
        with ended(start(sys.executable, MAIN, "supervise", f"--run-dir={tmp_path}", env=given)) as job:
            assert job.wait() == [2]
        assert f"supervise must be started by what starts no rank again, got {name}" in job.output


# What the kernel and `ps` see -----------------------------------------------------------------------------------


def test_ranks_have_names_and_go_first_where_memory_runs_out(forks: Forks, tmp_path: Path) -> None:
    def score(pid: int) -> int:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

    with launching(forks, tmp_path, [["save", "save"]]) as job:
        for rank in (0, 1):
            wait_for_file(tmp_path / f"ready-0-{rank}")
        launcher = job.processes[0].pid
        server = fork_server(launcher)
        ranks = [psutil.Process(start["pid"]) for start in starts(tmp_path)]
        assert [rank.name() for rank in ranks] == ["rank 0", "rank 1"]
        assert all(score(rank.pid) > score(server.pid) == score(launcher) for rank in ranks)
        job.processes[0].signal("SIGTERM")
        assert job.wait() == [143], job.output


# `supervise` ----------------------------------------------------------------------------------------------------


def test_supervise_runs_the_rank_that_the_environment_describes(forks: Forks, tmp_path: Path) -> None:
    env = rank_env(3, 4, 12345, LOCAL_RANK="0", RANKUP_ATTEMPT="job-7-1")
    with supervising(forks, tmp_path, ["signal SIGSEGV", "exit 171", "exit 0"], "--lr=0.5", env=env) as job:
        assert job.wait() == [0], job.output
    given = starts(tmp_path)
    assert [start["RANKUP_ATTEMPT"] for start in given] == ["job-7-1-0", "job-7-1-1", "job-7-1-2"]
    assert [start.get("RANKUP_ENDED") for start in given] == [None, "139", "171"]
    assert {(start["RANK"], start["WORLD_SIZE"], start["MASTER_PORT"]) for start in given} == {("3", "4", "12345")}
    assert all("RANKUP_LAUNCH" not in start for start in given)
    assert "rank 3 ended with 139, restarted (1 of 3 attempts without progress)" in job.output
    assert given[0]["arguments"][0] == "train"
    assert "--lr=0.5" in given[0]["arguments"]


@pytest.mark.parametrize(
    ("plan", "code"),
    [(["exit 0"], 0), (["exit 1"], 1), (["exit 2"], 2), (["exit 143"], 143), (["exit 171"], 171),
     (["signal SIGKILL", "exit 2"], 2)],
)
def test_supervise_ends_with_the_code_of_its_rank(plan: list[str], code: int, forks: Forks, tmp_path: Path) -> None:
    with supervising(forks, tmp_path, plan, "--max-restarts=1", env={}) as job:
        assert job.wait() == [code], job.output


def test_supervise_passes_a_url_and_a_rank_on(forks: Forks, tmp_path: Path) -> None:
    line = ("--init-method=tcp://node0:12345", "--rank=1", "--world-size=2", "--command=doctor", "--json")
    with supervising(forks, tmp_path, ["exit 0"], *line, env={}) as job:
        assert job.wait() == [0], job.output
    words = starts(tmp_path)[0]["arguments"]
    assert words[0] == "doctor"
    assert {"--init_method=tcp://node0:12345", "--rank=1", "--world_size=2", "--json=true"} <= set(words)


def test_supervise_refuses_half_a_rank(tmp_path: Path) -> None:
    with ended(start(sys.executable, MAIN, "supervise", f"--run-dir={tmp_path}", env={"WORLD_SIZE": "2"})) as job:
        assert job.wait() == [2]
    assert "RANK MASTER_ADDR MASTER_PORT are not set" in job.output


# May it be forked? ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "name", "value", "why"),
    [
        (fork_server_program, "_open_files", ["/dev/nvidia0", "/dev/null"], "it has opened /dev/nvidia0"),
        (torch.cuda, "is_initialized", True, "it has initialized CUDA"),
        (torch.distributed, "is_initialized", True, "it has a process group"),
    ],
)
def test_server_with_a_device_or_a_group_is_not_forked(
    where: Any, name: str, value: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pytest's own process may have threads
    monkeypatch.setattr(fork_server_program, "_threads", lambda: ["python"])
    assert fork_server_program.obstacle() == ""
    monkeypatch.setattr(where, name, lambda: value)
    assert fork_server_program.obstacle() == why


# Forked and fresh -----------------------------------------------------------------------------------------------


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "env",
    [{"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "3", "TORCH_CPP_LOG_LEVEL": "WARNING", "MKL_NUM_THREADS": "2"}],
    ids=["one thread", "three threads"],
)
def test_forked_rank_finds_what_a_fresh_one_finds_and_trains_to_the_same_weights(
    env: dict[str, str], forks: Forks, tmp_path: Path
) -> None:
    """The fresh ones are those of a server that must not be forked, as a library has started a thread."""
    line = (
        "launch", "--nproc=2", "--dataset=digits", "--model=cnn", "--max-steps=5", "--tensorboard=false",
        "--workload=tests.rigs.start_facts:build", "--name=run",
    )
    outputs = {}
    for start_method, preload in (("fork", ""), ("fresh", "tests.rigs.start_facts:use_a_thread")):
        folder = tmp_path / start_method
        folder.mkdir()
        words = (*line, f"--run-dir={folder}", "--options.facts", tmp_path / start_method)
        codes, outputs[start_method] = forks.run(*words, env=env, preload=preload, timeout_s=400)
        assert codes == [0], outputs[start_method]
    assert re.search(r"fresh interpreters, not forked .* has \d+ threads \(.*python", outputs["fresh"])
    assert "fresh interpreters" not in outputs["fork"]
    for rank in (0, 1):
        forked, fresh = (start_facts.read(tmp_path / start_method, rank) for start_method in ("fork", "fresh"))
        assert forked == {**fresh, "argv": [word.replace("fresh", "fork") for word in fresh["argv"]]}
    assert result(tmp_path / "fork" / "run")["digest"] == result(tmp_path / "fresh" / "run")["digest"]


@pytest.mark.timeout(900)
def test_workers_of_a_killed_rank_and_all_of_a_killed_supervisor_end(tmp_path: Path) -> None:
    line = ("--dataset=digits", "--model=mlp", "--epochs=100000", "--in-memory=never", "--num-workers=2")
    run = ("--log-every-steps=1", "--tensorboard=false", f"--run-dir={tmp_path}", "--name=run")
    job = Launched(tmp_path / "run", 2, *line, *run)
    with ended(job.job):
        wait_until(lambda: job.step() > 5, "no step", timeout_s=400)
        ranks = job.ranks()
        workers = ranks[1].children()
        assert len(workers) == 2
        ranks[1].kill()
        assert psutil.wait_procs(workers, timeout=60)[1] == []
        before = job.step()
        wait_until(lambda: job.step() > before + 50, "no step after the kill", timeout_s=400)
        assert len(job.ranks()) == 2
        job.process.kill()
        assert job.left_after() == []
