"""A run's copy in a store of objects: whole or not at all, and nothing is loaded that a digest does not confirm."""

import json
import random
from pathlib import Path

import pytest

from rankup.errors import UserError
from rankup.places.lease import Lineage
from rankup.places.place import Place
from rankup.state.second_place import StoredRun
from tests.rigs.checkpoints import damaged, newest, save, steps

RUN = "0123456789abcdef"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "copy")


def open_store(url: str, folder: Path = Path("nowhere"), *, number: int = 1) -> StoredRun:
    return StoredRun(Place.open(url, warn=str), folder, number=number)


def test_the_newest_checkpoint_comes_back_and_old_ones_and_a_killed_upload_are_removed(
    url: str, tmp_path: Path
) -> None:
    store = open_store(url)
    store.place.write(f"00000001/checkpoints/{RUN}/step-00000005-0123456789ab/model.safetensors", b"cut off")
    for step in (10, 20, 30):
        store.upload_copy(save(tmp_path / "here", step), run=RUN, keep=2)
    left = {name.split("/")[3][:13] for name in store.place.names()}
    assert left == {"step-00000020", "step-00000030"}
    there = tmp_path / "there" / "checkpoints"
    assert open_store(url, there.parent).fetch_newest(RUN) == there / "step-00000030"
    assert newest(there) == (30, [])
    assert steps(there) == [30]


def test_a_store_with_copies_and_no_run_file_is_refused(url: str, tmp_path: Path) -> None:
    open_store(url).upload_copy(save(tmp_path / "here", 10), run=RUN, keep=9)
    with pytest.raises(UserError, match=r"must say in run\.json .*, got none, and checkpoints of 0123456789abcdef\."):
        open_store(url).newest_run()


@pytest.mark.parametrize("content", [json.dumps(Lineage("../..", "", "", [], 1).values()), "[" * 100_000],
                         ids=["id", "nested"])
def test_a_run_whose_id_leads_out_of_its_folder_or_that_can_not_be_read_is_no_run(url: str, content: str) -> None:
    store = open_store(url)
    store.place.write("00000001/run.json", content.encode())
    assert store.newest_run() == (0, None)


def test_a_thousand_damaged_stores_give_no_wrong_state(url: str, tmp_path: Path) -> None:
    """Each damages up to three objects."""
    rng = random.Random(0)
    store = open_store(url)
    for step in (10, 20, 30):
        store.upload_copy(save(tmp_path / "here", step), run=RUN, keep=9)
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
        there = tmp_path / str(case)
        try:
            fetched = open_store(url, there).fetch_newest(RUN)
        except UserError:
            fetched = None
        step = newest(there / "checkpoints")[0] if fetched else None
        assert step == max(whole, default=None), f"case {case}"
        found[step] = found.get(step, 0) + 1
    assert found.keys() == {10, 20, 30, None}


def test_files_beside_the_checkpoints_are_copied_where_they_changed(url: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for name in ("metrics.jsonl", "tensorboard/events.1"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(f"content of {name}\n")
    Lineage(RUN, "", "", [], 1).write(run)
    store, first = open_store(url, run), open_store(url).place.below("00000001")
    store.upload_files()
    first.remove(first.names())
    (run / "run.json").touch()
    (run / "metrics.jsonl").write_text("more\n")
    store.upload_files()
    assert sorted(first.names()) == ["metrics.jsonl", "run.json"]
    open_store(url, run, number=2).upload_files()
    for name in ("lease.json", ".lock", "tensorboard/../../elsewhere"):
        store.place.write(f"00000002/{name}", b"")  # somebody's
    there = tmp_path / "there"
    open_store(url, there).fetch_files(2)
    found = sorted(path.relative_to(there).as_posix() for path in there.rglob("*") if path.is_file())
    assert found == ["metrics.jsonl", "run.json", "tensorboard/events.1"]
