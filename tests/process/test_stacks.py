"""Where a thread is, in a few words; what stands in a file of stacks; and whom a request may reach."""

import faulthandler
import gc
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from rankup.agent.logs import host_name
from rankup.env.rank_env import RankEnv
from train.process import flight_recorder, stack_requests, stacks
from train.process.places import Frame, Stack, compare, moment, own_place, place
from train.process.proc import start_of
from train.process.stacks import Writer

TORCH, RUN = "/usr/lib/python3/dist-packages/torch", "/job/train"
BACKWARD = [
    Frame(f"{TORCH}/autograd/graph.py", 865, "_engine_run_backward"), Frame(f"{TORCH}/_tensor.py", 500, "backward")
]
QUEUE = Frame("/usr/lib/python3.11/queue.py", 180, "get")
LOOP = [Frame(f"{RUN}/loop.py", 213, "step"), Frame(f"{RUN}/loop.py", 90, "train")]
FETCHED = [Frame("/me/set.py", 7, "__getitem__"), Frame(f"{TORCH}/utils/data/_utils/fetch.py", 52, "fetch"),
           Frame(f"{TORCH}/utils/data/_utils/worker.py", 300, "_worker_loop")]


# Places ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stack", "where"),
    [
        ([], ""),
        ([Frame("/me/train.py", 40, "main")], "train.py:40 main"),
        (
            [Frame(f"{TORCH}/distributed/distributed_c10d.py", 2810, "all_reduce"),
             Frame(f"{TORCH}/distributed/c10d_logger.py", 83, "wrapper"), Frame("/me/train.py", 40, "main")],
            "all_reduce (train.py:40 main)",
        ),
        (  # torch's functions call each other: what the program has called is named
            [Frame(f"{TORCH}/distributed/distributed_c10d.py", 900, "_store_based_barrier"),
             Frame(f"{TORCH}/distributed/distributed_c10d.py", 1700, "init_process_group"),
             Frame("/me/train.py", 3, "<module>")],
            "init_process_group (train.py:3 <module>)",
        ),
        (
            [Frame(f"{RUN}/group/host_link.py", 46, "max"), Frame(f"{RUN}/group/group.py", 85, "max"), *LOOP],
            "agreement (loop.py:213 step)",
        ),
        ([*BACKWARD, *LOOP], "backward (loop.py:213 step)"),
        (
            [QUEUE, Frame(f"{RUN}/data/worker_loader.py", 105, "next"), *LOOP],
            "data: loader.next (worker_loader.py:105 next)",
        ),
        ([Frame("/venv/lib/python3.12/site-packages/train/loop.py", 8, "step")], "loop.py:8 step"),  # installed
        (FETCHED, "set.py:7 __getitem__"),
        ([QUEUE, FETCHED[-1]], "idle"),
    ],
)
def test_place_names_what_is_called_and_who_calls(stack: Stack, where: str) -> None:
    assert place(stack) == where


def test_own_place_is_the_main_threads() -> None:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(own_place()))
    thread.start()
    thread.join()
    assert re.fullmatch(r"test_stacks\.py:\d+ test_own_place_is_the_main_threads", found[0])


def test_own_place_collects_no_garbage_while_it_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11 could stand still for good."""
    frames, collected = sys._current_frames, []
    monkeypatch.setattr(sys, "_current_frames", lambda: (collected.append(gc.isenabled()), frames())[1])
    own_place()
    assert (collected, gc.isenabled()) == ([False], True)
    gc.disable()
    try:
        own_place()
        assert not gc.isenabled()  # somebody has switched it off, and it stays so
    finally:
        gc.enable()


def test_ranks_in_one_place_share_a_line() -> None:
    assert compare({0: "a", 1: "a", 2: "b", 3: "a"}) == ["ranks 0-1, 3: a", "rank 2: b"]
    assert (moment("step", 412), moment("save", 412), moment("", 0)) == (" of step 413", " in save", "")


# Files ----------------------------------------------------------------------------------------------------------


def writer(**more: object) -> Writer:
    me = os.getpid()
    facts = {
        "rank": 0, "world_size": 1, "host": host_name(), "pid": me, "started": start_of(me), "thread": me,
        "main": f"{threading.main_thread().ident:#x}", "signals": [],
    }
    return Writer(**{**facts, **more})  # type: ignore[arg-type]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Path]:
    """A run's folder, with this process as its rank 0."""
    stacks.open_stacks(tmp_path, RankEnv())
    yield tmp_path
    faulthandler.unregister(signal.SIGRTMAX)
    assert stacks._file is not None
    stacks._file.file.close()
    stacks._file = None


