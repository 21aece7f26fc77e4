"""Shards at a URL: read in large pieces, which a node keeps in bounded room, or image by image."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from rankup.errors import DataError, UserError
from tests.rigs.object_store import S3
from tests.rigs.photographs import write_photographs
from tests.rigs.range_server import serving
from tests.rigs.shards import load_shards, pack_folder, samples_of
from train.config import Config
from train.data.loader import Loader
from train.data.sources.shards import index, remote
from train.data.sources.shards import pieces as pieces_module
from train.data.sources.shards.pieces import Pieces
from train.process.stop import StopRequest

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


def test_samples_at_a_url_are_those_of_the_folder(packed: Path, own_cache: Path) -> None:
    here, there = samples_of(packed), samples_of(f"local://{packed}")
    for _ in range(2):
        assert torch.equal(here.batch(ALL, 0)[0], there.batch(ALL, 0)[0])
    assert list((own_cache / "shards").glob("*.piece"))


def test_index_beside_shards_at_a_url_is_taken_and_none_is_scanned(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "scan_tar", None)
    assert len(samples_of(f"local://{packed}")) == 24


def test_workers_read_at_a_url(packed: Path) -> None:
    samples = samples_of(f"local://{packed}")
    loader = Loader(
        samples, iter([(0, ALL)]), device=torch.device("cpu"), stop=StopRequest(), num_workers=1, prefetch_factor=2
    )
    worked = loader.next()
    loader.close()
    assert worked is not None
    assert torch.equal(worked[0], samples.batch(ALL, 0)[0])


def test_samples_are_single_requests_where_pieces_would_not_stay(packed: Path, own_cache: Path) -> None:
    samples = samples_of(f"local://{packed}", cache_max_gb=1e-6)
    assert "each image is a request of its own" in samples.files.origin
    assert torch.equal(samples.batch(ALL, None)[0], samples_of(packed).batch(ALL, None)[0])
    assert not (own_cache / "shards").exists()
    assert samples_of(f"local://{packed}", cache_max_gb=1e-6, shuffle_window=8).files.contents.pieces is not None


@pytest.fixture
def blob(tmp_path: Path) -> Path:
    path = tmp_path / "blob"
    path.write_bytes(os.urandom(10_000))
    return path


def pieces_of(tmp_path: Path, *, max_bytes: int = 100_000) -> Pieces:
    return Pieces(tmp_path / "pieces", max_bytes, piece_bytes=1000)


@pytest.mark.parametrize(("offset", "size"), [(0, 10), (995, 10), (0, 10_000), (9_990, 10), (2_000, 1_000), (5, 0)])
def test_pieces_give_the_bytes_of_the_file(tmp_path: Path, blob: Path, offset: int, size: int) -> None:
    pieces = pieces_of(tmp_path)
    for _ in range(2):
        found = pieces.read(f"local://{blob}", "1", offset, size, file_size=10_000)
        assert found == blob.read_bytes()[offset : offset + size]


def test_piece_is_fetched_once_and_again_for_another_version(
    tmp_path: Path, blob: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def counted(url: str, begin: int, end: int) -> bytes:
        asked.append(begin)
        return remote.read_range(url, begin, end)

    monkeypatch.setattr(pieces_module, "read_range", counted)
    for version in ("1", "1", "2"):
        pieces_of(tmp_path).read(f"local://{blob}", version, 1500, 1000, file_size=10_000)
    assert asked == [1000, 2000, 1000, 2000]


def test_pieces_stay_below_their_bound_and_the_oldest_go(tmp_path: Path, blob: Path) -> None:
    pieces = pieces_of(tmp_path, max_bytes=4_000)
    for number in range(10):
        pieces.read(f"local://{blob}", "1", 1000 * number, 1000, file_size=10_000)
        for age, path in enumerate(sorted((tmp_path / "pieces").glob("*.piece"), reverse=True)):
            os.utime(path, (1e9 - age, 1e9 - age))
        assert sum(path.stat().st_size for path in (tmp_path / "pieces").glob("*.piece*")) <= 4_000
    left = {path.stem[-6:] for path in (tmp_path / "pieces").glob("*.piece")}
    assert "000009" in left
    assert "000000" not in left


def test_piece_that_is_larger_than_the_bound_is_not_kept(tmp_path: Path, blob: Path) -> None:
    pieces = pieces_of(tmp_path, max_bytes=999)
    assert pieces.read(f"local://{blob}", "1", 0, 1000, file_size=10_000) == blob.read_bytes()[:1000]
    assert not list((tmp_path / "pieces").glob("*.piece*"))


def test_damaged_piece_is_fetched_again(tmp_path: Path, blob: Path) -> None:
    pieces = pieces_of(tmp_path)
    pieces.read(f"local://{blob}", "1", 0, 1000, file_size=10_000)
    (path,) = (tmp_path / "pieces").glob("*.piece")
    path.write_bytes(path.read_bytes()[:500])
    assert pieces.read(f"local://{blob}", "1", 400, 200, file_size=10_000) == blob.read_bytes()[400:600]
    assert path.stat().st_size == 1000


def test_piece_is_fetched_once_by_several_processes_that_may_be_killed(tmp_path: Path, blob: Path) -> None:
    fork, asked = multiprocessing.get_context("fork"), tmp_path / "asked"

    def fetch(*, dies: bool) -> None:
        def slow(url: str, begin: int, end: int) -> bytes:
            with asked.open("a") as file:
                file.write("x")
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.2)
            return blob.read_bytes()[begin:end]

        pieces_module.read_range = slow
        data = pieces_of(tmp_path).read(f"local://{blob}", "1", 0, 1000, file_size=10_000)
        os._exit(data != blob.read_bytes()[:1000])

    for number, (dies, codes) in enumerate([([True], [-9]), ([False] * 3, [0] * 3)], 1):
        processes = [fork.Process(target=fetch, kwargs={"dies": one}) for one in dies]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == codes
        assert len(asked.read_text()) == number


def test_store_that_stays_away_is_waited_for_beyond_a_steps_deadline() -> None:
    assert sum(remote.PAUSES_S) > 3 * Config().step_timeout_s


@pytest.mark.parametrize("failures", [1, 99])
def test_read_that_fails_is_tried_again_some_times(
    blob: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], failures: int
) -> None:
    monkeypatch.setattr(remote, "PAUSES_S", (0,) * 7)
    tries = []

    class Flaky:
        def cat_file(self, url: str, *, start: int, end: int) -> bytes:
            tries.append(url)
            if len(tries) <= failures:
                raise ConnectionError("reset by peer")
            return blob.read_bytes()[start:end]

    monkeypatch.setattr(remote, "filesystem", lambda url: Flaky())
    if failures == 1:
        assert remote.read_range("s3://b/blob", 0, 10) == blob.read_bytes()[:10]
    else:
        with pytest.raises(DataError, match=r"s3://b/blob: can't be read \(reset by peer\).* 8 tries failed"):
            remote.read_range("s3://b/blob", 0, 10)
        assert len(tries) == 8
    said = capfd.readouterr().err.splitlines()
    assert [line.endswith("It is tried again.") for line in said] == ([] if failures == 1 else [True])


def test_file_at_a_url_that_is_gone_or_cut_is_named(blob: Path) -> None:
    url = f"local://{blob}"
    with pytest.raises(DataError, match="gives 5 bytes from byte 9995 on"):
        remote.read_range(url, 9995, 10_005)
    blob.unlink()
    with pytest.raises(DataError, match=f"{blob}: is gone"):
        remote.read_range(url, 0, 10)


def test_address_that_nobody_knows_is_named() -> None:
    with pytest.raises(UserError, match=r"nosuch://bucket must be an address that fsspec knows, got: .*nosuch"):
        load_shards("nosuch://bucket/folder")


# A web server ---------------------------------------------------------------------------------------------------


def test_shards_at_a_web_server_are_read_in_pieces_and_each_once(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "PAUSES_S", (0, 0))
    here = samples_of(packed)
    shards = {path.name: path.stat().st_size for path in packed.glob("train-*.tar")}
    with serving(packed) as server:
        there = samples_of(server.url)
        assert server.ranges == []  # the index lay there
        server.failures = 1
        for epoch in (None, 0, 1):
            assert torch.equal(there.batch(ALL, epoch)[0], here.batch(ALL, epoch)[0])
        first, *later = server.ranges
        assert first in later  # the one that failed
        assert sorted(later) == sorted((name, 0, size - 1) for name, size in shards.items())


def test_workers_read_at_a_web_server_that_their_parent_has_spoken_to(packed: Path) -> None:
    with serving(packed) as server:
        samples = samples_of(server.url)
        samples.batch(ALL[:2], None)
        loader = Loader(
            samples, iter([(0, ALL)]), device=torch.device("cpu"), stop=StopRequest(), num_workers=1, prefetch_factor=2
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


def test_shard_that_was_cut_at_a_web_server_is_named(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    for path in packed.iterdir():
        (tmp_path / "copy" / path.name).write_bytes(path.read_bytes())
    with serving(tmp_path / "copy") as server:
        samples_of(server.url)
        cut = tmp_path / "copy" / "train-000001.tar"
        cut.write_bytes(cut.read_bytes()[:-1])
        with pytest.raises(DataError, match=rf"{server.url}/train-000001\.tar: is cut off or another one"):
            samples_of(server.url)


# An object store ------------------------------------------------------------------------------------------------


def test_shards_in_an_object_store_are_those_of_the_folder(
    packed: Path, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    here = samples_of(packed)
    with s3.door() as door:
        for name, value in door.env.items():
            monkeypatch.setenv(name, value)
        files = fsspec.filesystem("s3", skip_instance_cache=True)  # with the environment of this test
        files.put(f"{packed}/", "bucket/shards/", recursive=True)
        monkeypatch.setattr(remote, "_filesystem", lambda protocol, pid: files)
        there = samples_of("s3://bucket/shards")
        for epoch in (None, 0):
            assert torch.equal(there.batch(ALL, epoch)[0], here.batch(ALL, epoch)[0])
        patterns = {"train_shards": "train-*.tar", "eval_shards": "val-00000{0..1}.tar"}
        assert len(load_shards("s3://bucket/shards", **patterns)[0]) == 24
        door.rule = lambda request: 403
        with pytest.raises(DataError, match="s3://bucket/shards: can't be listed: access is denied"):
            load_shards("s3://bucket/shards")
