"""How long until the first step? A cold start beside the least that torch needs, and a rank that is forked.

    python tests/bench/start.py --repeats 9

`bare` is a script of ten lines: it imports torch, and takes one optimizer step with a batch of zeros. `cold` is
`python -m train.main train` with the same model, from the command to the end of its first step. `forked` are ranks that
are forked from the process that an agent forks them from, from the request to the end of their first step. All take
turns, so that a machine that is busy for a while slows all of them. Prints a table of medians with its conditions.
Nothing is asserted here.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rankup.agent.fork_server import ForkServer
from rankup.agent.script import Script
from tests.bench.machine import conditions
from tests.rigs.jobs import MAIN, ROOT, environment, free_port, rank_env

GOAL = 1.3  # cold over bare
WORLDS = (1, 2)
COMMON = ("--max-steps", "1", "--log-every-steps", "1", "--limit-eval", "64", "--fresh", "--progress", "none")
BARE = """
import time, torch
from torch import nn
torch.set_num_threads(1)
{model}
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
nn.functional.cross_entropy(model(torch.zeros({shape})), torch.zeros({shape[0]}, dtype=torch.int64)).backward()
optimizer.step()
print(time.time())
"""
CNN = """model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
    nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 49, 256), nn.ReLU(), nn.Linear(256, 10),
)"""
MLP = "model = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))"
RESNET = "from torchvision import models; model = models.resnet18(num_classes=10)"


@dataclass
class Case:
    """One training, and the seconds that were measured of it."""

    name: str
    line: tuple[str, ...]  # settings
    model: str  # Python for BARE: the same model
    shape: tuple[int, ...]  # of a batch
    bare: list[float] = field(default_factory=list)
    cold: list[float] = field(default_factory=list)
    forked: dict[int, list[float]] = field(default_factory=lambda: {world: [] for world in WORLDS})


def bare_s(case: Case) -> float:
    """Seconds from the start of the interpreter to the end of the first step of the script BARE."""
    script = BARE.format(model=case.model, shape=case.shape)
    began_s = time.time()
    printed = subprocess.check_output([sys.executable, "-c", script], env=environment(), text=True)
    return float(printed) - began_s


def cold_s(run_dir: Path, line: tuple[str, ...]) -> float:
    """Seconds from the command to the end of the first step, one process."""
    began_s = time.time()
    subprocess.run(
        [sys.executable, "-m", "train.main", "train", *line, *COMMON, "--run-dir", run_dir, "--name", "run"],
        env=environment(), cwd=ROOT, stdout=subprocess.DEVNULL, check=True,
    )
    return first_step_at(run_dir / "run") - began_s


class Forks:
    """Ranks of one training, forked from a server as an agent has it."""

    def __init__(self, run_dir: Path, line: tuple[str, ...]) -> None:
        self.run = run_dir / "run"
        self.words = [str(MAIN), "train", *line, *COMMON, "--run-dir", str(run_dir), "--name", self.run.name]
        self.loop = asyncio.new_event_loop()
        self.codes: list[int] = []
        self.loop.run_until_complete(self.start())
        self.seconds(1)  # answered once the server has imported everything

    async def start(self) -> None:
        self.server = ForkServer(on_end=lambda _, code: self.codes.append(code), on_warning=refuse, on_gone=refuse)
        script = Script.find([str(MAIN)])
        preload, folder = script.own_imports()
        self.server.start(script.safe_imports(), env=environment(), preload=preload, folder=folder)

    def seconds(self, world_size: int) -> float:
        """From the request to the end of the first step."""
        return self.loop.run_until_complete(self.measure(world_size))

    async def measure(self, world_size: int) -> float:
        port = free_port()
        self.codes.clear()
        began_s = time.time()
        with open(os.devnull, "w") as nowhere:  # what the ranks print would stand between the lines of the table
            for rank in range(world_size):
                env = {**environment(), **(rank_env(rank, world_size, port) if world_size > 1 else {})}
                outputs = [nowhere.fileno()] * 2
                self.server.start_rank(rank, self.words, env=env, name=f"rank {rank}", outputs=outputs)
        while len(self.codes) < world_size:
            await asyncio.sleep(0.01)
        assert self.codes == [0] * world_size
        return first_step_at(self.run) - began_s

    def close(self) -> None:
        self.loop.run_until_complete(self.server.close())


def refuse(warning: str = "the server is gone") -> NoReturn:
    raise AssertionError(warning)


def first_step_at(run: Path) -> float:
    """When the first step ended, as time.time gives it."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return next(float(line["time"]) for line in lines if line["step"] == 1 and "train/loss" in line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    cases = [
        Case("Fashion-MNIST, cnn", ("--dataset", "fashion-mnist", "--model", "cnn"), CNN, (64, 1, 28, 28)),
        Case("digits, mlp", ("--dataset", "digits", "--model", "mlp"), MLP, (64, 1, 8, 8)),
        Case("fake images, resnet18", ("--dataset", "fake", "--model", "resnet18", "--batch-size", "16"), RESNET,
             (16, 3, 32, 32)),
    ]
    about = conditions()
    with tempfile.TemporaryDirectory() as folder:
        forks = {case.name: Forks(Path(folder) / case.name, case.line) for case in cases}
        for repeat in range(repeats):
            print(f"{repeat + 1} of {repeats}", file=sys.stderr, flush=True)
            for case in cases:
                case.bare.append(bare_s(case))
                case.cold.append(cold_s(Path(folder), case.line))
                for world in WORLDS:
                    case.forked[world].append(forks[case.name].seconds(world))
        for each in forks.values():
            each.close()
    print(table(cases, about, load_after=os.getloadavg()[0]))


def table(cases: list[Case], about: str, *, load_after: float) -> str:
    """Markdown, to be read and to be pasted."""
    heads = "".join(f" {world} forked rank{'s' if world > 1 else ''}, s |" for world in WORLDS)
    lines = [
        f"{about}, load {load_after:.1f} after, one thread a process; medians of {len(cases[0].cold)}.",
        "",
        f"| until the end of the first step | bare, s | cold, s | cold / bare (goal {GOAL}) |{heads}",
        f"|---|---|---|---|{'---|' * len(WORLDS)}",
    ]
    for case in cases:
        bare, cold = statistics.median(case.bare), statistics.median(case.cold)
        forked = "".join(f" {statistics.median(seconds):.2f} |" for seconds in case.forked.values())
        lines.append(f"| {case.name} | {bare:.2f} | {cold:.2f} | {cold / bare:.2f} |{forked}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
