"""How long until the first step? A cold start beside the least that torch needs, and a rank that is forked.

    python tests/bench/start.py --repeats 9

`bare` is a script of ten lines: it imports torch, and takes one optimizer step with a batch of zeros. `cold` is
`python -m train.main train` with the same model, from the command to the end of its first step. `forked` are ranks that
are forked from the process that an agent forks them from, from the request to the end of their first step. All take
turns, so that a machine that is busy for a while slows all of them. Prints a table of medians with its conditions.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rankup.agent.fork_server import ForkServer
from rankup.agent.script import Script
from tests.bench.machine import conditions, markdown_table, run, step_ends
from tests.rigs.jobs import MAIN, environment, free_port, rank_env

COMMON = ("--max-steps", "1", "--log-every-steps", "1", "--limit-eval", "64", "--fresh")
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


CASES = {  # settings of the training, and the same model and shape of a batch for BARE
    "Fashion-MNIST, cnn": (("--dataset", "fashion-mnist", "--model", "cnn"), CNN, (64, 1, 28, 28)),
    "digits, mlp": (("--dataset", "digits", "--model", "mlp"), MLP, (64, 1, 8, 8)),
    "fake images, resnet18": (
        ("--dataset", "fake", "--model", "resnet18", "--batch-size", "16"), RESNET, (16, 3, 32, 32)),
}


def bare_s(model: str, shape: tuple[int, ...]) -> float:
    """Seconds from the start of the interpreter to the end of the first step of the script BARE."""
    began_s = time.time()
    return float(run(sys.executable, "-c", BARE.format(model=model, shape=shape))[0]) - began_s


def cold_s(run_dir: Path, line: tuple[str, ...]) -> float:
    """Seconds from the command to the end of the first step, one process."""
    began_s = time.time()
    run(sys.executable, "-m", "train.main", "train", *line, *COMMON, "--run-dir", run_dir, "--name", "run")
    return step_ends(run_dir / "run")[1] - began_s


class Forks:
    """Ranks, forked from a server as an agent has it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.codes = folder, list[int]()
        self.server = ForkServer(on_end=lambda _, code: self.codes.append(code), on_warning=refuse, on_gone=refuse)
        script = Script.find([str(MAIN)])
        preload, own = script.own_imports()
        self.server.start(script.safe_imports(), env=environment(), preload=preload, folder=own)

    async def seconds(self, line: tuple[str, ...], world_size: int) -> float:
        """From the request to the end of the first step."""
        port, began_s = free_port(), time.time()
        words = [str(MAIN), "train", *line, *COMMON, "--run-dir", str(self.folder), "--name", "forked"]
        self.codes.clear()
        with open(os.devnull, "w") as nowhere:  # what the ranks print would stand between the lines of the table
            for rank in range(world_size):
                env = environment(rank_env(rank, world_size, port) if world_size > 1 else {})
                self.server.start_rank(rank, words, env=env, name=f"rank {rank}", outputs=[nowhere.fileno()] * 2)
        while len(self.codes) < world_size:
            await asyncio.sleep(0.01)
        assert self.codes == [0] * world_size
        return step_ends(self.folder / "forked")[1] - began_s


def refuse(warning: str = "the server is gone") -> NoReturn:
    raise AssertionError(warning)


async def measure(repeats: int) -> dict[str, dict[str, list[float]]]:
    """By case, what was measured, and the seconds of each time."""
    took = {name: defaultdict[str, list[float]](list) for name in CASES}
    with tempfile.TemporaryDirectory() as folder:
        forks = Forks(Path(folder))
        await forks.seconds(CASES["digits, mlp"][0], 1)  # when it answers, the server has imported everything
        for repeat, (name, (line, model, shape)) in product(range(repeats), CASES.items()):
            print(f"{repeat + 1} of {repeats}: {name}", file=sys.stderr, flush=True)
            took[name]["bare, s"].append(bare_s(model, shape))
            took[name]["cold, s"].append(cold_s(Path(folder), line))
            for world in (1, 2):
                took[name][f"forked ranks: {world}, s"].append(await forks.seconds(line, world))
        forks.server.close()
    return {**took}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    repeats, about = parser.parse_args().repeats, conditions()
    medians = {name: {what: statistics.median(found) for what, found in each.items()}
               for name, each in asyncio.run(measure(repeats)).items()}
    rows = [[name, *(f"{each:.2f}" for each in found.values()), f"{found['cold, s'] / found['bare, s']:.2f}"]
            for name, found in medians.items()]
    print(f"{about}, load {os.getloadavg()[0]:.1f} after, one thread a process; medians of {repeats}.\n")
    header = ["until the end of the first step", *next(iter(medians.values())), "cold / bare"]
    print("\n".join(markdown_table(header, rows)))


if __name__ == "__main__":
    main()
