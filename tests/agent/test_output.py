"""What is printed: to readers that are gone or asleep, by logging, and by a rank through pipes."""

import asyncio
import contextlib
import os
import re
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rankup.agent import logs
from rankup.agent.logs import Output, Pump, last_exception, open_log
from rankup.errors import UserError
from tests.rigs.jobs import ROOT, environment


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def fill(pipe: int) -> None:
    """Until nothing more fits."""
    os.set_blocking(pipe, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe, b"." * 4096)
    os.set_blocking(pipe, True)


def run(code: str, *, shell: str = "") -> subprocess.CompletedProcess[str]:
    """`python -c code`; `shell`: where a shell sends what it prints."""
    line = ["sh", "-c", f'exec "$@" {shell}', "sh", sys.executable, "-c", code]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, env=environment(), cwd=ROOT, check=False)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once an Output waits for its reader."""
    event, poll = threading.Event(), select.poll
    monkeypatch.setattr(logs.select, "poll", lambda: (event.set(), poll())[1])
    return event


# Streams that never fail ---------------------------------------------------------------------------------------------


def test_output_that_nobody_reads_drops_lines_and_says_how_many(
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
    assert os.read(reader, 2**20) == b"\n[3 lines were not printed: nobody read them]\nfour\nfive\n"


def test_output_whose_reader_comes_in_time_loses_nothing(
    pipe: tuple[int, int], waits: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "PRINT_S", 600.0)
    reader, writer = pipe
    fill(writer)
    late = threading.Thread(target=lambda: (waits.wait(), os.read(reader, 2**20)), daemon=True)
    late.start()
    Output(writer).write(b"x\n" * 4000)
    late.join()
    assert os.read(reader, 2**20) == b"x\n" * 4000


def test_threads_that_print_at_once_lose_no_line(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_fork_prints_while_a_thread_of_its_parent_waits_for_a_reader(
    pipe: tuple[int, int], waits: threading.Event, tmp_path: Path
) -> None:
    reader, writer = pipe
    fill(writer)
    out = Output(writer)
    waiting = threading.Thread(target=out.write, args=[b"waits\n"], daemon=True)
    waiting.start()
    assert waits.wait(60)
    if (pid := os.fork()) == 0:
        os.dup2(os.open(tmp_path / "said", os.O_CREAT | os.O_WRONLY), writer)
        out.write(b"hello\n")
        os._exit(0)
    os.waitpid(pid, 0)
    os.read(reader, 2**20)
    waiting.join()
    assert (tmp_path / "said").read_text() == "hello\n"


PRINTS = """
import os, sys
from rankup.agent.logs import guard
guard("stdout", "stderr")
for number in range(3):
    print("lost", sys.stdout.isatty(), flush=True)
sys.stderr.write("said\\n")
"""


@pytest.mark.parametrize("where", [">/dev/full", ">&-", "| true"], ids=["full disk", "closed", "reader gone"])
def test_printing_where_nothing_can_be_written_ends_nothing(where: str) -> None:
    if where == "| true":
        reader, writer = os.pipe()
        os.close(reader)
        line = [sys.executable, "-c", PRINTS]
        done = subprocess.run(line, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment(), cwd=ROOT)
        os.close(writer)
    else:
        done = run(PRINTS, shell=where)
    assert (done.returncode, done.stderr) == (0, "said\n")


def test_guarded_terminal_is_still_a_terminal_and_a_file_is_none(tmp_path: Path) -> None:
    master, slave = os.openpty()
    assert Output(slave).isatty()
    os.close(master)
    os.close(slave)
    file = open_log(tmp_path / "logs" / "rank-0.log")
    assert not file.isatty()
    file.write(b"one\n")
    open_log(tmp_path / "logs" / "rank-0.log").write(b"two\n")
    assert (tmp_path / "logs" / "rank-0.log").read_text() == "one\ntwo\n"


def test_log_that_cannot_be_opened_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    with pytest.raises(UserError, match=r"run_dir: \S+/logs must be writable, got File exists\. Set --run-dir"):
        open_log(tmp_path / "logs" / "rank-0.log")


# Logging -------------------------------------------------------------------------------------------------------------

LOGS = """
import logging, sys, warnings
from pathlib import Path
from rankup.agent.logs import guard, open_log, setup_logging
guard("stdout", "stderr")
folder, rank, world_size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
before = sys.argv[4:]
if before: logging.basicConfig(level=logging.INFO, format="THEIRS %(message)s")
for _ in range(2): setup_logging(rank=rank, world_size=world_size, host="vm", file=open_log(folder / "rank.log"))
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
    """The lines on stdout, on stderr and in the file, these as (rank, text)."""
    packages = folder / "lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    (packages / "library.py").write_text(LIBRARY)
    line = [sys.executable, "-c", LOGS, str(folder), *words]
    env = environment({"PYTHONWARNINGS": "default"})
    done = subprocess.run(line, capture_output=True, text=True, env=env, cwd=ROOT, check=True)
    found = [FILE_LINE.fullmatch(text) for text in (folder / "rank.log").read_text().splitlines()]
    assert all(found)
    return done.stdout.splitlines(), done.stderr.splitlines(), [(hit[1], hit[2]) for hit in found if hit]


