"""A race on this machine between rankup and what users would take instead: images/s, and the accuracy that is reached.

    make race     (or: python bench/race.py --repeats 5 --processes 1 2 --precision fp32 bf16)

All entrants train the same model from the same weights, on the same batches in the same order, with the same SGD and
one thread per process (`racers/shared.py`). Each entrant is a short script in `racers/`, whose docstring says how it
was made fast. rankup runs through its own command line, with its defaults. The speed is measured from the end of step
--warm-up to the end of the last step, on rank 0's clock. The time of the whole command includes the start, imports, one
evaluation, and rankup's checkpoint. The entrants take turns, in an order that changes with each repeat, so that a busy
period slows all of them. Ratios compare times of the same repeat. The tables are printed and written to --output.
Nothing is asserted here.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import machine
from bench.racers import shared
from bench.racers.shared import Task
from tests.rigs.idx_files import write_idx
from tests.rigs.jobs import MAIN, ROOT
from train.data.sources.fetch import KNOWN, locate

RANKUP = "rankup"
BY_HAND, WITH_LINES = "tuned by hand", "by hand, with rankup"
BATCH = 128  # global
Lap = dict[str, Any]  # entrant, precision, processes, repeat, images_per_s, accuracy, loss, command_s, load


@dataclass(frozen=True)
class Entrant:
    """A participant of the race. `about`: how it was made fast. `script`: a module in racers/, or "" for rankup's own
    command line. `package`: a package that it needs besides torch."""

    name: str
    about: str
    script: str = ""
    variant: str = ""
    package: str = ""


ENTRANTS = (
    Entrant("tutorial", "PyTorch's DDP tutorial, torchvision's FashionMNIST, a DataLoader", "tutorial", "loader"),
    Entrant("tutorial, in memory", "the same loop, batches taken from memory by index", "tutorial", "memory"),
    Entrant("Accelerate", "from memory; gradients as views of the buckets", "accelerate_loop", package="accelerate"),
    Entrant("Lightning", "from memory; barebones=True, gradients as views of the buckets", "lightning_trainer",
            package="lightning"),
    Entrant("torchft", "each process is a replica group; the loop tuned by hand, with torchft's DDP and vote",
            "torchft_loop", package="torchft"),
    Entrant(BY_HAND, "no loader; channels_last, fused SGD, gradients as views of the buckets; malloc set up",
            "hand_tuned"),
    Entrant(WITH_LINES, "the same loop with job.batches and job.step in it", "hand_tuned", "rankup"),
    Entrant(RANKUP, "its defaults; it also writes metrics, watches its ranks, can stop, and saves at the end"),
)


def run_script(entrant: Entrant, task: Task, processes: int) -> tuple[dict[str, float], float]:
    """Run a script of racers/. Return its result (see `shared.finish`), and the seconds of the whole command."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes] if processes > 1 else []
    settings = json.dumps(asdict(replace(task, variant=entrant.variant)))
    line = [sys.executable, *torchrun, "-m", f"bench.racers.{entrant.script}", settings]
    _, seconds = machine.run(*line)
    return json.loads(Path(task.result).read_text()), seconds


def run_rankup(task: Task, processes: int) -> tuple[dict[str, float], float]:
    """Do the same as `run_script` for rankup's command line."""
    runs = Path(task.result).parent
    flags = [
        "--workload", "bench.racers.shared:build", "--options.data", task.data, "--batch-size", task.batch_size,
        "--max-steps", task.steps, "--log-every-steps", task.warm_up, "--lr", shared.LR, "--momentum", shared.MOMENTUM,
        "--weight-decay", 0, "--schedule", "constant", "--precision", task.precision, "--device", "cpu",
        "--run-dir", runs, "--name", "race", "--fresh",
        # No other entrant evaluates or saves during the training
        "--evaluate-every-epochs", 1_000_000, "--save-every-steps", task.steps,
    ]
    several = ["launch", "--nproc", processes, "--max-restarts", 0, MAIN] if processes > 1 else []
    _, seconds = machine.run(sys.executable, MAIN, *several, "train", *flags)
    # Metrics are written at the same point of each step, so the time between two lines is that of the steps between
    ended_s = machine.step_ends(runs / "race")
    speed = (task.steps - task.warm_up) * task.batch_size / (ended_s[task.steps] - ended_s[task.warm_up])
    metrics = json.loads((runs / "race/result.json").read_text())["metrics"]
    return {"images_per_s": speed, "accuracy": metrics["accuracy"], "loss": metrics["loss"]}, seconds


def lap(entrant: Entrant, task: Task, processes: int, repeat: int) -> Lap:
    """Run one training of one entrant."""
    load = os.getloadavg()[0]
    found, seconds = run_script(entrant, task, processes) if entrant.script else run_rankup(task, processes)
    print(
        f"{task.precision}, {processes} processes, repeat {repeat}: {entrant.name} {found['images_per_s']:,.0f} "
        f"images/s, accuracy {found['accuracy']:.4f}, {seconds:.1f} s, load {load:.1f}", file=sys.stderr, flush=True,
    )
    return {"entrant": entrant.name, "precision": task.precision, "processes": processes, "repeat": repeat, **found,
            "command_s": seconds, "load": load}


def race(options: argparse.Namespace, task: Task, entrants: Sequence[Entrant]) -> list[Lap]:
    """Run all laps, one after the other."""
    laps = []
    for precision in options.precision:
        own = replace(task, precision=precision)
        for repeat in range(options.repeats):
            first = repeat % len(entrants)
            for processes in options.processes:
                laps += [lap(each, own, processes, repeat + 1) for each in (*entrants[first:], *entrants[:first])]
    return laps


