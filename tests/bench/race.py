"""A race: rankup beside what users would pick instead, on this machine. Images/s, and the accuracy that they lead to.

    make race     (or: python tests/bench/race.py --repeats 5 --processes 1 2 --precision fp32 bf16)

All entrants train the same model from the same weights, on the same batches in the same order, with the same SGD, one
thread a process: `racers/shared.py`. Each is a short script in `racers/`, and its docstring says what was done for its
speed. rankup runs by its own command line, with its defaults, and once more with the flags that its start lines advise.
The speed is that from the end of step --warm-up to the end of the last step, on rank 0's clock. The time of the whole
command has start, imports and one evaluation in it, and rankup's checkpoint. The entrants take turns, in an order that
changes with each repeat, so that a machine that is busy for a while slows all of them; ratios are of the same repeat.
Prints tables, and writes them to --output with all figures. Nothing is asserted here.
"""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.racers import shared
from tests.bench.racers.report import ADVISED, ENTRANTS, Entrant, Lap, conditions, table
from tests.bench.racers.shared import Task
from tests.rigs.idx_files import write_idx
from tests.rigs.jobs import MAIN, ROOT, environment
from train.data.sources import in_memory

PATIENCE_S = 3600.0  # for one training: a ResNet-50 on CPUs takes its time
# Threads and workers, which it may advise too, would change the conditions of the race
ADVICE = re.compile(r"--precision bf16")


def run(command: Sequence[str | Path | float]) -> tuple[str, float]:
    """A command's output, and the seconds that it took. Ends the race if it fails."""
    began_s = time.perf_counter()
    ended = subprocess.run(
        [str(word) for word in command], cwd=ROOT, env=environment({"PYTHONWARNINGS": "ignore"}), text=True,
        timeout=PATIENCE_S, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )
    if ended.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} ended with {ended.returncode}:\n{ended.stdout[-8000:]}")
    return ended.stdout, time.perf_counter() - began_s


def run_script(entrant: Entrant, task: Task, processes: int) -> tuple[dict[str, float], float]:
    """What a script in racers/ found (see `shared.finish`), and the seconds of the whole command."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes] if processes > 1 else []
    settings = json.dumps(asdict(replace(task, variant=entrant.variant)))
    _, seconds = run([sys.executable, *torchrun, "-m", f"tests.bench.racers.{entrant.script}", settings])
    return json.loads(Path(task.result).read_text()), seconds


def run_rankup(task: Task, processes: int, advice: Sequence[str]) -> tuple[dict[str, float], float, str]:
    """As `run_script`, for rankup's command line; and what it printed. `advice`: more flags."""
    runs = Path(task.result).parent
    flags = [
        "--workload", "tests.bench.racers.shared:build", "--options.data", task.data, "--batch-size", task.batch_size,
        "--max-steps", task.steps, "--log-every-steps", task.warm_up, "--lr", shared.LR, "--momentum", shared.MOMENTUM,
        "--weight-decay", 0, "--schedule", "constant", "--precision", task.precision, "--device", "cpu",
        "--run-dir", runs, "--name", "race", "--fresh", "--progress", "none",
        # Nobody else evaluates or saves on the way
        "--evaluate-every-epochs", 1_000_000, "--save-every-steps", task.steps,
    ]
    several = ["launch", "--nproc", processes, "--max-restarts", 0, MAIN] if processes > 1 else []
    output, seconds = run([sys.executable, MAIN, *several, "train", *flags, *advice])
    lines = [json.loads(line) for line in (runs / "race/metrics.jsonl").read_text().splitlines()]
    # A line is made at the same place of each step: the time between two is that of the steps between them
    ended_s = {line["step"]: line["time"] for line in lines if "train/loss" in line}
    speed = (task.steps - task.warm_up) * task.batch_size / (ended_s[task.steps] - ended_s[task.warm_up])
    metrics = json.loads((runs / "race/result.json").read_text())["metrics"]
    return {"images_per_s": speed, "accuracy": metrics["accuracy"], "loss": metrics["loss"]}, seconds, output


def advised(task: Task) -> list[str]:
    """The flags that rankup's lines advise on this machine, of those that leave the race's conditions alone."""
    output = run_rankup(replace(task, warm_up=10, steps=50), 1, [])[2]
    return [word for flag in sorted(set(ADVICE.findall(output))) for word in flag.split()]


