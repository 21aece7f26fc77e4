"""The same training with gradients averaged by real Horovod, which `make horovod` installs."""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import torch

from tests.rigs.checkpoints import steps
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import Job, ended, environ_of, metrics, probe, result, start, wait_for

# An mlp, because Horovod needs contiguous parameters. With ddp, to which it is compared, convolutions would be in NHWC
DIGITS = ("train", "--dataset", "digits", "--model", "mlp", "--tensorboard=false", "--limit-train", "704", "--lr",
          "0.02", "--schedule", "constant", "--log-every-steps", "1", "--device", "cpu")
HOROVOD = ("--parallel", "horovod")
STEPS = ("--max-steps", "14")
ENDLESS = ("--max-steps", "1000000", "--save-every-steps", "3")

needs_horovod = pytest.mark.skipif(find_spec("horovod") is None, reason="no Horovod here: make horovod builds it")


def train(forks: Forks, run: Path, world_size: int, *arguments: str | Path) -> Path:
    where = ("--name", run.name, "--run-dir", run.parent)
    forks.ends(*DIGITS, *arguments, *where, world_size=world_size)
    return run


def losses(run: Path) -> list[float]:
    return [line["train/loss"] for line in metrics(run) if "train/loss" in line]


def digest(run: Path) -> str:
    return str(result(run)["digest"])


