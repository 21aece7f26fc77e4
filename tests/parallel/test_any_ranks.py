"""Any number of ranks trains like one rank, even if it does not divide the batch.

A batch of 64 has 22 + 21 + 21 samples on three ranks. Each rank's mean is weighted by its number of samples, so the
gradient and the loss are those of the whole batch.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.rigs import places
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import MAIN, losses_of, metrics, probe, result
from tests.rigs.places import Fault

STEPS = 14  # an epoch has 11
# No batch norm and no dropout, because they see only one rank's samples
LINE = ("train", "--dataset", "digits", "--model", "mlp", "--tensorboard=false", "--limit-train", "704", "--lr", "0.08",
        "--schedule", "constant", "--batch-size", "64", "--max-steps", str(STEPS), "--log-every-steps", "1",
        "--device", "cpu", "--name", "run")
HOROVOD = ("--parallel", "horovod")

needs_horovod = pytest.mark.skipif(find_spec("horovod") is None, reason="no Horovod here: make horovod builds it")


def train(forks: Forks, folder: Path, world_size: int, *arguments: str, preload: str = "") -> Path:
    forks.ends(*LINE, *arguments, "--run-dir", folder, world_size=world_size, preload=preload)
    return folder / "run"


def losses(run: Path) -> list[float]:
    """Return the losses of all steps and of the last evaluation."""
    return [*losses_of(run, count=STEPS), next(line["eval/loss"] for line in metrics(run)[::-1] if "eval/loss" in line)]


def largest_difference(run: Path, alone: list[float]) -> float:
    """Return the largest relative difference of a run's losses from those of one process."""
    return max(abs(loss - expected) / expected for loss, expected in zip(losses(run), alone, strict=True))


