"""Texts by every method: the curve of one process, and exact evaluation where the ranks do not get equal work."""

from pathlib import Path
from typing import Any

import pytest

from tests.rigs.fork_server import Forks
from tests.rigs.jobs import metrics, result

# 15 batches of 30 and a rest of 10, which is left out; 150 texts to evaluate on, in 3 batches: one more for rank 0
# than for rank 1, and the last of 30
TEXT = ("train", "--workload", "text", "--tensorboard=false", "--progress=none", "--limit-train", "460",
        "--batch-size", "30", "--eval-batch-size", "60", "--epochs", "1", "--optimizer", "adamw", "--lr", "0.003",
        "--schedule", "constant", "--log-every-steps", "1", "--device", "cpu", "--name", "run")
STEPS = 15


def train(forks: Forks, folder: Path, world_size: int, *more: str) -> tuple[list[float], dict[str, Any]]:
    """The losses, and the evaluation at the end."""
    forks.ends(*TEXT, *more, "--run-dir", folder, world_size=world_size)
    lines = metrics(folder / "run")
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert len(losses) == STEPS
    return losses, result(folder / "run")


@pytest.fixture(scope="module")
def alone(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The curve of one process in fp32, which learns."""
    losses, _ = train(forks, tmp_path_factory.mktemp("alone"), 1, "--parallel", "none")
    assert losses[-1] < 0.9 * losses[0]
    return losses


# As in test_methods.py: how far the loss may be from that of one process
VARIANTS: dict[str, tuple[int, tuple[str, ...], float]] = {
    "dp": (1, ("--parallel", "dp"), 0.0),
    "ddp": (2, ("--parallel", "ddp"), 1e-3),
    "ddp in bf16": (2, ("--precision", "bf16"), 3e-2),
    "fsdp": (2, ("--parallel", "fsdp"), 1e-3),
    "fsdp in bf16, accumulated": (2, ("--parallel", "fsdp", "--precision", "bf16", "--accumulate", "3"), 3e-2),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_texts_follow_one_process_and_are_evaluated_exactly(
    forks: Forks, alone: list[float], tmp_path: Path, variant: str
) -> None:
    world_size, settings, tolerance = VARIANTS[variant]
    losses, outcome = train(forks, tmp_path, world_size, *settings)
    assert max(abs(a - b) / b for a, b in zip(losses, alone, strict=True)) <= tolerance
    # One process that reads the checkpoint counts every text once
    output = forks.ends("evaluate", *TEXT[1:], *settings, "--run-dir", tmp_path)
    rows = [line.rsplit("  ", 1) for line in output.splitlines() if line.startswith("  ") and "  " in line.strip()]
    printed = {name.strip(): value.strip() for name, value in rows}
    assert printed["samples"] == "150"
    for name in ("accuracy", "macro f1"):
        assert printed[name] == f"{outcome['metrics'][name.replace(' ', '_')]:.4f}"