@pytest.fixture(scope="module")
def ddp(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(forks, tmp_path_factory.mktemp("ddp") / "run", 2, *STEPS)


@pytest.fixture(scope="module")
def alone(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(train(forks, tmp_path_factory.mktemp("alone") / "run", 1, *STEPS))


def by_horovodrun(*arguments: str | Path) -> Job:
    """Start two ranks by horovodrun. Its own code warns, so warnings are no errors here."""
    runner = Path(sys.executable).with_name("horovodrun")
    command = (runner, "-np", "2", "--gloo", sys.executable, "-m", "train.main")
    return start(*command, *arguments, env={"PYTHONWARNINGS": "default"})


@needs_horovod
@pytest.mark.timeout(500)
def test_horovod_under_mpirun_trains_to_the_weights_of_ddp(ddp: Path, tmp_path: Path) -> None:
    words = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2")
    line = (*DIGITS, *HOROVOD, *STEPS, "--name", "run", "--run-dir", tmp_path)
    with ended(start(*words, sys.executable, "-m", "train.main", *line)) as job:
        assert job.wait(280) == [0], job.output
    assert digest(tmp_path / "run") == digest(ddp)


@needs_horovod
@pytest.mark.timeout(800)
def test_horovodrun_ends_after_a_killed_rank_and_the_same_command_resumes(forks: Forks, tmp_path: Path) -> None:
    rarely = ("--save-every-steps", "3", "--evaluate-every-epochs", "1000")
    line = (*DIGITS, *HOROVOD, *rarely, "--name", "run", "--run-dir", tmp_path)
    checkpoints = tmp_path / "run" / "checkpoints"
    with ended(by_horovodrun(*line, "--max-steps", "1000000")) as job:
        wait_for("a checkpoint", lambda: list(checkpoints.glob("step-*")), process=job.processes[0])
        rank_of(job, 1).kill()
        assert job.wait(120) == [1], job.output
    assert "Process 1 exit with status code" in job.output
    newest = max(steps(checkpoints)[-1], *map(int, re.findall(r"rescued step (\d+)", job.output)), 0)
    further = ("--max-steps", str(newest + 5))
    with ended(by_horovodrun(*line, *further)) as job:
        assert job.wait(280) == [0], job.output
    assert re.search(r"resumed from step[- ]\d", job.output)
    outcome = result(tmp_path / "run")
    assert (outcome["parallel"], outcome["world_size"]) == ("horovod", 2)
    assert outcome["digest"] == digest(train(forks, tmp_path / "whole", 2, *further, *rarely[2:]))


def rank_of(job: Job, rank: int) -> psutil.Process:
    """Return the process of a rank below horovodrun, and not one of the shells that started it."""
    (found,) = [
        child
        for child in psutil.Process(job.processes[0].pid).children(recursive=True)
        if environ_of(child.pid).get("HOROVOD_RANK") == str(rank) and child.cmdline()[1:3] == ["-m", "train.main"]
    ]
    return found


@needs_horovod
@pytest.mark.parametrize(("name", "codes", "said"), [
    ("SIGKILL", [171, -9], "lost a peer at step"), ("SIGTERM", [143, 143], "saved at step"),
])
def test_killed_or_stopped_horovod_rank_ends_both_ranks(
    forks: Forks, tmp_path: Path, name: str, codes: list[int], said: str
) -> None:
    line = (*DIGITS, *HOROVOD, *ENDLESS, "--run-dir", tmp_path, "--name", "run")
    with forks.running(*line, world_size=2) as job:
        job.wait_until(lambda: list((tmp_path / "run" / "checkpoints").glob("step-*")), "a checkpoint")
        job.processes[1].signal(name)
        assert job.wait() == codes, job.output
    assert said in job.output
    assert "Traceback" not in job.output


@needs_horovod
def test_lost_horovod_rank_costs_no_finished_step(forks: Forks, tmp_path: Path) -> None:
    line = ("train", "--workload=tests.rigs.faulting_workload:build", "--batch-size=8", "--max-steps=8", *HOROVOD,
            "--tensorboard=false", "--log-every-steps=1", "--run-dir", tmp_path, "--name=run")
    # Rank 0 may be slower: only once its fourth line is there has it finished the fourth step, too
    fourth = {"log": str(tmp_path / "run/metrics.jsonl"), "lines": 4}
    codes, output = forks.run(*line, env=probe("loss", 7, rank=1, signal="SIGKILL", **fourth), world_size=2)
    assert codes == [171, -9], output
    assert "resumed from step 4, rescued by rank 0" in forks.ends(*line, world_size=2)


@needs_horovod
def test_horovod_with_one_process_trains_as_without_horovod(forks: Forks, alone: list[float], tmp_path: Path) -> None:
    assert losses(train(forks, tmp_path / "run", 1, *HOROVOD, *STEPS)) == alone


VARIANTS: dict[str, tuple[str, ...]] = {
    "adamw, clipped": ("--optimizer", "adamw", "--lr", "0.002", "--clip-norm", "0.5"),
    "fp16, accumulated and clipped": ("--precision", "fp16", "--accumulate", "2", "--clip-norm", "1"),
    "bf16": ("--precision", "bf16"),
}


@needs_horovod
@pytest.mark.parametrize("variant", VARIANTS)
def test_horovod_variant_has_the_weights_of_ddp_and_resumes_to_the_bit(
    forks: Forks, tmp_path: Path, variant: str
) -> None:
    line = (*VARIANTS[variant], *STEPS)
    train(forks, tmp_path / "parts", 2, *HOROVOD, *line, "--max-steps", "8")
    parts = train(forks, tmp_path / "parts", 2, *HOROVOD, *line)
    whole = train(forks, tmp_path / "ddp", 2, *line)
    assert digest(parts) == digest(whole)
    assert losses(parts) == losses(whole)


@needs_horovod
def test_horovod_on_four_ranks_in_fp16_resumes_to_the_bit(forks: Forks, tmp_path: Path) -> None:
    """There are four ranks, because with two no other order of sums can be seen."""
    line = (*HOROVOD, "--compress", "fp16", "--dropout", "0.3", "--augment", *STEPS)
    whole = train(forks, tmp_path / "whole", 4, *line)
    train(forks, tmp_path / "parts", 4, *line, "--max-steps", "8")
    assert digest(train(forks, tmp_path / "parts", 4, *line)) == digest(whole)


@needs_horovod
def test_run_resumes_from_horovod_to_ddp_and_back(forks: Forks, ddp: Path, tmp_path: Path) -> None:
    for end, method in (("5", "horovod"), ("10", "ddp"), ("14", "horovod")):
        run = train(forks, tmp_path / "run", 2, "--parallel", method, "--max-steps", end)
    assert digest(run) == digest(ddp)


def hide_horovod() -> None:
    """Preloaded. Make the import of Horovod fail, as if it were not installed."""
    sys.modules["horovod"] = None  # type: ignore[assignment]


def test_missing_horovod_gives_one_line(forks: Forks, tmp_path: Path) -> None:
    line = (*DIGITS, *HOROVOD, "--run-dir", tmp_path)
    output = forks.ends(*line, world_size=2, preload="tests.parallel.test_horovod:hide_horovod", code=2)
    assert f"error: parallel horovod needs Horovod built for torch {torch.__version__}, got: " in output
    assert "`make horovod` builds and installs it" in output
