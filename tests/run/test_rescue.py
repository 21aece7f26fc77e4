"""Where a rescue is written, who may take it, and what is left of it in the end."""

import json
import os
import shutil
import stat
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from rankup.places.lineage import Lineage
from rankup.state.copies import Content, fingerprint
from tests.rigs.checkpoints import files_of, flip, train, training_state
from tests.rigs.fork_server import Forks
from train.config import Config
from train.data.sources import cache
from train.run import rescue
from train.run.checkpoint import load_checkpoint

RUN, ATTEMPT = "0123456789abcdef", "20200101T000000-abcdef"
LINEAGE = Lineage(RUN, ATTEMPT, "", [[ATTEMPT, 0]])
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of /dev/shm; the temporary directory is `tmp_path / "tmp"`."""
    for name in ("shm", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(rescue, "SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr(rescue.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    return tmp_path / "shm"


def files(step: int, **fields: Any) -> dict[str, Content]:
    return files_of(training_state(step, **fields), {"weight": torch.full((3,), float(step))})


def write(step: int, **fields: Any) -> str:
    return rescue.write(RUN, step, lambda: files(step, **fields))


def found() -> int | None:
    paths = rescue.find(LINEAGE, Config())
    return load_checkpoint(paths[-1]).step if paths else None


class Ranks:
    """A group of one rank, as far as `choose` looks at it."""

    rank, world_size = 0, 1

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, value: Any, *, source: int = 0) -> Any:
        return value

    def broadcast_bytes(self, data: bytes, *, source: int = 0) -> bytes:
        return data


def chosen(*, above: int = 0) -> tuple[int | None, list[str]]:
    said: list[str] = []
    found = rescue.choose(Ranks(), LINEAGE, Config(), above=above, warn=said.append)  # type: ignore[arg-type]
    return (found.step if found else None), said


# Writing --------------------------------------------------------------------------------------------------------


def test_rescue_is_a_checkpoint_that_only_its_user_can_read(memory: Path) -> None:
    assert write(7) == ""
    path = memory / f"rankup-{os.getuid()}" / RUN / "step-00000007"
    assert load_checkpoint(path).model["weight"].tolist() == [7.0] * 3
    assert all(stat.S_IMODE(folder.stat().st_mode) == 0o700 for folder in (path.parent, path.parent.parent))


def test_second_rank_of_a_node_copies_nothing_unless_it_is_a_step_further(memory: Path) -> None:
    def unexpected() -> dict[str, bytes]:
        raise AssertionError("the state was copied once more")

    assert write(7) == ""
    assert rescue.write(RUN, 7, unexpected) == ""
    assert rescue.write(RUN, 6, unexpected) == ""
    assert write(8) == ""
    assert [path.name for path in (memory / f"rankup-{os.getuid()}" / RUN).glob("step-*")] == ["step-00000008"]


def test_rank_that_was_killed_while_it_wrote_stands_in_nobodys_way(memory: Path) -> None:
    pid = os.fork()
    if pid == 0:
        rescue.write(RUN, 7, lambda: os.kill(os.getpid(), 9))  # type: ignore[arg-type, return-value]
    os.waitpid(pid, 0)
    assert write(7) == ""
    assert found() == 7


@pytest.mark.parametrize(
    ("full", "place"), [((), "shm"), (("shm",), "tmp"), (("shm", "tmp"), None)]
)
def test_temporary_directory_where_shared_memory_is_small_and_nothing_where_both_are(
    memory: Path, monkeypatch: pytest.MonkeyPatch, full: tuple[str, ...], place: str | None
) -> None:
    monkeypatch.setattr(
        rescue.shutil, "disk_usage", lambda path: Usage(0, 0, 1000 if Path(path).name in full else 2**30)
    )
    problem = write(7)
    for name in full:
        assert place is not None or f"{memory.parent / name} has 0 MiB free, " in problem
    assert (problem == "") == (place is not None)
    assert [path.parents[2].name for path in rescue.find(LINEAGE, Config())] == ([place] if place else [])


def test_folder_that_another_user_may_have_made_is_not_used(memory: Path) -> None:
    own = memory / f"rankup-{os.getuid()}"
    (memory / "elsewhere").mkdir(mode=0o700)
    own.symlink_to(memory / "elsewhere")
    assert write(7) == ""
    assert [path.parents[2].name for path in rescue.find(LINEAGE, Config())] == ["tmp"]
    assert list((memory / "elsewhere").glob("*/step-*")) == []
    own.unlink()
    (memory.parent / "tmp" / own.name).rename(own)
    assert found() == 7
    own.chmod(0o777)  # somebody else may have put it there
    assert found() is None
    assert write(8) == ""
    assert [path.parents[2].name for path in rescue.find(LINEAGE, Config())] == ["tmp"]


def test_old_data_in_the_cache_are_no_old_rescues(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rescue, "SHARED_MEMORY", memory / "none")
    for name in ("RANKUP_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "~")  # as for a user without a home directory
    data = cache.writable_cache() / "FashionMNIST"
    data.mkdir(mode=0o700)
    os.utime(data, (0, 0))
    assert write(7) == ""
    assert data.exists()


# Taking ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"run": "fedcba9876543210"}, {"attempt": "20200101T000001-abcdef"}, {"random": "dice"},
        {"config": Config(lr=0.5).model_dump()},
    ],
)
def test_rescue_of_other_origin_is_never_taken(memory: Path, fields: dict[str, Any]) -> None:
    assert write(7, **fields) == ""
    assert found() is None
    assert chosen() == (None, [])


def test_setting_without_effect_on_the_weights_may_change(memory: Path) -> None:
    write(7, config=Config(keep=9, epochs=99).model_dump())
    assert found() == 7


def test_newest_is_chosen_and_a_checkpoint_of_the_same_step_first(memory: Path) -> None:
    write(7)
    assert chosen(above=6) == (7, [])
    assert chosen(above=7) == (None, [])
    # A rescue in the other place
    (memory.parent / "tmp" / f"rankup-{os.getuid()}").mkdir(mode=0o700)
    shutil.copytree(memory / f"rankup-{os.getuid()}" / RUN, memory.parent / "tmp" / f"rankup-{os.getuid()}" / RUN)
    write(9)
    assert chosen(above=6) == (9, [])


@pytest.mark.parametrize("name", ["model.safetensors", "tree.json", "manifest.json"])
def test_damaged_rescue_is_passed_over_and_said(memory: Path, name: str) -> None:
    write(7)
    path = memory / f"rankup-{os.getuid()}" / RUN / "step-00000007"
    flip(path / name, 20)
    step, said = chosen()
    assert step is None
    assert len(said) == 1
    assert said[0].startswith(f"a rescue was passed over: checkpoint: {path} must be a whole checkpoint, got a damaged")
    assert chosen() == (None, [])


def test_damaged_rescue_that_cannot_be_removed_is_passed_over_too(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(7)
    flip(memory / f"rankup-{os.getuid()}" / RUN / "step-00000007" / "model.safetensors", 20)
    monkeypatch.setattr(rescue.shutil, "rmtree", lambda *values, **more: None)
    step, said = chosen()
    assert (step, len(said)) == (None, 1)


def test_another_format_is_not_looked_at(memory: Path) -> None:
    write(7)
    path = memory / f"rankup-{os.getuid()}" / RUN / "step-00000007" / "state.json"
    path.write_text(path.read_text().replace('"format": ', '"format": 1'))
    assert chosen() == (None, [])


# Removing -------------------------------------------------------------------------------------------------------


def test_nothing_is_left_once_a_later_checkpoint_stands(memory: Path) -> None:
    write(7)
    rescue.remove(RUN, up_to=6)
    rescue.remove(RUN, above=7)
    assert found() == 7
    rescue.remove(RUN, up_to=7)
    assert list(memory.iterdir()) == []
    rescue.remove(RUN)
    rescue.remove(RUN, up_to=9)


def test_ranks_of_a_node_remove_it_at_the_same_time(memory: Path) -> None:
    with ThreadPoolExecutor(4) as ranks:
        for step in range(1, 60):
            write(step)
            for done in [ranks.submit(rescue.remove, RUN, up_to=step) for _ in range(4)]:
                done.result()
    assert found() is None


def test_other_runs_keep_theirs(memory: Path) -> None:
    write(7)
    rescue.write("fedcba9876543210", 7, lambda: files(7))
    rescue.remove("fedcba9876543210")
    assert found() == 7
    assert len(list(memory.glob("*/*"))) == 1


def test_rescue_that_nobody_went_on_with_is_removed_after_a_week(memory: Path) -> None:
    for run in ("fedcba9876543210", "0000000000000000"):
        rescue.write(run, 7, lambda: files(7))
    old = memory / f"rankup-{os.getuid()}" / "fedcba9876543210"
    os.utime(old, (0, time.time() - 8 * 24 * 3600))
    write(7)
    assert {path.name for path in old.parent.iterdir()} == {RUN, "0000000000000000"}


@pytest.mark.parametrize("file", ["run.json", "state.json"])
def test_id_of_a_run_leads_to_no_folder_elsewhere(forks: Forks, tmp_path: Path, file: str) -> None:
    """Rescues lie in a folder of that name, and are removed."""
    victim = tmp_path / "private" / "thesis"
    for folder in (victim.parent, victim):
        folder.mkdir(mode=0o700)
    (victim / "text").write_text("years of work")
    line = train(tmp_path / "run", "--max-steps", "4", "--save-every-steps", "4")
    codes, output = forks.run(*line)
    assert codes == [0], output
    checkpoint = tmp_path / "run/checkpoints/step-00000004"
    changed = tmp_path / "run/run.json" if file == "run.json" else checkpoint / file
    changed.write_text(json.dumps({**json.loads(changed.read_text()), "run": str(victim)}))
    if file == "state.json":
        (tmp_path / "run/run.json").unlink()
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        manifest["files"][file] = fingerprint(changed.read_bytes())
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    codes, output = forks.run(*line[:-3], "8", *line[-2:])
    assert codes == [0 if file == "run.json" else 2], output
    assert file == "run.json" or f'must be of a run with an id, got "{victim}"' in output
    assert (victim / "text").exists()
