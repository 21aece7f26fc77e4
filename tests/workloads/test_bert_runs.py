"""A BERT from training to prediction, on any number of ranks, with every method that can train it."""

import csv
import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.rigs.fork_server import Forks
from tests.rigs.jobs import losses_of, result
from tests.rigs.tiny_bert import SLOW, change_json, make_bert, of_transformers, sample_texts
from train.workloads.text import TextSamples

# As in tests/parallel/test_methods.py, the rate is constant and small. There is no dropout, which differs on each rank
LINE = ("--workload", "text", "--tensorboard=false", "--batch-size", "60", "--max-seq-len", "40",
        "--optimizer", "adamw", "--lr", "0.002", "--schedule", "constant", "--log-every-steps", "1")
STEPS = 36
losses = partial(losses_of, count=STEPS)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    server = Forks(tmp_path_factory.mktemp("forks"), more=SLOW)
    yield server
    server.close()


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bert(tmp_path_factory.mktemp("bert") / "small")


def train(jobs: Forks, bert: Path, run: Path, world_size: int, *more: str) -> str:
    return jobs.ends("train", *LINE, "--bert-dir", bert, "--max-steps", str(STEPS), *more, "--name", run.name,
                     "--run-dir", run.parent, world_size=world_size)


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    (file,) = (run / "checkpoints").glob(f"step-*{STEPS}/model.safetensors")
    return load_file(file)


@pytest.fixture(scope="module")
def alone(jobs: Forks, bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process in fp32."""
    run = tmp_path_factory.mktemp("alone") / "run"
    output = train(jobs, bert, run, 1)
    assert output.count("left out what config.json does not describe") == 1
    assert min(losses(run)[-5:]) < 0.7 * losses(run)[0]  # a flat curve would prove nothing
    return run


# tests/parallel/test_methods.py tests bf16 and gradients sent as bf16
@pytest.mark.parametrize("method", ["ddp", "fsdp"])
def test_bert_follows_one_process_and_its_weights_fit_each_method(
    jobs: Forks, bert: Path, alone: Path, tmp_path: Path, method: str
) -> None:
    run, arguments = tmp_path / "run", ("--parallel", method)
    train(jobs, bert, run, 2, *arguments)
    assert losses(run) == pytest.approx(losses(alone), rel=1e-3)
    model = of_transformers(bert)
    model.load_state_dict(weights_of(run))  # strict
    # The weights of one process fit this method, and those of this method fit one process
    of_alone = ("--init-from", str(checkpoint_of(alone)), "--max-steps", "1")
    output = train(jobs, bert, tmp_path / "from", 2, *arguments, *of_alone)
    assert f"{len(weights_of(run))} of {len(weights_of(run))} tensors" in output
    output = jobs.ends("evaluate", "--name", "run", "--run-dir", alone.parent, "--checkpoint", checkpoint_of(run))
    assert result(run)["digest"][:16] in output


def checkpoint_of(run: Path) -> Path:
    (found,) = (run / "checkpoints").glob(f"step-*{STEPS}")
    return found


def test_killed_bert_resumes_without_the_folders_weights(
    jobs: Forks, bert: Path, tmp_path: Path
) -> None:
    own = Path(shutil.copytree(bert, tmp_path / "bert"))
    more = ("--dropout", "0.1", "--save-every-steps", "4")
    train(jobs, own, tmp_path / "whole", 2, *more)
    where = ("--name", "killed", "--run-dir", tmp_path)
    line = ("train", *LINE, "--bert-dir", own, "--max-steps", str(STEPS), *more, *where)
    jobs.ends(*line, world_size=2, preload="tests.rigs.injected_faults:dies_in_step_8", code=[171, -9])
    (own / "model.safetensors").unlink()
    output = train(jobs, own, tmp_path / "killed", 2, *more)
    assert "resumed from step 7, rescued by rank 0 on " in output
    assert result(tmp_path / "killed")["digest"] == result(tmp_path / "whole")["digest"]
    # A new run needs the folder's weights
    output = jobs.ends(*line, "--fresh", code=2)
    assert "must hold weights that load, got: Error no file named" in output


def test_bert_evaluates_and_predicts_without_the_folders_weights(
    jobs: Forks, bert: Path, alone: Path, tmp_path: Path
) -> None:
    """test_text.py tests that evaluation is equal on any number of ranks."""
    own = Path(shutil.copytree(bert, tmp_path / "elsewhere"))
    (own / "model.safetensors").unlink()
    where = ("--name", "run", "--run-dir", alone.parent, "--bert-dir", own)
    jobs.ends("evaluate", *where, "--eval-split", "test", "--limit-eval", "101", world_size=3)
    assert json.loads((alone / "evaluation.json").read_text())["count"] == 101
    (tmp_path / "in.txt").write_text("\n".join(sample_texts("test")[:30]), encoding="utf-8")
    files = []
    for world_size in (1, 2):
        files.append(tmp_path / f"{world_size}.csv")
        jobs.ends("predict", *where, "--input", tmp_path / "in.txt", "--eval-batch-size", "8", "--output", files[-1],
                  world_size=world_size)
    assert files[0].read_bytes() == files[1].read_bytes()
    with files[0].open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["input"] for row in rows] == sample_texts("test")[:30]
    assert [row["label"] for row in rows] == expected_labels(bert, alone, sample_texts("test")[:30])


def expected_labels(bert: Path, run: Path, texts: list[str]) -> list[str]:
    """Return the labels that transformers itself predicts, one text at a time and without padding."""
    from train.workloads.bert import WordPieceTokenizer

    model = of_transformers(bert).eval()
    model.load_state_dict(weights_of(run))
    samples = TextSamples(texts, [0] * len(texts), WordPieceTokenizer(bert, max_seq_len=40))
    with torch.no_grad():
        numbers = [int(model(samples.batch(torch.tensor([i]), None)[0]).logits.argmax()) for i in range(len(texts))]
    return [("food", "sports", "technology", "travel", "weather")[number] for number in numbers]


SPOILT: dict[str, tuple[Any, str]] = {
    "folder is gone": (shutil.rmtree, "must be a folder, got"),
    "vocabulary is another": (
        lambda own: (own / "vocab.txt").write_text(
            (own / "vocab.txt").read_text(encoding="utf-8").replace("##a\n", "##A\n"), encoding="utf-8"),
        "Set --data-dir or --bert-dir."),
    "heads are others": (
        lambda own: change_json(own / "config.json", num_attention_heads=4), "Set --data-dir or --bert-dir."),
}


@pytest.mark.parametrize("spoilt", SPOILT)
def test_checkpoint_with_another_bert_folder_is_refused(
    jobs: Forks, bert: Path, alone: Path, tmp_path: Path, spoilt: str
) -> None:
    """Weights for other heads or tokens may have the same shapes: the checkpoint would load with another meaning."""
    own = Path(shutil.copytree(bert, tmp_path / "bert"))
    spoil, message = SPOILT[spoilt]
    spoil(own)
    run = Path(shutil.copytree(alone, tmp_path / "run"))
    for command in (("evaluate", "--workload", "text"), ("train", *LINE, "--max-steps", str(STEPS + 4))):
        output = jobs.ends(*command, "--bert-dir", own, "--name", "run", "--run-dir", run.parent, code=2)
        assert message in output
