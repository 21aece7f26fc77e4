"""`rankup stacks` of a run that hangs says which of three ranks is at another place, and where."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from rankup.agent import logs
from rankup.agent.logs import announce_stacks
from rankup.observe import stacks
from tests.rigs.containers import wait_for
from tests.rigs.fork_server import Forks, Process
from tests.rigs.jobs import MAIN, environment, free_port, probe
from train.main import main

WORLD = 3
SETTINGS = ("--workload=tests.rigs.faulting_workload:build", "--batch-size=6", "--max-steps=12", "--eval-batch-size=4",
            "--log-every-steps=1", "--tensorboard=false", "--join-timeout-s=60", "--num-workers=1")
WAITING = r"ranks 0, 2: backward \(loop\.py:\d+ step\) of step \d+"


def settings(run: Path) -> tuple[str, ...]:
    return (*SETTINGS, f"--run-dir={run.parent}", f"--name={run.name}")


def shown(run: Path, *words: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["stacks", str(run), *words]) == 0, out.getvalue()
    return out.getvalue()


def shown_at_last(run: Path, *patterns: str) -> str:
    """Wait until the command shows all these places, where ranks hang or wait. Return what it shows."""
    said = ""

    def all_there() -> bool:
        nonlocal said
        said = shown(run)
        return all(re.search(pattern, said, re.MULTILINE) for pattern in patterns)

    wait_for(f"places {patterns}", all_there, log=lambda: said)
    return said


@pytest.mark.parametrize(("where", "order", "odd"), [
    # The rank's DataLoader worker hangs, and the rank waits for the worker
    ("data", {"sleep_s": 1000}, r"rank 1: data: next of a DataLoader \(loop\.py:\d+ batches_to_end\) of step \d+\n"),
    ("loss", {"sleep_s": 1000}, r"rank 1: faulting_workload\.py:\d+ probe of step \d+\n"),
    # No Python thread runs in this process any more, so the step that it reported is old
    ("loss", {"hold_s": 1000}, r"rank 1: faulting_workload\.py:\d+ probe\b.*\n"),
    ("loss", {"signal": "SIGSTOP"}, r"rank 1: does not answer: it is stopped \(SIGSTOP\)"),
], ids=["worker", "sleep", "lock", "stopped"])
def test_stacks_name_the_rank_that_hangs_at_another_place(
    where: str, order: dict[str, object], odd: str, forks: Forks, tmp_path: Path
) -> None:
    run, arrived = tmp_path / "run", tmp_path / "arrived"
    env = probe(where, 6, rank=1, tell=str(arrived), **order)
    with forks.running("train", *settings(run), world_size=WORLD, env=env) as job:
        job.wait_until(arrived.exists, "hang")
        shown_at_last(run, odd, WAITING if where == "data" else "ranks 0, 2: ")
        assert all(process.code is None for process in job.processes), "the command must end no rank"
        full = shown(run, "--full")
        assert "rank 0 on " in full
        assert full.count("(most recent call first)") > WORLD
    over = shown(run)
    assert re.search(r"^ranks? 0(, 2)?: ended, on \S+; last stacks at .*: ", over, re.MULTILINE), over


def test_stack_signal_to_all_processes_of_a_job_changes_nothing(forks: Forks, tmp_path: Path) -> None:
    run, arrived, go = tmp_path / "run", tmp_path / "arrived", tmp_path / "go"
    order = probe("loss", 6, rank=1, tell=str(arrived), until=str(go))
    with forks.running("train", *settings(run), world_size=WORLD, env=order) as job:
        job.wait_until(arrived.exists, "step")
        for process in job.processes:  # workers too, as a batch system signals them
            process.signal_group("SIGUSR2")
        files = [run / "stacks" / f"rank-{rank}.txt" for rank in range(WORLD)]
        job.wait_until(lambda: all('"why": "asked"' in file.read_text() for file in files), "their stacks")
        go.touch()
        assert job.wait() == [0] * WORLD, job.output


@contextmanager
def launched(
    forks: Forks, *words: str | Path, env: dict[str, str], nodes: int = 1
) -> Iterator[tuple[Process, Callable[[], str]]]:
    """Run `launch` with three ranks. Yield the last node's agent, and a function that returns all output so far."""
    where = (f"--nproc={WORLD // nodes}", f"--nnodes={nodes}", "--master-addr=127.0.0.1",
             f"--master-port={free_port()}")
    with ExitStack() as stack:
        agents = [stack.enter_context(forks.running("launch", *where, f"--node-rank={node}", *words, env=env))
                  for node in range(nodes)]
        yield agents[-1].processes[0], lambda: "\n".join(agent.output for agent in agents)


