"""Measure how long many agents take to meet, and to go on after the leader is lost.

Each agent of `rankup launch --nnodes LEAST:MOST --spares 1` is a process of its own, with all its connections and
messages. Its ranks are left out: the fork server of this script starts no process, and a rank ends as soon as its agent
says that another node is lost.

    python bench/agents.py 16 64 256

For each number of agents this prints the seconds from the first start until every agent has started its ranks, then
from the kill of the leading agent until all others have started them again, and the memory of an agent. The CPU seconds
of all agents say more where other processes run. All traffic stays on loopback.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rankup.agent import ranks
from rankup.agent.agent import Agent
from rankup.agent.processes import allow_open_files
from rankup.agent.script import Script
from rankup.env.node_env import Limits, NodeEnv
from tests.rigs.jobs import free_port

PATIENCE_S = 300.0
STARTED = struct.Struct("id")  # what an agent writes when it starts its rank: its node, and the time


class NoServer:
    """A fork server that forks nothing."""

    node, report = 0, -1

    def __init__(self, *, on_end: Callable[[int, int], object], **_: Any) -> None:
        self._on_end, self.ready = on_end, asyncio.Event()
        self.pids, self._lines = dict[int, int](), dict[int, socket.socket]()

    def start(self, *_: Any, **__: Any) -> None:
        self.ready.set()

    def start_rank(self, local_rank: int, *_: Any, line: list[int], **__: Any) -> None:
        self.pids[local_rank], self._lines[local_rank] = 0, socket.socket(fileno=os.dup(line[0]))
        asyncio.get_running_loop().add_reader(self._lines[local_rank], self.signal, local_rank, signal.SIGTERM)
        os.write(self.report, STARTED.pack(self.node, time.monotonic()))

    def start_store(self, listener: object) -> None:
        pass

    def signal(self, local_rank: int, number: int) -> None:
        if self.pids.pop(local_rank, None) is not None:
            asyncio.get_running_loop().remove_reader(self._lines[local_rank])
            self._lines.pop(local_rank).close()
            asyncio.get_running_loop().call_soon(self._on_end, local_rank, 128 + number)

    def close(self) -> None:
        pass


def fork_agent(node: int, size: int, port: int, script: Script, folder: Path, report: int) -> int:
    if child := os.fork():
        return child
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    NoServer.node, NoServer.report = node, report
    limits = Limits(size // 2 + 1, size - 1, wait_s=PATIENCE_S)  # one node is a spare
    node_env = NodeEnv(node_rank=node, num_nodes=size, master_addr="127.0.0.1", master_port=port, limits=limits)
    with contextlib.suppress(BaseException):
        asyncio.run(Agent(ranks.Options(node=node_env, script=script, run_dir=folder)).run())
    os._exit(0)


def wait_for(count: int, starts: int) -> float:
    """Return when the last of `count` nodes has started its rank, as time.monotonic()."""
    last_s, nodes = 0.0, set[int]()
    while len(nodes) < count:
        node, time_s = STARTED.unpack(os.read(starts, STARTED.size))
        nodes.add(node)
        last_s = max(last_s, time_s)
    return last_s


def cpu_s(agents: list[int]) -> float:
    return sum(sum(psutil.Process(agent).cpu_times()[:2]) for agent in agents)


def measure(size: int, folder: Path) -> tuple[float, float, float, float, float]:
    """Return the seconds until all have met and their CPU seconds, both until all have met again without the leader,
    and the MB of an agent's own memory."""
    (folder / "train.py").write_text("import rankup\n")
    script = Script.find([str(folder / "train.py")])
    same, port = script.must_match(), free_port()
    vars_of: Any = Script
    vars_of.must_match = lambda _: dict(same)  # it reads each file of rankup
    starts, report = os.pipe()
    began_s = time.monotonic()
    agents = [fork_agent(node, size, port, script, folder, report) for node in range(size)]
    try:
        met_s, met_cpu_s = wait_for(size - 1, starts) - began_s, cpu_s(agents)
        memory = psutil.Process(agents[-1]).memory_full_info().uss / 1e6
        time.sleep(5)  # until all know the membership
        lost_s, before_s = time.monotonic(), cpu_s(agents[1:])
        os.kill(agents[0], signal.SIGKILL)
        again_s = wait_for(size - 1, starts) - lost_s
        return met_s, met_cpu_s, again_s, cpu_s(agents[1:]) - before_s, memory
    finally:
        for agent in agents:
            os.kill(agent, signal.SIGKILL)
        for agent in agents:
            os.waitpid(agent, 0)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("sizes", nargs="*", type=int)
    sizes = parser.parse_args().sizes or [16, 64, 256]
    allow_open_files(4 * max(sizes) + 128, what=f"{max(sizes)} agents")
    vars_of: Any = ranks
    vars_of.ForkServer = NoServer
    print("| agents | all have met | CPU | met again without the leader | CPU | memory of an agent |")
    print("|---|---|---|---|---|---|")
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            met_s, met_cpu_s, again_s, again_cpu_s, memory = measure(size, Path(folder))
        row = f"{met_s:.2f} s | {met_cpu_s:.1f} s | {again_s:.2f} s | {again_cpu_s:.1f} s | {memory:.0f} MB"
        print(f"| {size} | {row} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