@contextmanager
def sleeper(first: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process that sleeps, once it has done what comes `first`."""
    code = f"{first}\nimport time\nprint(1, flush=True)\ntime.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def written_by(run_dir: Path, of: Writer) -> Path:
    """The file of a process that has said who it is."""
    file = stacks.StacksFile(run_dir, of)
    file.file.close()
    return file.path


def test_the_newest_dump_counts_and_says_why_and_where(opened: Path) -> None:
    stacks.note("setup", 0)
    stacks.dump("asked")
    stacks.note("step", 11)
    file = stacks.dump("step (step 11) took longer than 5 s")
    assert file == opened / "stacks" / "rank-0.txt"
    (answer,) = stack_requests.written(opened)
    assert (answer.why, answer.moment) == ("step (step 11) took longer than 5 s", " of step 12")
    assert answer.place.endswith(" of step 12")
    assert answer.text.count("in test_the_newest_dump_counts_and_says_why_and_where") == 1


def test_process_that_would_die_of_the_signal_is_not_sent_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has not come so far as yet, or has taken its handler away."""
    monkeypatch.setattr(stack_requests, "POLITE_S", 0.2)
    monkeypatch.setattr(stack_requests, "ANSWER_S", 0.2)
    with sleeper() as process:
        of = writer(pid=process.pid, thread=process.pid, started=start_of(process.pid), signals=[signal.SIGUSR2])
        written_by(tmp_path, of)
        (answer,) = stack_requests.ask(tmp_path)
        assert answer.place.startswith("does not answer: it waits")
        time.sleep(0.2)
        assert process.poll() is None


def test_another_process_with_that_number_is_not_signalled(tmp_path: Path) -> None:
    with sleeper("import signal; signal.signal(signal.SIGTERM, lambda *_: exit(3))") as stranger:
        of = writer(pid=stranger.pid, thread=stranger.pid, started="12345", signals=[signal.SIGTERM])
        written_by(tmp_path, of)
        (answer,) = stack_requests.ask(tmp_path)
        assert not answer.fresh
        assert stranger.poll() is None


def test_files_of_an_attempt_with_more_ranks_are_not_read(tmp_path: Path) -> None:
    for rank in range(4):
        os.utime(written_by(tmp_path, writer(rank=rank, world_size=4)), (1, 1))
    written_by(tmp_path, writer(rank=0, world_size=2))
    assert [answer.writer.rank for answer in stack_requests.written(tmp_path)] == [0, 1]


def test_what_is_no_file_of_stacks_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks" / "rank-0.txt").write_text("# {\n")
    head = json.dumps(asdict(writer(rank=1, world_size=2)))
    (tmp_path / "stacks" / "rank-1.txt").write_text(f"# {head}\nThread")
    (answer,) = stack_requests.written(tmp_path)
    assert (answer.writer.rank, answer.place) == (1, "has written no stacks")


def test_file_that_has_grown_large_begins_anew(tmp_path: Path) -> None:
    path = written_by(tmp_path, writer())
    path.write_text("x" * (stacks.MOST_BYTES + 1))
    written_by(tmp_path, writer())
    assert path.stat().st_size < 1000


# NCCL's recorder ------------------------------------------------------------------------------------------------


def test_flight_recorder_is_switched_on_into_the_runs_folder(tmp_path: Path) -> None:
    assert flight_recorder.environment(tmp_path, {}) == {
        "TORCH_FR_BUFFER_SIZE": "2000", "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/stacks/nccl/rank-",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }


@pytest.mark.parametrize(
    ("own", "ours"),
    [
        ({"TORCH_FR_BUFFER_SIZE": "7"}, "TORCH_FR_BUFFER_SIZE"),
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}, "TORCH_FR_BUFFER_SIZE"),  # by its older name
        ({"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/mine/"}, "TORCH_FR_DUMP_TEMP_FILE"),
        ({"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}, "TORCH_NCCL_DUMP_ON_TIMEOUT"),
    ],
)
def test_a_users_own_setting_of_the_recorder_stays(own: dict[str, str], ours: str, tmp_path: Path) -> None:
    found = flight_recorder.environment(tmp_path, own)
    assert ours not in found
    assert len(found) == 2


def test_recorder_without_nccl_writes_and_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in flight_recorder.environment(tmp_path, {}).items():
        monkeypatch.setenv(name, value)
    flight_recorder.dump(0)
    assert flight_recorder.lines(0) == []
    assert not list(tmp_path.iterdir())


def test_recorders_file_is_the_one_that_is_named_and_torch_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._C import _distributed_c10d

    # What nccl's group has recorded; there is none without a GPU
    recorded = pickle.dumps({"version": "2.10", "entries": [], "pg_config": {}})
    monkeypatch.setattr(_distributed_c10d, "_dump_nccl_trace", lambda: recorded, raising=False)
    monkeypatch.setattr(flight_recorder, "_recording", lambda: True)
    for name in flight_recorder.environment(tmp_path, {}):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "")  # so that the values that are set below go in the end
        monkeypatch.delenv(name)
    flight_recorder.switch_on(tmp_path)
    flight_recorder.dump(3)
    file = tmp_path / "stacks" / "nccl" / "rank-3"
    assert f"in {file};" in flight_recorder.lines(3)[0]
    assert f"fr_trace {file.parent}" in flight_recorder.lines(3)[0]
    from torch.distributed.flight_recorder.components.loader import read_dump

    assert read_dump("rank-", str(file))["rank"] == 3
