"""Where does the time of a step go? Data, agreement on stopping, forward, backward, exchange, optimizer, Python.

    python tests/bench/step_shares.py --repeats 7

The small CNN on Fashion-MNIST, over numbers of ranks and global batches. Every second step of a rank exchanges no
gradients and changes no weights, so that the exchange is what the others take longer for in backward: sending, adding,
and waiting for a rank that is later. Beside it, the ratio of one job of two ranks to two jobs of one rank each that run
at the same time with half the batch: 1 is as much as two cores give. All take turns, so that a machine that is busy for
a while slows all of them. Prints tables of medians with their conditions. Nothing is asserted here.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.throughput import conditions
from tests.rigs.fork_server import Forks

PARTS = ("data", "agreement", "seeding", "forward", "backward", "exchange", "buffers", "optimizer", "Python")
FOLDER = "STEP_SHARES_FOLDER"  # the environment's variable that tells the ranks where to leave their figures
WARM_STEPS = 20  # left out


def measure() -> None:
    """Preloaded in each rank: time the parts of each step, and leave their medians in a file once all are done."""
    import torch

    import train.loop as loop
    from rankup.group.group import Group
    from rankup.loop.tracked import Tracked
    from train.data.loader import Loader
    from train.parallel.ddp import DDP
    from train.parallel.method import Method
    from train.workloads.classification import Classification

    now: dict[str, float] = defaultdict(float)  # seconds of the step that runs
    steps: list[dict[str, float]] = []
    exchanges = [True]
    inside, update = DDP.micro_batch, Method.step

    def timed(owner: Any, name: str, part: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def timed_function(*arguments: Any, **more: Any) -> Any:
            began_s = time.perf_counter()
            result = function(*arguments, **more)
            now[part] += time.perf_counter() - began_s
            return result

        setattr(owner, name, timed_function)

    def step(t: Any, step: Callable[[Any], bool] = loop.step) -> bool:
        exchanges[0] = t.group.world_size == 1 or t.job.step_number % 2 == 0
        now.clear()
        began_s = time.perf_counter()
        finished = step(t)
        whole_s = time.perf_counter() - began_s
        steps.append({**now, "step": whole_s, "Python": whole_s - sum(now.values()), "exchanges": exchanges[0]})
        if t.job.step_number == t.total_steps:
            folder, name = Path(os.environ[FOLDER]), f"rank-{t.group.rank}.json"
            (folder / name).write_text(json.dumps(medians(steps[WARM_STEPS:])))
        return finished

    def micro_batch(method: DDP, model: Any, *, last: bool) -> Any:
        return inside(method, model, last=last and exchanges[0])

    def update_or_not(method: Method, plain: Any, optimizer: Any, scaler: Any) -> None:
        if exchanges[0]:
            update(method, plain, optimizer, scaler)
        else:
            optimizer.zero_grad()

    loop.step, DDP.micro_batch, Method.step = step, micro_batch, update_or_not  # type: ignore[assignment, method-assign]
    for owner, name, part in (
        (Loader, "next", "data"), (Group, "max", "agreement"), (loop, "seed_everything", "seeding"),
        (Classification, "loss", "forward"), (torch.Tensor, "backward", "backward"),
        (Tracked, "share_buffers", "buffers"), (Method, "step", "optimizer"),
    ):
        timed(owner, name, part)


def medians(steps: list[dict[str, float]]) -> dict[str, float]:
    """Seconds of each part, from steps that exchange and steps that do not."""
    whole = [step for step in steps if step["exchanges"]]
    alone = [step for step in steps if not step["exchanges"]] or whole
    found = {part: statistics.median(step.get(part, 0.0) for step in whole) for part in (*PARTS, "step")}
    backward = statistics.median(step["backward"] for step in alone)
    found["exchange"], found["backward"] = found["backward"] - backward, backward
    return found


class Bench:
    """Runs of one number of steps, forked from one process."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps
        self.forks = Forks(folder)

    def settings(self, name: str, batch: int) -> list[str]:
        return [
            "train", f"--batch-size={batch}", f"--max-steps={self.steps}", "--limit-eval=64", "--tensorboard=false",
            "--fresh", f"--name={name}", f"--run-dir={self.folder}",
        ]

    def shares(self, world: int, batch: int) -> dict[str, float]:
        """Seconds of each part of a step, the mean over the ranks."""
        env = {FOLDER: str(self.folder)}
        codes, output = self.forks.run(
            *self.settings("shares", batch), world_size=world, env=env, preload="tests.bench.step_shares:measure"
        )
        assert codes == [0] * world, output
        ranks = [json.loads((self.folder / f"rank-{rank}.json").read_text()) for rank in range(world)]
        return {part: statistics.mean(rank[part] for rank in ranks) for part in ranks[0]}

    def ratio(self, batch: int) -> tuple[float, float]:
        """Images/s of one job of two ranks, and of two jobs of one rank with half the batch at the same time."""
        jobs = [self.forks.start(*self.settings(f"alone-{i}", batch // 2)) for i in range(2)]
        assert [job.wait() for job in jobs] == [[0], [0]], jobs[0].output
        codes, output = self.forks.run(*self.settings("together", batch), world_size=2)
        assert codes == [0, 0], output
        return self.speed("together"), self.speed("alone-0") + self.speed("alone-1")

    def speed(self, name: str) -> float:
        """Images/s of training alone."""
        return float(json.loads((self.folder / name / "result.json").read_text())["images_per_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=200, help="of each training")
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[32, 128, 512], help="global, in samples")
    arguments = parser.parse_args()
    about = conditions()
    cases = [(world, batch) for world in arguments.worlds for batch in arguments.batch_sizes]
    shares: dict[tuple[int, int], list[dict[str, float]]] = {case: [] for case in cases}
    speeds: dict[int, list[tuple[float, float]]] = {batch: [] for batch in arguments.batch_sizes}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), arguments.steps)
        for repeat in range(arguments.repeats):
            print(f"{repeat + 1} of {arguments.repeats}", file=sys.stderr, flush=True)
            for world, batch in cases:
                shares[world, batch].append(bench.shares(world, batch))
            for batch, found in speeds.items():
                found.append(bench.ratio(batch))
        bench.forks.close()
    print(
        f"{about['cpu']}, {about['cpus']} CPUs (load {about['load_average']:.1f} before, {os.getloadavg()[0]:.1f} "
        f"after), one thread a process; torch {about['torch']}, Python {about['python']}, {about['date']}; medians of "
        f"{arguments.repeats}.\n"
    )
    print(shares_table(shares), ratio_table(speeds), sep="\n\n")


def shares_table(shares: dict[tuple[int, int], list[dict[str, float]]]) -> str:
    """Markdown: percent of a step that exchanges."""
    lines = [f"| ranks | batch | step, ms | {' | '.join(f'{part}, %' for part in PARTS)} |", "|---" * 12 + "|"]
    for (world, batch), found in shares.items():
        median = {part: statistics.median(run[part] for run in found) for part in found[0]}
        percents = " | ".join(f"{100 * median[part] / median['step']:.1f}" for part in PARTS)
        lines.append(f"| {world} | {batch} | {1000 * median['step']:.2f} | {percents} |")
    return "\n".join(lines)


def ratio_table(speeds: dict[int, list[tuple[float, float]]]) -> str:
    """Markdown: the medians of the ratios, and how far they spread."""
    lines = ["| batch | 2 ranks, images/s | 2 jobs of 1 rank | ratio | lowest to highest |", "|---|---|---|---|---|"]
    for batch, found in speeds.items():
        ratios = [together / alone for together, alone in found]
        together, alone = (statistics.median(column) for column in zip(*found, strict=True))
        lines.append(
            f"| {batch} | {together:,.0f} | {alone:,.0f} | {statistics.median(ratios):.2f} | {min(ratios):.2f} to "
            f"{max(ratios):.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
