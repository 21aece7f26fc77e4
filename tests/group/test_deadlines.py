"""Whatever happens to one rank, all ranks end: within the bound, with the code of the cause, and naming the culprit."""

import contextlib
import json
import os
import re
from pathlib import Path

import psutil
import pytest

from rankup import timing
from rankup.agent.logs import host_name
from rankup.explain import diagnose_files
from tests.rigs.faulting_workload import probe_saves
from tests.rigs.fork_server import Forks, Job
from tests.rigs.jobs import lives, probe, result

HOST = host_name()
WORLD = 3
WORKLOAD = "tests.rigs.faulting_workload"
# 8 steps an epoch; the loss of the first step is call 3
SETTINGS = (f"--workload={WORKLOAD}:build", "--batch-size=6", "--max-steps=12", "--eval-batch-size=4",
            "--log-every-steps=1", "--save-every-steps=2", "--tensorboard=false",
            "--join-timeout-s=30", "--num-workers=1")
SHORT = 8  # in seconds; a step takes milliseconds, and a busy machine may delay a process by some seconds


def train(run: Path, *more: str) -> tuple[str, ...]:
    return ("train", *SETTINGS, f"--run-dir={run.parent}", f"--name={run.name}", *more)


def assert_named(job: Job, run: Path, culprit: int, *, among: list[int]) -> None:
    """Assert that these ranks name only the culprit, in their output and in `status/`."""
    for rank in among:
        output = job.processes[rank].output
        named = re.findall(r"rank (\d+) on (\S+) \(", output)
        assert named == [(str(culprit), HOST)], output  # once, although loop and watching thread notice it together
        (file,) = run.glob(f"status/*/rank-{rank}.json")
        assert json.loads(file.read_text())["suspect"] == culprit


def assert_nothing_left(job: Job) -> None:
    """Assert that no process of the job is left. Each rank leads a session with its DataLoader workers."""
    sessions, left = {process.pid for process in job.processes}, []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError):
            if lives(process.pid) and os.getsid(process.pid) in sessions:
                left.append(process)
    assert psutil.wait_procs(left, timeout=60)[1] == []


