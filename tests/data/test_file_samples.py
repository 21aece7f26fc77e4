"""Image files as samples follow torchvision's recipes bit for bit. Batch, rank, worker and restart change no pixel."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torchvision.transforms import v2

from rankup.seeds import derive_seed, seed_host
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import result
from train.config import Config
from train.config.data import Augment
from train.data.file_samples import FileSamples, decode
from train.data.sources import load
from train.workloads import images as workload

RECIPES: list[Augment] = [False, True, "imagenet", "trivial"]


def config_of(folder: Path, augment: Augment, image_size: int | None = 56) -> Config:
    return Config(dataset="imagefolder", data_dir=str(folder), augment=augment, image_size=image_size)


def samples_of(folder: Path, augment: Augment, *, seed: int = 0, image_size: int | None = 56) -> FileSamples:
    found, _ = load(config_of(folder, augment, image_size))
    assert isinstance(found, FileSamples)
    return replace(found, augment=augment, seed=seed)


def as_torchvision_has_it(samples: FileSamples, transform: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return all samples of epoch 3. Torch's random state is seeded for each sample."""
    found = []
    for index, path in enumerate(samples.paths):
        seed_host(derive_seed(samples.seed, 3, index))
        found.append(transform(decode(path)))
    return torch.stack(found)


@pytest.mark.parametrize("augment", ["imagenet", "trivial"])
def test_augmentation_equals_torchvisions_recipe_bit_for_bit(folder: Path, augment: Augment) -> None:
    parts: list[torch.nn.Module] = [v2.RandomResizedCrop(56), v2.RandomHorizontalFlip()]
    if augment == "trivial":
        parts.append(v2.TrivialAugmentWide(interpolation=v2.InterpolationMode.BILINEAR))
    samples = samples_of(folder, augment)
    assert torch.equal(samples.batch(torch.arange(12), 3)[0], as_torchvision_has_it(samples, v2.Compose(parts)))


@pytest.mark.parametrize(("augment", "image_size", "shorter_side"), [
    ("imagenet", None, 256), ("trivial", 56, 64), ("imagenet", 33, 38), (False, None, 224), (True, 56, 56),
])
def test_evaluation_crops_the_middle_as_torchvision_does(
    folder: Path, augment: Augment, image_size: int | None, shorter_side: int
) -> None:
    """With ImageNet's recipe the picture is first resized to a larger size."""
    samples = samples_of(folder, augment, image_size=image_size)
    transform = v2.Compose([v2.Resize(shorter_side), v2.CenterCrop(image_size or 224)])
    expected = as_torchvision_has_it(samples, transform)
    assert torch.equal(samples.batch(torch.arange(12), None)[0], expected)
    assert torch.equal(samples.batch(torch.arange(12), 3)[0], expected) is (augment is False)


@pytest.mark.parametrize("augment", RECIPES)
def test_sample_is_equal_in_any_batch_and_differs_by_epoch_and_seed(folder: Path, augment: Augment) -> None:
    samples = samples_of(folder, augment, seed=1)
    whole = samples.batch(torch.arange(12), 0)[0]
    assert (whole.shape, whole.dtype, whole.is_contiguous()) == ((12, 3, 56, 56), torch.uint8, True)
    torch.rand(7)  # earlier draws must not matter
    some = torch.tensor([9, 2, 5])
    assert torch.equal(samples.batch(some, 0)[0], whole[some])
    for other in (samples.batch(some, 1)[0], samples_of(folder, augment, seed=2).batch(some, 0)[0]):
        assert torch.equal(other, whole[some]) is (augment is False)


def test_grey_images_are_the_mean_of_the_colours(folder: Path) -> None:
    samples = samples_of(folder, False)
    grey = replace(samples, channels=1).batch(torch.arange(3), None)[0]
    expected = samples.batch(torch.arange(3), None)[0].float().mean(1, keepdim=True).round()
    assert torch.equal(grey.float(), expected)


def test_predicted_files_are_prepared_like_evaluation_files(folder: Path) -> None:
    for augment in (True, "imagenet"):
        built = workload.build(config_of(folder, augment))
        assert built.open_input is not None
        assert isinstance(built.evaluation, FileSamples)
        samples, name_of = built.open_input(str(folder / "val"))
        assert [name_of(index) for index in range(6)] == list(built.evaluation.paths)
        assert torch.equal(samples.batch(torch.arange(6), None)[0], built.evaluation.batch(torch.arange(6), None)[0])


def line(folder: Path, *more: str) -> tuple[str, ...]:
    return (
        "train", "--dataset", "imagefolder", "--data-dir", str(folder), "--image-size", "32", "--batch-size", "4",
        "--epochs", "3", "--tensorboard=false", *more,
    )


def test_killed_job_resumes_with_the_same_crops(forks: Forks, folder: Path, tmp_path: Path) -> None:
    words = line(folder, "--augment", "trivial", "--run-dir", str(tmp_path), "--save-every-steps", "2")
    forks.ends(*words, "--name", "whole", "--num-workers", "1", world_size=2)
    killed = forks.run(*words, "--name", "killed", world_size=2, preload="tests.rigs.injected_faults:dies_in_step_8")
    assert killed[0] == [171, -9], killed[1]
    forks.ends(*words, "--name", "killed", world_size=2)
    assert result(tmp_path / "killed")["digest"] == result(tmp_path / "whole")["digest"]


def test_evaluate_and_predict_prepare_images_like_the_training(forks: Forks, folder: Path, tmp_path: Path) -> None:
    where = ("--name", "run", "--run-dir", str(tmp_path))
    output = forks.ends(*line(folder, "--augment", "imagenet"), *where)
    trained = result(tmp_path / "run")["metrics"]
    output = forks.ends("evaluate", *where)
    assert f"{trained['loss']:.4f}" in output
    rows = []
    for number, more in enumerate(((), ("--input", str(folder / "val")))):
        forks.ends("predict", *where, *more, "--output", str(tmp_path / f"{number}.csv"))
        with (tmp_path / f"{number}.csv").open() as file:
            rows.append(list(csv.reader(file)))
    assert rows[0] == rows[1]
    assert len(rows[0]) == 7
