"""Printing, to pipes that nobody reads and by several threads and processes at once."""

import contextlib
import os
import select
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from train.process import log
from train.process.log import Output


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


def test_output_that_nobody_reads_drops_lines_and_says_how_many(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "WAIT_S", 0.1)
    reader, writer = pipe
    fill(writer)
    output = Output(writer)
    output.write(b"one\n")
    output.write(b"two\nthree\n")
    assert set(os.read(reader, 2**20)) == {ord(".")}
    output.write(b"four\n")
    output.write(b"five\n")
    assert os.read(reader, 2**20) == b"\n[3 lines were not printed: nobody read them]\nfour\nfive\n"


def test_output_whose_reader_comes_in_time_loses_nothing(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    fill(writer)
    late = threading.Timer(0.2, os.read, [reader, 2**20])
    late.start()
    Output(writer).write(b"x\n" * 4000)
    late.join()
    assert os.read(reader, 2**20) == b"x\n" * 4000


def test_threads_that_print_at_once_lose_no_line(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    output, found = Output(writer), bytearray()

    def read() -> None:
        while not found.endswith(b"end\n"):
            found.extend(os.read(reader, 512))

    def say(name: str) -> None:
        for number in range(500):
            output.write(f"{name} {number}\n".encode() * 10)

    threads = [threading.Thread(target=say, args=[name]) for name in "ab"]
    reading = threading.Thread(target=read)
    for thread in (reading, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    output.write(b"end\n")
    reading.join()
    wanted = [f"{name} {number}" for name in "ab" for number in range(500) for _ in range(10)]
    assert sorted(found.decode().splitlines()) == sorted([*wanted, "end"])


def test_fork_prints_while_a_thread_of_its_parent_waits_for_a_reader(
    pipe: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = pipe
    fill(writer)
    output, waits, poll = Output(writer), threading.Event(), select.poll
    monkeypatch.setattr(log.select, "poll", lambda: (waits.set(), poll())[1])
    waiting = threading.Thread(target=output.write, args=[b"waits\n"])
    waiting.start()
    assert waits.wait(60)
    if (pid := os.fork()) == 0:
        os.dup2(os.open(tmp_path / "said", os.O_CREAT | os.O_WRONLY), writer)
        output.write(b"hello\n")
        os._exit(0)
    os.waitpid(pid, 0)
    os.read(reader, 2**20)
    waiting.join()
    assert (tmp_path / "said").read_text() == "hello\n"
