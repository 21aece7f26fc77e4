"""Measure how the time to meet grows with the number of ranks.

Each rank's agent is a process of its own, and does what it does beside a rank of torchrun. The ranks themselves are
left out: this process has their sockets and records.

    python bench/joining.py 2 64 256 1024

For each size this prints the seconds from the moment when all agents have started until the last rank hears that all
have met, including the test of its route to the next rank; the CPU seconds of all agents, which say more where other
processes run; and the memory of an agent. Each size may take 300 s at most. All traffic stays on loopback.
"""

import argparse
import asyncio
import contextlib
import json
import os
import resource
import selectors
import signal
import socket
import sys
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rankup.agent import rank_agent
from rankup.agent.network import encode
from rankup.agent.processes import allow_open_files
from rankup.agent.record import Record
from tests.rigs.jobs import free_port

TIMEOUT_S = 300.0


def fork_agent(line: socket.socket, pid: int) -> int:
    """Fork an agent from this process, which has imported what agents need."""
    if child := os.fork():
        return child
    os.dup2(line.fileno(), 3)
    os.closerange(4, line.fileno() + 1)
    record = Record.new()
    with contextlib.suppress(BaseException):
        asyncio.run(rank_agent.serve(3, os.dup(record.file), pid))
    os._exit(0)


def begin(rank: int, world_size: int, port: int) -> bytes:
    member = {"first_rank": rank, "num_ranks": 1, "world_size": world_size, "host": f"node{rank // 8}",
              "pid": os.getpid(), "settings": {"torch": "x"}, "left_s": TIMEOUT_S, "restarts": 0, "ip": ""}
    return encode("begin", listen=["", port], leader=["127.0.0.1", port], local_rank=0, job="a", file="", store_port=1,
                  silent_s=30.0, member=member)


def cpu_s() -> float:
    """Return the CPU seconds of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(world_size: int) -> tuple[float, float, float, str]:
    """Return the seconds until the last rank has joined, the CPU seconds of all agents, the MB of an agent's own
    memory, and an error or ""."""
    before_s = cpu_s()
    port, problem = free_port(), ""
    agents, waiting = list[int](), selectors.DefaultSelector()
    lines = [socket.socketpair() for _ in range(world_size)]
    for ours, theirs in lines:
        agents.append(fork_agent(theirs, os.getpid()))
        theirs.close()
        waiting.register(ours, selectors.EVENT_READ, bytearray())
    began_s = time.monotonic()
    for rank, (ours, _) in enumerate(lines):
        ours.sendall(begin(rank, world_size, port))
    while waiting.get_map() and not problem:
        for key, _ in waiting.select():
            key.data.extend(data := key.fileobj.recv(1 << 16))  # type: ignore[union-attr]
            for message in map(json.loads, key.data.splitlines() if key.data.endswith(b"\n") else ()):
                if message["is"] == "over":
                    problem = message["text"]
                if message["is"] == "commit":
                    waiting.unregister(key.fileobj)
            if not data and key.fileobj in waiting.get_map():
                problem = "an agent has ended"
    met_s, memory = time.monotonic() - began_s, psutil.Process(agents[-1]).memory_full_info().uss / 1e6
    for agent in agents:
        os.kill(agent, signal.SIGKILL)
    for agent in agents:
        os.waitpid(agent, 0)
    waiting.close()
    for ours, _ in lines:
        ours.close()
    return met_s, cpu_s() - before_s, memory, problem


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("sizes", nargs="*", type=int)
    sizes = parser.parse_args().sizes or [2, 16, 64, 256, 1024]
    allow_open_files(4 * max(sizes) + 128, what=f"{max(sizes)} ranks")
    print("| ranks | all have met | CPU seconds | memory of an agent |\n|---|---|---|---|")
    for size in sizes:
        met_s, used_s, memory, problem = measure(size)
        if problem:
            print(f"{size} ranks failed: {problem}")
            return 1
        print(f"| {size} | {met_s:.2f} s | {used_s:.1f} | {memory:.0f} MB |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
