"""Output to readers that are gone or stopped, and logging. test_launch.py tests what ranks print."""

import contextlib
import io
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankup.agent import logs
from rankup.agent.logs import Output, OutputReader, RankLog, last_exception
from tests.rigs.jobs import ROOT, environment


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def fill(pipe: int) -> None:
    """Write until the pipe is full."""
    os.set_blocking(pipe, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe, b"." * 4096)
    os.set_blocking(pipe, True)


def run(code: str, *, shell: str = "") -> subprocess.CompletedProcess[str]:
    """Run `python -c code`. `shell`: a redirection of its output."""
    line = ["sh", "-c", f'exec "$@" {shell}', "sh", sys.executable, "-c", code]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, env=environment(), cwd=ROOT, check=False)


# Streams that never fail ---------------------------------------------------------------------------------------------


def test_lines_that_nobody_reads_are_dropped_until_somebody_reads(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "PRINT_S", 0.1)
    reader, writer = pipe
    fill(writer)
    out = Output(writer)
    out.write(b"one\n")
    out.write(b"two\nthree\n")
    assert set(os.read(reader, 2**20)) == {ord(".")}
    out.write(b"four\n")
    out.write(b"five\n")
    assert os.read(reader, 2**20) == b"\nfour\nfive\n"


def test_threads_that_print_together_lose_no_line(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "PRINT_S", 600.0)
    reader, writer = pipe
    out, found = Output(writer), bytearray()

    def read() -> None:
        while not found.endswith(b"end\n"):
            found.extend(os.read(reader, 512))

    def say(name: str) -> None:
        for number in range(500):
            out.write(f"{name} {number}\n".encode() * 10)

    threads = [threading.Thread(target=say, args=[name]) for name in "ab"]
    reading = threading.Thread(target=read, daemon=True)
    for thread in (reading, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    out.write(b"end\n")
    reading.join()
    wanted = [f"{name} {number}" for name in "ab" for number in range(500) for _ in range(10)]
    assert sorted(found.decode().splitlines()) == sorted([*wanted, "end"])


PRINTS = """
import os, sys
from rankup.agent.logs import guard
guard()
for number in range(3):
    print("lost", sys.stdout.isatty(), flush=True)
sys.stderr.write("said\\n")
"""


@pytest.mark.parametrize("where", [">/dev/full", ">&-"], ids=["full disk", "closed"])
def test_failing_output_ends_no_process(where: str) -> None:
    done = run(PRINTS, shell=where)
    assert (done.returncode, done.stderr) == (0, "said\n")


def test_guarded_terminal_remains_a_terminal(tmp_path: Path) -> None:
    master, slave = os.openpty()
    assert Output(slave).isatty()
    os.close(master)
    os.close(slave)
    assert not RankLog(tmp_path, 0).isatty()


# Logging -------------------------------------------------------------------------------------------------------------

LOGS = """
import logging, sys, warnings
from pathlib import Path
from rankup.agent import logs
from rankup.agent.logs import RankLog, guard, setup_logging
logs.host_name = lambda: "vm"
guard()
folder, rank, world_size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
before = sys.argv[4:]
if before: logging.basicConfig(level=logging.INFO, format="THEIRS %(message)s")
for _ in range(2): setup_logging(rank=rank, world_size=world_size, file=RankLog(folder, rank))
sys.path.insert(0, str(folder / "lib/python3.11/site-packages"))
import library
library.log()
log = logging.getLogger("rankup.agent")
log.debug("hidden"); log.info("two\\nlines"); log.warning("careful %d", 7); log.info("%d", "no number")
logging.getLogger("mine").info("loss 0.5")
try: 1 / 0
except ZeroDivisionError: log.exception("failed")
"""
LIBRARY = """
import logging, warnings
def log():
    logging.getLogger("lib.net").debug("nothing")
    logging.getLogger("lib.net").info("connected")
    logging.getLogger("lib.net").warning("retries")
    warnings.warn("is old", stacklevel=1)
"""
FILE_LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d vm r(\d) (.*)")


def logged(folder: Path, *words: str) -> tuple[list[str], list[str], list[tuple[str, str]]]:
    """Return the lines on stdout, those on stderr, and (rank, text) of each line in the file."""
    packages = folder / "lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    (packages / "library.py").write_text(LIBRARY)
    line = [sys.executable, "-c", LOGS, str(folder), *words]
    env = environment({"PYTHONWARNINGS": "default"})
    done = subprocess.run(line, capture_output=True, text=True, env=env, cwd=ROOT, check=True)
    found = [FILE_LINE.fullmatch(text) for text in (folder / f"logs/rank-{words[0]}.log").read_text().splitlines()]
    assert all(found)
    return done.stdout.splitlines(), done.stderr.splitlines(), [(hit[1], hit[2]) for hit in found if hit]


@pytest.mark.parametrize(("rank", "world_size", "head"), [(0, 1, ""), (0, 2, "[vm r0/2] "), (1, 2, "[vm r1/2] ")])
def test_record_is_printed_by_its_level_and_rank(rank: int, world_size: int, head: str, tmp_path: Path) -> None:
    out, error, file = logged(tmp_path, str(rank), str(world_size))
    assert out == ([f"{head}{text}" for text in ("two", "lines", "loss 0.5")] if rank == 0 else [])
    assert error[0] == f"{head}lib.net: retries"
    assert [text.startswith(head) for text in error] == [True] * len(error)
    assert error[-1] == f"{head}ZeroDivisionError: division by zero"
    assert f"{head}careful 7" in error
    assert {written for written, _ in file} == {str(rank)}
    texts = [text for _, text in file]
    assert texts[:2] == ["lib.net: connected", "lib.net: retries"]
    assert re.fullmatch(r"py\.warnings: \S+library\.py:\d+: UserWarning: is old", texts[2])
    assert texts[4:9] == ["hidden", "two", "lines", "careful 7", "loss 0.5"]
    assert texts[9:11] == ["failed", "Traceback (most recent call last):"]


def test_logging_that_the_user_has_set_up_is_kept(tmp_path: Path) -> None:
    out, error, file = logged(tmp_path, "0", "2", "before")
    assert out == ["[vm r0/2] two", "[vm r0/2] lines"]
    theirs = [text for text in error if text.startswith("THEIRS")]
    assert theirs[:2] == ["THEIRS connected", "THEIRS retries"]
    assert "THEIRS loss 0.5" in theirs
    assert not any("careful" in text for text in theirs)
    assert ("0", "loss 0.5") in file


def test_progress_bar_makes_room_for_a_line() -> None:
    code = """
import logging
from rankup.agent.logs import guard, setup_logging
guard()
setup_logging(world_size=2)
from tqdm import tqdm
bar = tqdm(total=10, mininterval=0)
bar.update(3)
logging.getLogger("rankup").info("hello")
"""
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment(), cwd=ROOT)
    printed = done.stdout.decode()  # as bytes, because text mode would lose the carriage returns
    assert re.search(r"3/10[^\n]*\r +\r\[\S+ r0/2\] hello\n\r[^\n]*3/10", printed), printed


