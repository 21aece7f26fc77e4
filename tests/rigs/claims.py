"""What has to be true of a job that lost ranks, read from its run directory and from what its faults wrote down."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.rigs import places
from tests.rigs.jobs import comparable_metrics, is_comparable, result
from tests.rigs.places import Strike


def of_run(run_dir: Path) -> dict[str, Any]:
    return {
        "digest": result(run_dir)["digest"], "metrics": comparable_metrics(run_dir),
        "tensorboard": _tensorboard(run_dir / "tensorboard"),
    }


def _tensorboard(folder: Path) -> dict[str, list[int]]:
    """The steps of each curve, as TensorBoard shows it, but for curves whose steps depend on the clock."""
    if not folder.exists():
        return {}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    tags = [tag for tag in events.Tags()["scalars"] if is_comparable(tag) or tag.startswith("train/")]
    return {tag: [point.step for point in events.Scalars(tag)] for tag in tags}


def differences(run_dir: Path, expected: Mapping[str, Any]) -> list[str]:
    got = of_run(run_dir)
    problems = []
    if got["digest"] != expected["digest"]:
        problems.append("other weights")
    if got["tensorboard"] != expected["tensorboard"]:
        problems.append(f"other curves in TensorBoard: {got['tensorboard']}")
    if got["metrics"] != expected["metrics"]:
        steps = [entry["step"] for entry in got["metrics"] if "train/loss" in entry]
        twice = sorted({step for step in steps if steps.count(step) > 1})
        missing = sorted({entry["step"] for entry in expected["metrics"]} - set(steps))
        problems.append(f"other metrics (training steps twice: {twice}, missing: {missing})")
    return problems


def done_again(struck: Sequence[Strike], updates: Sequence[Mapping[str, Any]]) -> tuple[int, list[str]]:
    """How many optimizer steps had to be done again, and those that need not: a process had finished them and lived on.

    A killed process takes the step along that it had finished as the first.
    """
    killed = {pid for strike in struck for pid in strike.pids}
    done: dict[tuple[int, int], Mapping[str, Any]] = {}  # by rank and step
    lost, repeated = 0, []
    for update in updates:
        rank, step = update["rank"], update["step"]
        before = done.get((rank, step))
        if before is not None and before["pid"] in killed:
            lost += 1
        elif before is not None:
            repeated.append(f"step {step} by rank {rank}")
        done[rank, step] = update
    return lost, repeated


def left_in_memory(folder: Path) -> list[str]:
    """What the job has left in /dev/shm: rescues of its run, and what its processes shared with their workers."""
    try:
        run = json.loads((folder / "run" / "run.json").read_text())["run"]
    except (OSError, KeyError, ValueError):
        run = None
    pids = {str(update["pid"]) for update in places.updates(folder / "faults")}
    shared = Path("/dev/shm")
    left = [path for path in shared.glob("torch_*") if path.name.split("_")[1] in pids]
    left += [path for path in shared.glob(f"rankup-{os.getuid()}/*") if path.name.partition(".")[0] == run]
    return [f"left in memory: {path}" for path in left]
