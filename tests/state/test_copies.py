"""Checkpoints appear whole or not at all, and the last good one is never lost: retention, kills, full disks."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rankup.errors import UserError
from rankup.places.files import remove_unfinished
from rankup.state import copies, place
from rankup.state.place import Folder
from rankup.state.tree import TensorFile
from tests.rigs.checkpoints import find_problem, flip, load_newest, newest, save, steps, train
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import ROOT, result
from tests.rigs.small_filesystems import small_disk

RUNS = int(os.environ.get("RANKUP_RUNS", "30"))


def test_checkpoints_that_do_not_look_whole_do_not_count_as_kept(tmp_path: Path) -> None:
    save(tmp_path, 1)
    os.truncate(save(tmp_path, 2) / "model.safetensors", 50)
    (save(tmp_path, 3) / "manifest.json").write_text('{"step": 3, "files": {"model.safetensors": 1}}')
    save(tmp_path, 4, keep=2)
    assert steps(tmp_path) == [1, 2, 3, 4]
    save(tmp_path, 5, keep=2)
    assert steps(tmp_path) == [4, 5]


@pytest.mark.parametrize("damage", ["flipped", "another step's"])
def test_damaged_later_checkpoint_never_displaces_a_new_one(tmp_path: Path, damage: str) -> None:
    for step in (1, 9):
        save(tmp_path, step)
    if damage == "flipped":
        flip(tmp_path / "step-00000009" / "model.safetensors", 50)
    else:
        shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000009", dirs_exist_ok=True)
    for keep in (2, 1):
        save(tmp_path, 2, keep=keep)
        # A folder with another step's manifest does not look whole, so it does not count as kept
        assert steps(tmp_path) == ([2, 9] if damage == "flipped" or keep == 1 else [1, 2, 9])
        assert newest(tmp_path)[0] == 2


def test_saving_a_step_again_replaces_its_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 0)
    save(tmp_path, 1, value=-1.0)
    save(tmp_path, 1, keep=1)
    assert newest(tmp_path) == (1, [])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("kind", ["link", "file", "folder", "pipe"])
def test_save_replaces_whatever_has_the_name_of_its_checkpoint(tmp_path: Path, kind: str) -> None:
    """Also what an interrupted replacement has left under the second name."""
    for name in ("step-00000002", "step-00000002.replaced"):
        if kind == "link":
            (tmp_path / name).symlink_to("gone")
        elif kind == "pipe":
            os.mkfifo(tmp_path / name)
        else:
            _ = (tmp_path / name).touch() if kind == "file" else (tmp_path / name).mkdir()
    save(tmp_path, 2)
    assert newest(tmp_path) == (2, [])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


@pytest.mark.parametrize("again", [True, False])
def test_kill_between_the_renames_leaves_the_replaced_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    save(tmp_path, 1)
    rename = Path.rename

    def killed(self: Path, target: Path) -> Path:
        if self.name.startswith(".writing-"):
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 1, keep=1)
    assert newest(tmp_path) == (1, [])
    if again:  # and a second time at the same place
        flip(save(tmp_path, 1, keep=99) / "model.safetensors", 50)
        (tmp_path / "step-00000001").rename(tmp_path / "step-00000001.replaced")
        save(tmp_path, 1)
    save(tmp_path, 2, keep=2)
    assert steps(tmp_path) == [1, 2]
    assert newest(tmp_path) == (2, [])


def test_rescue_that_threads_write_has_the_files_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces begin and end anywhere in the tensors."""
    monkeypatch.setattr(copies, "PIECE", 1000)
    monkeypatch.setattr("rankup.state.place.cpu_quota", lambda: 4.0)
    tensors = {"a": torch.rand(9), "b": torch.rand(7000), "c": torch.rand(333)}
    content = {"state.json": b'{"step": 1}', "empty.bin": b"", "exact.bin": bytes(2000),
               "model.safetensors": TensorFile(tensors)}
    one = Folder(tmp_path / "one").write(1, content)
    other = Folder(tmp_path / "other", durable=False).write(1, content)
    assert {path.name: path.read_bytes() for path in one.iterdir()} == {
        path.name: path.read_bytes() for path in other.iterdir()
    }
    assert (one / "manifest.json").read_text().count('",\n') > 20, "a digest for each piece"
    flip(one / "model.safetensors", 17_000)
    assert find_problem(one) == "model.safetensors does not match its digest"


