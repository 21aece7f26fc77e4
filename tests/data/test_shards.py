"""Training on shards: the same weights as from the folder that they were made of, wherever they lie, killed or not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.rigs.fork_server import Forks
from tests.rigs.jobs import result
from tests.rigs.photographs import write_photographs
from tests.rigs.shards import load_shards, pack_folder, samples_of, write_shard
from train.config import Config
from train.config.settings import Augment
from train.data.order import Order
from train.workloads import images as workload

ALL = torch.arange(24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of photographs, some with names that a tar member can't have."""
    root = tmp_path_factory.mktemp("photographs")
    write_photographs(root / "train", 22, width=100, height=75)
    write_photographs(root / "val", 6, width=100, height=75, first=100)
    shutil.copy(root / "train/class0/00000.jpg", root / "train/class0/a picture.of.mine.jpg")
    shutil.copy(root / "train/class1/00001.jpg", root / "train/class1/Ü.JPEG")
    return root


@pytest.fixture(scope="module")
def packed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its shards, several of each half."""
    return pack_folder(folder, tmp_path_factory.mktemp("shards") / "out", max_bytes=30_000)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RANKUP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# The same samples -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("augment", [False, True, "imagenet"])
def test_samples_of_shards_are_those_of_the_folder(folder: Path, packed: Path, augment: Augment) -> None:
    assert len(list(packed.glob("train-*.tar"))) > 2
    ours = samples_of(folder, dataset="imagefolder", augment=augment)
    theirs = samples_of(packed, augment=augment)
    assert theirs.classes == ours.classes
    for epoch in (None, 0, 3):
        for one, other in zip(ours.batch(ALL, epoch), theirs.batch(ALL, epoch), strict=True):
            assert torch.equal(one, other)


def test_samples_do_not_depend_on_the_size_of_the_shards(folder: Path, packed: Path, tmp_path: Path) -> None:
    one = samples_of(pack_folder(folder, tmp_path / "one", max_bytes=10**9))
    assert len(list((tmp_path / "one").glob("train-*.tar"))) == 1
    several = samples_of(packed)
    assert one.name == several.name  # so a run goes on with either
    assert torch.equal(one.batch(ALL, 0)[0], several.batch(ALL, 0)[0])


def test_names_tell_shard_and_file(packed: Path) -> None:
    built = workload.build(Config(dataset="shards", data_dir=str(packed), image_size=32))
    name = built.input_name(0)
    assert name.startswith(f"{packed}/val-00000")
    assert name.endswith(".tar:000000")


def test_cached_images_are_those_of_the_shards(packed: Path) -> None:
    plain = samples_of(packed)
    for _ in range(2):
        cached = samples_of(packed, cache_images=True)
        assert torch.equal(cached.batch(ALL, None)[0], plain.batch(ALL, None)[0])
    assert cached.cache is not None
    assert cached.cache.count() == 24


def test_images_held_in_memory_keep_the_order_of_a_window(packed: Path) -> None:
    config = Config(dataset="shards", data_dir=str(packed), image_size=32)
    files, held = (
        workload.build(config.model_copy(update={"in_memory": where})).train for where in ("never", "always")
    )
    assert torch.equal(files.storage, held.storage)
    assert not torch.equal(files.storage, ALL)
    assert torch.equal(files.storage.sort().values, ALL)


# The window -----------------------------------------------------------------------------------------------------


def windowed(num_samples: int, *, window: int, storage: torch.Tensor | None = None, seed: int = 1) -> Order:
    return Order(num_samples, 8, seed, window=window, storage=storage)


@pytest.mark.parametrize("window", [1, 16, 64, 100, 5000])
def test_window_has_each_sample_once_and_another_order_in_each_epoch_and_run(window: int) -> None:
    order = windowed(1000, window=window).epoch(0)
    assert torch.equal(order.sort().values, torch.arange(1000))
    assert torch.equal(order, windowed(1000, window=window).epoch(0))
    for other in (windowed(1000, window=window).epoch(1), windowed(1000, window=window, seed=2).epoch(0)):
        assert not torch.equal(order, other)


def test_window_needs_few_blocks_at_a_time() -> None:
    storage = torch.randperm(10_000)
    where = storage.argsort()  # sample -> its place
    order = windowed(10_000, window=1600, storage=storage).epoch(0)
    for part in order.split(1600):
        blocks = (where[part] // 100).unique()
        assert len(blocks) <= 16
        assert len(part) == min(1600, len(blocks) * 100)
    assert (where[order].diff().abs() < 10).float().mean() < 0.1  # and they are mixed


def test_ranks_share_the_batches_of_a_window() -> None:
    alone = [part for _, part in windowed(100, window=32).batches(0, 12)]
    halves = [[part for _, part in Order(100, 8, 1, rank, 2, window=32).batches(0, 12)] for rank in (0, 1)]
    for batch, *parts in zip(alone, *halves, strict=True):
        assert torch.equal(batch, torch.cat(parts))


# Whole jobs -----------------------------------------------------------------------------------------------------


def line(place: Path | str, *more: str, dataset: str = "shards") -> tuple[str, ...]:
    return (
        "train", "--dataset", dataset, "--data-dir", str(place), "--image-size", "32", "--batch-size", "4",
        "--epochs", "3", "--tensorboard=false", "--augment", "imagenet", *more,
    )


def test_job_on_shards_ends_with_the_weights_of_the_job_on_the_folder(
    forks: Forks, folder: Path, packed: Path, tmp_path: Path
) -> None:
    jobs = {"folder": (line(folder, dataset="imagefolder"), 2), "one": (line(packed, "--num-workers", "1"), 1),
            "two": (line(packed), 2), "url": (line(f"local://{packed}"), 2)}
    for name, (words, world_size) in jobs.items():
        codes, output = forks.run(*words, "--run-dir", tmp_path, "--name", name, world_size=world_size)
        assert codes == [0] * world_size, output
    digests = {name: result(tmp_path / name)["digest"] for name in jobs}
    assert digests["two"] == digests["url"] == digests["folder"]
    assert result(tmp_path / "one")["data"] == result(tmp_path / "two")["data"]


def test_killed_job_with_a_window_goes_on_to_the_same_weights(forks: Forks, packed: Path, tmp_path: Path) -> None:
    words = line(packed, "--shuffle-window", "8", "--run-dir", str(tmp_path), "--save-every-steps", "2")
    codes, output = forks.run(*words, "--name", "whole", world_size=2)
    assert codes == [0, 0], output
    codes, output = forks.run(
        *words, "--name", "killed", world_size=2, preload="tests.rigs.injected_faults:dies_in_step_8"
    )
    assert codes == [171, -9], output
    codes, output = forks.run(*words, "--name", "killed", world_size=2)
    assert codes == [0, 0], output
    assert result(tmp_path / "killed")["digest"] == result(tmp_path / "whole")["digest"]


def test_run_is_not_resumed_with_other_samples(forks: Forks, folder: Path, tmp_path: Path) -> None:
    write_photographs(tmp_path / "data" / "train", 8, width=40, height=30)
    write_photographs(tmp_path / "data" / "val", 2, width=40, height=30)
    place = pack_folder(tmp_path / "data", tmp_path / "shards")
    words = line(place, "--run-dir", str(tmp_path), "--name", "run")
    codes, output = forks.run(*words)
    assert codes == [0], output
    with (tmp_path / "data/train/class0/00000.jpg").open("ab") as file:
        file.write(b"more")
    shutil.rmtree(place)
    pack_folder(tmp_path / "data", place)
    codes, output = forks.run(*words, "--epochs", "4")
    assert codes == [2], output
    assert "was trained on shards-" in output


# Foreign shards -------------------------------------------------------------------------------------------------


def test_shards_with_names_that_restart_in_each_are_told_apart(tmp_path: Path) -> None:
    for number in (0, 1):
        write_shard(tmp_path / f"train-{number}.tar", {"0": (number, 0), "1": (number, 1)})
    write_shard(tmp_path / "val-0.tar", {"0": (9, 0), "1": (8, 1)})
    train, _ = load_shards(tmp_path)
    assert [train.contents.name(n).split("/")[-1] for n in range(4)] == [
        "train-0.tar:0", "train-1.tar:0", "train-0.tar:1", "train-1.tar:1",
    ]
