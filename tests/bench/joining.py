"""How the time to join grows with the number of ranks, with the machine's resolver and with a slow one.

Starts light ranks on this machine: threads of a few processes, each a member of one meeting. They join through the
program's own functions.

    python tests/bench/joining.py 2 64 256 1024
    python tests/bench/joining.py --slow-resolver 2 64 256 1024

Prints, for each size, the seconds until the last rank has met the others, its route to the next one tried. Each size
may take 300 s at most. Everything stays on loopback.

`--slow-resolver` does the same on a machine of its own, made of namespaces (Linux, root), whose resolver takes 5 s to
say that it does not know a name. (One that never answers costs less: after its first silence torch asks no more.)
"""

import argparse
import contextlib
import logging
import multiprocessing
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.queues import SimpleQueue
from pathlib import Path

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # before torch: it prints a thousand lines about addresses without names
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


from rankup.agent.record import RecordWriter
from rankup.env.rank_env import RankEnv, read_rank_env
from rankup.group.meeting import MemberLine
from rankup.group.stop import StopRequest

THREADS = 64  # ranks of one process
TIMEOUT_S = 300.0
ANSWER_S = 5.0  # how long the slow resolver takes for each answer
RESOLV_CONF = "nameserver 127.0.0.1\noptions timeout:10 attempts:1\n"
NOT_KNOWN = b"\x81\x83"  # the flags of an answer that says that there is no such name
QUIET = logging.getLogger("quiet")
QUIET.disabled = True


def launch_of(rank: int, world_size: int, port: int) -> RankEnv:
    five = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return read_rank_env({name: str(value) for name, value in five.items()})


def be_ranks(ranks: range, world_size: int, port: int, ends: "SimpleQueue[tuple[int, float, str]]") -> None:
    """Join as each of `ranks`, and put (rank, met at, error) in the queue. All processes share the clock."""

    def one(rank: int) -> None:
        try:
            launch = launch_of(rank, world_size, port)
            record = RecordWriter(None)
            line = MemberLine(
                launch, {"torch": "x"}, attempt="a", timeout_s=TIMEOUT_S, log=QUIET, record=record, stop=StopRequest(),
                until_formed=contextlib.ExitStack(),
            )
            line.open_store(line.join())
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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
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


def be_slow_resolver() -> None:
    """Answer every question after ANSWER_S: no such name. Those that come together are answered together."""
    port = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    port.bind(("127.0.0.1", 53))
    while True:
        question, asker = port.recvfrom(4096)
        answer = question[:2] + NOT_KNOWN + question[4:]
        threading.Timer(ANSWER_S, port.sendto, (answer, asker)).start()


def with_slow_resolver(arguments: list[str]) -> int:
    """Run this program again on a machine of its own, whose resolver is slow."""
    with tempfile.TemporaryDirectory() as folder:
        files = {"hosts": "127.0.0.1 localhost\n", "nsswitch.conf": "hosts: files dns\n", "resolv.conf": RESOLV_CONF}
        mounts = []
        for name, text in files.items():
            Path(folder, name).write_text(text)
            mounts.append(f"mount --bind {folder}/{name} /etc/{name}")
        script = " && ".join(["ip link set lo up", *mounts, 'exec "$0" "$@"'])
        line = [sys.executable, __file__, "--on-slow-machine", *arguments]
        return subprocess.run(["unshare", "--net", "--mount", "sh", "-c", script, *line]).returncode


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("sizes", nargs="*", type=int)
    parser.add_argument("--slow-resolver", action="store_true")
    parser.add_argument("--on-slow-machine", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    sizes = asked.sizes or [2, 16, 64, 256, 1024, 4096]
    if asked.slow_resolver:
        return with_slow_resolver([str(size) for size in sizes])
    if asked.on_slow_machine:
        threading.Thread(target=be_slow_resolver, daemon=True).start()
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