def save_until_killed(directory: Path, pipe: int) -> None:
    """Save each step twice, as after a stop in evaluation, and write each saved step to the pipe."""
    found = load_newest(directory, lambda text: os._exit(3))
    step = found.step if found is not None else 0
    while True:
        step += 1
        for _ in range(2):
            save(directory, step, keep=1)
            os.write(pipe, f"{step}\n".encode())


def kill_savers(directory: Path, runs: int) -> None:
    """Kill a saving process `runs` times at random points. Each time the last step that it reported must be there."""
    draw = random.Random()
    last = 0
    for number in range(runs):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            save_until_killed(directory, writer)
        os.close(writer)
        with os.fdopen(reader) as lines:
            began_s = time.monotonic()
            if number % 5:  # otherwise before the first save
                last = int(lines.readline())
            time.sleep(draw.uniform(0, 1.5) * (time.monotonic() - began_s + 0.002))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            last = max([last, *map(int, lines.read().split())])
        if last:
            step, said = newest(directory)
            assert step in (last, last + 1), (number, step, last)
            assert said == []
    print(f"{runs} kills, {last} steps")


def test_kill_at_any_point_of_a_save_leaves_the_last_good_checkpoint(tmp_path: Path) -> None:
    code = f"from tests.state.test_copies import *; kill_savers(Path(sys.argv[1]), {RUNS})"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[2]) > 5, done.stdout


CALLS = {
    "mkdir": (Path, "mkdir", ".writing-"),
    "write": (copies, "write_durably", "model.safetensors"),
    "last write": (copies, "write_durably", "manifest.json"),
    "sync": (place, "_sync", ".writing-"),
    "rename": (Path, "rename", ".writing-"),
}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("call", CALLS)
def test_failing_disk_loses_no_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    for step in (10, 20):
        save(tmp_path, step)
    owner, name, fragment = CALLS[call]
    real = getattr(owner, name)

    def fails(path: Path, *arguments: Any, **more: Any) -> Any:
        if path.name.startswith(fragment):
            raise OSError(number, os.strerror(number))
        return real(path, *arguments, **more)

    monkeypatch.setattr(owner, name, fails)
    said = "has no space left" if number in (errno.ENOSPC, errno.EDQUOT) else os.strerror(number)
    with pytest.raises(UserError, match=said) as caught:
        save(tmp_path, 30, keep=1)
    assert str(tmp_path) in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000020"]
    assert newest(tmp_path) == (20, [])


SPLIT = ("--parallel=fsdp", "--checkpoint-format=sharded", "--memory-every-steps=0")


def test_full_disk_ends_all_ranks_with_2_and_more_room_lets_them_resume(forks: Forks, tmp_path: Path) -> None:
    """Here with parts of all ranks; test_compose_limits.py has whole checkpoints in containers."""
    wide = ("--options.width", "20000", "--keep", "3", *SPLIT)
    output = forks.ends(*train(tmp_path / "undisturbed", *wide), world_size=2)
    with small_disk(tmp_path / "disk", "5m") as (disk, resize):
        run = disk / "run"
        for _ in range(2):
            output = forks.ends(*train(run, *wide), world_size=2, code=2)
            assert output.count("has no space left") == 1
            assert "run the same command again" in output
            assert sorted(os.listdir(run / "checkpoints")) == ["step-00000008", "step-00000016"]
            assert find_problem(run / "checkpoints" / "step-00000016") == ""
        resize("50m")
        output = forks.ends(*train(run, *wide), world_size=2)
        assert "resumed from step-00000016" in output
        assert result(run)["digest"] == result(tmp_path / "undisturbed")["digest"]


def test_folder_may_disappear_while_it_is_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of a node remove the parts of their run at the same time."""
    scandir = os.scandir

    def late(path: Path) -> Any:
        path.rmdir()  # another rank may remove it just before this call
        return scandir(path)

    monkeypatch.setattr(os, "scandir", late)
    remove_unfinished(tmp_path)
    assert not tmp_path.exists()
