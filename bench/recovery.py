"""Measure how long a lost rank stops the training, and how many finished steps it costs.

    python bench/recovery.py [launch compose slurm pods] [--kills 10]      # as root; make image comes first
    python bench/recovery.py launch --settings "--parallel fsdp"

Each round has four events: it stops the whole job and starts it again, and it kills (kill -9) rank 0 on node 0, rank 1
on node 1, and a whole node. A busy period slows all four, so the kills can be compared with the cold restart. The time
is from the kill, or from the command that starts the job again, to the end of the next step in `metrics.jsonl`. A
Markdown table is printed with its conditions. Nothing is asserted here.
"""

import argparse
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.machine import conditions, markdown_table, step_ends
from tests.rigs import containers, kubepods, slurm_cluster
from tests.rigs.containers import docker, rank_of, wait_for
from tests.rigs.jobs import MAIN, ROOT, environment

# The program's defaults, except that each step has a line of metrics and the training never ends
SETTINGS = ["--name", "job", "--epochs", "100000", "--evaluate-every-epochs", "100000", "--log-every-steps", "1"]
PATIENCE_S = 300.0
NEWEST = 2**16  # bytes of metrics to read, because the file grows to megabytes
COLD = "cold restart of the whole job"
# A container engine waits longer before each restart of a container that ended within 10 s of its start
SETTLED_S = 11


class Fault:
    """An event that a job suffers, and its cost. Create it just before the event."""

    def __init__(self, run: Path) -> None:
        self.run, self.log = run, run / "logs" / "rank-0.log"
        self.finished, self.log_size = max(step_ends(run, NEWEST)), self.log.stat().st_size
        self.moment_s = time.time()

    def cost(self) -> tuple[float, int]:
        """Wait for the next step. Return the seconds from the fault to its end, and the number of steps done twice."""
        try:
            next_step, end_s = wait_for("next step", self._next_step, timeout_s=PATIENCE_S, log=self._said)
        except AssertionError as error:
            sys.exit(str(error)[-4000:])
        steps = [*step_ends(self.run)]
        if steps != list(range(1, len(steps) + 1)):
            print("metrics.jsonl lacks steps", file=sys.stderr)
        return end_s - self.moment_s, max(0, self.finished + 1 - next_step)

    def _said(self) -> str:
        with self.log.open() as log:
            log.seek(self.log_size)
            return log.read()

    def _next_step(self) -> tuple[int, float] | None:
        """Return the first step after the newest resume, and its end. Steps without a resume do not count: a step that
        was almost done when the rank died may end after the kill."""
        resumes = re.findall(r"resumed from step[- ]0*(\d+)", self._said())
        next_step = int(resumes[-1]) + 1 if resumes else 0
        end_s = step_ends(self.run, NEWEST).get(next_step, 0.0)
        return (next_step, end_s) if end_s > self.moment_s else None


# Each class is a job of two nodes with one rank each. `run`: the folder of its run. `node`: what counts as a whole
# node. `stop` makes all ranks save and leave. `kill_node` also starts the node again if the launcher does not


class Launch:
    """`launch` with two ranks. Nothing else restarts a killed `launch`, so this class does."""

    node = "`launch`, with all ranks, started again at once"

    def __init__(self, folder: Path, settings: list[str], stack: ExitStack) -> None:
        self.folder, self.run, self.settings = folder, folder / "job", settings
        stack.callback(lambda: self.process.kill())

    def start(self) -> None:
        launch = [sys.executable, "-m", "rankup", "launch", "--nproc=2"]
        words = [*launch, MAIN, "train", "--run-dir", self.folder, *self.settings]
        with (self.folder / "output").open("a") as output:
            self.process = subprocess.Popen(words, env=environment(), cwd=ROOT, stdout=output, stderr=output)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE_S)

    def processes(self, node: int) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def kill_node(self) -> None:
        self.process.kill()
        self.process.wait()
        self.start()


class Compose:
    """Two containers of compose.yaml."""

    node = "the container of node 1"

    def __init__(self, folder: Path, settings: list[str], stack: ExitStack) -> None:
        self.project = containers.Project(folder, ARGS=" ".join(settings), RESTART="on-failure:100000")
        stack.callback(self.project.remove)
        self.run, self.start, self.stop = folder / "runs" / "job", self.project.up, self.project.stop

    def processes(self, node: int) -> list[psutil.Process]:
        return self.project.ranks(f"node{node}")

    def kill_node(self) -> None:
        self.project.kill_container("node1")


