"""Measure how the time to join grows with the number of ranks.

The ranks are threads of a few processes on this machine. Each thread is a member of one meeting, and joins through the
program's own functions.

    python tests/bench/joining.py 2 64 256 1024

For each size this prints the seconds until the last rank has joined, including the test of its route to the next rank.
Each size may take 300 s at most. All traffic stays on loopback.
"""

import argparse
import logging
import multiprocessing
import os
import resource
import sys
import threading
import time
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # before torch is imported: it prints 1,000 lines about names of addresses
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rankup.agent.record import Record
from rankup.env.rank_env import read_rank_env
from rankup.group import joining  # imports torch once, before the forks
from tests.rigs.jobs import free_port, rank_env

THREADS = 64  # ranks of one process
TIMEOUT_S = 300.0
QUIET = logging.getLogger("quiet")
QUIET.disabled = True


def be_ranks(ranks: range, world_size: int, port: int, ends: "SimpleQueue[tuple[int, float, str]]") -> None:
    """Join as each of `ranks`, and put (rank, time, error) in the queue. The clock is the same in all processes."""
    from rankup.group import member  # noqa: F401  every process imports this, like a rank

    def one(rank: int) -> None:
        watch: Any = mock.Mock()
        group: Any = SimpleNamespace(rank_env=read_rank_env(rank_env(rank, world_size, port)), settings={"torch": "x"},
                                     attempt="a", log=QUIET, record=Record.new(), watch=watch, status=watch.status)
        with joining.no_name_lookups():
            try:
                group.store = joining.open_store(*joining.meet(group, timeout_s=TIMEOUT_S), timeout_s=TIMEOUT_S)
                ends.put((rank, time.monotonic(), ""))
            except Exception as error:
                ends.put((rank, time.monotonic(), f"{type(error).__name__}: {error}"[:300]))
            time.sleep(TIMEOUT_S)  # a member that leaves would end the others as well

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure(world_size: int) -> tuple[float, list[str]]:
    """Return the seconds until the last rank has joined, and the errors."""
    port = free_port()
    context = multiprocessing.get_context("fork")
    ends: SimpleQueue[tuple[int, float, str]] = context.SimpleQueue()
    groups = [range(1), *(range(first, min(world_size, first + THREADS)) for first in range(1, world_size, THREADS))]
    began_s = time.monotonic()
    common = (world_size, port, ends)
    processes = [context.Process(target=be_ranks, args=(ranks, *common), daemon=True) for ranks in groups]
    for process in processes:
        process.start()
    reported = [ends.get() for _ in range(world_size)]
    for process in processes:
        process.kill()
        process.join()
    return max(end[1] for end in reported) - began_s, [end[2] for end in reported if end[2]]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("sizes", nargs="*", type=int)
    sizes = parser.parse_args().sizes or [2, 16, 64, 256, 1024, 4096]
    # Each rank has several connections, and a process holds those of 64 ranks
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    print("| ranks | all have met |\n|---|---|")
    for size in sizes:
        met_s, wrong = measure(size)
        if wrong:
            print(f"{len(wrong)} of {size} ranks failed, the first: {wrong[0]}")
            return 1
        print(f"| {size} | {met_s:.2f} s |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
