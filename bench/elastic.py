"""Measure what a lost or returning node costs a job: under `launch`, with and without a spare, and under torchrun.

    python bench/elastic.py [--repeats 10]
    python bench/elastic.py --light 64

Three nodes of one process each run on this machine. Each repeat starts each kind of job, and causes the events that the
table lists. A node is either killed with its ranks, which the others notice at once, or stopped (SIGSTOP), which they
notice by its silence. The time is from the event to the end of the next step. For a node that comes back it is the
pause between two steps. torchrun's node 0 is never killed: it holds the store, without which its job ends.

`--light AGENTS` starts this many agents, whose ranks only sleep. The time is until the last rank of the next membership
has started. No new round of events begins after two minutes. Nothing is asserted.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import recovery
from bench.machine import conditions, markdown_table, step_ends
from bench.recovery import SETTINGS, Fault
from tests.agent.test_membership import Nodes
from tests.rigs.containers import wait_for
from tests.rigs.jobs import MAIN, ended, lives, start

NODES = 3
recovery.PATIENCE_S = 150  # a new node imports torch first; torchrun sometimes never continues
TASK = [str(MAIN), "train", "--dataset", "digits", "--model", "mlp", *SETTINGS]
SILENT_S, WAIT_S = 3, 1
LAUNCH = ["-m", "rankup", "launch", "--node-rank={node}", "--master-addr=127.0.0.1", "--master-port={port}",
          "--max-restarts=1000", f"--lost-after-s={SILENT_S}"]
TORCHRUN = [
    "-m", "torch.distributed.run", f"--nnodes=2:{NODES}", "--nproc-per-node=1", "--rdzv-backend=c10d",
    "--rdzv-conf=join_timeout=900,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3",
    "--rdzv-endpoint=127.0.0.1:{port}", "--max-restarts=1000",
]
SEPARATE_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
BUDGET_S = 120.0  # no further round begins after this time
Costs = Iterator[tuple[str, dict[str, float]]]  # kind of job, and the seconds that each event took


class Job(Nodes):
    """The nodes of a training job under `launch` or torchrun. `options`: more options for each node."""

    def __init__(self, folder: Path, *options: str, torchrun: bool) -> None:
        super().__init__(folder, "")
        self.line, self.run, self.torchrun = [*options, *TASK, f"--run-dir={folder}"], folder / "job", torchrun

    def add(self, node: int, env: dict[str, str] | None = None) -> None:
        words = [word.format(node=node, port=self.port) for word in (TORCHRUN if self.torchrun else LAUNCH)]
        start(sys.executable, *words, *self.line, job=self.job, env=SEPARATE_STORE)
        self.agents[node] = psutil.Process(self.job.processes[-1].pid)

    def rested(self) -> None:
        """Wait until all nodes take part, and thus have a vote, and all fork servers have imported torch. Otherwise the
        times would include a start."""
        wait_for("all nodes", lambda: self.torchrun or len(nodes_of(self.run, "in use", "spare")) == NODES)
        before_s, now_s = -1.0, 0.0
        while now_s > before_s + 0.05 and not self.torchrun:
            time.sleep(2)
            children = [child for agent in self.agents.values() for child in agent.children()]
            servers = [child for child in children if not child.name().startswith("rank ")]
            before_s, now_s = now_s, sum(sum(server.cpu_times()[:2]) for server in servers)

    def another(self) -> int:
        """Return a node in use that is not node 0. Chance decides which node is the spare at first."""
        return NODES - 1 if self.torchrun else max(nodes_of(self.run, "in use"))


def nodes_of(run: Path, *states: str) -> list[int]:
    """Return the nodes that have one of these states in the newest report of the run."""
    newest = max(run.glob("status/*/progress-*.json"), key=lambda path: path.stat().st_mtime_ns, default=None)
    nodes = json.loads(newest.read_text())["nodes"] if newest else []
    return [node["node"] for node in nodes if node["state"] in states]


def to_next_step(job: Job, act: Callable[[], Any]) -> float:
    fault = Fault(job.run)
    act()
    return fault.cost()[0]


def pause(job: Job, node: int) -> float:
    """Start the node again. Return the longest pause between two steps."""
    fault = Fault(job.run)
    job.add(node)
    fault.cost()
    times = [end_s for end_s in step_ends(job.run).values() if end_s > fault.moment_s - 5]
    return max(later - earlier for earlier, later in itertools.pairwise(times))


def measure(job: Job, kind: str) -> dict[str, float]:
    def stop(node: int) -> None:
        for process in [job.agents[node], *job.agents[node].children(recursive=True)]:
            process.suspend()

    found, spare = {}, "spare" in kind
    job.rested()
    node = job.another()
    found["another node is killed"] = to_next_step(job, lambda: job.kill(node))
    if spare:
        job.add(node)
        job.rested()
    else:
        time.sleep(1)
        found["it comes back: pause"] = pause(job, node)
        job.rested()
    if not job.torchrun:
        node = job.another()
        found[f"another node is silent for {SILENT_S} s"] = to_next_step(job, lambda: stop(node))
        job.kill(node)
        job.add(node)
        job.rested()
        time.sleep(3)
        found["node 0 is killed"] = to_next_step(job, lambda: job.kill(0))
    return found


KINDS = {
    "launch, a spare": ["--nnodes=2", "--spares=1"],
    f"launch, fewer after {WAIT_S} s": [f"--nnodes=2:{NODES}", f"--wait-for-node={WAIT_S}"],
    "torchrun": [],
}


class Light:
    """A job of `count` light agents, one of them a spare."""

    def __init__(self, count: int, folder: Path) -> None:
        more = ("--spares=1", f"--wait-for-node={WAIT_S}", "--max-restarts=1000")
        self.nodes, self.shared = Nodes(folder, f"{count // 2}:{count - 1}", *more), folder / "shared"
        self.all_used = count - 1

    def next(self, world_size: int) -> float:
        """Wait until `world_size` ranks of a newer attempt have started. Return when the last one started."""
        self.attempt = self.nodes.attempt(world_size, after=self.attempt)
        files = [self.shared / f"{self.attempt}-{rank}-of-{world_size}" for rank in range(world_size)]
        self.pids = [int(path.read_text().split()[1]) for path in files]
        return max(path.stat().st_mtime for path in files)

    def start(self) -> float:
        self.attempt, began_s = -1, time.time()
        for node in range(self.all_used + 1):
            self.nodes.add(node)
        return self.next(self.all_used) - began_s

    def spare(self, node: int) -> None:
        """Start this node as a spare, and wait until it has a vote."""
        self.nodes.add(node)
        leads = self.nodes.folder / f"runs{self.nodes.of_rank(0, self.attempt)}" / "job"
        wait_for("a spare", lambda: nodes_of(leads, "spare"))
        time.sleep(3)

    def killed(self, rank: int, left: int) -> tuple[int, float]:
        """Kill the node of this rank. Return the node, and the seconds until `left` ranks have started."""
        lost, began_s = self.nodes.of_rank(rank, self.attempt), time.time()
        self.nodes.kill(lost)
        took_s = self.next(left) - began_s
        time.sleep(2)
        return lost, took_s

    def round(self) -> dict[str, float]:
        costs = {}
        first, costs["an agent is killed, a spare is there"] = self.killed(self.all_used // 3, self.all_used)
        what = f"an agent is killed, no spare is there, with {WAIT_S} s of --wait-for-node"
        second, costs[what] = self.killed(self.all_used - 1, self.all_used - 1)
        began_s = time.time()
        self.nodes.add(second)
        wait_for("the end of a rank", lambda: not all(map(lives, self.pids)))
        left_s = time.time()
        last_s = self.next(self.all_used)
        costs["it comes back: pause"], costs["it comes back: from its start"] = last_s - left_s, last_s - began_s
        self.spare(first)
        leader, costs["the agent that leads is killed, a spare is there"] = self.killed(0, self.all_used)
        self.spare(leader)
        return costs


def light(count: int, repeats: int) -> Costs:
    """Yield the costs of the start, then those of each round of events."""
    kind = f"{count} light agents"
    with tempfile.TemporaryDirectory() as folder:
        made, began_s = Light(count, Path(folder)), time.time()
        with ended(made.nodes.job):
            yield kind, {"all start": made.start()}
            for _ in range(repeats):
                time.sleep(5)
                if time.time() - began_s > BUDGET_S:
                    break
                yield kind, made.round()


def trained(repeats: int) -> Costs:
    """Yield the costs of each kind of job. The kinds take turns."""
    for _, (kind, options) in itertools.product(range(repeats), KINDS.items()):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            job = Job(Path(folder), *options, torchrun=kind == "torchrun")
            with ended(job.job):
                for node in range(NODES):
                    job.add(node)
                wait_for("steps", (job.run / "metrics.jsonl").exists)
                time.sleep(3)
                try:
                    yield kind, measure(job, kind)
                except SystemExit:
                    if not job.torchrun:
                        raise
                    yield kind, {f"no step within {recovery.PATIENCE_S:g} s": math.inf}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--light", type=int, default=0, metavar="AGENTS")
    given = parser.parse_args()
    costs, loads, began_s = defaultdict[tuple[str, str], list[float]](list), [], time.monotonic()
    for kind, found in light(given.light, given.repeats) if given.light else trained(given.repeats):
        loads.append(os.getloadavg()[0])
        for what, took_s in found.items():
            costs[kind, what].append(took_s)
            print(f"{kind}: {what}: {took_s:.2f}, load {loads[-1]:.1f}", file=sys.stderr, flush=True)
    rows = [
        [*names, *(f"{of(took):.2f}" for of in (statistics.median, min, max)), str(len(took))]
        for names, took in costs.items()
    ]
    print("\n".join(markdown_table(["job", "what happens", "median, s", "fastest", "slowest", "times"], rows)))
    load = f"load {min(loads):.1f} to {max(loads):.1f} meanwhile"
    print(f"\nTook {time.monotonic() - began_s:.0f} s, by turns; {load}. {conditions()}")


if __name__ == "__main__":
    main()
