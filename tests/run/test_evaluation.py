"""Evaluation is exact: counts and losses are equal (==) for any number of ranks."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.fork_server import Forks
from tests.rigs.jobs import metrics
from tests.rigs.recording_workload import records

DIGITS = ("--dataset", "digits", "--model", "cnn", "--tensorboard=false", "--batch-size", "60")
WORLDS = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def trained(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose model is right about some samples and wrong about others."""
    folder = tmp_path_factory.mktemp("trained")
    forks.ends("train", *DIGITS, "--max-steps", "30", "--name", "run", "--run-dir", folder)
    return folder / "run"


def evaluated(forks: Forks, run: Path, world_size: int, *arguments: str) -> dict[str, Any]:
    forks.ends("evaluate", "--name", run.name, "--run-dir", run.parent, *arguments, world_size=world_size)
    outcome: dict[str, Any] = json.loads((run / "evaluation.json").read_text())
    assert outcome["world_size"] == world_size
    return outcome


# No world size divides 101 samples in batches of 10. 15 in batches of 10, and 101 in one, leave ranks without a batch
@pytest.mark.parametrize(("limit", "batch"), [("101", "10"), ("15", "10"), ("101", "200")])
def test_evaluate_is_equal_on_any_number_of_ranks(forks: Forks, trained: Path, limit: str, batch: str) -> None:
    worlds = WORLDS if (limit, batch) == ("101", "10") else (1, 4)
    outcomes = [
        evaluated(forks, trained, world_size, "--limit-eval", limit, "--eval-batch-size", batch)
        for world_size in worlds
    ]
    assert all(outcome["count"] == int(limit) for outcome in outcomes)
    assert all(outcome["metrics"] == outcomes[0]["metrics"] for outcome in outcomes)
    assert set(outcomes[0]["metrics"]) == {"loss", "accuracy", "accuracy_top5"}
    right = outcomes[0]["metrics"]["accuracy"] * int(limit)
    assert round(right) == pytest.approx(right, abs=1e-9)  # a whole number, so no sample counted twice


def test_train_evaluates_equally_on_any_number_of_ranks(forks: Forks, trained: Path, tmp_path: Path) -> None:
    """All start from the same weights, with a rate too small to change them. Only the number of ranks differs."""
    checkpoint = next((trained / "checkpoints").iterdir())
    found = []
    for world_size in WORLDS:
        output = forks.ends("train", *DIGITS, "--init-from", checkpoint, "--lr", "1e-30", "--max-steps", "1",
                            "--limit-eval", "101", "--eval-batch-size", "10", "--name", str(world_size), "--run-dir",
                            tmp_path, world_size=world_size)
        assert "on 101 samples" in output
        found.append({k: v for k, v in metrics(tmp_path / str(world_size))[-1].items() if k.startswith("eval/")})
    assert len(found[0]) == 3
    assert all(one == found[0] for one in found)
    of_command = evaluated(forks, trained, 3, "--limit-eval", "101", "--eval-batch-size", "10")["metrics"]
    assert {name.removeprefix("eval/"): value for name, value in found[0].items()} == of_command


RECORDED = ("--workload", "tests.rigs.recording_workload:build", "--name", "run", "--tensorboard=false", "--batch-size",
       "12", "--eval-batch-size", "10", "--max-steps", "6")


def test_evaluation_on_several_ranks_is_of_rank_0s_model(forks: Forks, tmp_path: Path) -> None:
    """After a step each rank's batch norm has its own statistics. Rank 0's count, because the checkpoint has them."""
    record = tmp_path / "record"
    forks.ends(
        "train", *RECORDED, "--options.model", "norm", "--options.record", record, "--run-dir", tmp_path, world_size=3
    )
    weights = {entry["weights"] for rank in records(record, "evaluate") for entry in rank}
    assert len(weights) == 1
    found = {k.removeprefix("eval/"): v for k, v in metrics(tmp_path / "run")[-1].items() if k.startswith("eval/")}
    assert evaluated(forks, tmp_path / "run", 1)["metrics"] == found


def test_evaluation_leaves_frozen_parts_in_eval_mode(forks: Forks, tmp_path: Path) -> None:
    """A model.train() after the evaluation would unfreeze them, and a resumed run would get other weights."""
    record = tmp_path / "record"
    line = ("train", *RECORDED, "--schedule", "constant", "--options.model", "norm", "--options.frozen_norm", "true",
            "--run-dir", tmp_path)
    forks.ends(*line, "--name", "whole", "--limit-train", "24", "--options.record", record)
    digests = [json.loads((tmp_path / "whole" / "result.json").read_text())["digest"]]
    for steps in ("2", "6"):
        forks.ends(*line, "--name", "parts", "--limit-train", "24", "--options.record", record, "--max-steps", steps)
    digests.append(json.loads((tmp_path / "parts" / "result.json").read_text())["digest"])
    assert digests[0] == digests[1]


def test_evaluation_without_count_is_refused_in_one_line(forks: Forks, tmp_path: Path) -> None:
    output = forks.ends("train", *RECORDED, "--options.no_count", "true", "--run-dir", tmp_path, world_size=2, code=2)
    assert 'evaluate must return "count", the number of samples, got accuracy.' in output
