"""A run's copy in an object store: whole or not at all, and only verified data is loaded."""

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from rankup.errors import UserError
from rankup.job import open_checkpoint
from rankup.loop.settings import FORMAT
from rankup.places.lease import Lineage
from rankup.places.object_store import ObjectStore
from rankup.state.copies import Damaged
from rankup.state.place import Folder
from rankup.state.saver import Options
from rankup.state.second_place import SecondPlace, _copies, newest_run
from tests.rigs.checkpoints import damaged, fetch, files_of, newest, save, second_place, steps, training_state

RUN = "0123456789abcdef"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "copies")


def open_store(url: str, machine: Path, *, number: int = 1, keep: int = 9) -> SecondPlace:
    """Return the place of the run in a folder of this machine, for the owner with this number."""
    place = second_place(url, machine / "run", "it", Options(keep=keep))
    place.run, place.lease.number = RUN, number
    return place


def newest_of(place: SecondPlace) -> Path | None:
    """Fetch the newest whole copy there, and return its path."""
    for one in _copies(place.place.names()):
        with contextlib.suppress(Damaged):
            return fetch(place, one).path
    return None


def test_newest_checkpoint_is_restored_and_old_or_partial_ones_are_removed(url: str, tmp_path: Path) -> None:
    store = open_store(url, tmp_path / "here", keep=2)
    store.place.write(f"00000001/checkpoints/{RUN}/step-00000005-0123456789ab/model.safetensors", b"cut off")
    for step in (10, 20, 30):
        store.upload(save(tmp_path / "here", step))
    left = {name.split("/")[3][:13] for name in store.place.names()}
    assert left == {"step-00000020", "step-00000030"}
    there = tmp_path / "there" / "run" / "checkpoints"
    assert newest_of(open_store(url, tmp_path / "there")) == there / "step-00000030"
    assert newest(there) == (30, [])
    assert steps(there) == [30]


def test_upload_of_a_copy_lists_the_store_once(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lists, names = list[str](), ObjectStore.names
    store = open_store(url, tmp_path / "here", keep=1)
    monkeypatch.setattr(ObjectStore, "names", lambda place: lists.append(place.url) or names(place))
    for step in (10, 20):
        store.upload(save(tmp_path / "here", step))
    assert lists == [store.place.url] * 2
    assert {name.split("/")[3][:13] for name in names(store.place)} == {"step-00000020"}


def test_store_with_copies_but_no_run_file_is_refused(url: str, tmp_path: Path) -> None:
    store = open_store(url, tmp_path)
    store.upload(save(tmp_path / "here", 10))
    with pytest.raises(UserError, match=r"got no run\.json, and checkpoints of 0123456789abcdef\."):
        newest_run(store.place, store.place.names())


@pytest.mark.parametrize("content", [json.dumps(Lineage("../..", "", "", [], 1).values()), "[" * 100_000],
                         ids=["id", "nested"])
def test_run_file_that_is_unreadable_or_leads_out_of_its_folder_is_ignored(url: str, content: str) -> None:
    there = ObjectStore.open(url, warn=str)
    there.write("00000001/run.json", content.encode())
    assert newest_run(there, there.names()) == (0, None)


def test_copy_of_a_later_format_is_refused_by_its_address(url: str, tmp_path: Path) -> None:
    store = open_store(f"file://{url}", tmp_path / "here")
    files = files_of(training_state(8, format=FORMAT + 1), {"weight": torch.ones(3)})
    store.upload(Folder(tmp_path / "here").write(8, files))
    store.place.write("00000001/run.json", json.dumps(Lineage(RUN, "", "", [], 1).values()).encode())
    with pytest.raises(UserError, match=rf"^checkpoint: file:{url}/run must be of format {FORMAT}, got format "):
        open_checkpoint(f"file://{url}/run")


def test_folder_of_a_stranger_with_a_large_number_is_passed_over_at_once(url: str) -> None:
    there, line = ObjectStore.open(url, warn=str), Lineage(RUN, "", "", [], 1)
    there.write("00000001/run.json", json.dumps(line.values()).encode())
    there.write("202611291745000/notes.txt", b"of that minute")
    assert newest_run(there, there.names()) == (1, line)


def test_thousand_damaged_stores_give_no_wrong_state(url: str, tmp_path: Path) -> None:
    rng = random.Random(0)
    store = open_store(url, tmp_path / "here")
    for step in (10, 20, 30):
        store.upload(save(tmp_path / "here", step))
    objects = {name: store.place.read(name) or b"" for name in sorted(store.place.names())}
    found: dict[int | None, int] = {}
    for case in range(1000):
        for name, content in objects.items():
            store.place.write(name, content)
        whole = {10, 20, 30}
        for name in rng.sample(list(objects), rng.randint(1, 3)):
            left = damaged(objects[name], list(objects.values()), rng)
            store.place.remove([name])
            if left is not None:
                store.place.write(name, left)
            if left != objects[name]:
                whole -= {int(name.split("/")[3][5:13])}
        fetched = newest_of(open_store(url, tmp_path / str(case)))
        step = newest(fetched.parent)[0] if fetched else None
        assert step == max(whole, default=None), f"case {case}"
        found[step] = found.get(step, 0) + 1
    assert found.keys() == {10, 20, 30, None}


def test_changed_files_beside_the_checkpoints_are_copied(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user may remove files meanwhile, but none of a checkpoint."""
    def upload(place: ObjectStore, files: dict[str, Path], usual: Any = ObjectStore.upload) -> None:
        for file in (file for file in files.values() if file.name in ("gone", "model.safetensors")):
            file.unlink()
        usual(place, files)

    monkeypatch.setattr(ObjectStore, "upload", upload)
    run = tmp_path / "here" / "run"
    for name in ("metrics.jsonl", "tensorboard/events.1", "tensorboard/gone"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(f"content of {name}\n")
    Lineage(RUN, "", "", [], 1).write(run)
    store = open_store(url, run.parent)
    first = store.place.below("00000001")
    store.upload(None)
    first.remove(first.names())
    (run / "run.json").touch()
    (run / "metrics.jsonl").write_text("more\n")
    store.upload(None)
    assert sorted(first.names()) == ["metrics.jsonl", "run.json"]
    open_store(url, run.parent, number=2).upload(None)
    for name in ("lease.json", ".lock", "tensorboard/../../elsewhere"):
        store.place.write(f"00000002/{name}", b"")  # not rankup's
    there = tmp_path / "there" / "run"
    open_store(url, there.parent).fetch_files(2)
    found = sorted(path.relative_to(there).as_posix() for path in there.rglob("*") if path.is_file())
    assert found == ["metrics.jsonl", "run.json", "tensorboard/events.1"]
    with pytest.raises(UserError, match=r"step-00000010 must stay while it is uploaded, got .*/model\.safetensors"):
        store.upload(save(run, 10))
