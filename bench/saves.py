"""Measure what a save costs the training of a ResNet-50 with SGD's momentum, 189 MB: in the background, or waited for.

    python bench/saves.py --repeats 5

For each number of processes this trains with `--save sync`, with `--save auto`, and with only the last save. The three
take turns, so that a busy period slows all of them. A table of medians is printed with its conditions: the time for
which a save keeps the steps waiting, and images/s over the wall clock, saves included.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.machine import conditions, markdown_table, run, step_ends
from tests.rigs import places
from tests.rigs.jobs import MAIN, ROOT

EVERY, BATCH = 15, 32
WARM, STEPS = 5, 4 * EVERY + 5  # the first steps are slower
LINE = ("--dataset=fake", "--fake-samples=512", "--image-size=32", "--model=resnet50", f"--batch-size={BATCH}",
        "--limit-eval=32", "--evaluate-every-epochs=1000", "--tensorboard=false", "--fresh",
        "--name=run", "--log-every-steps=1")


def train(how: str, world_size: int, folder: Path) -> dict[str, float]:
    """Run one training in its own processes. Return what rank 0 measured."""
    save = ("--save=sync", f"--save-every-steps={10 * STEPS}") if how == "none" else (
        f"--save={how}", f"--save-every-steps={EVERY}")
    launch = ["-m", "rankup", "launch", f"--nproc={world_size}", "--max-restarts=0"] if world_size > 1 else []
    # Python runs this file at the start of each process
    (folder / "sitecustomize.py").write_text("from bench.saves import install\n\ninstall()\n")
    run(sys.executable, *launch, MAIN, "train", *LINE, *save, f"--max-steps={STEPS}", f"--run-dir={folder}",
        env={"PYTHONPATH": f"{folder}:{ROOT}", "MEASURED": str(folder / "blocked.json")})
    ends_s = step_ends(folder / "run")
    result, blocked_s = json.loads((folder / "run" / "result.json").read_text()), json.loads(
        (folder / "blocked.json").read_text())
    return {"blocked_s": blocked_s, "peak_mb": result["peak_memory_mb"],
            "images_per_s": (STEPS - WARM) * BATCH / (ends_s[STEPS] - ends_s[WARM])}


def install() -> None:
    """Call `measure` in a process of the training as soon as `train.loop` is imported."""
    places.HOOKS, places.WRAPPED = {"train.loop": measure}, {}
    sys.meta_path.insert(0, places._Finder())


def measure(loop: Any) -> None:
    """Let rank 0 add up how long saves keep the loop waiting, except the last save, for which `wait` is set."""
    from rankup.loop.job import Job
    from rankup.state.saver import Saver

    blocked_s, saves, write_result = 0.0, 0, loop.write_result

    def timed(owner: Any, name: str, counts: int) -> None:
        whole = getattr(owner, name)

        def call(*values: Any, wait: bool = False) -> None:
            nonlocal blocked_s, saves
            began_s = time.perf_counter()
            whole(*values, wait=wait)
            if not wait:  # a `look` that waits belongs to a save
                blocked_s, saves = blocked_s + time.perf_counter() - began_s, saves + counts

        setattr(owner, name, call)

    def report(t: Any, *values: Any, **more: Any) -> None:
        if t.job.group.is_rank0:
            Path(os.environ["MEASURED"]).write_text(json.dumps(blocked_s / max(1, saves)))
        write_result(t, *values, **more)

    timed(Job, "save", 1)
    timed(Saver, "look", 0)
    loop.write_result = report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    about, found = conditions(), defaultdict[tuple[int, str], list[dict[str, float]]](list)
    for repeat, world_size, how in product(range(repeats), (1, 2), ("sync", "auto", "none")):
        print(f"{repeat + 1} of {repeats}: {world_size} x {how}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            found[world_size, how].append(train(how, world_size, Path(folder)))

    medians = {case: {what: statistics.median(entry[what] for entry in entries) for what in entries[0]}
               for case, entries in found.items()}
    rows = []
    for (world_size, how), own in medians.items():
        sync, none = medians[world_size, "sync"], medians[world_size, "none"]
        rows.append([
            str(world_size), how, f"{1000 * own['blocked_s']:,.0f}", f"{own['blocked_s'] / sync['blocked_s']:.1%}",
            f"{own['images_per_s']:,.0f}", f"{own['images_per_s'] / none['images_per_s']:.2f}",
            f"{own['peak_mb']:,.0f}",
        ])
    header = ["processes", "save", "holds the steps up, ms", "of sync", "images/s", "of no saves", "peak memory, MB"]
    print(f"{about}, one thread a process. A save each {EVERY} steps of {BATCH} images.\n")
    print("\n".join(markdown_table(header, rows)))


if __name__ == "__main__":
    main()