class Pods:
    """The containers of pytorchjob.yaml's two pods. This class replaces a lost pod, as the operator would."""

    node = "the pod of node 1, replaced at once"

    def __init__(self, folder: Path, settings: list[str], stack: ExitStack) -> None:
        self.cluster = kubepods.Cluster(folder, "pytorchjob.yaml", settings)
        stack.callback(self.cluster.remove)
        self.run, self.start = self.cluster.runs / "job", self.cluster.start

    def stop(self) -> None:
        names = [self.cluster.container(index) for index in (0, 1)]
        docker("stop", "--time", "60", *names)
        docker("rm", *names)

    def processes(self, node: int) -> list[psutil.Process]:
        first = psutil.Process(self.cluster.state(node)["Pid"])  # without an init this is the agent
        return [first, *first.children(recursive=True)]

    def kill_node(self) -> None:
        os.kill(self.cluster.state(1)["Pid"], signal.SIGKILL)
        self.cluster.codes(1)
        self.cluster.replace(1)


class Slurm:
    """Two tasks of slurm/ddp.sbatch on the two nodes of slurm/local.sh."""

    node = "the agent of task 1"

    def __init__(self, folder: Path, settings: list[str], stack: ExitStack) -> None:
        self.cluster, self.folder, self.settings = slurm_cluster.Cluster(), folder, " ".join(settings)
        self.cluster.local("up")
        stack.callback(self.cluster.close)
        self.run = folder / "runs" / "job"

    def start(self) -> None:
        self.job = self.cluster.submit(self.folder, self.settings, launch="--max-restarts 100000")

    def stop(self) -> None:
        self.job.cancel()
        self.job.wait()
        self.cluster.idle()

    def processes(self, node: int) -> list[psutil.Process]:
        return self.job.processes(f"node{node}")

    def kill_node(self) -> None:
        self.job.kill_agent("node1")


# Each launcher with a function that says why it cannot run here
LAUNCHERS = {"launch": (Launch, str), "compose": (Compose, containers.why_not),
             "slurm": (Slurm, slurm_cluster.why_not), "pods": (Pods, containers.why_not)}
Job = Launch | Compose | Slurm | Pods


def measure(name: str, kills: int, settings: list[str]) -> list[list[str]]:
    """Measure one launcher. Return its rows of the table, with the machine's load."""
    costs, loads = defaultdict[str, list[tuple[float, int]]](list), []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, ExitStack() as stack:
        job = LAUNCHERS[name][0](Path(folder), [*SETTINGS, *settings], stack)
        job.start()
        wait_for("first step", lambda: step_ends(job.run), timeout_s=PATIENCE_S)
        for _ in range(kills):
            for what in (COLD, "rank 0", "rank 1", job.node):
                time.sleep(SETTLED_S if what == job.node else random.uniform(2, 4))
                loads.append(os.getloadavg()[0])
                costs[what].append(cost(job, what))
                print(f"{name}, {what}: %.2f s, %d steps twice" % costs[what][-1], file=sys.stderr, flush=True)
    cold_s, rows = statistics.median(took_s for took_s, _ in costs[COLD]), []
    for what, found in costs.items():
        median_s = statistics.median(took_s for took_s, _ in found)
        rows.append([name, what, f"{median_s:.2f}", f"{max(took_s for took_s, _ in found):.2f}",
                     f"{median_s / cold_s:.2f}", str(sum(twice for _, twice in found)),
                     f"{min(loads):.0f} to {max(loads):.0f}"])
    return rows


def cost(job: Job, what: str) -> tuple[float, int]:
    """Cause one of the four events in a job. Return its cost (see Fault.cost)."""
    if what == COLD:
        job.stop()
        fault = Fault(job.run)
        job.start()
    elif what == job.node:
        fault = Fault(job.run)
        job.kill_node()
    else:
        rank = int(what[-1])
        victims = wait_for(what, lambda: [each for each in job.processes(rank) if rank_of(each) == rank])
        fault = Fault(job.run)
        victims[0].kill()
    return fault.cost()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("launchers", nargs="*", default=list(LAUNCHERS), help=f"some of {', '.join(LAUNCHERS)}")
    parser.add_argument("--kills", type=int, default=10, help="kills of each of the three kinds, and cold restarts")
    parser.add_argument("--settings", type=str.split, default=[], help="settings of the program, besides its defaults")
    options = parser.parse_args()
    for name in options.launchers:
        if reason := LAUNCHERS[name][1]():
            sys.exit(f"{name}: {reason}")
    rows = [row for name in options.launchers for row in measure(name, options.kills, options.settings)]
    header = ["launcher", "lost", "median, s", "worst, s", "of the cold restart", "steps done twice", "load average"]
    print("\n".join(markdown_table(header, rows)))
    print(
        f"\n{options.kills} of each, taking turns; two ranks of the program's defaults (Fashion-MNIST, small CNN)"
        f"{' except for ' * bool(options.settings)}{' '.join(options.settings)}. {conditions()}."
    )


if __name__ == "__main__":
    main()
