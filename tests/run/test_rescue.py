"""Where a rescue is written, which ranks may use it, and when it is removed."""

import errno
import json
import os
import random
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from rankup.state import copies
from rankup.state.copies import Content
from rankup.state.memory import list_held, remove, write_rescue
from tests.rigs.checkpoints import files_of, fingerprint, flip, load_checkpoint, train, training_state
from tests.rigs.fork_server import Forks

RUN, OTHER, ATTEMPT = "0123456789abcdef", "fedcba9876543210", "20200101T000000-abcdef"


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /dev/shm. The temporary folder is `tmp_path / "tmp"`."""
    for name in ("shm", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr("rankup.state.memory.SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "tmp"))
    return tmp_path / "shm"


def files(step: int, **fields: Any) -> dict[str, Content]:
    return files_of(training_state(step, **fields), {"weight": torch.full((3,), float(step))})


def write(step: int, **fields: Any) -> None:
    write_rescue(RUN, step, fields.get("attempt", ATTEMPT), lambda: files(step, **fields))


def found() -> int | None:
    steps = [load_checkpoint(path).step for path in list_held() if path.parent.name == RUN]
    return max(steps, default=None)


def test_rescue_is_a_checkpoint_that_only_its_user_can_read(memory: Path) -> None:
    write(7)
    path = memory / f"rankup-{os.getuid()}" / RUN / "step-00000007"
    assert load_checkpoint(path).tracked["model"]["weight"].tolist() == [7.0] * 3
    assert stat.S_IMODE(path.parents[1].stat().st_mode) == 0o700


def test_second_rank_of_a_node_writes_a_rescue_only_if_it_is_newer(memory: Path) -> None:
    def unexpected() -> dict[str, bytes]:
        raise AssertionError("the state was copied again")

    write(7)
    write_rescue(RUN, 7, ATTEMPT, unexpected)
    write_rescue(RUN, 6, ATTEMPT, unexpected)
    write(8)
    assert [path.name for path in (memory / f"rankup-{os.getuid()}" / RUN).glob("step-*")] == ["step-00000008"]


def test_ranks_of_a_node_that_rescue_together_copy_the_state_once(memory: Path) -> None:
    def make() -> dict[str, Content]:
        made.append(7)
        time.sleep(0.2)  # meanwhile the others come
        return files(7)

    made: list[int] = []
    with ThreadPoolExecutor(4) as ranks:
        for done in [ranks.submit(write_rescue, RUN, 7, ATTEMPT, make) for _ in range(4)]:
            done.result()
    assert (made, found()) == ([7], 7)


def test_rank_that_hangs_in_a_rescue_does_not_keep_the_others_from_theirs(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang() -> dict[str, Content]:
        begun.set()
        ended.wait()
        return files(7)

    monkeypatch.setattr("rankup.state.memory.TURN_S", 0.1)
    begun, ended = threading.Event(), threading.Event()
    with ThreadPoolExecutor(4) as ranks:
        hanging = ranks.submit(write_rescue, RUN, 7, ATTEMPT, hang)
        begun.wait()
        for other in [ranks.submit(write, 7) for _ in range(3)]:
            other.result()
        assert found() == 7
        ended.set()
        hanging.result()
    assert found() == 7


def at_each_moment(before: Callable[[], None]) -> None:
    """From now on, call `before` when this process opens, makes, renames or removes a file, or has written a chunk."""
    sys.addaudithook(lambda event, _: before() if event in ("open", "os.mkdir", "os.rename", "os.rmdir") else None)
    copies.on_write.append(lambda size: before())


def rescue_in_a_process(step: int, *, kill_at: int, moments: Path) -> int:
    """Write a rescue in a new process. It is killed at that moment, or else writes the number of moments to a file."""
    if pid := os.fork():
        return pid
    try:
        count = iter(range(1, sys.maxsize))
        at_each_moment(lambda: os.kill(os.getpid(), signal.SIGKILL) if next(count) == kill_at else None)
        write(step)
        moments.write_text(str(next(count)))
    finally:
        os._exit(0)


def test_kills_of_ranks_at_any_moment_of_a_rescue_leave_whole_copies(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "PIECE", 64)
    monkeypatch.setattr(copies, "CHUNK", 16)
    os.waitpid(rescue_in_a_process(7, kill_at=0, moments=memory.parent / "moments"), 0)
    last, draw = int((memory.parent / "moments").read_text()), random.Random(54)
    for turn in range(50):
        remove(RUN)
        write(6, attempt="earlier")
        kills = [draw.randrange(1, last) if rank < draw.randint(1, 3) else 0 for rank in range(3)]
        ranks = [rescue_in_a_process(7, kill_at=kill, moments=memory.parent / "moments") for kill in kills]
        ends = [os.waitpid(rank, 0)[1] for rank in ranks]
        assert found() in ((7,) if 0 in ends else (6, 7)), (turn, kills, ends)  # `found` verifies each copy
        write(8)  # the next rescue removes what is left of those that were killed
        assert [path.name for path in (memory / f"rankup-{os.getuid()}" / RUN).iterdir()] == ["step-00000008"]


def test_removal_by_one_rank_spares_the_rescue_that_another_writes(memory: Path) -> None:
    def make() -> dict[str, Content]:
        (folder / ".writing-step-00000008").mkdir()
        saved.start()
        saved.join(0.2)
        assert (folder / ".writing-step-00000008").exists()
        return files(8)

    write(6)
    folder, saved = memory / f"rankup-{os.getuid()}" / RUN, threading.Thread(target=remove, args=(RUN, range(8, 99)))
    write_rescue(RUN, 8, ATTEMPT, make)
    saved.join()
    assert [path.parent for path in list_held()] == [folder]


def test_rescue_of_an_earlier_attempt_is_replaced(memory: Path) -> None:
    write(7)
    flip(memory / f"rankup-{os.getuid()}" / RUN / "step-00000007" / "model.safetensors", 99)
    write(7, attempt="next")
    assert found() == 7


@pytest.mark.parametrize("file", ["", "manifest.json", None])
def test_rescue_goes_to_tmp_if_shared_memory_is_absent_or_read_only(
    memory: Path, monkeypatch: pytest.MonkeyPatch, file: str | None
) -> None:
    opens = Path.open

    def fails(self: Path, *mode: str, **more: Any) -> Any:
        if file is not None and memory in self.parents and self.name.endswith(file):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return opens(self, *mode, **more)

    monkeypatch.setattr(Path, "open", fails)
    if file is None:
        memory.rmdir()
    write(7)
    assert [path.parents[2].name for path in list_held()] == ["tmp"]


def test_memory_folder_that_another_user_may_have_made_is_not_used(memory: Path) -> None:
    own = memory / f"rankup-{os.getuid()}"
    (memory / "elsewhere").mkdir(mode=0o700)
    own.symlink_to(memory / "elsewhere")
    write(7)
    assert [path.parents[2].name for path in list_held()] == ["tmp"]
    assert list((memory / "elsewhere").glob("*/step-*")) == []
    own.unlink()
    (memory.parent / "tmp" / own.name).rename(own)
    assert found() == 7
    own.chmod(0o777)  # another user may have written to it
    assert found() is None
    write(8)
    assert [path.parents[2].name for path in list_held()] == ["tmp"]


def test_later_checkpoint_removes_rescues_of_this_run_and_of_no_other(memory: Path) -> None:
    for run in (RUN, OTHER):
        write_rescue(run, 7, ATTEMPT, lambda: files(7))
    remove(OTHER)
    remove(RUN, range(7, 99))
    remove(RUN, range(8))
    assert found() == 7
    remove(RUN, range(8, 99))
    assert list(memory.glob("*/*")) == []


def test_unused_rescues_are_removed_after_a_week(memory: Path) -> None:
    other = f"{OTHER}.rank-00001"
    for run, days in ((OTHER, 8), (other, 8), ("0000000000000000", 6)):
        write_rescue(run, 7, ATTEMPT, lambda: files(7))
        os.utime(memory / f"rankup-{os.getuid()}" / run, (0, time.time() - days * 24 * 3600))
    write(7)
    assert {path.name for path in memory.glob("*/*")} == {RUN, "0000000000000000"}


def test_ranks_of_a_node_can_remove_a_rescue_at_the_same_time(memory: Path) -> None:
    with ThreadPoolExecutor(4) as ranks:
        for step in range(1, 60):
            write(step)
            for done in [ranks.submit(remove, RUN, range(step + 1, 999)) for _ in range(4)]:
                done.result()
    assert found() is None


@pytest.mark.parametrize("file", ["run.json", "state.json"])
def test_id_of_a_run_never_leads_to_another_folder(forks: Forks, tmp_path: Path, file: str) -> None:
    """Rescues are in a folder with the id as its name, and are removed from there."""
    victim = tmp_path / "private" / "thesis"
    for folder in (victim.parent, victim):
        folder.mkdir(mode=0o700)
    (victim / "text").write_text("years of work")
    line = train(tmp_path / "run", "--max-steps", "4", "--save-every-steps", "4")
    output = forks.ends(*line)
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
    assert file == "run.json" or f'must be of a run with an id, got "{victim!s:.80}"' in output
    assert (victim / "text").exists()
