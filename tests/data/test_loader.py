"""Workers of the program's loaders die with their rank, and their errors and deaths are explained.
tests/promises/test_parity.py tests that any number of workers gives the same batches."""

import itertools
import os
import re
import time
from pathlib import Path

import psutil
import pytest
import torch

from rankup import doctor
from rankup.errors import UserError
from rankup.loop.workers import Workers
from tests.rigs.fork_server import Forks, Job
from tests.rigs.jobs import probe, result
from tests.rigs.small_filesystems import own_tmpfs
from train.data.samples import EpochSampler, MapSamples, load_batches


class Faulty:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        raise self.error


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("error", [UserError("file 99: UserError: no image"), ZeroDivisionError("a fault of the data")])
def test_unreadable_sample_gives_one_line_and_a_fault_keeps_its_type(error: Exception, num_workers: int) -> None:
    samples, order, device = MapSamples(Faulty(error), seed=3), EpochSampler(24, 4, seed=1), torch.device("cpu")
    loader = load_batches(samples, order, accumulate=2, num_workers=num_workers, device=device)
    with pytest.raises(type(error)) as caught:
        next(iter(Workers(loader)))
    assert str(error) in str(caught.value)
    assert not isinstance(error, UserError) or str(caught.value) == str(error)


SETTINGS = ("--workload", "tests.rigs.faulting_workload:build", "--batch-size", "8", "--epochs", "4",
            "--tensorboard=false", "--num-workers", "2", "--join-timeout-s", "30", "--eval-batch-size", "4")


def train(run: Path, *more: str) -> tuple[str, ...]:
    return ("train", *SETTINGS, "--run-dir", str(run.parent), "--name", run.name, *more)


def workers_of(job: Job) -> list[psutil.Process]:
    found: list[psutil.Process] = []

    def complete() -> bool:
        found[:] = [child for process in job.processes for child in psutil.Process(process.pid).children()]
        return len(found) == 2 * len(job.processes)

    job.wait_until(complete, "workers")
    return found


@pytest.mark.parametrize("end", ["killed", "past its deadline"])
def test_workers_die_with_their_rank(forks: Forks, tmp_path: Path, end: str) -> None:
    # The worker sleeps in a batch, because an idle worker would check its parent itself
    line = train(tmp_path / "run", "--step-timeout-s", "12" if end != "killed" else "600")
    with forks.running(*line, env=probe("data", 3, sleep_s=600, tell=str(tmp_path / "asleep"))) as job:
        workers = workers_of(job)
        job.wait_until((tmp_path / "asleep").exists, "a worker that sleeps")
        if end == "killed":
            job.processes[0].signal("SIGKILL")
        assert job.wait() == [-9 if end == "killed" else 171], job.output
        assert psutil.wait_procs(workers, timeout=30)[1] == []


@pytest.mark.parametrize("hanging", ["2", "2 3"])
def test_worker_that_hangs_in_fork_is_forked_a_second_time(forks: Forks, tmp_path: Path, hanging: str) -> None:
    twice, preload = hanging == "2 3", "tests.data.test_loader:hang_in_fork"
    output = forks.ends(*train(tmp_path / "run"), env={"HANGING": hanging}, preload=preload, code=171 * twice)
    assert ("DataLoader worker 1 has not begun 5 s after its start, twice" in output) == twice
    assert "Traceback" not in output


def hang_in_fork() -> None:
    """Preloaded. Let the forks of a rank with the numbers in HANGING hang in os.fork."""
    from rankup.loop import workers

    workers.START_S = 5.0  # other workers begin within 5 s, even on a busy machine
    forks, hanging = itertools.count(1), [int(number) for number in os.environ["HANGING"].split()]
    os.register_at_fork(after_in_child=lambda: time.sleep(600) if next(forks) in hanging else None,
                        after_in_parent=lambda: next(forks))


def test_workers_of_training_and_evaluation_live_until_the_end(forks: Forks, tmp_path: Path) -> None:
    output = forks.ends(*train(tmp_path / "run"), preload="tests.data.test_loader:say_forks")
    assert output.count("epoch ") == 4
    assert output.count("forked") == 2 + 2


def say_forks() -> None:
    os.register_at_fork(before=lambda: os.write(2, b"forked\n"))


def test_run_resumed_with_fewer_steps_than_done_evaluates_and_ends(forks: Forks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    output = forks.ends(*train(run, "--schedule", "constant"), env=probe("loss", 15, signal="SIGTERM"), code=143)
    output = forks.ends(*train(run, "--schedule", "constant", "--max-steps", "5"))
    assert "Traceback" not in output
    assert result(run)["step"] > 8
    assert result(run)["metrics"]


def test_killed_worker_ends_all_ranks_with_a_code_to_retry(forks: Forks, tmp_path: Path) -> None:
    order = probe("data", 3, rank=1, signal="SIGKILL")
    output = forks.ends(*train(tmp_path / "run"), world_size=2, env=order, code=171)
    # Each worker of rank 1 dies at its own third sample, so both may be dead at the time of the message
    worker = r"worker [01] \(exit code -9\)"
    assert re.search(
        f"a DataLoader worker died, most likely because memory ran out: {worker}(, {worker})?", output
    ), output
    assert "Traceback" not in output


# 12 KiB an image
IMAGES = ("train", "--dataset", "fake", "--fake-samples", "256", "--image-size", "64", "--model", "mlp",
          "--num-workers", "2", "--batch-size", "64", "--max-steps", "4", "--tensorboard=false", "--name", "run")


def little_shared_memory() -> None:
    own_tmpfs("/dev/shm", "1m")


def test_small_dev_shm_ends_with_2(forks: Forks, tmp_path: Path) -> None:
    codes, output = forks.run(*IMAGES, "--run-dir", str(tmp_path), preload=f"{__name__}:little_shared_memory")
    assert codes == [2], output  # the traceback of a worker comes first
    assert "error: /dev/shm must hold the batches of all DataLoader workers" in output
    assert "Traceback" not in output.split("error: /dev/shm")[1]


@pytest.mark.parametrize(("threads", "ranks", "cpus", "said"), [
    (1, 2, 1.5, ""),  # half a CPU too few does not count
    (4, 2, 8.0, ""),
    (4, 2, 4.0, "2 x 4 threads on this node, but only 4 CPUs to use"),
    (1, 1, 0.5, "1 x 1 threads on this node, but only 0.5 CPUs to use"),
    (1, 2, 1.2, "2 x 1 threads on this node, but only 1.2 CPUs"),
])
def test_doctor_warns_of_more_threads_than_cpus(
    monkeypatch: pytest.MonkeyPatch, threads: int, ranks: int, cpus: float, said: str
) -> None:
    monkeypatch.setattr(doctor, "cpu_quota", lambda root: cpus)
    finding = next(doctor.limits(ranks=ranks, threads=threads))
    assert said in finding.seen
    assert (finding.level != doctor.OK) == bool(said)