@pytest.mark.parametrize(("rank", "world_size", "head"), [(0, 1, ""), (0, 2, "[vm r0/2] "), (1, 2, "[vm r1/2] ")])
def test_record_goes_where_its_level_and_rank_allow(rank: int, world_size: int, head: str, tmp_path: Path) -> None:
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


def test_logging_that_the_user_has_set_up_stays_his(tmp_path: Path) -> None:
    out, error, file = logged(tmp_path, "0", "2", "before")
    assert out == ["[vm r0/2] two", "[vm r0/2] lines"]
    theirs = [text for text in error if text.startswith("THEIRS")]
    assert theirs[:2] == ["THEIRS connected", "THEIRS retries"]
    assert "THEIRS loss 0.5" in theirs
    assert not any("careful" in text for text in theirs)
    assert ("0", "loss 0.5") in file


def test_bar_makes_room_for_a_line() -> None:
    code = """
import logging
from rankup.agent.logs import guard, setup_logging
guard("stdout", "stderr")
setup_logging(host="vm", world_size=2)
from tqdm import tqdm
bar = tqdm(total=10, mininterval=0)
bar.update(3)
logging.getLogger("rankup").info("hello")
"""
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment(), cwd=ROOT)
    printed = done.stdout.decode()  # as bytes: text would lose the carriage returns
    assert re.search(r"3/10[^\n]*\r +\r\[vm r0/2\] hello\n\r[^\n]*3/10", printed), printed


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
logs.setup_logging(file=logs.Output(writer))
log = logging.getLogger("rankup")
threading.Thread(target=log.debug, args=["hangs"]).start()
assert began.wait(60)
log.warning("one")
log.warning("two")
os._exit(7)
"""


def test_thread_that_hangs_in_the_log_does_not_hold_the_others() -> None:
    done = run(HANGS)
    assert (done.returncode, done.stderr) == (7, "one\ntwo\n")


# A rank's output through pipes ---------------------------------------------------------------------------------------


class Rank:
    """Two pipes, a Pump that reads them, and a file."""

    def __init__(self, folder: Path, *, world_size: int = 2, file: Output | None = None) -> None:
        self.log = folder / "rank-1.log"
        (out, self.out), (error, self.error) = os.pipe(), os.pipe()
        kept = file or open_log(self.log)
        self.pump = Pump(out, error, rank=1 if world_size > 1 else 0, world_size=world_size, host="vm", file=kept)

    def say(self, text: str | bytes) -> None:
        os.write(self.out, text if isinstance(text, bytes) else text.encode())

    def fail(self, text: str) -> None:
        os.write(self.error, text.encode())

    async def until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            await asyncio.sleep(0)

    async def end(self) -> None:
        os.close(self.out)
        os.close(self.error)
        assert await asyncio.to_thread(self.pump.drained, 60)

    @property
    def texts(self) -> list[str]:
        return [line.split(" vm r", 1)[1][2:] for line in self.log.read_text().splitlines()]


def test_lines_of_a_rank_carry_its_name_and_its_file_has_the_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        rank = Rank(tmp_path)
        rank.say(b"one\n\ntwo \xff")
        await rank.until(lambda: rank.pump.tail == "one")
        rank.say("three\nlast without an end")
        rank.fail("careful\n")
        await rank.end()
        assert sorted(rank.texts) == ["careful", "last without an end", "one", "two �three"]
        assert sorted(rank.pump.tail.splitlines()) == ["careful", "last without an end", "one", "two �three"]

    asyncio.run(main())
    said = capsys.readouterr()
    assert said.out == "[vm r1/2] one\n[vm r1/2] two �three\n[vm r1/2] last without an end\n"
    assert said.err == "[vm r1/2] careful\n"
    lines = (tmp_path / "rank-1.log").read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d vm r1 ", line) for line in lines)


def test_rank_alone_prints_as_it_is_and_its_bar_does_not_fill_the_log(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    async def main() -> None:
        rank = Rank(tmp_path, world_size=1)
        code = """
