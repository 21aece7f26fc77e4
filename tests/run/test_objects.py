"""A run in a real S3 server that is slow, deaf, full, forgetful or denies access, through s3fs."""

import random
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from rankup.errors import PeerLost, UserError
from tests.rigs.checkpoints import newest, save
from tests.rigs.jobs import free_port
from tests.rigs.object_store import BUCKET, S3, Door, Request
from train.run import objects
from train.run.objects import Objects
from train.run.run_store import RunStore
from train.run.store_lease import StoreLease

RUN = "0123456789abcdef"


@pytest.fixture
def door(s3: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    import s3fs

    with s3.door() as made:
        for name, value in made.env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(objects, "FIRST_PAUSE_S", 0.02)
        s3fs.S3FileSystem.clear_instance_cache()  # clients know the door of the test before
        yield made
        s3fs.S3FileSystem.clear_instance_cache()


class Place:
    """Where a test's objects are, in the store."""

    def __init__(self, name: str) -> None:
        self.url = f"s3://{BUCKET}/{name}"
        self.said: list[str] = []

    def objects(self, timeout_s: float = 0.0) -> Objects:
        return Objects.open(self.url, warn=self.said.append, timeout_s=timeout_s)

    def store(self, timeout_s: float = 0.0) -> RunStore:
        return RunStore(self.objects(timeout_s))


@pytest.fixture
def place(door: Door, tmp_path: Path) -> Place:
    return Place(tmp_path.name)


def test_a_checkpoint_goes_to_s3_and_comes_back(door: Door, place: Place, tmp_path: Path) -> None:
    for step in (10, 20):
        place.store().upload_checkpoint(save(tmp_path / "here", step), run=RUN, keep=1)
    written = [request.name.split("/")[-1] for request in door.seen if request.method == "PUT"]
    assert written[3::5] == ["manifest.json"] * 2, "it comes after what it names"
    assert place.store().fetch_newest(tmp_path / "there", run=RUN) is not None
    assert newest(tmp_path / "there") == (20, [])
    left = {name.split("/")[2][:13] for name in place.objects().names("checkpoints")}
    assert left == {"step-00000020"}


def test_a_large_file_goes_in_parts(door: Door, place: Place, tmp_path: Path) -> None:
    content = random.Random(0).randbytes(2 * objects.PART + 1)
    (tmp_path / "large").write_bytes(content)
    place.objects().upload({"large": tmp_path / "large"})
    parts = sorted(request.size for request in door.seen if "partNumber" in request.query)
    assert len(parts) == 3
    assert sum(parts) >= len(content)  # a checksum goes with them
    assert place.objects().read("large") == content


def test_a_large_file_has_time_as_long_as_its_parts_are_taken(
    door: Door, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, failed, over = [0.0], list[str](), threading.Event()
    monkeypatch.setattr(objects, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda pause_s: None))
    (tmp_path / "large").write_bytes(bytes(6 * objects.PART))

    def slow(request: Request) -> int | None:
        clock[0] += 100 if "partNumber" in request.query else 0
        if "partNumber=6" not in request.query or failed:
            return None
        failed.append(request.query)
        return 503

    door.rule = slow
    place.objects().while_moving(300).upload({"large": tmp_path / "large"})
    assert place.objects().size("large") == 6 * objects.PART
    assert failed

    def silent(request: Request) -> None:
        clock[0] += 400
        over.wait(60)

    door.rule = silent
    monkeypatch.setattr(objects, "SMALL_S", 0.2)
    with pytest.raises(PeerLost, match=r"did not answer in time: write large: .* was not taken in time"):
        place.objects().while_moving(0.3).upload({"large": tmp_path / "large"})
    over.set()


@pytest.mark.parametrize("status", [500, 503])
def test_what_fails_for_a_moment_is_tried_again(status: int, door: Door, place: Place, tmp_path: Path) -> None:
    failures = iter([status] * 6)
    door.rule = lambda request: next(failures, None)
    place.store(timeout_s=60).upload_checkpoint(save(tmp_path / "here", 10), run=RUN, keep=1)
    assert place.store().fetch_newest(tmp_path / "there", run=RUN) is not None
    assert "tried again for" in place.said[0]


def test_a_slow_store_is_waited_for(door: Door, place: Place, tmp_path: Path) -> None:
    door.rule = lambda request: time.sleep(0.1)
    place.store(timeout_s=60).upload_checkpoint(save(tmp_path / "here", 10), run=RUN, keep=1)
    assert place.store().fetch_newest(tmp_path / "there", run=RUN) is not None
    assert place.said == []


def test_a_store_that_stays_away_is_a_lost_peer(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")  # nobody listens
    with pytest.raises(PeerLost, match="did not answer in time: write hint"):
        place.objects(timeout_s=0.2).write("hint", b"")
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        s3fs.S3FileSystem.clear_instance_cache()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        monkeypatch.setattr(objects, "SMALL_S", 0.2)
        with pytest.raises(PeerLost, match="did not answer in time: write hint"):
            place.objects(timeout_s=0.2).write("hint", b"")


@pytest.mark.parametrize(("status", "why"), [(403, "denies access"), (507, "is full")])
def test_a_store_that_refuses_is_told_to_the_user_at_once(
    status: int, why: str, door: Door, place: Place, tmp_path: Path
) -> None:
    place.store().upload_checkpoint(save(tmp_path / "here", 10), run=RUN, keep=1)
    door.rule = lambda request: status if request.method == "PUT" else None
    with pytest.raises(UserError, match=f"{place.url}.* {why}: write checkpoints/"):
        place.store(timeout_s=60).upload_checkpoint(save(tmp_path / "here", 20), run=RUN, keep=1)
    door.rule = lambda request: None
    assert place.store().fetch_newest(tmp_path / "there", run=RUN) == tmp_path / "there" / "step-00000010"


def test_a_bucket_that_is_missing_is_the_users_mistake(door: Door) -> None:
    with pytest.raises(UserError, match="s3://no-such-bucket/runs: the bucket or container must exist"):
        Objects.open("s3://no-such-bucket/runs", warn=print, timeout_s=60).write("hint", b"")


@pytest.mark.parametrize(("url", "message"), [
    ("gs://bucket/runs", r"needs a package that is not installed here\. pip install 'rankup\[gcs\]'"),
    ("nowhere://bucket/runs", "must be an address that fsspec knows, got: ValueError: Protocol not known: nowhere"),
])
def test_an_address_without_its_package_is_the_users_mistake(
    url: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UserError, match=message):
        Objects.open(url, warn=print, timeout_s=0)


def test_a_store_that_loses_what_it_took_gets_no_manifest(door: Door, place: Place, tmp_path: Path) -> None:
    lost = "optimizer.safetensors"
    door.rule = lambda request: 200 if request.method == "PUT" and request.name.endswith(lost) else None
    with pytest.raises(UserError, match="must keep what is written, got None bytes"):
        place.store().upload_checkpoint(save(tmp_path / "here", 10), run=RUN, keep=1)
    assert not [request for request in door.seen if request.name.endswith("manifest.json") and request.method == "PUT"]


def test_twenty_damaged_checkpoints_on_s3_give_no_wrong_state(door: Door, place: Place, tmp_path: Path) -> None:
    rng = random.Random(1)
    store = place.store()
    for step in (10, 20):
        store.upload_checkpoint(save(tmp_path / "here", step), run=RUN, keep=9)
    newer = [name for name in store.objects.names(f"checkpoints/{RUN}") if "step-00000020" in name]
    for case in range(20):
        name = rng.choice(newer)
        content = store.objects.read(name)
        assert content
        damaged = rng.choice([None, content[: rng.randrange(len(content))], bytes(len(content))])
        if damaged is None:
            store.objects.remove([name])
        else:
            store.objects.write(name, damaged)
        there = tmp_path / str(case)
        assert place.store().fetch_newest(there, run=RUN) == there / "step-00000010"
        assert newest(there)[0] == 10
        store.objects.write(name, content)


# Who owns the run ----------------------------------------------------------------------------------------------------


def lease(place: Place, folder: Path, attempt: str, *, life_s: float = 5.0) -> StoreLease:
    folder.mkdir(exist_ok=True)
    return StoreLease(place.objects(timeout_s=5), folder, attempt, life_s=life_s, beat_s=0.1)


def test_a_second_attempt_is_refused_and_told_the_owner(place: Place, tmp_path: Path) -> None:
    second = lease(place, tmp_path / "b", "second")
    with lease(place, tmp_path / "a", "first"), pytest.raises(UserError, match="owned by a live attempt, first on "):
        second.__enter__()
    with lease(place, tmp_path / "b", "second") as taken:  # it was given back
        taken.check()


def test_of_two_attempts_in_one_moment_one_gets_the_run(door: Door, place: Place, tmp_path: Path) -> None:
    """Both find nobody, and write at once: the store lets one of them."""
    first, second = lease(place, tmp_path / "a", "first"), lease(place, tmp_path / "b", "second")

    def between(request: Request) -> None:
        if request.method == "PUT":
            door.rule = lambda request: None
            first.__enter__()

    door.rule = between
    with pytest.raises(UserError, match="is owned by a live attempt, first on "):
        second.__enter__()
    first.check()
    first.__exit__()


def test_the_successor_of_a_killed_attempt_waits_for_its_silence_but_not_on_the_same_disk(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = lease(place, tmp_path / "a", "killed")
    monkeypatch.setattr(killed, "_beat", lambda: None)
    killed.__enter__()
    watched: list[int] = []
    monkeypatch.setattr(StoreLease, "_alive", lambda self, number, owner: bool(watched.append(number)))
    with lease(place, tmp_path / "a", "same disk"):
        assert watched == []
    again = lease(place, tmp_path / "a", "killed")
    monkeypatch.setattr(again, "_beat", lambda: None)
    again.__enter__()
    with lease(place, tmp_path / "b", "another machine"):
        assert watched == [3]


def test_an_owner_that_was_frozen_and_replaced_publishes_nothing(place: Place, tmp_path: Path) -> None:
    frozen = lease(place, tmp_path / "a", "frozen")
    frozen._beat = lambda: None  # type: ignore[method-assign]
    frozen.__enter__()
    with lease(place, tmp_path / "b", "successor", life_s=0.3):
        assert frozen.is_ours()
        with pytest.raises(PeerLost, match=r"another attempt owns .* by now \(successor on "):
            place.store().upload_checkpoint(save(tmp_path / "here", 10), run=RUN, keep=1, check_owner=frozen.check)
        assert not frozen.is_ours()
    assert place.store().fetch_newest(tmp_path / "there", run=RUN) is None


def test_a_store_without_conditions_is_said(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Objects, "create", lambda self, name, content: self.write(name, content) is None)
    with lease(place, tmp_path / "a", "first"):
        assert place.said == [
            f"{place.url} knows no conditional writes: two attempts that begin in the same second may both train"
        ]
