"""A run in a real S3 server that is slow, deaf, full or denies access, through s3fs."""

import asyncio
import os
import random
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rankup.agent.leader_files import id_of
from rankup.errors import PeerLost, UserError
from rankup.places import object_store
from rankup.places.files import staged, write_atomically
from rankup.places.lease import Lease, StoreLease
from rankup.places.object_store import ObjectStore
from rankup.state.saver import Options
from tests.rigs.checkpoints import fetch, save, second_place
from tests.rigs.object_store import BUCKET, S3, Door, Request
from tests.rigs.small_filesystems import small_disk


@pytest.fixture
def door(s3: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    import s3fs

    with s3.door() as made:
        for name, value in made.env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(object_store, "FIRST_PAUSE_S", 0.02)
        s3fs.S3FileSystem.clear_instance_cache()  # clients may know the door of an earlier test
        yield made
        s3fs.S3FileSystem.clear_instance_cache()


class Bucket:
    """The place of a test's objects."""

    def __init__(self, folder: Path) -> None:
        self.url = f"s3://{BUCKET}/{folder.name}"
        self.said: list[str] = []

    def place(self, timeout_s: float = 0.0) -> ObjectStore:
        return ObjectStore.open(self.url, warn=self.said.append, timeout_s=timeout_s)


@pytest.fixture
def bucket(door: Door, tmp_path: Path) -> Bucket:
    return Bucket(tmp_path)


def test_large_file_is_uploaded_in_parts(door: Door, bucket: Bucket, tmp_path: Path) -> None:
    content = random.Random(0).randbytes(2 * object_store.PART + 1)
    (tmp_path / "large").write_bytes(content)
    bucket.place().upload({"large": tmp_path / "large"})
    parts = sorted(request.size for request in door.seen if "partNumber" in request.query)
    assert len(parts) == 3
    assert sum(parts) >= len(content)  # each part has a checksum too
    assert bucket.place().read("large") == content


def test_requests_that_fail_for_a_moment_are_retried(door: Door, bucket: Bucket, tmp_path: Path) -> None:
    """Each request fails once while a copy is uploaded and fetched."""
    failed = set[Request]()

    def fail_once(request: Request) -> int | None:
        known = request in failed
        failed.add(request)
        return None if known else 503

    here, there = (second_place(bucket.url, tmp_path / disk / "run", "it", Options()) for disk in ("here", "there"))
    here.run, here.lease.number = "0123456789abcdef", 1
    here.place = replace(here.place, warn=bucket.said.append)
    path = save(tmp_path / "copies", 10)
    door.rule = fail_once
    here.upload(path)
    there.retry_for(60)
    (manifest,) = (name for name in there.place.names() if name.endswith("/manifest.json"))
    assert fetch(there, manifest.rpartition("/")[0]).step == 10
    assert {request.method for request in failed} >= {"GET", "PUT"}
    assert "retrying for" in bucket.said[0]


def test_failed_write_keeps_the_old_file_and_leaves_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError), staged(path) as staging:
        staging.write_text("\udc80")
    assert (path.read_text(), [*tmp_path.iterdir()]) == ("old", [path])


def test_only_one_of_two_creates_a_name_in_a_folder(tmp_path: Path) -> None:
    """It decides which of two nodes that are cut apart continues."""
    one, other = (ObjectStore.open(str(tmp_path), warn=print) for _ in range(2))
    created = [one.create("x.json", b"1"), other.create("x.json", b"2"), one.create("x.json", b"1")]
    assert (created, one.read("x.json")) == ([True, False, True], b"1")
    (tmp_path / "x.json").write_bytes(b"")  # as while its creator is still writing it
    other.must_refuse("x.json", option="run_dir")


@pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
def test_folder_takes_what_is_no_file_for_absent(tmp_path: Path, kind: str) -> None:
    """A read of it would be retried for minutes, or wait for ever."""
    (tmp_path / "a").write_text("{}")
    if kind == "folder":
        (tmp_path / "b").mkdir()
    else:
        _ = os.mkfifo(tmp_path / "b") if kind == "pipe" else (tmp_path / "b").symlink_to("b")
    place = ObjectStore.open(str(tmp_path), warn=pytest.fail, timeout_s=60)
    assert (place.names(), place.read("b"), place.read_json("b")) == ({"a": 2}, None, {})


def test_read_only_folder_is_not_tried_again(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as (disk, resize):
        place = ObjectStore.open(str(disk), warn=pytest.fail, timeout_s=60)
        place.write("x", b"1")
        resize("1m,ro")
        for write in (place.write, place.create):
            with pytest.raises(UserError, match="must be a folder that can be written to"):
                write("y", b"1")
        assert place.read("x") == b"1"


def test_name_below_a_file_is_not_taken_for_one_that_another_attempt_has(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(PeerLost, match="File exists"):
        ObjectStore.open(str(tmp_path / "loop"), warn=print).create("x", b"1")


def test_store_that_does_not_answer_is_a_lost_peer(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        monkeypatch.setattr(object_store, "REQUEST_S", 0.2)
        with pytest.raises(PeerLost, match="did not answer in time: write hint"):
            bucket.place(timeout_s=0.2).write("hint", b"")


def test_missing_bucket_is_the_users_mistake(door: Door) -> None:
    with pytest.raises(UserError, match="s3://no-such-bucket/runs must be in a bucket or container that exists: "):
        ObjectStore.open("s3://no-such-bucket/runs", warn=print, timeout_s=60).write("hint", b"")


@pytest.mark.parametrize(("url", "message"), [
    ("gs://bucket/runs", r"needs a package that is not installed here\. pip install 'rankup\[gcs\]'"),
    ("nowhere://bucket/runs", "must be an address that fsspec knows, got: ValueError: Protocol not known: nowhere"),
])
def test_address_without_its_package_is_the_users_mistake(
    url: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UserError, match=message):
        ObjectStore.open(url, warn=print, timeout_s=0)


def lease(bucket: Bucket, attempt: str, tokens: tuple[str, str] = ("", ""), *, life_s: float = 5.0) -> StoreLease:
    folder = Lease(Path("/nowhere"), attempt)
    folder.token, folder.predecessor = tokens[0] or folder.token, tokens[1]
    return StoreLease(bucket.place(timeout_s=5), folder, life_s=life_s, beat_s=0.1)


def test_second_attempt_is_refused_and_told_the_owner(bucket: Bucket) -> None:
    second = lease(bucket, "second")
    with lease(bucket, "first"), pytest.raises(UserError, match="owned by a live attempt, first on "):
        second.__enter__()
    with lease(bucket, "second") as taken:  # the first has released it
        taken.look()


def test_one_of_two_simultaneous_attempts_gets_the_run(door: Door, bucket: Bucket) -> None:
    """Both find no owner and write at once. The store accepts one of them."""
    first, second = lease(bucket, "first"), lease(bucket, "second")

    def between(request: Request) -> None:
        if request.method == "PUT":
            door.rule = lambda request: None
            first.__enter__()

    door.rule = between
    with pytest.raises(UserError, match="is owned by a live attempt, first on "):
        second.__enter__()
    first.look()
    first.__exit__()


def test_successor_on_a_killed_attempts_disk_does_not_wait_for_its_silence(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StoreLease, "_beat", lambda self: None)
    lease(bucket, "killed", ("its token", "")).__enter__()
    with lease(bucket, "same disk", ("another", "its token"), life_s=600):
        pass


def test_store_without_conditional_writes_is_refused(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ObjectStore, "create", lambda self, name, content: self.write(name, content) is None)
    uses = {"run_dir": lease(bucket, "first").__enter__, "--shared-dir": lambda: asyncio.run(id_of(bucket.url))}
    for option, use in uses.items():
        with pytest.raises(UserError, match=f"^{option} must be a place with conditional writes, .*, got {bucket.url}"):
            use()
