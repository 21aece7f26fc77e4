"""What does a save cost the training? A ResNet-50 with SGD's momentum, 189 MB, saved beside the training or waited for.

    python tests/bench/saves.py --repeats 5

For each number of processes it trains with `--save sync`, with `--save async`, and without saves but the last, in
turns, so that a machine that is busy for a while slows all three. Prints a table of medians with its conditions: the
time for which a save keeps the steps waiting, images/s over the wall clock, saves included, and the time to load what
was saved. Nothing is asserted here.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.machine import conditions
from tests.rigs import place_hooks
from tests.rigs.jobs import MAIN, ROOT, environment

EVERY = 15
BATCH = 32
WARM = 5  # steps, the first of which are slower
HOWS = ("sync", "async", "none")
LINE = (
    "--dataset=fake", "--fake-samples=512", "--image-size=32", "--model=resnet50", f"--batch-size={BATCH}",
    "--limit-eval=32", "--evaluate-every-epochs=1000", "--tensorboard=false", "--progress=none", "--fresh",
    "--name=run",
)


def train(how: str, world_size: int, steps: int, folder: Path) -> dict[str, Any]:
    """One training in processes of its own, and what rank 0 measured."""
    save = ("--save=sync", f"--save-every-steps={10 * steps}") if how == "none" else (
        f"--save={how}", f"--save-every-steps={EVERY}")
    launch = ["-m", "rankup", "launch", "--nproc", str(world_size), "--max-restarts", "0"] if world_size > 1 else []
    line = [*launch, str(MAIN), "train", *LINE, *save, f"--max-steps={steps}", f"--run-dir={folder}"]
    # Python runs it in each process as it starts
    (folder / "sitecustomize.py").write_text("from tests.bench.saves import install\n\ninstall()\n")
    env = environment({"PYTHONPATH": f"{folder}:{ROOT}", "MEASURED": str(folder / "measured.json")})
    ran = subprocess.run(
        [sys.executable, *line], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if ran.returncode != 0:
        sys.exit(f"{' '.join(line)} ended with {ran.returncode}:\n{ran.stdout}")
    return json.loads((folder / "measured.json").read_text())  # type: ignore[no-any-return]


def install() -> None:
    """In a process of the training: measure, once `train.loop` is imported."""
    place_hooks.HOOKS = {"train.loop": measure}
    sys.meta_path.insert(0, place_hooks._Finder())


def measure(loop: Any) -> None:
    """Rank 0 adds up for how long saves keep the loop waiting, but for the last, and notes when steps are done."""
    from rankup.loop.job import Job
    from rankup.state.saver import Saver

    step, save, look, write_result = loop.step, Job.save, Saver.look, loop.write_result
    ends: list[float] = []
    blocked_s, saves = 0.0, 0

    def timed_save(job: Job, *, wait: bool = False) -> None:
        nonlocal blocked_s, saves
        began_s = time.perf_counter()
        save(job, wait=wait)
        if not wait:
            blocked_s, saves = blocked_s + time.perf_counter() - began_s, saves + 1

    def timed_look(run: Any, *, wait: bool = False) -> None:
        nonlocal blocked_s
        began_s = time.perf_counter()
        look(run, wait=wait)
        if not wait:  # else it is part of a save
            blocked_s += time.perf_counter() - began_s

    def timed_step(t: Any) -> Any:
        done = step(t)
        ends.append(time.perf_counter())
        return done

    def report(t: Any, *values: Any, **more: Any) -> None:
        if t.group.is_rank0:
            per_s = (len(ends) - WARM) * BATCH / (ends[-1] - ends[WARM - 1])
            found = {"blocked_s": blocked_s / max(1, saves), "images_per_s": per_s, "step": t.job.step_number}
            found["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            Path(os.environ["MEASURED"]).write_text(json.dumps(found))
        write_result(t, *values, **more)

    loop.step, Job.save, Saver.look, loop.write_result = timed_step, timed_save, timed_look, report  # type: ignore[method-assign]


def load(checkpoints: Path) -> float:
    """Seconds to read, verify and unpack the newest checkpoint, whose files the system still has in memory."""
    from tests.rigs.checkpoints import load_newest

    began_s = time.perf_counter()
    load_newest(checkpoints, print)
    return time.perf_counter() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4 * EVERY + 5, help="of each training")
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2], help="numbers of processes")
    arguments = parser.parse_args()
    about = conditions()
    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    loads = []
    for repeat in range(arguments.repeats):
        for world_size in arguments.worlds:
            for how in HOWS:
                print(f"{repeat + 1} of {arguments.repeats}: {world_size} x {how}", file=sys.stderr, flush=True)
                with tempfile.TemporaryDirectory() as folder:
                    measured = train(how, world_size, arguments.steps, Path(folder))
                    loads.append(load(Path(folder) / "run" / "checkpoints"))
                found.setdefault((world_size, how), []).append(measured)
    print(table(about, found, loads))


def table(about: str, found: dict[tuple[int, str], list[dict[str, Any]]], loads: list[float]) -> str:
    """Markdown. Medians of the repeats."""
    lines = [
        f"{about}, one thread a process. A save each {EVERY} steps of {BATCH} images.",
        "",
        "| processes | save | keeps the steps waiting, ms | of sync | images/s | of no saves | peak memory, MB |",
        "|---|---|---|---|---|---|---|",
    ]

    def median(world_size: int, how: str, what: str) -> float:
        return statistics.median(entry[what] for entry in found[world_size, how])

    for world_size, how in found:
        blocked_s, per_s = median(world_size, how, "blocked_s"), median(world_size, how, "images_per_s")
        share = blocked_s / median(world_size, "sync", "blocked_s")
        waits = "| |" if how == "none" else f"| {1000 * blocked_s:,.0f} | {share:.1%} |"
        of_none = per_s / median(world_size, "none", "images_per_s")
        lines.append(f"| {world_size} | {how} {waits} {per_s:,.1f} | {of_none:.2f} | "
                     f"{median(world_size, how, 'peak_mb'):,.0f} |")
    lines += ["", f"Loading it: {statistics.median(loads):.2f} s."]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
