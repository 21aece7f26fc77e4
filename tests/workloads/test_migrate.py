"""train/migrate.md: each script runs unchanged, its workload trains, and both come to the same loss and weights.

They begin with the same weights. Each step's batch is the whole data, so that the order of the samples, which no two
programs draw alike, changes nothing but the last bits of a sum.
"""

import ast
import importlib.util
import re
import shutil
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.rigs.checkpoints import load_checkpoint
from tests.rigs.foreign_scripts import WARN, again_if_aborted
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import ROOT, ended, result, start
from tests.rigs.migrations import FOLDER, NAMES, diff, with_diffs

SIDES = ("before", "after")
# Those that show the diffs
PAGES = [path for path in sorted((ROOT / "train").glob("migrate*.md")) if "```diff" in path.read_text(encoding="utf-8")]
SAMPLES, EPOCHS = 512, 20
# What stands in the script's loop
LOOP = ("--lr", "0.1", "--momentum", "0.9", "--weight-decay", "0", "--schedule", "constant", "--epochs", str(EPOCHS))


@dataclass(frozen=True)
class Pair:
    name: str
    world_size: int
    method: str = "auto"
    package: str = ""
    why_not: str = ""

    def folder(self, parent: Path) -> Path:
        """A user's own, with the script, the workload, and the weights that the script begins with."""
        folder = parent / "project"
        folder.mkdir()
        for side in SIDES:
            shutil.copy(FOLDER / f"{side}_{self.name}.py", folder)
        torch.manual_seed(0)
        torch.save(net(self.name).state_dict(), folder / "first.pt")
        return folder


PAIRS = (
    Pair("one_gpu", 1),
    Pair("data_parallel", 1, method="dp"),
    Pair("ddp", 2),
    Pair("lightning", 2, package="lightning", why_not="no Lightning here: make venv-tests installs it"),
    Pair("accelerate", 2, package="accelerate", why_not="no Accelerate here: make venv-tests installs it"),
    Pair("horovod", 2, package="horovod", why_not="no Horovod here: make horovod builds it"),
)


def net(name: str) -> torch.nn.Module:
    """The model of a pair, built with the random state as it is."""
    spec = importlib.util.spec_from_file_location(f"after_{name}", FOLDER / f"after_{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model: torch.nn.Module = module.Net()
    return model


# Both sides train -----------------------------------------------------------------------------------------------


@again_if_aborted
def script(forks: Forks, pair: Pair, folder: Path) -> str:
    """What the script prints, unchanged: under `launch`, or started by horovodrun."""
    words = (f"before_{pair.name}.py", "--batch-size", str(SAMPLES // pair.world_size))
    if pair.name == "horovod":  # only horovodrun tells Horovod's ranks of each other
        runner = Path(sys.executable).with_name("horovodrun")
        line = (runner, "-np", "2", "--gloo", sys.executable, *words)
        with ended(start(*line, env=WARN, cwd=folder)) as job:
            codes, output = job.wait(), job.output
    else:
        codes, output = forks.run("launch", f"--nproc={pair.world_size}", *words, env=WARN, cwds=[folder])
    assert codes == [0], output
    return output


def workload(forks: Forks, pair: Pair, folder: Path, module: str) -> Path:
    """The run of the workload."""
    line = ("train", "--workload", f"{module}:build", "--batch-size", str(SAMPLES), *LOOP, "--init-from", "first.pt",
            "--parallel", pair.method, "--eval-batch-size", "64", "--tensorboard=false")
    codes, output = forks.run(*line, world_size=pair.world_size, cwds=[folder] * pair.world_size)
    assert codes == [0] * pair.world_size, output
    return folder / "runs" / module


@pytest.mark.parametrize(
    "pair", [
        pytest.param(pair, id=pair.name, marks=pytest.mark.skipif(
            bool(pair.package) and find_spec(pair.package) is None, reason=pair.why_not
        )) for pair in PAIRS
    ],
)
def test_script_and_its_workload_come_to_the_same_loss_and_weights(forks: Forks, pair: Pair, tmp_path: Path) -> None:
    folder = pair.folder(tmp_path)
    printed = re.findall(rf"epoch {EPOCHS}: loss ([\d.]+)(?:, accuracy ([\d.]+))?", script(forks, pair, folder))
    assert len(printed) == 1, "the ranks of the script did not find each other"
    run = workload(forks, pair, folder, f"after_{pair.name}")
    metrics = result(run)["metrics"]
    assert metrics["loss"] == pytest.approx(float(printed[0][0]), rel=1e-6)
    assert not printed[0][1] or metrics["accuracy"] == float(printed[0][1])
    theirs = torch.load(folder / "rings.pt", weights_only=True)
    ours = load_checkpoint(run / "checkpoints" / f"step-{EPOCHS:08}").as_plain().tracked["model"]
    assert theirs.keys() == ours.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)


def test_script_that_keeps_its_loop_is_a_workload_beside_it(forks: Forks, tmp_path: Path) -> None:
    """The green lines alone, at the end of the script: both ways start from one file."""
    pair = PAIRS[0]
    folder = pair.folder(tmp_path)
    both = folder / "both.py"
    head, guard, tail = (folder / "before_one_gpu.py").read_text().partition('if __name__ == "__main__":')
    added = re.findall(r"^\+(?!\+\+)(.*)$", diff("one_gpu"), re.MULTILINE)
    both.write_text(head + "\n".join(line for line in added if "import Dataset" not in line) + "\n\n" + guard + tail)
    assert result(workload(forks, pair, folder, "both"))["metrics"]["loss"] < 0.6


# The pages ------------------------------------------------------------------------------------------------------


def test_pages_show_the_diffs_of_the_pairs() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {f"{side}_{name}" for name in NAMES for side in SIDES}
    assert [pair.name for pair in PAIRS] == list(NAMES)
    shown, rows = [], []
    for path in PAGES:
        page = path.read_text()
        assert page == with_diffs(page), f"{path.name}: python -m tests.rigs.migrations writes its diffs anew"
        shown += re.findall(r"^--- before_(\w+)\.py$", page, re.MULTILINE)
        rows += re.findall(r"\| (\d+) → (\d+) \|$", page, re.MULTILINE)
    assert sorted(shown) == sorted(NAMES)
    lengths = [[len((FOLDER / f"{side}_{name}.py").read_text().splitlines()) for side in SIDES] for name in NAMES]
    assert [[int(number) for number in row] for row in rows] == lengths


@pytest.mark.parametrize("name", NAMES)
def test_data_model_and_criterion_stay_the_same_to_the_byte(name: str) -> None:
    """But for Lightning's class, which the model was: its layers and its forward stay."""
    before, after = (parts((FOLDER / f"{side}_{name}.py").read_text()) for side in SIDES)
    kept = {part: text for part, text in after.items() if part not in ("loss", "evaluate", "build")}
    assert set(kept) == {"Rings", "Net.__init__", "Net.forward", "criterion"}
    assert kept.items() <= before.items()


def parts(text: str) -> dict[str, str]:
    """The source of a module's classes, functions and names; of the model each method by itself."""
    found = {}
    for node in ast.parse(text).body:
        own = [node]
        if isinstance(node, ast.ClassDef) and node.name == "Net":
            own = node.body
        for part in own:
            if isinstance(part, ast.Assign):
                found[ast.unparse(part.targets[0])] = ast.get_source_segment(text, part) or ""
            elif isinstance(part, ast.FunctionDef | ast.ClassDef):
                prefix = "" if part is node else "Net."
                found[prefix + part.name] = ast.get_source_segment(text, part) or ""
    return found
