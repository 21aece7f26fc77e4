"""Slow ranks: how often is a healthy one called slow, how soon is a slow one found, and what does measuring cost?

    python tests/bench/stragglers.py words --seconds 60     (or: overhead --seconds 60)

`words`: jobs of 2, 3 and 4 ranks on this machine, as busy as it is: healthy ones, and ones whose last rank waits longer
for its data or computes longer. Windows are of one second in place of five, which makes the rule's task harder and the
bench shorter.
`overhead`: in one job steps with and without measuring take turns; medians. Nothing is asserted here.
"""

import argparse
import itertools
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.throughput import conditions
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import metrics

WAYS = ("without", "with", "without again")
WARM_STEPS = 50
CASE, OUT = "STRAGGLER_CASE", "STRAGGLER_OUT"  # variables of the environment for the ranks
WINDOW_S = 1.0
BATCH = 96  # which 2, 3 and 4 ranks divide


def slow() -> None:
    """Preloaded in each rank: make the last one slow as the case says."""
    from rankup.observe import stragglers
    from train.data.loader import Loader
    from train.workloads.classification import Classification

    stragglers.WINDOW_S = WINDOW_S
    case = json.loads(os.environ[CASE])
    if os.environ["RANK"] != case["rank"]:
        return

    def busy(seconds: float) -> None:
        until_s = time.perf_counter() + seconds
        while time.perf_counter() < until_s:
            pass

    def longer(function: Callable[..., Any], spend: Callable[[float], None]) -> Callable[..., Any]:
        def called(*arguments: Any, **more: Any) -> Any:
            spend(case["more_s"])
            return function(*arguments, **more)

        return called

    if case["kind"] == "data":
        Loader.next = longer(Loader.next, time.sleep)  # type: ignore[method-assign]
    if case["kind"] == "compute":
        Classification.loss = longer(Classification.loss, busy)  # type: ignore[method-assign]


def alternate() -> None:
    """Preloaded in each rank: steps with and without measuring take turns, and rank 0 leaves how long each took.

    WAYS has the steps without it twice: what these two differ by is chance.
    """
    import train.loop as loop
    from rankup.observe.step_clock import StepClock

    usual, clocks = loop.step, []  # type: ignore[var-annotated]
    times: dict[str, list[float]] = {way: [] for way in WAYS}

    def step(t: Any) -> bool:
        if not clocks:
            without = StepClock(t.group.device, world_size=1)
            clocks.extend([without, t.job.clock, without])
        number = t.job.step_number
        t.job.clock = clocks[number % len(WAYS)]
        began_s = time.perf_counter()
        finished = usual(t)
        if number > WARM_STEPS and (number + 1) % t.config.log_every_steps:  # in a step without a report
            times[WAYS[number % len(WAYS)]].append(time.perf_counter() - began_s)
        if not finished and t.group.is_rank0:
            Path(os.environ[OUT]).write_text(json.dumps(times))
        return finished

    loop.step = step


