"""What does a lost node cost an elastic job of four nodes: under torchrun, and under `launch`, whose roster is fixed?

    python tests/bench/elastic.py [--repeats 5]

Four nodes of one process each, all on this machine. In each repeat, for the launchers by turns, node 3 (its launcher
and its rank) is killed and started again at once. Under torchrun it is also killed and stays away, and comes back
later: with torch's heartbeats (5 s, and three may be missed), and with faster ones. `launch` can't go on without it:
there the others are stopped and started anew with `--nnodes 3`. The time is from the kill, or from the command that
starts nodes, to the end of the next step. Nothing is asserted.
"""

import argparse
import datetime
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.machine import cpu_model
from tests.bench.recovery import SETTINGS, Fault
from tests.rigs.containers import wait_for
from tests.rigs.jobs import MAIN, ROOT, environment, free_port

NODES = 4
TASK = ["--dataset", "digits", "--model", "mlp", "--progress=none", "--simulated-nodes", *SETTINGS]
# For a short wait
RENDEZVOUS = "join_timeout=900,read_timeout=30,last_call_timeout=5"
FASTER = ",keep_alive_interval=1,keep_alive_max_attempt=6"
SEPARATE_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

Words = Callable[[int, int], list[str]]  # what starts a node: by its number, and by how many there are


class Job:
    """The nodes of one job."""

    def __init__(self, folder: Path, words: Words) -> None:
        self.folder, self.words, self.run = folder, words, folder / "job"
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, *nodes: int, of: int = NODES) -> None:
        for node in nodes:
            line = [sys.executable, *self.words(node, of), *TASK, "--run-dir", str(self.folder)]
            with (self.folder / f"node{node}.txt").open("a") as output:
                self.nodes[node] = subprocess.Popen(
                    line, env=environment(SEPARATE_STORE), cwd=ROOT, stdout=output, stderr=output
                )

    def kill(self, *nodes: int) -> None:
        """As if their machines lost their power: all processes at once."""
        for node in nodes:
            parent = self.nodes.pop(node)
            for process in [*psutil.Process(parent.pid).children(recursive=True), parent]:
                process.kill()
            parent.wait()

    def stop(self) -> None:
        for process in self.nodes.values():
            process.terminate()
        while self.nodes:
            self.nodes.popitem()[1].wait(120)


def by_torchrun(port: int, conf: str = RENDEZVOUS) -> Words:
    options = ["--nnodes", f"{NODES - 1}:{NODES}", "--nproc-per-node", "1", "--rdzv-backend", "c10d",
               "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", conf, "--max-restarts", "1000"]
    return lambda node, of: ["-m", "torch.distributed.run", *options, str(MAIN), "train"]


def by_launch(port: int) -> Words:
    where = ["--master-addr", "127.0.0.1", "--master-port", str(port), str(MAIN), "train"]
    return lambda node, of: [str(MAIN), "launch", "--nnodes", str(of), "--node-rank", str(node), *where]


def is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def lost_for_a_while(job: Job, name: str) -> dict[str, float]:
    """Killed, and back when three train; then killed, and started again at once."""
    found, fault = {}, Fault(job.run)
    job.kill(3)
    found[f"{name}: killed, three go on"] = fault.cost()[0]
    time.sleep(1)
    fault = Fault(job.run)
    job.start(3)
    found[f"{name}: comes back, four go on"] = fault.cost()[0]
    time.sleep(1)
    return found | lost_and_back(job, name)


def lost_and_back(job: Job, name: str) -> dict[str, float]:
    fault = Fault(job.run)
    job.kill(3)
    job.start(3)
    return {f"{name}: killed, started again at once": fault.cost()[0]}


def started_anew(job: Job, name: str) -> dict[str, float]:
    """As `lost_and_back`, and what somebody has to do where node 3 stays away: end the others, start them as three."""
    found = lost_and_back(job, name)
    time.sleep(1)
    job.kill(3)
    fault = Fault(job.run)
    job.stop()
    job.start(*range(3), of=3)
    return found | {f"{name}: stopped, three start anew": fault.cost()[0]}


VARIANTS: dict[str, tuple[Callable[[int], Words], Callable[[Job, str], dict[str, float]]]] = {
    "torchrun": (by_torchrun, lost_for_a_while),
    "torchrun, faster": (lambda port: by_torchrun(port, RENDEZVOUS + FASTER), lost_for_a_while),
    "launch": (by_launch, started_anew),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    costs: dict[str, list[float]] = defaultdict(list)
    loads = []
    for _ in range(repeats):
        for name, (make, measure) in VARIANTS.items():
            folder = Path(tempfile.mkdtemp())
            port = free_port()
            job = Job(folder, make(port))
            try:
                job.start(0)
                wait_for("the store, on node 0", lambda port=port: is_open(port))
                job.start(*range(1, NODES))
                wait_for("steps", lambda job=job: (job.run / "metrics.jsonl").exists())
                time.sleep(3)
                loads.append(os.getloadavg()[0])
                found = measure(job, name)
            finally:
                job.kill(*job.nodes)
                shutil.rmtree(folder)
            for what, took_s in found.items():
                costs[what].append(took_s)
                print(f"{what}: {took_s:.1f} s", file=sys.stderr, flush=True)
    print("| node 3 of 4 | median, s | fastest | slowest |\n|---|---|---|---|")
    for what, found_s in costs.items():
        print(f"| {what} | {statistics.median(found_s):.1f} | {min(found_s):.1f} | {max(found_s):.1f} |")
    print(
        f"\n{repeats} of each, launchers by turns; {psutil.cpu_count()} CPUs of {cpu_model()}, load average "
        f"{min(loads):.0f} to {max(loads):.0f}, torch {torch.__version__}, {datetime.date.today():%B %Y}, Python "
        f"{platform.python_version()}."
    )


if __name__ == "__main__":
    main()