def spread(values: Sequence[float], form: str) -> str:
    """Return the median, with the range in brackets. `form`: the format of a value."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def ratio(laps: Sequence[Lap], winner: str, other: str) -> float | None:
    """Return the median, over the repeats, of `winner`'s speed divided by `other`'s, or None if one did not race."""
    speeds = {(each["entrant"], each["repeat"]): each["images_per_s"] for each in laps}
    both = [repeat for name, repeat in speeds if name == other and (winner, repeat) in speeds]
    found = [speeds[winner, repeat] / speeds[other, repeat] for repeat in both]
    return statistics.median(found) if found else None


def table(laps: Sequence[Lap], precision: str) -> list[str]:
    """Return the Markdown table of one precision. The ratios are those of the largest number of processes."""
    own = [each for each in laps if each["precision"] == precision]
    worlds = sorted({each["processes"] for each in own})
    most, rows = [each for each in own if each["processes"] == worlds[-1]], []
    for entrant in ENTRANTS:
        mine = [each for each in own if each["entrant"] == entrant.name]
        if not mine:
            continue
        cells = [spread([each["images_per_s"] for each in mine if each["processes"] == w], ",.0f") for w in worlds]
        factor = ratio(most, RANKUP, entrant.name) if entrant.script else None
        cells.append(f"{factor:.2f}" if factor else "")
        command_s = statistics.median(each["command_s"] for each in mine if each["processes"] == worlds[-1])
        rows.append([entrant.name, *cells, spread([100 * each["accuracy"] for each in mine], ".1f"),
                     f"{command_s:.1f}"])
    titles = [f"images/s, {world} process{'es' if world > 1 else ''}" for world in worlds]
    at = f" at {worlds[-1]}" if len(worlds) > 1 else ""
    header = [precision, *titles, f"rankup is faster{at}", "accuracy, %", f"command{at}, s"]
    lines = machine.markdown_table(header, rows)
    if found := ratio(most, WITH_LINES, BY_HAND):
        lines += ["", f"With the lines of a job, the loop tuned by hand has {found:.3f} of its speed."]
    return lines


def conditions(options: argparse.Namespace, laps: Sequence[Lap]) -> str:
    """Return the conditions that belong to the figures."""
    packages = ["torchvision", *(each.package for each in ENTRANTS if each.package)]
    versions = ", ".join(f"{name} {version(name)}" for name in packages if find_spec(name))
    loads, raced = [each["load"] for each in laps], {each["entrant"] for each in laps}
    notes = "\n".join(f"- {each.name}: {each.about}." for each in ENTRANTS if each.name in raced)
    data = "random images" if options.random else "Fashion-MNIST"
    return (
        f"{notes}\n\nCNN, {data}, global batch {BATCH}, one thread a process; medians of "
        f"{options.repeats} (and their range) from step {options.warm_up} to {options.steps}; ratios are medians of "
        f"those within a repeat. {machine.conditions()}, load average {min(loads):.1f} to {max(loads):.1f} meanwhile, "
        f"{versions}."
    )


def prepare_data(folder: Path, *, random: bool) -> None:
    """Put Fashion-MNIST, or random images of its form, below `folder`, in the form that torchvision's class reads."""
    if not random:
        root = locate(KNOWN["fashion-mnist"], data_dir=None, timeout_s=3600)
        (folder / "FashionMNIST").symlink_to((root / "FashionMNIST").absolute())  # RANKUP_CACHE may be a relative path
        return
    raw = folder / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for part, size in (("train", 2048), ("t10k", 256)):
        generator = torch.Generator().manual_seed(size)
        images = torch.randint(0, 256, (size, 28, 28), dtype=torch.uint8, generator=generator)
        write_idx(raw / f"{part}-images-idx3-ubyte", images)
        write_idx(raw / f"{part}-labels-idx1-ubyte", torch.randint(0, 10, (size,), generator=generator).byte())


def parse() -> argparse.Namespace:
    names = [entrant.name for entrant in ENTRANTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], choices=[1, 2, 4, 8])
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--random", action="store_true", help="random images in place of Fashion-MNIST")
    parser.add_argument("--warm-up", type=int, default=50, help="steps that do not count; steps must be a multiple")
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--only", nargs="+", default=names, choices=names, metavar="NAME", help="entrants that race")
    parser.add_argument("--output", type=Path, default=ROOT / "runs/race", help="folder of race.md and race.json")
    options = parser.parse_args()
    if options.steps % options.warm_up or options.steps == options.warm_up:
        parser.error(f"--steps must be a larger multiple of --warm-up, got {options.steps} and {options.warm_up}")
    return options


def main() -> None:
    options, entrants = parse(), []
    for entrant in ENTRANTS:
        if entrant.name in options.only and entrant.package and find_spec(entrant.package) is None:
            print(f"{entrant.name} does not race: pip install {entrant.package}", file=sys.stderr)
        elif entrant.name in options.only:
            entrants.append(entrant)
    with tempfile.TemporaryDirectory() as scratch:
        prepare_data(Path(scratch), random=options.random)
        task = Task(data=scratch, batch_size=BATCH, warm_up=options.warm_up, steps=options.steps, precision="",
                    result=f"{scratch}/result.json", variant="")
        laps = race(options, task, entrants)
    text = "\n\n".join("\n".join(table(laps, precision)) for precision in options.precision)
    text += f"\n\n{conditions(options, laps)}\n"
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "race.md").write_text(text)
    (options.output / "race.json").write_text(json.dumps(laps, indent=2) + "\n")
    print(f"{text}\nwritten to {options.output}")


if __name__ == "__main__":
    main()
