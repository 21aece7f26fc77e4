"""evaluate and predict use the settings of the training, on any number of ranks."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.rigs.fork_server import Forks
from tests.rigs.jobs import metrics
from train.config import Config
from train.data.sources import load

# These settings differ from the defaults, so an evaluation without them would get another model or other data
TRAINED = ("--dataset", "digits", "--model", "mlp", "--precision", "bf16", "--limit-eval", "101",
           "--eval-batch-size", "10", "--epochs", "4", "--tensorboard=false")


@pytest.fixture(scope="module")
def trained(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    output = forks.ends("train", *TRAINED, "--name", "run", "--run-dir", folder)
    assert "/run/ (result.json, checkpoints/)" in output  # there is no tensorboard/
    return folder / "run"


def command(forks: Forks, run: Path, *arguments: str | Path, world_size: int = 1, code: int = 0) -> str:
    words = ("--name", run.name, "--run-dir", run.parent)
    return forks.ends(*arguments, *words, world_size=world_size, code=code)


def evaluation(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "evaluation.json").read_text())
    return found


def test_evaluate_restores_the_settings_of_the_run(forks: Forks, trained: Path) -> None:
    status = (trained / "status.json").read_bytes()
    output = command(forks, trained, "evaluate")
    found = evaluation(trained)
    final = {k.removeprefix("eval/"): v for k, v in metrics(trained)[-1].items() if k.startswith("eval/")}
    assert found["metrics"] == final  # so bf16 and 101 samples were used too
    assert found["count"] == 101
    assert found["step"] == 22 * 4
    assert f"  accuracy        {final['accuracy']:.4f}" in output
    assert (trained / "status.json").read_bytes() == status  # evaluate must not change the run


def test_flags_and_files_outrank_the_settings_of_the_training(forks: Forks, trained: Path, tmp_path: Path) -> None:
    command(forks, trained, "evaluate", "--limit-eval", "0")
    assert evaluation(trained)["count"] == 359
    (tmp_path / "settings.yaml").write_text("limit_eval: 50\n")
    command(forks, trained, "evaluate", "--config", tmp_path / "settings.yaml")
    assert evaluation(trained)["count"] == 50


def test_evaluate_uses_the_named_or_the_newest_checkpoint(forks: Forks, trained: Path) -> None:
    checkpoints = sorted((trained / "checkpoints").iterdir())
    assert [path.name for path in checkpoints] == ["step-00000066", "step-00000088"]
    command(forks, trained, "evaluate", "--checkpoint", checkpoints[0])
    earlier = evaluation(trained)
    assert (earlier["step"], earlier["checkpoint"]) == (66, str(checkpoints[0]))
    command(forks, trained, "evaluate", world_size=2)
    assert evaluation(trained)["step"] == 88
    assert evaluation(trained)["digest"] != earlier["digest"]


def test_missing_or_unfit_checkpoint_gives_one_line(forks: Forks, trained: Path, tmp_path: Path) -> None:
    output = command(forks, tmp_path / "nothing", "evaluate", "--dataset", "digits", world_size=2, code=2)
    assert f"checkpoint: {tmp_path}/nothing/checkpoints must hold one, got none. Train first, or name one." in output
    output = command(forks, trained, "evaluate", "--model", "cnn", code=2)
    assert "step-00000088 does not fit the model of these settings:" in output


def predicted(path: Path) -> list[dict[str, Any]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_predictions_are_of_the_test_data_in_order(forks: Forks, trained: Path, tmp_path: Path) -> None:
    output = command(forks, trained, "predict", "--output", tmp_path / "new" / "out.csv")
    assert f"101 predictions in {tmp_path}/new/out.csv" in output
    rows = predicted(tmp_path / "new" / "out.csv")
    assert [row["input"] for row in rows] == [f"test/{index}" for index in range(101)]
    labels = load(Config(dataset="digits"))[1].labels[:101]
    right = sum(row["label"] == str(int(label)) for row, label in zip(rows, labels, strict=True))
    assert right / 101 == pytest.approx(metrics(trained)[-1]["eval/accuracy"])
    assert all(0.1 <= float(row["probability"]) <= 1 for row in rows)


def test_predictions_are_the_same_file_on_any_number_of_ranks(forks: Forks, trained: Path, tmp_path: Path) -> None:
    for world_size in (1, 2, 3):
        command(forks, trained, "predict", "--output", tmp_path / f"{world_size}.csv", world_size=world_size)
    assert len({(tmp_path / f"{world_size}.csv").read_bytes() for world_size in (1, 2, 3)}) == 1


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder of folders with test images as PNG files of two sizes, and with a file that is no image."""
    images = load(Config(dataset="digits"))[1].images
    for index in range(5):
        image = Image.fromarray(images[index, 0].numpy())
        path = tmp_path / "pictures" / ("odd" if index % 2 else "even") / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.resize((16, 16), Image.Resampling.NEAREST).save(path) if index == 3 else image.save(path)
    (tmp_path / "pictures" / "notes.txt").write_text("no image\n")
    return tmp_path / "pictures"