def lap(entrant: Entrant, task: Task, processes: int, repeat: int, advice: Sequence[str]) -> Lap:
    """One training of one entrant."""
    load = os.getloadavg()[0]
    if entrant.script:
        found, seconds = run_script(entrant, task, processes)
    else:
        found, seconds, _ = run_rankup(task, processes, advice if entrant.name == ADVISED else [])
    done = Lap(entrant.name, task.precision, processes, repeat, **found, command_s=seconds, load=load)
    print(
        f"{task.precision}, {processes} processes, repeat {repeat}: {entrant.name} {done.images_per_s:,.0f} images/s, "
        f"accuracy {done.accuracy:.4f}, {seconds:.1f} s, load {load:.1f}", file=sys.stderr, flush=True,
    )
    return done


def race(options: argparse.Namespace, task: Task, entrants: Sequence[Entrant]) -> list[Lap]:
    """All laps, one after the other."""
    laps = []
    for precision in options.precision:
        own = replace(task, precision=precision)
        advice = advised(own) if any(entrant.name == ADVISED for entrant in entrants) else []
        # It races a second time only where it advises something
        here = [entrant for entrant in entrants if entrant.name != ADVISED or advice]
        for repeat in range(options.repeats):
            first = repeat % len(here)
            for processes in options.processes:
                laps += [lap(each, own, processes, repeat + 1, advice) for each in (*here[first:], *here[:first])]
    return laps


def prepare_data(folder: Path, *, random: bool) -> None:
    """Fashion-MNIST as torchvision's class wants it, below `folder`, fetched if need be; or random images alike."""
    raw = folder / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    source, family = None, in_memory.FAMILIES["fashion-mnist"]
    if not random:
        source = in_memory.find_family(family, data_dir=None, timeout_s=PATIENCE_S, say=print)
    for train, (image_name, label_name) in in_memory.FILES.items():
        if source is None:
            generator, size = torch.Generator().manual_seed(int(train)), 2048 if train else 256
            images = torch.randint(0, 256, (size, 1, 28, 28), dtype=torch.uint8, generator=generator)
            labels = torch.randint(0, 10, (size,), generator=generator)
        else:
            half = in_memory.read_half(source, family, train=train)
            images, labels = half.images, half.labels
        write_idx(raw / image_name, images[:, 0])
        write_idx(raw / label_name, labels.to(torch.uint8))


def choose(names: Sequence[str]) -> list[Entrant]:
    """The entrants of these names, all by default. Leaves those out that lack a package, and says so."""
    known = {entrant.name: entrant for entrant in ENTRANTS}
    if unknown := set(names) - known.keys():
        sys.exit(f"--only must be some of {', '.join(known)}, got {', '.join(unknown)}.")
    chosen = []
    for entrant in (known[name] for name in names or known):
        if entrant.package and importlib.util.find_spec(entrant.package) is None:
            print(f"{entrant.name} stays at home: pip install -e '.[test]', or make race", file=sys.stderr)
        else:
            chosen.append(entrant)
    return chosen


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--random", action="store_true", help="random images in place of Fashion-MNIST")
    parser.add_argument("--batch-size", type=int, default=128, help="global, in samples")
    parser.add_argument("--warm-up", type=int, default=50, help="steps that do not count; steps must be a multiple")
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--only", nargs="+", default=[], help="some of the entrants, by name")
    parser.add_argument("--output", type=Path, default=ROOT / "runs/race", help="folder of race.md and race.json")
    options = parser.parse_args()
    if options.steps % options.warm_up or options.steps == options.warm_up:
        parser.error(f"--steps must be a larger multiple of --warm-up, got {options.steps} and {options.warm_up}")
    if bad := [count for count in options.processes if options.batch_size % count]:
        parser.error(f"--batch-size must be a multiple of --processes, got {options.batch_size} and {bad[0]}")
    return options


def main() -> None:
    options = parse()
    entrants = choose(options.only)
    with tempfile.TemporaryDirectory() as scratch:
        prepare_data(Path(scratch), random=options.random)
        task = Task(
            data=scratch, batch_size=options.batch_size, warm_up=options.warm_up, steps=options.steps, precision="",
            result=f"{scratch}/result.json", variant="",
        )
        laps = race(options, task, entrants)
    text = "\n\n".join("\n".join(table(laps, precision)) for precision in options.precision)
    text += f"\n\n{conditions(options, laps)}\n"
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "race.md").write_text(text)
    (options.output / "race.json").write_text(json.dumps([asdict(each) for each in laps], indent=2) + "\n")
    print(f"{text}\nwritten to {options.output}")


if __name__ == "__main__":
    main()