class Bench:
    """Jobs that are stopped after some seconds."""

    def __init__(self, folder: Path, seconds: float, model: str) -> None:
        self.folder, self.seconds = folder, seconds
        self.forks = Forks(folder)
        self.settings = [
            "train", "--dataset=fake", "--fake-samples=4800", f"--model={model}", f"--batch-size={BATCH}",
            "--epochs=100000", "--evaluate-every-epochs=100000", "--save-every-steps=10000000", "--limit-eval=96",
            "--progress=none", "--advice=false", "--fresh", f"--run-dir={folder}",
        ]

    def run(self, world: int, preload: str, env: dict[str, str], *more: str) -> tuple[str, list[dict[str, Any]]]:
        """What it printed, and its metrics."""
        preload = f"tests.bench.stragglers:{preload}"
        job = self.forks.start(*self.settings, "--name=bench", *more, world_size=world, env=env, preload=preload)
        run = self.folder / "bench"
        job.wait_for("ready after")
        time.sleep(self.seconds)
        job.processes[0].signal("SIGTERM")
        assert job.wait() == [143] * world, job.output
        return job.output, metrics(run)

    def words(self, world: int, kind: str, share: float, own_s: float) -> dict[str, Any]:
        case = {"rank": str(world - 1), "kind": kind, "more_s": share * own_s}
        output, entries = self.run(world, "slow", {CASE: json.dumps(case)}, "--log-every-steps=5")
        found = [entry for entry in entries if "ranks/data_s/0" in entry]
        windows = [
            [entry["step"], *([entry[f"ranks/{part}_s/{rank}"] for part in ("data", "compute", "waiting")]
                              for rank in range(world))] for entry in found
        ]
        lines = re.findall(r"(ranks? [\d-]+ \(.*(?:slower than|keeps up).*)", output)
        first = next((int(m[1]) for line in lines if (m := re.search(r"since step (\d+)", line))), None)
        return {"world": world, "case": kind, "share": share, "load": os.getloadavg()[0], "windows": windows,
                "lines": lines, "since": first}

    def own_s(self, windows: list[Any]) -> float:
        """Seconds of a step that a rank needs for itself: the median."""
        return statistics.median(rank[0] + rank[1] for _, *ranks in windows for rank in ranks)

    def overhead(self, world: int) -> dict[str, list[float]]:
        out = self.folder / "times.json"
        self.run(world, "alternate", {OUT: str(out)})
        return json.loads(out.read_text())  # type: ignore[no-any-return]


def words(bench: Bench, kinds: list[str], shares: list[float], worlds: list[int], out: Path) -> None:
    print(f"| ranks | slow | by | load | windows of {WINDOW_S:g} s | lines on the slow rank | on others |")
    print("|---" * 7 + "|")
    for world in worlds:
        healthy = bench.words(world, "healthy", 0.0, 0.0)
        _show(healthy, out)
        for kind, share in itertools.product(kinds, shares):
            _show(bench.words(world, kind, share, bench.own_s(healthy["windows"])), out)


def _show(case: dict[str, Any], out: Path) -> None:
    with out.open("a") as file:
        file.write(json.dumps(case) + "\n")
    slow = f"rank {case['world'] - 1} "
    right = [line for line in case["lines"] if line.startswith(slow) and case["case"] != "healthy"]
    wrong = [line for line in case["lines"] if line not in right]
    print(f"| {case['world']} | {case['case']} | {case['share']:.0%} | {case['load']:.1f} | {len(case['windows'])} | "
          f"{len(right)} | {len(wrong)} |", flush=True)
    for line in case["lines"]:
        print("   ", line, file=sys.stderr, flush=True)


def overhead(bench: Bench, worlds: list[int]) -> None:
    print("| ranks | steps | ms a step | with measuring | without again |\n|---|---|---|---|---|")
    for world in worlds:
        times = bench.overhead(world)
        own, measured, again = (statistics.median(times[way]) for way in WAYS)
        differences = f"{measured / own - 1:+.2%} | {again / own - 1:+.2%}"
        print(f"| {world} | {len(times['with'])} | {1000 * own:.3f} | {differences} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["words", "overhead"])
    parser.add_argument("--seconds", type=float, default=60, help="of each training")
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--kinds", nargs="*", default=["data", "compute"])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.2, 0.5], help="of a rank's own step")
    parser.add_argument("--model", choices=["cnn", "mlp"], default="cnn")
    parser.add_argument("--out", type=Path, default=Path("runs/stragglers.jsonl"), help="all windows, a case a line")
    arguments = parser.parse_args()
    about = conditions()
    print(f"{about['cpu']}, {about['cpus']} CPUs, load {about['load_average']:.1f} before, one thread a process; torch "
          f"{about['torch']}, {about['date']}\n")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), arguments.seconds, arguments.model)
        if arguments.what == "words":
            words(bench, arguments.kinds, arguments.shares, arguments.worlds, arguments.out)
        else:
            overhead(bench, arguments.worlds)
        bench.forks.close()


if __name__ == "__main__":
    main()
