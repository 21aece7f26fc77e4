"""Shards at a URL: a node copies each once, whole, in bounded room."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from rankup.errors import DataError, PeerLost, UserError
from rankup.group.stop import StopRequest
from tests.rigs.object_store import S3
from tests.rigs.photographs import write_photographs
from tests.rigs.range_server import serving
from tests.rigs.shards import load_shards, pack_folder, samples_of
from train.config import Config
from train.data.loader import Loader
from train.data.sources import shard_files

ALL = torch.arange(24)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 images to train on, in several shards."""
    root = tmp_path_factory.mktemp("shards")
    write_photographs(root / "folder" / "train", 24, width=100, height=75)
    write_photographs(root / "folder" / "val", 6, width=100, height=75, first=100)
    return pack_folder(root / "folder", root / "out", max_bytes=30_000)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RANKUP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def copies(cache: Path) -> list[Path]:
    """The files that the node keeps, finished or not."""
    return [path for path in (cache / "shards").iterdir() if path.name != "lock"]


def test_workers_copy_the_shards_of_a_window_when_they_need_them(packed: Path, own_cache: Path) -> None:
    samples = samples_of(f"local://{packed}", shuffle_window=8)
    for path in copies(own_cache):  # they were there for the index
        path.unlink()
    loader = Loader(
        samples, iter([(0, ALL[:1])]), device=torch.device("cpu"), stop=StopRequest(), num_workers=1
    )
    worked = loader.next()
    loader.close()
    assert worked is not None
    assert torch.equal(worked[0], samples_of(packed).batch(ALL[:1], 0)[0])
    assert len(copies(own_cache)) == 1


def test_shards_that_take_more_than_the_node_may_keep_need_a_window(packed: Path, own_cache: Path) -> None:
    address, size = f"local://{packed}", max(path.stat().st_size for path in packed.glob("*.tar"))
    with pytest.raises(DataError, match=r"and cache_max_gb lets this node keep .* or --shuffle-window"):
        samples_of(address, cache_max_gb=2.5 * size / 1e9)
    with pytest.raises(DataError, match=r"\.tar: takes .* GB\. Set a larger --cache-max-gb"):
        samples_of(address, cache_max_gb=0.5 * size / 1e9, shuffle_window=8)
    samples = samples_of(address, cache_max_gb=2.5 * size / 1e9, shuffle_window=8)
    for epoch in (None, 0):
        assert torch.equal(samples.batch(ALL, epoch)[0], samples_of(packed).batch(ALL, epoch)[0])
    assert sum(path.stat().st_size for path in copies(own_cache)) <= 2.5 * size


# Copies ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def blob(tmp_path: Path) -> Path:
    path = tmp_path / "blob"
    path.write_bytes(os.urandom(10_000))
    return path


def copied(blob: Path, cache: Path, stamp: str = "1", max_bytes: int = 35_000) -> bytes:
    """What a process reads of the file as one shard."""
    file = shard_files.ShardFiles(f"local://{blob.parent}", cache / "shards", max_bytes).open(
        shard_files.Shard(blob.name, blob.stat().st_size, stamp)
    )
    data = os.read(file, 100_000)
    os.close(file)
    return data


