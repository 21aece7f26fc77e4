"""Ranks of one host agree over local sockets and share memory; where they are not on one host there is no link."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from rankup.group.host_link import MOST_RANKS, open_link
from tests.rigs.bare_group import group_of
from tests.rigs.fork_server import Forks


class Gathering:
    """What `group.gather` does, among threads. `changed` is what becomes of the values on their way."""

    def __init__(self, world_size: int, changed: Callable[[list[Any]], list[Any]] = lambda values: values) -> None:
        self.values, self.changed = [None] * world_size, changed
        self.barrier = threading.Barrier(world_size)

    def of(self, rank: int) -> Callable[[Any], list[Any]]:
        def gather(value: Any) -> list[Any]:
            self.values[rank] = value
            self.barrier.wait(30)
            found = self.changed(list(self.values))
            self.barrier.wait(30)
            return found

        return gather


def each(world_size: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work(rank)` returned, or the error that it raised, by rank; each in a thread."""
    results: list[Any] = [None] * world_size

    def call(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=call, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def links(world_size: int, gathering: Gathering | None = None) -> list[Any]:
    gathering = gathering or Gathering(world_size)
    return each(world_size, lambda rank: open_link(rank, world_size, gather=gathering.of(rank)))


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_max_is_that_of_all_ranks_each_time(world_size: int) -> None:
    linked = links(world_size)
    for largest in range(world_size):
        values = [-5] * world_size
        values[largest] = 2**31 - 1 - largest
        found = each(world_size, lambda rank, values=values: linked[rank].max(values[rank]))  # type: ignore[misc]
        assert found == [2**31 - 1 - largest] * world_size


def test_memory_is_one_and_has_no_name() -> None:
    files = set(os.listdir("/dev/shm"))
    linked = links(3)
    memories = each(3, lambda rank: linked[rank].share_memory(5000))
    assert all(bytes(memory) == bytes(5000) for memory in memories)
    for rank, memory in enumerate(memories):
        memory[rank] = rank + 1
    assert [memory[:4] for memory in memories] == [b"\1\2\3\0"] * 3
    assert not {name for name in set(os.listdir("/dev/shm")) - files if "rankup" in name}


@pytest.mark.parametrize("elsewhere", [(0, 1, 2), (1,), (0, 2)])
def test_rank_on_another_host_leaves_all_without_a_link(elsewhere: tuple[int, ...]) -> None:
    """Its address is none here."""

    def changed(values: list[Any]) -> list[Any]:
        return [
            f"{value}, elsewhere" if isinstance(value, str) and rank in elsewhere else value
            for rank, value in enumerate(values)
        ]

    assert links(3, Gathering(3, changed)) == [None, None, None]


def test_too_many_ranks_have_no_link() -> None:
    assert open_link(0, MOST_RANKS + 1, gather=lambda value: pytest.fail("nothing to ask")) is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_connection_of_another_user_is_left_out() -> None:
    """It is the first in the queue, and claims to be rank 1."""
    stranger = (
        "import os, socket, sys\nos.setuid(65534)\ns = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "s.connect('\\0' + sys.argv[1])\ns.send(b'\\1\\0\\0\\0')\nprint('!', flush=True)\nsys.stdin.read()"
    )
    strangers: list[subprocess.Popen[str]] = []
    lock = threading.Lock()

    def changed(values: list[Any]) -> list[Any]:
        with lock:
            if not strangers:  # rank 0 listens, and nobody has connected yet
                line = [sys.executable, "-c", stranger, values[0][1:]]
                strangers.append(subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
                assert strangers[0].stdout is not None
                assert strangers[0].stdout.readline() == "!\n"
        return values

    try:
        linked = links(2, Gathering(2, changed))
        assert each(2, lambda rank: linked[rank].max(rank)) == [1, 1]
    finally:
        for process in strangers:
            process.communicate()


def test_rank_that_ends_wakes_those_that_wait_for_it(forks: Forks) -> None:
    """Even though a child of it lives on, as DataLoader workers do for a moment."""
    with forks.running(world_size=3, preload="tests.group.test_host_link:lose_a_rank") as job:
        assert job.wait() == [7, 7, -9], job.output
        job.processes[2].kill()  # the child


def lose_a_rank() -> None:
    """In each of the forked ranks: the last one is killed, the others wait for it."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=3)
    link = open_link(rank, 3, gather=group_of(rank, 3).gather)
    assert link is not None
    assert link.max(rank) == 2
    if rank == 2:
        if os.fork() == 0:
            signal.pause()
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(dist.DistNetworkError):
        link.max(0)
        os._exit(1)
    with contextlib.suppress(dist.DistNetworkError):  # and again
        link.max(0)
        os._exit(2)
    os._exit(7)
