"""`launch` and `supervise` with fake ranks, see `fake_rank`."""

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.rigs.fork_server import Forks, Job


@contextmanager
def launching(
    forks: Forks, folder: Path, plan: list[list[str]], *more: str, preload: str = "tests.rigs.fake_rank:use"
) -> Iterator[Job]:
    """`launch` with a fake rank for each word of the plan's first row. Whatever happens, none is left."""
    with _running(forks, folder, plan, "launch", f"--nproc={len(plan[0])}", *more, env={}, preload=preload) as job:
        yield job


@contextmanager
def supervising(forks: Forks, folder: Path, plan: list[str], *more: str, env: Mapping[str, str]) -> Iterator[Job]:
    """`supervise` with a fake rank: a word for each incarnation. `env`: which rank it is."""
    words = [[word] for word in plan]
    with _running(forks, folder, words, "supervise", *more, env=env, preload="tests.rigs.fake_rank:use") as job:
        yield job


@contextmanager
def _running(
    forks: Forks, folder: Path, plan: list[list[str]], *line: str, env: Mapping[str, str], preload: str
) -> Iterator[Job]:
    (folder / "run").mkdir()
    env = {**env, "FAKE_RANKS": json.dumps(plan), "FAKE_FOLDER": str(folder), "TMPDIR": str(folder)}
    words = (*line, "--batch-size=12", f"--run-dir={folder}", "--name=run")
    try:
        with forks.running(*words, env=env, preload=preload) as job:
            yield job
    finally:
        left = [start["pid"] for start in starts(folder) if lives(start["pid"])]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert not left


def lives(pid: int) -> bool:
    """And is no zombie: one whose parent was killed waits for the first process of this machine to reap it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def starts(folder: Path) -> list[dict[str, Any]]:
    """What each rank was given, in the order of incarnations and ranks."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("start-*.json"))]


def wait_for_file(path: Path) -> None:
    until_s = time.monotonic() + 240
    while not path.exists():
        assert time.monotonic() < until_s
        time.sleep(0.01)
