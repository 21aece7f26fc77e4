"""Slow imports: no collections meanwhile, as many as ever afterwards, and none left for the ranks that are forked."""

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.jobs import ROOT, environment
from tests.rigs.photographs import write_photographs
from tests.rigs.tiny_bert import make_bert
from train.process.imports import without_collections

# As the fork server and then a rank do it, in one process: what slow modules does a rank import before its first step?
SERVER_AND_RANK = """
import importlib, json, sys
from train.config import load_config
from train.config.command_line import parse_args
from train.process.local_launcher import slow_modules
for module in slow_modules(load_config(parse_args(sys.argv[1:]).settings), "train"):
    importlib.import_module(module)
from train import loop, main
usual, before, after = loop.step, set(sys.modules), set()
def step(t):
    after.update(sys.modules)
    return usual(t)
loop.step = step
code = main.main(sys.argv[1:])
slow = ("torch", "torchvision", "tensorboard", "transformers", "tokenizers", "safetensors", "numpy", "PIL")
print(json.dumps([name for name in sorted(after - before) if name.partition(".")[0] in slow]))
sys.exit(code)
"""


def test_garbage_is_collected_again_after_the_imports() -> None:
    try:
        with without_collections():
            assert not gc.isenabled()
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("what", ["images", "torchvision", "files", "bert"])
def test_forked_rank_imports_nothing_slow_before_its_first_step(tmp_path: Path, what: str) -> None:
    lines = {
        "images": ["--dataset", "digits", "--model", "mlp"],
        "torchvision": ["--dataset", "fake", "--fake-samples", "64", "--model", "resnet18", "--batch-size", "8"],
        "files": ["--dataset", "imagefolder", "--data-dir", str(tmp_path / "files"), "--image-size", "16",
                  "--augment", "trivial", "--batch-size", "4"],
        "bert": ["--workload", "text", "--max-seq-len", "32", "--bert-dir", str(tmp_path / "bert")],
    }
    if what == "bert":
        make_bert(tmp_path / "bert")
    if what == "files":
        write_photographs(tmp_path / "files", 8, width=40, height=30)
    line = ["train", *lines[what], "--max-steps", "1", "--limit-eval", "8", "--run-dir", str(tmp_path), "--name", "run"]
    ran = subprocess.run(
        [sys.executable, "-c", SERVER_AND_RANK, *line], cwd=ROOT, env=environment(), text=True, capture_output=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) == []