HANGS = """
import logging, os, stat, threading
from rankup.agent import logs
reader, writer = os.pipe()
os.set_blocking(writer, False)
try:
    while True: os.write(writer, b"." * 4096)
except BlockingIOError: pass
os.set_blocking(writer, True)
logs.stat.S_ISREG = lambda mode: True
logs.PRINT_S = 0.1
writes, began = os.write, threading.Event()
logs.os.write = lambda number, data: (number == writer and began.set(), writes(number, data))[1]
logs.Path.mkdir, logs.os.open = lambda *_, **__: None, lambda *_: writer
logs.setup_logging(file=logs.RankLog(logs.Path(), 0))
log = logging.getLogger("rankup")
threading.Thread(target=log.debug, args=["hangs"]).start()
assert began.wait(60)
log.warning("one")
log.warning("two")
os._exit(7)
"""


def test_thread_that_hangs_in_the_log_does_not_block_others() -> None:
    done = run(HANGS)
    assert (done.returncode, done.stderr) == (7, "one\ntwo\n")


# How a rank failed ---------------------------------------------------------------------------------------------------

TRACEBACK = "[rank1]: Traceback (most recent call last):\n[rank1]: RuntimeError: connection closed by peer\n"


@pytest.mark.parametrize(("tail", "said"), [
    (f"{TRACEBACK}bye", "RuntimeError: connection closed by peer"),
    ("ValueError: first\ntorch.OutOfMemoryError: too much\nthe rest", "torch.OutOfMemoryError: too much"),
    ("usage: job.py [-h]\njob.py: error: no such argument: -x", "job.py: error: no such argument: -x"),
    ("  RuntimeError: inside a line", ""),
    ("RuntimeError: " + "x" * 1000, "RuntimeError: " + "x" * 486),
])
def test_reason_of_a_failure_is_its_last_exception(tail: str, said: str) -> None:
    assert last_exception(tail) == said


def test_logs_of_ended_ranks_leave_no_file_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        reader = OutputReader(0, 2, run_dir=lambda: tmp_path, fail=print)
        os.write(reader.outputs[0], b"hello\n")
        for output in reader.outputs:
            os.close(output)
        reader.thread.join(60)
    assert len(os.listdir("/proc/self/fd")) == before
    assert (tmp_path / "logs" / "rank-0.log").read_text().count("hello") == 3


def test_long_line_of_a_script_is_whole_in_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    logs.copy_prints(RankLog(tmp_path, 0))
    print("BEGIN" + 3000 * "x")
    print("of a Windows file\r")
    written = (tmp_path / "logs" / "rank-0.log").read_text()
    assert " r0 BEGINxxx" in written
    assert " r0 of a Windows file\n" in written
