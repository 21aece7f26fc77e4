"""How long does a lost rank stop the training, and how many finished steps does it cost?

    python tests/bench/recovery.py [launch compose slurm pods] [--kills 10]      # as root; make image comes first
    python tests/bench/recovery.py launch --settings "--parallel fsdp"

Each round stops the whole job and starts it again, and kills (kill -9) rank 0, which is on node 0, rank 1 on node 1,
and a whole node. The kills are compared with the cold restarts: a machine that is busy for a while slows all four.
The time is from the kill, or from the command that starts the job again, to the end of the next step, as
`metrics.jsonl` has it. Prints a table in Markdown with its conditions. Nothing is asserted here.
"""

import argparse
import json
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.machine import conditions, markdown_table
from tests.rigs import containers, slurm_cluster
from tests.rigs.launched import LAUNCHERS, Launcher, rank_process

# The program's defaults, but a line of metrics for each step, and an end that never comes
SETTINGS = ["--name", "job", "--epochs", "100000", "--evaluate-every-epochs", "100000", "--log-every-steps", "1"]
PATIENCE_S = 300.0
COLD = "cold restart of the whole job"
# An engine waits longer and longer before it restarts a container that ends within 10 s of its start
SETTLED_S = 11


class Fault:
    """What happens to a job now, and what it costs. Made just before it happens."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.finished = newest_steps(run)[-1]["step"]
        self.log_size = (run / "logs" / "rank-0.log").stat().st_size
        self.moment_s = time.time()

    def cost(self) -> tuple[float, int]:
        """Wait for the next step. The seconds from the fault to its end, and the finished steps that are done again."""
        until_s = time.monotonic() + PATIENCE_S
        while (found := self._next_step()) is None:
            if time.monotonic() > until_s:
                sys.exit(f"no step within {PATIENCE_S:g} s:\n{self._said()[-4000:]}")
            time.sleep(0.1)
        next_step, end_s = found
        with (self.run / "metrics.jsonl").open() as file:
            steps = [json.loads(line)["step"] for line in file if is_training(line)]
        if steps != list(range(1, len(steps) + 1)):
            print("metrics.jsonl lacks steps, or has some twice", file=sys.stderr)
        return end_s - self.moment_s, max(0, self.finished + 1 - next_step)

    def _said(self) -> str:
        with (self.run / "logs" / "rank-0.log").open() as log:
            log.seek(self.log_size)
            return log.read()

    def _next_step(self) -> tuple[int, float] | None:
        """The first step after the newest resume, and its end: a step that was almost done when a rank died may end
        after the kill, too."""
        resumes = re.findall(r"resumed from step[- ]0*(\d+)", self._said())
        if not resumes:
            return None
        next_step = int(resumes[-1]) + 1
        for entry in newest_steps(self.run):
            if entry["time"] > self.moment_s and entry["step"] == next_step:
                return next_step, entry["time"]
        return None


def newest_steps(run: Path) -> list[dict[str, Any]]:
    """The last lines of the run's metrics that are about steps."""
    with (run / "metrics.jsonl").open("rb") as metrics:
        metrics.seek(max(0, metrics.seek(0, os.SEEK_END) - 2**16))
        lines = metrics.read().decode(errors="replace").splitlines(keepends=True)
    return [json.loads(line) for line in lines[len(lines) > 1 :] if is_training(line)]


def is_training(line: str) -> bool:
    """Whether a line of metrics.jsonl is about a step, not about an evaluation, and is whole."""
    return '"train/loss"' in line and line.endswith("\n")


def measure(name: str, kills: int, settings: list[str]) -> list[list[str]]:
    """The rows of one launcher, with the machine's load beside them."""
    costs: dict[str, list[tuple[float, int]]] = defaultdict(list)
    loads = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, ExitStack() as stack:
        job = LAUNCHERS[name](Path(folder), [*SETTINGS, *settings], stack)
        job.start()
        until_s = time.monotonic() + PATIENCE_S
        while not (job.run / "metrics.jsonl").exists() or not (job.run / "metrics.jsonl").stat().st_size:
            if time.monotonic() > until_s:
                sys.exit(f"{name}: no step within {PATIENCE_S:g} s")
            time.sleep(0.1)
        for _ in range(kills):
            for what in (COLD, "rank 0", "rank 1", job.node):
                time.sleep(SETTLED_S if what == job.node else random.uniform(2, 4))
                loads.append(os.getloadavg()[0])
                costs[what].append(cost(job, what))
                print(f"{name}, {what}: %.2f s, %d steps twice" % costs[what][-1], file=sys.stderr, flush=True)
    cold_s = statistics.median(took_s for took_s, _ in costs[COLD])
    load = f"{min(loads):.0f} to {max(loads):.0f}"
    rows = []
    for what, found in costs.items():
        took_s = [each for each, _ in found]
        median_s = statistics.median(took_s)
        rows.append([name, what, f"{median_s:.2f}", f"{max(took_s):.2f}", f"{median_s / cold_s:.2f}",
                     str(sum(twice for _, twice in found)), load])
    return rows


def cost(job: Launcher, what: str) -> tuple[float, int]:
    """Do one of the four to a job: see Fault.cost."""
    if what == COLD:
        job.stop()
        fault = Fault(job.run)
        job.start()
    elif what == job.node:
        fault = Fault(job.run)
        job.kill_node()()
    else:
        victim = rank_process(job, int(what[-1]))
        fault = Fault(job.run)
        victim.kill()
    return fault.cost()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("launchers", nargs="*", default=list(LAUNCHERS), help=f"some of {', '.join(LAUNCHERS)}")
    parser.add_argument("--kills", type=int, default=10, help="kills of each of the three kinds, and cold restarts")
    parser.add_argument("--settings", type=str.split, default=[], help="of the program, besides its defaults")
    options = parser.parse_args()
    for name in options.launchers:
        ask = {"compose": containers.why_not, "pods": containers.why_not, "slurm": slurm_cluster.why_not}.get(name, str)
        if reason := ask():
            sys.exit(f"{name}: {reason}")
    rows = [row for name in options.launchers for row in measure(name, options.kills, options.settings)]
    header = ["launcher", "lost", "median, s", "worst, s", "of the cold restart", "steps done twice", "load average"]
    print("\n".join(markdown_table(header, rows)))
    print(
        f"\n{options.kills} of each, taking turns; two ranks of the program's defaults (Fashion-MNIST, small CNN)"
        f"{' but for ' * bool(options.settings)}{' '.join(options.settings)}. {conditions()}."
    )


if __name__ == "__main__":
    main()