import sys
for step in range(1000): sys.stderr.write(f"\\r{step}/1000")
sys.stderr.write("\\rall 1000\\r\\nnext\\n")
sys.stderr.buffer.write(b"\\xff")
"""
        child = subprocess.Popen([sys.executable, "-c", code], stdout=rank.out, stderr=rank.error)
        await rank.end()
        child.wait()
        assert rank.texts == ["all 1000", "next", "�"]

    asyncio.run(main())
    said = capfdbinary.readouterr()
    assert b"\r998/1000\r999/1000\rall 1000\r\nnext\n\xff" in said.err


TRACEBACK = "[rank1]: Traceback (most recent call last):\n[rank1]: RuntimeError: connection closed by peer\n"


def test_rank_whose_disk_hangs_waits_at_its_pipe_and_the_loop_goes_on(
    pipe: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = pipe
    fill(writer)
    monkeypatch.setattr(logs.stat, "S_ISREG", lambda mode: True)

    async def main() -> None:
        rank = Rank(tmp_path, file=Output(writer))
        os.set_blocking(rank.out, False)
        taken = 0
        for _ in range(2000):
            with contextlib.suppress(BlockingIOError):
                taken += os.write(rank.out, b"x" * 1023 + b"\n")
            await asyncio.sleep(0)
        assert 2**16 <= taken < 2**18  # a pipe, and what was read before the disk hung
        os.close(rank.out)
        os.close(rank.error)
        assert not rank.pump.drained(0.1)
        reading = asyncio.create_task(asyncio.to_thread(rank.pump.drained, 600))
        found = b""
        while not reading.done():
            if select.select([reader], [], [], 0)[0]:
                found += os.read(reader, 2**20)
            await asyncio.sleep(0)
        while select.select([reader], [], [], 0)[0]:
            found += os.read(reader, 2**20)
        assert found.count(b"x\n") == taken // 1024

    asyncio.run(main())


def test_process_that_a_rank_left_behind_may_hold_its_output_open(tmp_path: Path) -> None:
    async def main() -> None:
        rank = Rank(tmp_path)
        code = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True)"
        subprocess.run([sys.executable, "-W", "ignore", "-c", code], stdout=rank.out, check=True)
        os.close(rank.out)
        os.close(rank.error)
        assert not rank.pump.drained(0.1)
        await rank.until(lambda: bool(rank.pump.tail))
        os.kill(int(rank.pump.tail), 9)
        assert rank.pump.drained(60)

    asyncio.run(main())


# How a rank failed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tail", "recorded", "said"),
    [
        (f"{TRACEBACK}bye", None, "RuntimeError: connection closed by peer"),
        ("ValueError: first\ntorch.OutOfMemoryError: CUDA out of memory\nthe rest", None,
         "torch.OutOfMemoryError: CUDA out of memory"),
        ("usage: job.py [-h]\njob.py: error: unrecognized arguments: -x", None,
         "job.py: error: unrecognized arguments: -x"),
        ("a line", '{"message": {"message": "KeyError: 1\\nmore"}}', "KeyError: 1"),
        ("a line", '{"message": "KeyError: 2"}', "KeyError: 2"),
        ("a line", "{", ""),
        ("  RuntimeError: inside a line", None, ""),
        ("RuntimeError: " + "x" * 1000, None, "RuntimeError: " + "x" * 486),
    ],
)
def test_reason_of_a_failure_is_its_last_exception(
    tail: str, recorded: str | None, said: str, tmp_path: Path
) -> None:
    if recorded is not None:
        (tmp_path / "error.json").write_text(recorded)
    assert last_exception(tail, tmp_path / "error.json") == said
    assert recorded is not None or last_exception(tail) == said