@pytest.fixture(scope="module")
def undisturbed(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> str:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    forks.ends(*train(run), world_size=WORLD)
    return result(run)["digest"]  # type: ignore[no-any-return]


# A rank that fails ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("culprit", "order", "own", "code", "says"), [
    (1, {"raise": "ValueError"}, 1, 1, "ValueError: probe"),
    # This fault reads like a lost peer, but does not justify a restart
    (2, {"raise": "RuntimeError"}, 1, 1, "RuntimeError: NCCL error: probe"),
    (0, {"raise": "UserError"}, 2, 2, "error: probe"),
    (1, {"raise": "SystemExit"}, 1, 1, "SystemExit: 0"),  # SystemExit(0) before the end is a failure too
    # The `code` of this exception, 404, is no exit code
    (1, {"raise": "HTTPError"}, 1, 1, "HTTPError: HTTP Error 404: probe"),
    (0, {"signal": "SIGKILL"}, -9, 171, ""),
    (1, {"signal": "SIGKILL"}, -9, 171, ""),
])
def test_failed_or_killed_rank_ends_all_and_is_named(
    culprit: int, order: dict[str, str], own: int, code: int, says: str, forks: Forks, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with forks.running(*train(run), world_size=WORLD, env=probe("loss", 6, culprit, **order)) as job:
        assert job.wait() == [own if rank == culprit else code for rank in range(WORLD)], job.output
    zero, one, two = (process.output.splitlines() for process in job.processes)
    for rank, lines in enumerate((zero, one, two)):
        assert all(line.startswith(f"[{HOST} r{rank}/{WORLD}] ") for line in lines), job.output
    if order.get("raise") == "ValueError":  # ranks other than 0 print only their own failure
        assert len(zero) > 3
        assert "Traceback" in one[0]
        # If rank 1 takes long to end, the watching thread ends rank 2, and names its stacks
        assert len([line for line in two if "the stacks of all threads" not in line]) == 1
    assert says in job.processes[culprit].output
    if own == -9:
        first = diagnose_files([run])[0]
        assert (first.name, first.rank, first.host) == ("lost-silent", culprit, HOST)
    assert_named(job, run, culprit, among=[rank for rank in range(WORLD) if rank != culprit])
    assert_nothing_left(job)


# A rank that hangs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("where", "call", "phase", "culprit"), [
    ("loss", 6, "step", 0), ("loss", 6, "step", 2), ("evaluate", 1, "evaluation", 1),
])
def test_stopped_rank_is_found_by_the_deadline_and_the_job_resumes(
    where: str, call: int, phase: str, culprit: int, forks: Forks, undisturbed: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    order = probe(where, call, culprit, signal="SIGSTOP")
    others = [rank for rank in range(WORLD) if rank != culprit]
    line = train(run, f"--step-timeout-s={SHORT}", f"--eval-timeout-s={SHORT}")
    with forks.running(*line, world_size=WORLD, env=order) as job:
        for rank in others:
            assert job.processes[rank].ended.wait(240), job.output
            assert job.processes[rank].code == 171, job.output
        # Another rank's deadline may begin a second later. That rank then hears of the loss before its own deadline
        found = [rank for rank in others if f"{phase} (step" in job.processes[rank].output]
        assert found, job.output
        assert all("Thread 0x" in (run / "stacks" / f"rank-{rank}.txt").read_text() for rank in found)
        assert job.processes[culprit].code is None
        assert_named(job, run, culprit, among=others)
    assert_nothing_left(job)
    output = forks.ends(*train(run), world_size=WORLD)
    assert result(run)["digest"] == undisturbed, output


@pytest.mark.parametrize(
    ("where", "call", "culprit", "method"),
    # Rank 0 takes the store with it, which then does not answer. With fsdp all ranks write parts of a checkpoint
    [("loss", 6, 2, "ddp"), ("loss", 6, 0, "ddp"), ("save", 2, 0, "ddp"), ("save", 2, 2, "fsdp"),
     ("evaluate", 1, 2, "fsdp")],  # the forward pass is a collective
)
def test_rank_without_heartbeats_is_found_long_before_a_deadline(
    where: str, call: int, culprit: int, method: str, forks: Forks, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    line = train(run, "--step-timeout-s=1000", f"--parallel={method}")
    order = probe(where, call, culprit, signal="SIGSTOP")
    preload = "tests.group.test_deadlines:accept_little_silence"
    with forks.running(*line, world_size=WORLD, env=order, preload=preload) as job:
        others = [rank for rank in range(WORLD) if rank != culprit]
        for rank in others:
            assert job.processes[rank].ended.wait(240), job.output
            assert job.processes[rank].code == 171, job.output
        assert "sent no heartbeat for" in job.output
        assert_named(job, run, culprit, among=others)


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_that_holds_the_interpreter_lock_is_not_silent(rank: int, forks: Forks, tmp_path: Path) -> None:
    """Its agent is a process of its own, and leads the others meanwhile if it is rank 0's."""
    order = probe("loss", 6, rank, hold_s=12)
    preload = "tests.group.test_deadlines:accept_little_silence"
    forks.ends(*train(tmp_path / "run"), world_size=WORLD, env=order, preload=preload)


def accept_little_silence() -> None:
    timing.SILENT_S = 8.0  # heartbeats come every second
    probe_saves()


@pytest.mark.parametrize("culprit", [0, 2])
def test_rank_whose_agent_is_killed_counts_as_lost(culprit: int, forks: Forks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with forks.running(*train(run, "--max-steps=100000"), world_size=WORLD) as job:
        job.wait_for("step 4")
        children = psutil.Process(job.processes[culprit].pid).children()
        agent, = (child for child in children if child.name() == "rank's agent")  # the others load data
        agent.kill()
        assert job.wait() == [171] * WORLD, job.output
    assert_named(job, run, culprit, among=list(range(WORLD)))
    assert_nothing_left(job)


def test_culprit_that_wakes_last_names_itself(forks: Forks, tmp_path: Path) -> None:
    """By then the ranks that waited for it have left, and the store has ended with rank 0."""
    run = tmp_path / "run"
    order = probe("build", 1, 1, signal="SIGSTOP", sleep_s=1000)
    line = train(run, f"--setup-timeout-s={SHORT}", "--num-workers=0")
    with forks.running(*line, world_size=WORLD, env=order) as job:
        for rank in (0, 2):
            assert job.processes[rank].ended.wait(240), job.output
        job.processes[1].signal("SIGCONT")
        assert job.wait() == [171] * WORLD, job.output
    assert "setup (step 0) took longer" in job.processes[1].output
    assert_named(job, run, 1, among=list(range(WORLD)))


@pytest.mark.parametrize(("where", "call", "phase", "setting", "culprit"), [
    ("build", 1, "setup", "setup", 1), ("data", 6, "step", "step", 0), ("loss", 6, "step", "step", 1),
])
def test_rank_that_takes_too_long_is_named_by_all(
    where: str, call: int, phase: str, setting: str, culprit: int, forks: Forks, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    order = probe(where, call, culprit, sleep_s=1000)
    line = train(run, f"--{setting}-timeout-s={SHORT}", "--num-workers=0")
    with forks.running(*line, world_size=WORLD, env=order) as job:
        assert job.wait() == [171] * WORLD, job.output
    assert f"{phase} (step" in job.output  # printed by the first rank that noticed
    # One line says where each rank is, and files have the stacks
    assert re.search(rf"rank {culprit}: .*faulting_workload\.py:\d+ probe\b", job.processes[culprit].output)
    for rank in range(WORLD):
        assert "Thread 0x" in (run / "stacks" / f"rank-{rank}.txt").read_text()
    assert_named(job, run, culprit, among=list(range(WORLD)))


def test_deadline_ends_a_rank_whose_output_has_no_reader(forks: Forks, tmp_path: Path) -> None:
    line = train(tmp_path / "run", f"--step-timeout-s={SHORT}", "--num-workers=0")
    (code,), _ = forks.run(*line, env=probe("loss", 6, 0, sleep_s=1000), preload=f"{WORKLOAD}:lose_reader")
    assert code == 171


def test_rank_0_that_saves_too_long_is_named(forks: Forks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    line = train(run, f"--save-timeout-s={SHORT}")
    with forks.running(*line, world_size=WORLD, preload=f"{WORKLOAD}:slow_save") as job:
        assert job.wait() == [171] * WORLD, job.output
    # Printed by the first rank that noticed; the others hear it from there
    assert f"save (step 4) took longer than {SHORT} s" in job.output
    assert_named(job, run, 0, among=list(range(WORLD)))
    assert "faulting_workload.py" in (run / "stacks" / "rank-0.txt").read_text()


def test_hang_that_holds_the_interpreter_lock_permits_a_restart(forks: Forks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    order = probe("loss", 6, 1, hold_s=1000)
    line = train(run, f"--step-timeout-s={SHORT}")
    with forks.running(*line, world_size=WORLD, env=order, preload=f"{WORKLOAD}:impatient") as job:
        assert job.wait() == [171, -14, 171], job.output  # -14 is 142 in a shell
    assert_named(job, run, 1, among=[0, 2])
    assert "in probe" in job.processes[1].output


def test_disk_that_hangs_after_a_failure_delays_no_exit_and_changes_no_code(forks: Forks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    order = probe("loss", 6, 1, **{"raise": "UserError"})
    with forks.running(*train(run), world_size=WORLD, env=order, preload=f"{WORKLOAD}:stuck_disk") as job:
        assert job.wait() == [2] * WORLD, job.output
    assert_named(job, run, 1, among=[0, 2])
