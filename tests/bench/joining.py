"""How the time to join grows with the number of ranks.

Starts light ranks on this machine: threads of a few processes, each a member of one meeting. They join through the
program's own functions.

    python tests/bench/joining.py 2 64 256 1024

Prints, for each size, the seconds until the last rank has met the others, its route to the next one tried. Each size
may take 300 s at most. Everything stays on loopback.
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

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # before torch: it prints a thousand lines about addresses without names
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rankup.agent.record import Record
from rankup.env.rank_env import read_rank_env
from rankup.group import joining  # torch, once for all
from tests.rigs.jobs import free_port, rank_env

THREADS = 64  # ranks of one process
TIMEOUT_S = 300.0
QUIET = logging.getLogger("quiet")
QUIET.disabled = True


def be_ranks(ranks: range, world_size: int, port: int, ends: "SimpleQueue[tuple[int, float, str]]") -> None:
    """Join as each of `ranks`, and put (rank, met at, error) in the queue. All processes share the clock."""
    from rankup.group import member  # noqa: F401  each process imports it, as a rank does

    def one(rank: int) -> None:
        watch: Any = mock.Mock()
        group: Any = SimpleNamespace(launch=read_rank_env(rank_env(rank, world_size, port)), settings={"torch": "x"},
                                     attempt="a", log=QUIET, record=Record.new(), watch=watch, status=watch.status)
        with joining.no_name_lookups():
            try:
                group.store = joining.open_store(*joining.meet(group, timeout_s=TIMEOUT_S), timeout_s=TIMEOUT_S)
                ends.put((rank, time.monotonic(), ""))
            except Exception as error:
                ends.put((rank, time.monotonic(), f"{type(error).__name__}: {error}"[:300]))
            time.sleep(TIMEOUT_S)  # whoever goes is lost, and all others with it

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure(world_size: int) -> tuple[float, list[str]]:
    """Seconds until the last rank has met the others, and what failed."""
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
    # Every light rank has several connections, and all those of 64 ranks are open in one process
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
