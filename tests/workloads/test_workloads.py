"""A user's own workload: the listing of train/workloads/README.md trains, evaluates and predicts in any folder."""

import csv
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from rankup.errors import UserError
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import MAIN, ROOT, Job, result, start
from tests.rigs.listings import workload
from train import workloads
from train.config import Config
from train.data.samples import TensorSamples
from train.group import join_options
from train.workloads import Workload

PAGE = "train/workloads/README.md"
LINE = ("--workload", "throws:build", "--lr", "0.2", "--tensorboard=false")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's own folder with the page's example, and with files that have names of the program's modules."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "throws.py").write_text(workload(PAGE))
    for name in ("config", "data", "log", "stop", "train"):
        (folder / f"{name}.py").write_text("raise SystemExit('taken for the program')\n")
    return folder


# The listing ----------------------------------------------------------------------------------------------------


def test_example_learns_equally_on_one_and_two_ranks(forks: Forks, project: Path) -> None:
    for world_size in (1, 2):
        forks.ends("train", *LINE, "--epochs", "5", "--name", str(world_size), "--run-dir", project / "runs",
                   world_size=world_size, cwds=[project] * world_size)
    results = [result(project / "runs" / name) for name in "12"]
    assert results[0]["metrics"]["accuracy"] > 0.8
    assert results[1]["metrics"]["loss"] == pytest.approx(results[0]["metrics"]["loss"], rel=1e-4)


def test_model_is_not_evaluated_on_other_data(forks: Forks, project: Path) -> None:
    """After a fallback to other data, for example, the classes are not those that the model learned."""
    forks.ends("train", *LINE, "--max-steps=1", cwds=[project])
    own = project / "throws.py"
    # Change the length too, because Python may not notice a change within a second that keeps the length
    own.write_text(own.read_text().replace('data_name="throws"', 'data_name="other throws"'))
    output = forks.ends("evaluate", "--name=throws", cwds=[project], code=2)
    assert "was trained on throws, got other throws now. Set --data-dir or --dataset." in output
    forks.ends("evaluate", *LINE, cwds=[project])