def test_folder_of_images_is_predicted(forks: Forks, trained: Path, pictures: Path, tmp_path: Path) -> None:
    command(forks, trained, "predict", "--input", pictures, "--output", tmp_path / "out.csv", world_size=2)
    rows = predicted(tmp_path / "out.csv")
    one = ("predict", "--input", pictures / "even/2.png", "--output", tmp_path / "one.csv")
    command(forks, trained, *one, world_size=2)  # one rank has no image
    assert predicted(tmp_path / "one.csv") == [rows[1]]
    assert [Path(row["input"]).relative_to(pictures).as_posix() for row in rows] == [
        "even/0.png", "even/2.png", "even/4.png", "odd/1.png", "odd/3.png"
    ]
    command(forks, trained, "predict", "--output", tmp_path / "test.csv")
    test = predicted(tmp_path / "test.csv")
    for row in rows[:4]:  # the same pixels give the same answer
        same = test[int(Path(row["input"]).stem)]
        assert row["label"] == same["label"]
        assert float(row["probability"]) == pytest.approx(float(same["probability"]), abs=0.02)


@pytest.mark.parametrize(("flag", "given", "said"), [
    ("input", "nowhere", "--input must be an image or a folder of images, got {0}/nowhere, where there is none."),
    ("input", "empty", "--input must be an image or a folder of images, got {0}/empty, where there is none."),
    ("input", "notes.png", "{0}/notes.png"),
    ("output", "notes.png/out.csv", "{0}/notes.png/out.csv: cannot be written ("),
    ("output", "out.xlsx", '--output must be a .csv file, got "{0}/'),
])
def test_impossible_prediction_gives_one_line(
    forks: Forks, trained: Path, tmp_path: Path, flag: str, given: str, said: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.png").write_text("no image\n")
    words = (f"--output={tmp_path}/out.csv", f"--{flag}={tmp_path / given}")
    output = command(forks, trained, "predict", *words, world_size=2, code=2)
    assert said.format(tmp_path) in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "notes.png"]


def test_stopped_prediction_writes_no_file(forks: Forks, trained: Path, tmp_path: Path) -> None:
    with forks.running(
        "predict", "--name", "run", "--run-dir", trained.parent, "--output", tmp_path / "out.csv", world_size=2,
        preload="tests.commands.test_checkpoint_commands:slow_prediction",
    ) as job:
        job.wait_for("predicting")
        job.processes[1].signal("SIGTERM")
        assert job.wait() == [143, 143], job.output
    assert "nothing new to save" in job.output
    assert not list(tmp_path.iterdir())


def slow_prediction() -> None:
    """Preloaded. Take a second for each batch."""
    import time

    from train.workloads.classification import Classification

    predict = Classification.predict

    def slowly(self: Classification, *values: Any) -> tuple[torch.Tensor, torch.Tensor]:
        print("predicting", flush=True)
        time.sleep(1)
        return predict(self, *values)

    Classification.predict = slowly  # type: ignore[method-assign]
