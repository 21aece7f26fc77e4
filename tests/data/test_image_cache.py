"""The cache of decoded images: exact, filled once, shared by ranks and runs, never half used, bounded by its size."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rankup.errors import DataError
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import result
from tests.rigs.photographs import photograph, write_photographs
from tests.rigs.small_filesystems import small_disk
from train.config import Config
from train.data import file_samples
from train.data.file_samples import FileSamples, version_of
from train.data.sources import image_cache, load
from train.data.sources.image_cache import ImageCache, Plan, open_caches

ALL = torch.arange(10)
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """10 images to train on, 4 to test on, and an empty place for caches."""
    monkeypatch.setenv("RANKUP_CACHE", str(tmp_path / "cache"))
    write_photographs(tmp_path / "data" / "train", 10, width=64, height=48)
    write_photographs(tmp_path / "data" / "val", 4, width=64, height=48, first=50)
    return tmp_path / "data"


def samples_of(folder: Path, *, cached: bool = True, size: int = 16, max_gb: float = 1.0, augment: bool = False,
               limit: int = 0) -> FileSamples:
    config = Config(
        dataset="imagefolder", data_dir=str(folder), image_size=size, cache_images=cached, cache_max_gb=max_gb,
        augment=augment, limit_train=limit,
    )
    found, _ = load(config)
    assert isinstance(found, FileSamples)
    return replace(found, augment=augment)


def cache_of(samples: FileSamples) -> ImageCache:
    assert samples.cache is not None
    return samples.cache


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of the files that this process has decoded."""
    paths: list[str] = []
    usual = file_samples.decode

    def record(path: str, *, at_least: int | None = None) -> torch.Tensor:
        paths.append(path)
        return usual(path, at_least=at_least)

    monkeypatch.setattr(file_samples, "decode", record)
    return paths


# Exact and once -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("augment", [False, True])
def test_cached_images_are_those_of_the_files_and_decoded_once(
    folder: Path, augment: bool, decoded: list[str]
) -> None:
    plain = [samples_of(folder, cached=False, augment=augment).batch(ALL, epoch) for epoch in (None, 0, 1)]
    decoded.clear()
    for _ in range(2):  # the second time as another run, which finds the file of the first
        samples = samples_of(folder, augment=augment)
        for epoch, (images, labels) in zip((None, 0, 1), plain, strict=True):
            found = samples.batch(ALL, epoch)
            assert torch.equal(found[0], images)
            assert torch.equal(found[1], labels)
        assert sorted(decoded) == sorted(samples.paths)


def test_settings_that_change_the_pixels_have_a_cache_of_their_own(folder: Path) -> None:
    paths = {cache_of(samples_of(folder, size=size, limit=limit)).path for size in (16, 24) for limit in (0, 5)}
    assert len(paths) == 4
    assert cache_of(samples_of(folder)).path in paths


def test_other_libraries_have_a_cache_of_their_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache_of(samples_of(folder)).path
    monkeypatch.setattr(image_cache.torchvision, "__version__", "99.0")
    assert cache_of(samples_of(folder)).path != before


def test_copy_in_a_process_that_is_not_forked_reads_the_same_file(folder: Path) -> None:
    samples = samples_of(folder)
    images = samples.batch(ALL, None)[0]
    copy = pickle.loads(pickle.dumps(samples))
    assert cache_of(copy).count() == 10
    assert torch.equal(copy.batch(ALL, None)[0], images)


# Damaged, foreign, stale ----------------------------------------------------------------------------------------


