"""Who races, what a lap measures, and the table of all laps."""

import argparse
import importlib.metadata
import importlib.util
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tests.bench import machine

RANKUP, ADVISED = "rankup", "rankup as advised"
BY_HAND, WITH_LINES, LINES_GOAL = "tuned by hand", "by hand, with rankup", 0.97


@dataclass(frozen=True)
class Entrant:
    """One that races. `script`: in racers/; empty: rankup's own command line. `package`: what it needs beside torch.

    `about`: what was done for its speed, in short; the script's docstring says more. `goal`: how many times as fast
    rankup shall be, with its defaults and with its advice followed.
    """

    name: str
    about: str
    script: str = ""
    variant: str = ""
    package: str = ""
    goal: tuple[float, float] = (1.5, 2.0)


ENTRANTS = (
    Entrant("tutorial", "PyTorch's DDP tutorial, torchvision's FashionMNIST, a DataLoader", "tutorial", "loader"),
    Entrant("tutorial, in memory", "the same loop, batches taken from memory by index", "tutorial", "memory"),
    Entrant(
        "Accelerate", "from memory; gradients as views of the buckets", "accelerate_loop", package="accelerate",
    ),
    Entrant(
        "Lightning", "from memory; barebones=True, gradients as views of the buckets",
        "lightning_trainer", package="lightning",
    ),
    Entrant(
        BY_HAND,
        "no loader; channels_last, fused SGD, gradients as views of the buckets; malloc set up",
        "hand_tuned", goal=(1.0, 1.0),
    ),
    Entrant(WITH_LINES, "the same loop with the lines of a job in it: job.batches and job.step", "hand_tuned", "rankup",
            goal=(1.0, 1.0)),
    Entrant(RANKUP, "its defaults; it also writes metrics, watches its ranks, can stop, and saves at the end"),
    Entrant(ADVISED, "with the flags that its start lines advise"),
)


@dataclass(frozen=True)
class Lap:
    """One training. `accuracy`, `loss`: on the test images. `command_s`: seconds of the whole command.

    `load`: the machine's load average before it.
    """

    entrant: str
    precision: str
    processes: int
    repeat: int
    images_per_s: float
    accuracy: float
    loss: float
    command_s: float
    load: float


def spread(values: Sequence[float], form: str) -> str:
    """The median, and the range in brackets: `form` is one value's format."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def ratio(laps: Sequence[Lap], winner: str, other: str) -> float | None:
    """The median, over the repeats, of how many times as fast `winner` was; None if one of the two did not race."""
    speeds = {(each.entrant, each.repeat): each.images_per_s for each in laps}
    both = [repeat for name, repeat in speeds if name == other and (winner, repeat) in speeds]
    found = [speeds[winner, repeat] / speeds[other, repeat] for repeat in both]
    return statistics.median(found) if found else None


def table(laps: Sequence[Lap], precision: str) -> list[str]:
    """Markdown of one precision. The ratios are those at the largest number of processes."""
    own = [each for each in laps if each.precision == precision]
    worlds = sorted({each.processes for each in own})
    most = [each for each in own if each.processes == worlds[-1]]
    rows = []
    for entrant in ENTRANTS:
        name = entrant.name
        if not (mine := [each for each in most if each.entrant == name]):
            continue
        speeds = [[each.images_per_s for each in own if (each.entrant, each.processes) == (name, w)] for w in worlds]
        factors = [ratio(most, rankup, name) if entrant.script else None for rankup in (RANKUP, ADVISED)]
        cells = [spread(values, ",.0f") for values in speeds]
        cells += [f"{f:.2f} (goal {goal:g})" if f else "" for f, goal in zip(factors, entrant.goal, strict=True)]
        cells.append(spread([100 * each.accuracy for each in own if each.entrant == name], ".1f"))
        rows.append([name, *cells, f"{statistics.median(each.command_s for each in mine):.1f}"])
    titles = [f"images/s, {world} process{'es' if world > 1 else ''}" for world in worlds]
    at = f"at {worlds[-1]}" if len(worlds) > 1 else ""
    header = [precision, *titles, f"rankup is faster {at}", f"with its advice {at}", "accuracy, %", f"command {at}, s"]
    lines = machine.markdown_table([title.strip() for title in header], rows)
    if found := ratio(most, WITH_LINES, BY_HAND):
        lines += ["", f"The lines of a job in the loop tuned by hand: {found:.3f} of its speed (goal {LINES_GOAL:g})."]
    return lines


def conditions(options: argparse.Namespace, laps: Sequence[Lap]) -> str:
    """What the figures must not be read without."""
    packages = ["torchvision", *(each.package for each in ENTRANTS if each.package)]
    versions = [f"{name} {importlib.metadata.version(name)}" for name in packages if importlib.util.find_spec(name)]
    loads, raced = [each.load for each in laps], {each.entrant for each in laps}
    notes = "\n".join(f"- {each.name}: {each.about}." for each in ENTRANTS if each.name in raced)
    data = "random images" if options.random else "Fashion-MNIST"
    return (
        f"{notes}\n\nCNN, {data}, global batch {options.batch_size}, one thread a process; medians of "
        f"{options.repeats} (and their range) from step {options.warm_up} to {options.steps}; ratios are medians of "
        f"those within a repeat. {machine.conditions()}, load average {min(loads):.1f} to {max(loads):.1f} meanwhile, "
        f"{', '.join(versions)}."
    )