def test_copy_is_made_in_pieces_once_and_again_for_another_version(
    blob: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, usual = [], shard_files.Place.read
    monkeypatch.setattr(shard_files, "REQUEST_BYTES", 6_000)
    monkeypatch.setattr(
        shard_files.Place, "read", lambda store, name, span: (asked.append(span), usual(store, name, span))[1]
    )
    for stamp in ("1", "1", "2"):
        assert copied(blob, own_cache, stamp) == blob.read_bytes()
    assert asked == [(0, 6_000), (6_000, 10_000)] * 2


def test_copies_stay_below_their_bound_and_the_oldest_go(blob: Path, own_cache: Path) -> None:
    seen: list[Path] = []
    for number in range(5):
        copied(blob, own_cache, f"{number}")
        seen += [path for path in copies(own_cache) if path not in seen]
        os.utime(seen[0])  # used again
        for age, path in enumerate(seen[1:]):
            if path.exists():
                os.utime(path, (1e9 + age, 1e9 + age))
    assert sorted(copies(own_cache)) == sorted([seen[0], *seen[3:]])


def test_damaged_copy_is_made_again(blob: Path, own_cache: Path) -> None:
    """As after a power cut: what is kept is not synced."""
    copied(blob, own_cache)
    (path,) = copies(own_cache)
    path.write_bytes(path.read_bytes()[:500])
    assert copied(blob, own_cache) == blob.read_bytes()


def test_shard_is_copied_once_by_several_processes_that_may_be_killed(
    blob: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork, asked = multiprocessing.get_context("fork"), own_cache.parent / "asked"
    monkeypatch.setattr(shard_files, "REQUEST_BYTES", 6_000)

    def work(*, dies: bool) -> None:
        def slow(store: object, name: str, span: tuple[int, int]) -> bytes:
            with asked.open("a") as file:
                file.write("x")
            if dies and span[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.2)
            return blob.read_bytes()[slice(*span)]

        shard_files.Place.read = slow  # type: ignore[method-assign, assignment]
        os._exit(copied(blob, own_cache) != blob.read_bytes())

    for dies, codes, tries in (([True], [-9], 2), ([False] * 3, [0] * 3, 4)):
        processes = [fork.Process(target=work, kwargs={"dies": one}) for one in dies]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == codes
        assert len(asked.read_text()) == tries
    assert [path.name.startswith(".") for path in copies(own_cache)] == [False]


def test_folder_that_cannot_hold_copies_is_named(
    blob: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shard_files, "staged", full)
    with pytest.raises(DataError, match=rf"{own_cache}/shards: can't hold the shards \(No space.*Set RANKUP_CACHE"):
        copied(blob, own_cache)


def test_store_that_stays_away_is_waited_for_beyond_a_steps_deadline() -> None:
    assert 3 * Config().step_timeout_s < shard_files.PATIENCE_S


def test_store_that_does_not_answer_is_a_lost_peer_also_in_a_worker(
    packed: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With code 171, so that agents start the rank again."""
    monkeypatch.setattr(shard_files, "PATIENCE_S", 0.1)
    shard_files._store.cache_clear()
    with serving(packed) as server:
        samples = samples_of(server.url, shuffle_window=8)
        for path in copies(own_cache):
            path.unlink()
        server.failures = 10**6
        loader = Loader(
            samples, iter([(0, ALL)]), device=torch.device("cpu"), stop=StopRequest(), num_workers=1
        )
        with pytest.raises(PeerLost, match="did not answer in time: read train-"):
            loader.next()
        loader.close()
    assert "fails, tried again for 0 s" in capfd.readouterr().err


def test_file_at_a_url_that_is_gone_or_cut_is_named(blob: Path, own_cache: Path) -> None:
    files = shard_files.ShardFiles(f"local://{blob.parent}", own_cache / "shards", 35_000)
    with pytest.raises(DataError, match="gives 10000 bytes from byte 0 on"):
        files.open(shard_files.Shard("blob", 10_005, ""))
    blob.unlink()
    with pytest.raises(DataError, match="blob: is gone"):
        files.open(shard_files.Shard("blob", 10_000, ""))


def test_address_that_nobody_knows_is_named() -> None:
    with pytest.raises(UserError, match=r"nosuch://bucket/folder must be an address that fsspec knows, got: .*nosuch"):
        load_shards("nosuch://bucket/folder")


# A web server ---------------------------------------------------------------------------------------------------


def test_shards_at_a_web_server_are_copied_once(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankup.places.place.FIRST_PAUSE_S", 0)
    here, sizes = samples_of(packed), {path.name: path.stat().st_size for path in packed.glob("*.tar")}
    with serving(packed) as server:
        server.failures = 1
        there = samples_of(server.url)
        for epoch in (None, 0, 1):
            assert torch.equal(there.batch(ALL, epoch)[0], here.batch(ALL, epoch)[0])
        assert len(samples_of(server.url)) == 24
        assert len(server.ranges) == len(sizes) + 1  # and the one that failed
        assert set(server.ranges) == {(name, 0, size - 1) for name, size in sizes.items()}


def test_workers_read_at_a_web_server_that_their_parent_has_spoken_to(packed: Path) -> None:
    with serving(packed) as server:
        samples = samples_of(server.url, shuffle_window=8)
        samples.batch(ALL[:2], None)
        loader = Loader(
            samples, iter([(0, ALL)]), device=torch.device("cpu"), stop=StopRequest(), num_workers=1
        )
        worked = loader.next()
        loader.close()
        assert worked is not None
        assert torch.equal(worked[0], samples.batch(ALL, 0)[0])


def test_shards_of_others_at_a_web_server_are_scanned_once_and_what_is_missing_is_named(
    packed: Path, tmp_path: Path
) -> None:
    (tmp_path / "plain").mkdir()
    for path in packed.glob("*.tar"):
        (tmp_path / "plain" / path.name).write_bytes(path.read_bytes())
    last = len(list(packed.glob("train-*.tar"))) - 1
    patterns = {"eval_shards": "val-000000.tar", "train_shards": f"train-{{000000..{last:06}}}.tar"}
    with serving(tmp_path / "plain") as server:
        assert len(samples_of(server.url, **patterns)) == 24
        count = len(server.ranges)
        assert count > 0
        assert len(samples_of(server.url, **patterns)) == 24
        assert len(server.ranges) == count
        for path in ("train-000001.tar", "val-000000.tar"):
            (tmp_path / "plain" / path).unlink()
            with pytest.raises(DataError, match=rf"{server.url}/{path}: is missing"):
                load_shards(server.url, **patterns)
            (tmp_path / "plain" / path).write_bytes((packed / path).read_bytes())


# An object store ------------------------------------------------------------------------------------------------


def test_shards_in_an_object_store_are_those_of_the_folder(
    packed: Path, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = samples_of(packed)
    with s3.door() as door:
        for name, value in door.env.items():
            monkeypatch.setenv(name, value)
        files = shard_files._store("s3://bucket/shards", os.getpid()).fs
        files.put(f"{packed}/", "bucket/shards/", recursive=True)
        there = samples_of("s3://bucket/shards")
        for epoch in (None, 0):
            assert torch.equal(there.batch(ALL, epoch)[0], here.batch(ALL, epoch)[0])
        patterns = {"train_shards": "train-*.tar", "eval_shards": "val-00000{0..1}.tar"}
        assert len(load_shards("s3://bucket/shards", **patterns)[0]) == 24
        door.rule = lambda request: 403
        with pytest.raises(UserError, match="s3://bucket/shards denies access"):
            load_shards("s3://bucket/shards")