def test_damaged_image_is_decoded_again_and_said(
    folder: Path, decoded: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    samples = samples_of(folder)
    images = samples.batch(ALL, None)[0]
    cache = cache_of(samples)
    for index in (2, 5):
        cache.pixels[index].flat[17:21] = 1, 2, 3, 4
    decoded.clear()
    assert torch.equal(samples.batch(ALL, None)[0], images)
    assert decoded == [samples.paths[2], samples.paths[5]]
    said = capfd.readouterr().err
    assert f"{cache.path}: the image of {samples.paths[2]} is damaged, so it is decoded again" in said
    assert said.count("\n") == 1
    decoded.clear()
    assert torch.equal(samples_of(folder).batch(ALL, None)[0], images)
    assert decoded == []


def test_image_in_the_place_of_another_is_not_taken(folder: Path, decoded: list[str]) -> None:
    samples = samples_of(folder)
    images = samples.batch(ALL, None)[0]
    cache = cache_of(samples)
    cache.entries[0], cache.pixels[0] = cache.entries[1], cache.pixels[1]
    decoded.clear()
    assert torch.equal(samples.batch(ALL, None)[0], images)
    assert decoded == [samples.paths[0]]


def test_file_that_changed_is_decoded_again_and_said(
    folder: Path, decoded: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    samples = samples_of(folder)
    before = samples.batch(ALL, None)[0]
    changed = Path(samples.paths[4])
    photograph(77, width=64, height=48).save(changed)
    decoded.clear()
    for again in (samples, samples_of(folder)):
        after = again.batch(ALL, None)[0]
        assert not torch.equal(after[4], before[4])
        assert torch.equal(after[[0, 9]], before[[0, 9]])
    assert decoded == [str(changed)]
    assert f"{changed}: has changed since it was cached, so it is decoded again" in capfd.readouterr().err


def test_file_that_is_gone_is_an_error_as_without_a_cache(folder: Path) -> None:
    samples = samples_of(folder)
    samples.batch(ALL, None)
    Path(samples.paths[4]).unlink()
    with pytest.raises(DataError, match="is gone since the folder was listed"):
        samples.batch(ALL, None)


@pytest.mark.parametrize("damage", ["truncated", "longer", "empty", "foreign"])
def test_damaged_or_foreign_cache_is_made_anew_and_said(
    folder: Path, damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    images = samples_of(folder).batch(ALL, None)[0]
    path = cache_of(samples_of(folder)).path
    content = path.read_bytes()
    other = cache_of(samples_of(folder, size=24)).path.read_bytes()
    path.unlink()  # not written over: the objects above have it mapped
    path.write_bytes({
        "truncated": content[:-1], "longer": content + b"x", "empty": b"", "foreign": other,
    }[damage])
    samples = samples_of(folder)
    assert f"{path}: is damaged; it is made anew." in capfd.readouterr().err
    assert cache_of(samples).count() == 0
    assert torch.equal(samples.batch(ALL, None)[0], images)
    samples_of(folder)
    assert capfd.readouterr().err == ""


# Shared by ranks, killed ranks ----------------------------------------------------------------------------------


def test_ranks_of_a_node_share_what_they_decode(forks: Forks, folder: Path, tmp_path: Path) -> None:
    def line(name: str, *more: str) -> tuple[str, ...]:
        return (
            "train", "--dataset", "imagefolder", "--data-dir", str(folder), "--image-size", "16", "--batch-size", "2",
            "--epochs", "3", "--augment", "--tensorboard=false", "--run-dir", str(tmp_path), "--name", name, *more,
        )

    env = {"RANKUP_CACHE": str(tmp_path / "shared")}
    plain = forks.run(*line("plain"), world_size=2)
    assert plain[0] == [0, 0], plain[1]
    for name, more in (("first", ("--num-workers", "1")), ("second", ())):
        codes, output = forks.run(*line(name, "--cache-images", *more), world_size=2, env=env)
        assert codes == [0, 0], output
        assert f", {0 if name == 'first' else 14} of 14 decoded in {tmp_path / 'shared'}" in output
        assert result(tmp_path / name)["digest"] == result(tmp_path / "plain")["digest"]
        assert result(tmp_path / name)["metrics"] == result(tmp_path / "plain")["metrics"]
    assert len(list((tmp_path / "shared").glob("images-*"))) == 2


def test_process_killed_while_filling_leaves_nothing_half_used(folder: Path) -> None:
    images = samples_of(folder, cached=False).batch(ALL, None)[0]
    samples = samples_of(folder)
    cache = cache_of(samples)

    def fill() -> None:
        while True:
            for index in range(10):
                cache.write(index, version_of(samples.paths[index]), images[index])
                # And half of the next: the kill may come between its pixels and its entry
                cache.pixels[(index + 1) % 10].flat[:300] = 0

    for delay_s in (0.01, 0.03, 0.05):
        child = FORK.Process(target=fill)
        child.start()
        while cache.count() == 0:
            assert child.is_alive()
            time.sleep(0.001)
        time.sleep(delay_s)
        child.kill()
        child.join()
        assert torch.equal(samples.batch(ALL, None)[0], images)
        assert torch.equal(samples_of(folder).batch(ALL, None)[0], images)


def test_processes_that_fill_at_the_same_time_read_what_is_right(folder: Path) -> None:
    images = samples_of(folder, cached=False).batch(ALL, None)[0]

    def use(seed: int) -> None:
        order = torch.randperm(10, generator=torch.Generator().manual_seed(seed))
        samples = samples_of(folder)
        right = all(torch.equal(samples.batch(order, None)[0], images[order]) for _ in range(20))
        os._exit(0 if right else 1)

    children = [FORK.Process(target=use, args=(seed,)) for seed in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0] * 4


# Size -----------------------------------------------------------------------------------------------------------


def test_cache_that_would_be_larger_than_allowed_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        samples_of(folder, max_gb=1e-5)
    assert str(caught.value) == (
        "cache_max_gb must be at least 1.89e-05 for 14 images of this size, got 1e-05. Raise it, lower --image-size, "
        "or leave --cache-images out."
    )
    assert list((tmp_path / "cache").glob("images-*")) == []


def test_caches_used_longest_ago_give_way(folder: Path, tmp_path: Path) -> None:
    paths = [cache_of(samples_of(folder, size=size)).path for size in (16, 20, 24)]
    for age, path in zip((100, 300, 200), paths, strict=True):
        os.utime(path, (time.time() - age,) * 2)
    (tmp_path / "cache" / "others.txt").write_text("not ours")
    sizes = {path: path.stat().st_size for path in (tmp_path / "cache").glob("images-*")}
    assert len(sizes) == 6  # each run has one for each half
    # Room for the four of the sizes 16 and 24, and a little more
    kept = sum(size for path, size in sizes.items() if path != paths[1])
    samples_of(folder, max_gb=(kept + 1000) / 1e9)
    assert not paths[1].exists()
    assert paths[0].exists()
    assert paths[2].exists()
    assert (tmp_path / "cache" / "others.txt").exists()


def test_run_keeps_a_cache_that_gave_way_to_another(folder: Path, decoded: list[str]) -> None:
    samples = samples_of(folder)
    images = samples.batch(ALL, None)[0]
    samples_of(folder, size=20, max_gb=3e-5)
    assert not cache_of(samples).path.exists()
    decoded.clear()
    assert torch.equal(samples.batch(ALL, None)[0], images)
    assert decoded == []


def test_disk_with_too_little_room_is_named_before_anything_is_decoded(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        with pytest.raises(DataError, match=r"must have 0\.0\d+ GB free for decoded images, has .* Set RANKUP_CACHE"):
            open_caches([Plan(("a.jpg",) * 10, 64)], disk.path, max_bytes=10**9)
        assert list(disk.path.glob("images-*")) == []


def test_room_is_taken_when_the_file_is_made(tmp_path: Path) -> None:
    plan = Plan(("a.jpg",) * 10, 64)
    (cache,) = open_caches([plan], tmp_path, max_bytes=10**9)
    assert cache.path.stat().st_blocks * 512 >= plan.num_bytes


def test_folder_of_data_is_not_written_to(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    samples_of(folder).batch(ALL, None)
    assert sorted(folder.rglob("*")) == before


def test_place_that_cannot_be_written_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, since root may write into any folder")
    with pytest.raises(DataError, match="cannot be written"):
        samples_of(folder)