def test_example_evaluates_and_predicts(forks: Forks, project: Path) -> None:
    more: dict[str, Any] = {"world_size": 2, "cwds": [project] * 2}
    trains, predicts = ("train", "--epochs", "3", "--options.width", "16"), ("predict", "--output", "throws.csv")
    for words in (trains, ("evaluate",), predicts):
        forks.ends(*words, *LINE, **more)
    run_dir = project / "runs" / "throws"  # named after the module
    outcome = json.loads((run_dir / "evaluation.json").read_text())
    assert outcome["count"] == 501
    assert outcome["metrics"] == result(run_dir)["metrics"]
    with (project / "throws.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["input"] for row in rows] == [str(index) for index in range(501)]
    assert {row["label"] for row in rows} <= {"short", "hit", "far"}
    assert all(1 / 3 <= float(row["probability"]) <= 1 for row in rows)


# Where a workload is found --------------------------------------------------------------------------------------

ONE_STEP = ("train", *LINE, "--max-steps", "1")


def by_module(project: Path) -> Job:
    """Start the program in its own folder, with the user's module in another one."""
    env = {"PYTHONPATH": str(project)}
    return start(sys.executable, "-m", "train.main", *ONE_STEP, "--run-dir", project / "runs", cwd=ROOT, env=env)


def by_launch(project: Path) -> Job:
    """Start the ranks of the program as a file."""
    rankup = Path(sys.executable).with_name("rankup")
    return start(rankup, "launch", "--nproc=2", MAIN, *ONE_STEP, cwd=project, env={"PYTHONPATH": ""})


@pytest.mark.parametrize("started", [by_module, by_launch], ids=lambda f: f.__name__)
def test_own_module_is_found_beside_an_own_train_py(project: Path, started: Any) -> None:
    job: Job = started(project)
    job.wait()
    assert job.codes == [0], job.output
    assert result(project / "runs" / "throws")["step"] == 1


def test_ranks_compare_the_code_of_an_own_workload(forks: Forks, project: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(project, other)
    with (other / "throws.py").open("a") as file:
        file.write("# edited on one node\n")
    output = forks.ends(*ONE_STEP, "--run-dir", tmp_path / "runs", world_size=2, cwds=[project, other], code=2)
    assert "program code" in output


# Datasets, and a workload without evaluate ----------------------------------------------------------------------


class Draws(Dataset[Any]):
    """A Dataset of random numbers. Like Hugging Face's data sets it has a `batch` with another meaning."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.rand(1), "y": torch.tensor(0.0)}

    def batch(self, batch_size: int) -> None:
        raise AssertionError("this batch must not be called")


def loaded(monkeypatch: pytest.MonkeyPatch, seed: int = 0, **fields: Any) -> Workload:
    def build(config: Config) -> Workload:
        def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
            return (model(batch["x"]) - batch["y"]).square().mean()

        given = {"model": torch.nn.Identity(), "train": Draws(), "evaluation": Draws(), "loss": loss} | fields
        return Workload(**given)

    monkeypatch.setitem(sys.modules, "own_loaded", SimpleNamespace(build=build, __file__="own_loaded.py"))
    return workloads.load(Config(workload="own_loaded:build", seed=seed))


def test_dataset_draws_by_the_seed_in_training_and_equally_in_evaluation(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    indices = torch.arange(5)
    first, other = (loaded(monkeypatch, seed) for seed in (0, 1))
    assert not torch.equal(first.train.batch(indices, 0)["x"], other.train.batch(indices, 0)["x"])
    assert torch.equal(first.evaluation.batch(indices, None)["x"], other.evaluation.batch(indices, None)["x"])


def test_tensor_dataset_is_indexed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = TensorDataset(torch.rand(5, 2), torch.arange(5))
    workload = loaded(monkeypatch, train=dataset)
    assert isinstance(workload.train, TensorSamples)
    indices = torch.tensor([4, 0])
    for own, theirs in zip(workload.train.batch(indices, 0), dataset[indices], strict=True):
        assert torch.equal(own, theirs)


def test_workload_without_evaluate_is_evaluated_by_its_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = loaded(monkeypatch)
    parts = [workload.evaluation.batch(indices, None) for indices in (torch.arange(3), torch.arange(3, 5))]
    sums = [workload.sums(workload.model, part) for part in parts]
    assert [int(one["count"]) for one in sums] == [3, 2]
    whole = workload.evaluation.batch(torch.arange(5), None)
    mean = float(sums[0]["loss"] + sums[1]["loss"]) / 5
    assert mean == pytest.approx(float(workload.loss(workload.model, whole)))


# Mistakes -------------------------------------------------------------------------------------------------------

MODULES = {
    "fine": "from tests.rigs.recording_workload import build\n",
    "broken": "def build(config):\n    return undefined_name\n",
    "syntax": "def build(config)\n",
    "lacks": "import a_package_that_is_not_there\n",
    "returns": "def build(config):\n    return 3\n",
    "empty": "from dataclasses import replace\nimport tests.rigs.recording_workload as recording\n\n\n"
             "def build(config):\n    return replace(recording.build(config), evaluation=recording.samples(0, 1))\n",
    "stream": "from dataclasses import replace\nimport tests.rigs.recording_workload as recording\n"
              "from torch.utils.data import ChainDataset\n\n\n"
              "def build(config):\n    return replace(recording.build(config), train=ChainDataset([]))\n",
    "iterator": "from dataclasses import replace\nimport tests.rigs.recording_workload as recording\n\n\n"
                "def build(config):\n    return replace(recording.build(config), evaluation=iter([1]))\n",
}


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in MODULES.items():
        (tmp_path / f"own_{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, f"own_{name}", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("workload", "message"), [
    ("own_missing:build", r'got "own_missing:build": no module "own_missing" in .* or on PYTHONPATH'),
    ("own_fine.part:build", 'got "own_fine.part:build": no module "own_fine.part"'),
    ("own_fine:bild", r'own_fine \(.*own_fine.py\) must have a function "bild", got none'),
    ("own_fine:build.x", 'must have a function "build.x", got none'),
    ("sys:exit", 'got "sys:exit": sys is built into Python'),
    ("own_returns:build", "own_returns:build must return a train.workloads.Workload, got int"),
    ("own_empty:build", "own_empty:build must have samples to use for evaluation, got none"),
    ("own_stream:build", "train of own_stream:build must be a map-style Dataset, .* got ChainDataset"),
    ("own_iterator:build", "evaluation of own_iterator:build must be .* or samples with batch.* got list_iterator"),
])
def test_wrong_own_workload_gives_one_line(modules: Path, workload: str, message: str) -> None:
    join_options(Config(workload=workload))  # a rank joins before it imports the module
    with pytest.raises(UserError, match=message) as caught:
        workloads.load(Config(workload=workload))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("module", "error", "where"), [
    ("broken", "NameError: name 'undefined_name' is not defined", "own_broken.py"),
    ("syntax", "SyntaxError: expected ':'", "own_syntax.py"),
    ("lacks", "ModuleNotFoundError: No module named 'a_package_that_is_not_there'", "own_lacks.py"),
])
def test_fault_in_an_own_workload_keeps_its_traceback(
    forks: Forks, modules: Path, module: str, error: str, where: str
) -> None:
    output = forks.ends("train", "--workload", f"own_{module}:build", cwds=[modules], code=1)
    assert error in output
    assert where in output
    assert "Traceback (most recent call last):" in output