@pytest.fixture(scope="module")
def alone(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    found = losses(train(forks, tmp_path_factory.mktemp("alone"), 1))
    assert found[STEPS - 1] < 0.8 * found[0]  # a flat curve would prove nothing
    return found


@pytest.mark.parametrize("world_size", [2, 3, 5, 6, 7])  # a test below has four
def test_number_of_ranks_changes_no_loss(forks: Forks, alone: list[float], tmp_path: Path, world_size: int) -> None:
    difference = largest_difference(train(forks, tmp_path, world_size), alone)
    print(f"{world_size} ranks, batch 64: loss within {difference:.1e}")
    assert difference < 1e-5


# Settings of the ranks, and the tolerance for their loss against one process in fp32. Equal weights of all ranks' means
# would give 1e-2. A variant "own" changes the loss or the steps, so its single process has the same settings
VARIANTS: dict[str, tuple[tuple[str, ...], float]] = {
    "accumulated": (("--accumulate", "4"), 1e-5),
    "fp16, accumulated": (("--precision", "fp16", "--accumulate", "4"), 1e-3),
    "fsdp, accumulated": (("--parallel", "fsdp", "--accumulate", "4"), 1e-5),
    "horovod, accumulated": ((*HOROVOD, "--accumulate", "4"), 1e-5),
    "own: clipped, accumulated, with adamw": (
        ("--clip-norm", "0.5", "--accumulate", "4", "--optimizer", "adamw", "--lr", "0.002"), 1e-5),
    "own: clipped by fsdp": (("--parallel", "fsdp", "--clip-norm", "0.5"), 1e-5),
    "own: augmented": (("--augment",), 1e-5),
}
CASES = [
    pytest.param(variant, marks=needs_horovod if HOROVOD[1] in settings else ())
    for variant, (settings, _) in VARIANTS.items()
]


@pytest.mark.parametrize("variant", CASES)
def test_variant_on_three_ranks_follows_one(forks: Forks, alone: list[float], tmp_path: Path, variant: str) -> None:
    settings, tolerance = VARIANTS[variant]
    expected = losses(train(forks, tmp_path / "one", 1, *settings)) if variant.startswith("own") else alone
    difference = largest_difference(train(forks, tmp_path / "three", 3, *settings), expected)
    print(f"{variant}: loss within {difference:.1e}")
    assert difference < tolerance


def test_synchronized_batch_norm_of_uneven_parts_is_that_of_the_batch(
    forks: Forks, tmp_path: Path
) -> None:
    """On CPUs torch's SyncBatchNorm gets formulas for its kernels. In the run `own` ranks have their own statistics."""
    norm = ("--workload", "tests.rigs.recording_workload:build", "--options.model", "norm")
    expected = losses(train(forks, tmp_path / "one", 1, *norm))
    assert largest_difference(train(forks, tmp_path / "own", 3, *norm), expected) > 1e-3
    train(forks, tmp_path / "synced", 3, *norm, preload="tests.rigs.sync_norm:convert")
    difference = largest_difference(tmp_path / "synced" / "run", expected)
    print(f"synchronized batch norm: loss within {difference:.1e}")
    assert difference < 1e-5


def test_one_process_accumulates_uneven_micro_batches(forks: Forks, alone: list[float], tmp_path: Path) -> None:
    assert largest_difference(train(forks, tmp_path, 1, "--accumulate", "3"), alone) < 1e-5


# Batches of 10 are 3 + 3 + 2 + 2 or 4 + 3 + 3 samples. An epoch has 6 steps
SMALL = ("train", "--workload", "tests.rigs.faulting_workload:build", "--batch-size", "10", "--log-every-steps", "1",
         "--tensorboard=false", "--device", "cpu", "--name", "run", "--schedule", "constant",
         "--max-steps", str(STEPS))


def test_job_of_four_ranks_resumes_with_three_and_then_four(forks: Forks, tmp_path: Path) -> None:
    """Its losses are those of one process, although each world size splits the batch differently."""
    line = (*SMALL, "--options.dropout", "0", "--accumulate", "2")
    forks.ends(*line, "--run-dir", tmp_path / "one")
    lost = probe("loss", 11, rank=2, signal="SIGKILL", saved=True)  # in step 5: two losses a step, from call 3 on
    forks.ends(*line, "--run-dir", tmp_path / "four", world_size=4, env=lost, code=[171, 171, -9, 171])
    output = forks.ends(*line, "--run-dir", tmp_path / "four", "--max-steps", "9", world_size=3)
    assert "resumed from step 4, rescued by rank" in output
    assert "world size was 4, is 3: the run goes on, but its last bits will differ" in output
    assert "batch  10 global = 3 ranks x 3 to 4 in 2 parts" in output
    forks.ends(*line, "--run-dir", tmp_path / "four", world_size=4)
    assert largest_difference(tmp_path / "four" / "run", losses(tmp_path / "one" / "run")) < 1e-5


def test_launch_of_three_with_a_lost_rank_has_the_weights_of_ranks_by_hand(
    forks: Forks, tmp_path: Path
) -> None:
    """The model has dropout, batch norm and several buckets. test_methods_kills.py has ranks that meet by a file."""
    line = ("train", "--workload=tests.rigs.recording_workload:build", "--options.model=wide", "--limit-train=384",
            "--batch-size=64", f"--max-steps={STEPS}", "--save-every-steps=5", "--log-every-steps=1",
            "--tensorboard=false", "--name=run")
    output = forks.ends(*line, "--run-dir", tmp_path / "hand", world_size=3)
    assert "batch  64 global = 3 ranks x 21 to 22" in output
    faults = places.order(tmp_path / "faults", [[Fault("backward", 1, 8)]])
    words = ("launch", "--nproc=3", MAIN, *line, "--run-dir", tmp_path / "launch")
    output = forks.ends(*words, env=faults)
    assert len(places.strikes(tmp_path / "faults")) == 1
    assert "; no finished step was lost" in output
    assert result(tmp_path / "hand" / "run")["digest"] == result(tmp_path / "launch" / "run")["digest"]
