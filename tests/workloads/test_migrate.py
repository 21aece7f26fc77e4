"""train/migrate.md: each script runs unchanged, the workload trains, and both reach the same loss and weights.

Both begin with the same weights. Each batch is the whole data set, because no two programs draw the same order of
samples. The order then changes only the last bits of sums.
"""

import re
import runpy
import shutil
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.rigs.checkpoints import load_checkpoint
from tests.rigs.foreign_scripts import WARN, by_forks
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import ROOT, ended, result, start
from tests.rigs.listings import workload as workload_of

FOLDER = ROOT / "tests" / "rigs" / "foreign"
PAGE, SAMPLES, EPOCHS = "train/migrate.md", 512, 20
# The same settings as in the script's loop
LOOP = ("--lr", "0.1", "--momentum", "0.9", "--weight-decay", "0", "--schedule", "constant", "--epochs", str(EPOCHS))


@dataclass(frozen=True)
class Pair:
    name: str
    world_size: int
    method: str = "auto"
    package: str = ""
    why_not: str = ""

    def script(self) -> str:
        text = (FOLDER / f"before_{'one_gpu' if self.name == 'data_parallel' else self.name}.py").read_text()
        if self.name == "data_parallel":
            text = text.replace("import torch\n", "import torch\nfrom torch import nn\n", 1)
            text = text.replace("Net().to", "nn.DataParallel(Net()).to").replace("model.state", "model.module.state")
        return text

    def folder(self, parent: Path) -> Path:
        """Make a user's folder with the script, the workload, and the weights with which the script begins."""
        folder = parent / "project"
        folder.mkdir()
        shutil.copy(FOLDER / "rings.py", folder)
        (folder / "after.py").write_text(workload_of(PAGE))
        (folder / f"before_{self.name}.py").write_text(self.script())
        torch.manual_seed(0)
        torch.save(net().state_dict(), folder / "first.pt")
        return folder


PAIRS = (
    Pair("one_gpu", 1),
    Pair("data_parallel", 1, method="dp"),
    Pair("ddp", 2),
    Pair("lightning", 2, package="lightning", why_not="no Lightning here: make venv-tests installs it"),
    Pair("accelerate", 2, package="accelerate", why_not="no Accelerate here: make venv-tests installs it"),
    Pair("horovod", 2, package="horovod", why_not="no Horovod here: make horovod builds it"),
)


def net() -> torch.nn.Module:
    """Build the model of all scripts with the present random state."""
    model: torch.nn.Module = runpy.run_path(str(FOLDER / "rings.py"))["Net"]()
    return model


def script(loaded: Forks, pair: Pair, folder: Path) -> str:
    """Run the unchanged script with torchrun's variables, or by horovodrun. Return its output. tests/commands/
    test_foreign.py runs scripts under `launch`, and Lightning's also runs on Slurm."""
    words = (f"before_{pair.name}.py", "--batch-size", str(SAMPLES // pair.world_size))
    if pair.name == "horovod":  # only horovodrun tells Horovod's ranks of each other
        runner = Path(sys.executable).with_name("horovodrun")
        line = (runner, "-np", "2", "--gloo", sys.executable, *words)
        with ended(start(*line, env=WARN, cwd=folder)) as job:
            assert job.wait() == [0], job.output
        return job.output
    return by_forks(loaded, *words, folder=folder, nproc=pair.world_size)


def workload(forks: Forks, pair: Pair, folder: Path, module: str) -> Path:
    """Train the workload. Return its run."""
    line = ("train", "--workload", f"{module}:build", "--batch-size", str(SAMPLES), *LOOP, "--init-from", "first.pt",
            "--parallel", pair.method, "--eval-batch-size", "64", "--tensorboard=false")
    forks.ends(*line, world_size=pair.world_size, cwds=[folder] * pair.world_size)
    return folder / "runs" / module


@pytest.mark.parametrize(
    "pair", [
        pytest.param(pair, id=pair.name, marks=pytest.mark.skipif(
            bool(pair.package) and find_spec(pair.package) is None, reason=pair.why_not
        )) for pair in PAIRS
    ],
)
def test_script_and_workload_reach_the_same_loss_and_weights(
    forks: Forks, loaded: Forks, pair: Pair, tmp_path: Path
) -> None:
    folder = pair.folder(tmp_path)
    printed = re.findall(rf"epoch {EPOCHS}: loss ([\d.]+)(?:, accuracy ([\d.]+))?", script(loaded, pair, folder))
    assert len(printed) == 1, "the ranks of the script did not find each other"
    run = workload(forks, pair, folder, "after")
    metrics = result(run)["metrics"]
    assert metrics["loss"] == pytest.approx(float(printed[0][0]), rel=1e-6)
    assert not printed[0][1] or metrics["accuracy"] == float(printed[0][1])
    theirs = torch.load(folder / "rings.pt", weights_only=True)
    ours = load_checkpoint(run / "checkpoints" / f"step-{EPOCHS:08}").tracked["model"]
    assert theirs.keys() == ours.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)


def test_script_can_keep_its_loop_and_be_a_workload_too(forks: Forks, tmp_path: Path) -> None:
    """The functions of the workload stand at the end of the script, so one file starts both ways."""
    pair = PAIRS[0]
    folder = pair.folder(tmp_path)
    both = folder / "both.py"
    head, guard, tail = (folder / "before_one_gpu.py").read_text().partition('if __name__ == "__main__":')
    both.write_text(head + workload_of(PAGE) + "\n\n" + guard + tail)
    assert result(workload(forks, pair, folder, "both"))["metrics"]["loss"] < 0.6


def test_page_names_the_lengths_of_scripts_and_workload() -> None:
    page = (ROOT / PAGE).read_text()
    texts = [(pair.script(), workload_of(PAGE)) for pair in PAIRS]
    lengths = [[str(len(text.splitlines())) for text in pair] for pair in texts]
    assert [list(row) for row in re.findall(r"\| (\d+) → (\d+) \|", page)] == lengths


def test_one_gpu_script_with_the_lines_of_the_page_trains_alike_on_any_ranks(loaded: Forks, tmp_path: Path) -> None:
    script = (FOLDER / "before_one_gpu.py").read_text()
    blocks = re.findall(r"```diff\n(.*?)```", (ROOT / PAGE).read_text(), re.DOTALL)
    (lines,) = [block for block in blocks if "rings" in block]
    for change in lines.split("\n\n"):
        before, after = (
            "".join(f"{line[1:]}\n" for line in change.splitlines() if line[0] != added) for added in "+-"
        )
        assert script.count(before) == 1, before
        script = script.replace(before, after)
    losses = []
    for nproc in (2, 4):
        folder = tmp_path / str(nproc)
        folder.mkdir()
        shutil.copy(FOLDER / "rings.py", folder)
        (folder / "after.py").write_text(script)
        said = by_forks(loaded, "after.py", folder=folder, nproc=nproc)
        losses.append(float(re.findall(rf"epoch {EPOCHS}: loss ([\d.]+)", said)[-1]))
        assert (folder / "rings.pt").exists()
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[0] < 0.5
