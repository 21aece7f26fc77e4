"""Any number of ranks, also one that does not divide the batch, and shares as the user sets them, train as one does.

A batch of 64 is 22 + 21 + 21 samples on three ranks. Each rank's mean counts by its samples, so that the gradient and
the loss are those of the whole batch.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.rigs.fork_server import Forks
from tests.rigs.jobs import metrics

STEPS = 14  # of which 11 are an epoch
# Without batch norm and dropout, which see one rank's samples only
LINE = ("train", "--dataset", "digits", "--model", "mlp", "--tensorboard=false", "--limit-train", "704", "--lr", "0.08",
        "--schedule", "constant", "--batch-size", "64", "--max-steps", str(STEPS), "--log-every-steps", "1",
        "--progress=none", "--device", "cpu", "--name", "run")
HOROVOD = ("--parallel", "horovod")

needs_horovod = pytest.mark.skipif(find_spec("horovod") is None, reason="no Horovod here: make horovod builds it")


def train(forks: Forks, folder: Path, world_size: int, *arguments: str) -> Path:
    codes, output = forks.run(*LINE, *arguments, "--run-dir", folder, world_size=world_size)
    assert codes == [0] * world_size, output
    return folder / "run"


def losses(run: Path) -> list[float]:
    found = [line["train/loss"] for line in metrics(run) if "train/loss" in line]
    assert len(found) == STEPS
    return found


def largest_difference(run: Path, alone: list[float]) -> float:
    """Of the losses of all steps, as a part of what one process has there."""
    return max(abs(loss - expected) / expected for loss, expected in zip(losses(run), alone, strict=True))


@pytest.fixture(scope="module")
def alone(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    found = losses(train(forks, tmp_path_factory.mktemp("alone"), 1))
    assert found[-1] < 0.8 * found[0]  # a curve that stays where it was proves nothing
    return found


@pytest.mark.parametrize("world_size", range(2, 8))
def test_any_number_of_ranks_follows_one(forks: Forks, alone: list[float], tmp_path: Path, world_size: int) -> None:
    difference = largest_difference(train(forks, tmp_path, world_size), alone)
    print(f"{world_size} ranks, batch 64: loss within {difference:.1e}")
    assert difference < 1e-5


# What the ranks do, and how far the loss may be from one process's in fp32. Were all ranks' means to count alike, it
# would be 1e-2 away, and 0.26 with shares 5,1
VARIANTS: dict[str, tuple[tuple[str, ...], float]] = {
    "ddp": ((), 1e-5),
    "accumulated": (("--accumulate", "4"), 1e-5),
    "bf16": (("--precision", "bf16"), 5e-3),
    "fp16": (("--precision", "fp16"), 1e-3),
    "fp16, accumulated": (("--precision", "fp16", "--accumulate", "4"), 1e-3),
    "sent as fp16": (("--compress", "fp16"), 1e-4),
    "sent as bf16": (("--compress", "bf16"), 1e-3),
    "fsdp": (("--parallel", "fsdp"), 1e-5),
    "fsdp, accumulated": (("--parallel", "fsdp", "--accumulate", "4"), 1e-5),
    "horovod": (HOROVOD, 1e-5),
    "horovod, accumulated": ((*HOROVOD, "--accumulate", "4"), 1e-5),
    "workers": (("--num-workers", "1", "--in-memory", "never"), 1e-5),
}
# The same by three ranks, and by two of which one takes five sixths
SPLITS = {"3 ranks": (3, ()), "shares 5,1": (2, ("--shares", "5,1"))}
CASES = [
    pytest.param(variant, split, marks=needs_horovod if HOROVOD[1] in settings else ())
    for variant, (settings, _) in VARIANTS.items() for split in SPLITS
]


@pytest.mark.parametrize(("variant", "split"), CASES)
def test_variant_follows_one(forks: Forks, alone: list[float], tmp_path: Path, variant: str, split: str) -> None:
    (settings, tolerance), (world_size, shares) = VARIANTS[variant], SPLITS[split]
    difference = largest_difference(train(forks, tmp_path, world_size, *settings, *shares), alone)
    print(f"{variant}, {split}: loss within {difference:.1e}")
    assert difference < tolerance


# These have a curve of their own: that of one process, or where one has nothing to send, of two with equal shares.
OTHERS: dict[str, tuple[int, tuple[str, ...]]] = {
    "clipped": (1, ("--clip-norm", "0.5")),
    "clipped, accumulated, with adamw": (
        1, ("--clip-norm", "0.5", "--accumulate", "4", "--optimizer", "adamw", "--lr", "0.002")
    ),
    "clipped by fsdp": (1, ("--parallel", "fsdp", "--clip-norm", "0.5")),
    "augmented": (1, ("--augment",)),
    "sent by powersgd": (2, ("--compress", "powersgd", "--powersgd-start", "5")),
}


@pytest.mark.parametrize("variant", OTHERS)
def test_other_curve_is_the_same_with_unequal_parts(forks: Forks, tmp_path: Path, variant: str) -> None:
    base, settings = OTHERS[variant]
    expected = losses(train(forks, tmp_path / "base", base, *settings))
    for name, (world_size, shares) in SPLITS.items():
        difference = largest_difference(train(forks, tmp_path / name, world_size, *settings, *shares), expected)
        print(f"{variant}, {name}: loss within {difference:.1e}")
        assert difference < 1e-5


def test_one_process_takes_micro_batches_that_differ_by_one(forks: Forks, alone: list[float], tmp_path: Path) -> None:
    assert largest_difference(train(forks, tmp_path, 1, "--accumulate", "3"), alone) < 1e-5