def test_stacks_are_readable_from_another_machine_and_agents_ignore_the_signal(
    forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, arrived = tmp_path / "run", tmp_path / "arrived"
    order = probe("data", 6, rank=1, tell=str(arrived), sleep_s=1000)
    with launched(forks, MAIN, *settings(run), env=order, nodes=3) as (process, output):
        wait_for("hang", lambda: arrived.exists() or process.code is not None, log=output)
        shown_at_last(run, WAITING, "rank 1: data: next of a DataLoader")

        process.signal("SIGUSR2")
        # As on a machine that shares the disk, but sees none of the processes
        monkeypatch.setattr(stacks, "host_name", lambda: "login")
        monkeypatch.setattr(stacks.Answer, "alive", False)
        assert main(["stacks", str(run)]) == 0
        said = capsys.readouterr().out
        asked = r"on \S+: ask there; last stacks at \S+ \(asked\): "
        for rank, place in ((0, "backward"), (1, "data: next of a DataLoader"), (2, "backward")):
            assert re.search(rf"ranks? [\d, -]*\b{rank}\b.*: {asked}{place}", said), said
        assert process.code is None


SCRIPT = """
import os, pathlib, signal, sys, time
import torch.distributed as dist

assert "train" not in sys.modules, "a script of that name imports itself"
signal.signal(signal.SIGUSR2, lambda *_: os._exit(3))  # its own: a batch system's warning, say
assert "RANKUP_STACKS" not in os.environ
assert os.environ["PYTHONPATH"] == os.environ["PATH_BEFORE"]
dist.init_process_group("gloo")
def hang():
    pathlib.Path(sys.argv[1]).touch()
    time.sleep(1000)
if dist.get_rank() == 1:
    hang()
dist.barrier()
"""


def test_stacks_of_an_unchanged_script_are_shown_too(forks: Forks, tmp_path: Path) -> None:
    run, arrived, script = tmp_path / "run", tmp_path / "arrived", tmp_path / "train.py"
    script.write_text(SCRIPT)
    words, env = (f"--run-dir={tmp_path}", "--name=run", script, arrived), {"PATH_BEFORE": environment()["PYTHONPATH"]}
    with launched(forks, *words, env=env) as (process, output):
        wait_for("hang", lambda: arrived.exists() or process.code is not None, log=output)
        shown_at_last(run, r"^ranks 0, 2: barrier \(train\.py:\d+ <module>\)$", r"^rank 1: train\.py:\d+ hang$")
        assert process.code is None


def test_stacks_of_a_run_that_never_started_are_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").touch()
    assert main(["stacks", str(tmp_path)]) == 2
    assert "RUN must be a run whose ranks can be asked, got no stacks/rank-N.txt in" in capsys.readouterr().err


# Which processes get the signal, and which files are read -------------------------------------------------------------


@pytest.mark.parametrize("stranger", [False, True])
def test_stack_signal_is_not_sent_to_processes_that_would_die_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stranger: bool
) -> None:
    """One is a rank that has no handler yet. The other (`stranger`) is another process that now has the rank's pid."""
    monkeypatch.setattr(stacks, "ANSWER_STACKS_S", (0.2, 0.2))
    handler = "signal.signal(signal.SIGUSR2, lambda *_: exit(3));" if stranger else ""
    code = f"import signal, time; {handler} print(1, flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            if stranger:
                monkeypatch.setattr(logs, "start_of", lambda pid: "12345")
            announce_stacks(tmp_path, 0, 1, process.pid, signals=[signal.SIGUSR2])
            (answer,) = stacks.ask(tmp_path)
            assert answer.fresh != stranger
            assert stranger or answer.place.startswith("does not answer: it waits")
            assert process.poll() is None
        finally:
            process.kill()


def test_stack_files_of_an_attempt_with_more_ranks_are_not_read(tmp_path: Path) -> None:
    for rank in range(4):
        os.utime(announce_stacks(tmp_path, rank, 4, os.getpid()), (1, 1))
    announce_stacks(tmp_path, 0, 2, os.getpid())
    assert [answer.rank for answer in stacks.written(tmp_path)] == [0, 1]


def test_refused_attempt_does_not_replace_the_live_ranks_stack_file(tmp_path: Path) -> None:
    for pid in (os.getpid(), 2**22 + 1):
        announce_stacks(tmp_path, 0, 1, pid)
    (answer,) = stacks.written(tmp_path)
    assert answer.pid == os.getpid()


def test_stack_dump_without_the_main_thread_counts_as_unfinished(tmp_path: Path) -> None:
    path, frame = announce_stacks(tmp_path, 0, 1, os.getpid(), main="0x7f01"), '  File "/me/a.py", line 1 in look\n'
    for thread, place in ((0, "has written no stacks"), (1, "a.py:1 look")):
        with path.open("a") as file:
            file.write(f"Thread 0x7f0{thread} (most recent call first):\n{frame}")
        assert stacks.written(tmp_path)[0].place == place


def test_damaged_stack_file_is_skipped_and_its_rank_is_named_as_missing(tmp_path: Path) -> None:
    with announce_stacks(tmp_path, 1, 3, 2**22 + 1).open("a") as file:
        file.write("Thread")
    (tmp_path / "stacks" / "rank-0.txt").write_text("# {\n")
    said = stacks.report(tmp_path)
    assert re.match(r"rank 1: ended, on \S+; no stacks were written\nranks 0, 2 of 3: no file here\.", said), said
    assert "--full" not in said
