"""How fast is it here? Images/s with 1 and 2 processes, time to the first step, saving and loading a checkpoint.

    make throughput   (or: python tests/bench/throughput.py --repeats 5 --steps 600)

Each number is the median of the repeats, which take turns, so that a machine that is busy for a while slows both sides
of a ratio. Prints a table with its conditions and writes runs/throughput.json. Nothing is asserted here.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
WORLDS = (1, 2)
CHECKPOINTS = ("cnn", "resnet50")


def train(world_size: int, run_dir: Path, *flags: str) -> tuple[float, dict[str, Any], list[dict[str, Any]]]:
    """One training: when it was started (time.time), its result, its metrics."""
    name = f"world-{world_size}"
    command = ["train"] if world_size == 1 else ["launch", "--nproc", str(world_size), "--max-restarts", "0"]
    own = ["--run-dir", str(run_dir), "--name", name, "--fresh"]
    started_s = time.time()
    ran = subprocess.run(
        [sys.executable, str(ROOT / "train/main.py"), *command, *own, *flags],
        cwd=run_dir, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )
    if ran.returncode != 0:
        sys.exit(f"{' '.join(ran.args)} ended with {ran.returncode}:\n{ran.stdout}")
    lines = (run_dir / name / "metrics.jsonl").read_text().splitlines()
    return started_s, json.loads((run_dir / name / "result.json").read_text()), [json.loads(line) for line in lines]


def measure_training(repeats: int, steps: int, batch_size: int, run_dir: Path) -> dict[str, Any]:
    """By world size: medians of images/s and of the seconds from the command to the end of the first step."""
    batch = ["--batch-size", str(batch_size), "--limit-eval", "512"]
    speeds: dict[int, list[float]] = {world: [] for world in WORLDS}
    starts: dict[int, list[float]] = {world: [] for world in WORLDS}
    for repeat in range(repeats):
        print(f"batch {batch_size}: {repeat + 1} of {repeats}", file=sys.stderr, flush=True)
        for world in WORLDS:
            _, result, _ = train(world, run_dir, *batch, "--max-steps", str(steps))
            speeds[world].append(result["images_per_s"])
            started_s, _, metrics = train(world, run_dir, *batch, "--max-steps", "1", "--log-every-steps", "1")
            starts[world].append(next(line["time"] for line in metrics if line["step"] == 1) - started_s)
    return {
        "data": result["data"],
        "images_per_s": [statistics.median(speeds[world]) for world in WORLDS],
        "first_step_s": [statistics.median(starts[world]) for world in WORLDS],
    }


def measure_checkpoint(model_name: str, repeats: int, directory: Path) -> dict[str, float]:
    """Size, and the medians of saving (write, sync, rename) and loading (verify), with SGD's momentum."""
    import torch

    from tests.rigs.checkpoints import load_newest, save_checkpoint, training_state
    from train.workloads.vision_models import build_model

    model = build_model(model_name, channels=3, size=32, num_classes=10, dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    saves, loads = [], []
    for step in range(repeats):
        began_s = time.perf_counter()
        state = optimizer.state_dict()
        path = save_checkpoint(directory, training_state(step), model.state_dict(), optimizer=state, keep=2)
        saved_s = time.perf_counter()
        earlier = load_newest(directory, print)
        assert earlier is not None
        model.load_state_dict(earlier.model)
        optimizer.load_state_dict(earlier.tracked["optimizer"])
        saves.append(saved_s - began_s)
        loads.append(time.perf_counter() - saved_s)
    size = sum(file.stat().st_size for file in path.iterdir())
    return {"megabytes": size / 1e6, "save_s": statistics.median(saves), "load_s": statistics.median(loads)}


def conditions() -> dict[str, Any]:
    import torch

    from tests.bench.machine import cpu_model

    return {
        "cpu": cpu_model(), "cpus": os.cpu_count(), "torch": torch.__version__, "python": platform.python_version(),
        "date": datetime.date.today().isoformat(), "load_average": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300, help="of each training that measures images/s")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[64, 512], help="global, in samples")
    parser.add_argument("--output", type=Path, default=ROOT / "runs/throughput.json")
    arguments = parser.parse_args()
    report: dict[str, Any] = {"conditions": conditions(), "training": {}, "checkpoint": {}}
    with tempfile.TemporaryDirectory() as folder:
        for size in arguments.batch_sizes:
            report["training"][size] = measure_training(arguments.repeats, arguments.steps, size, Path(folder))
        for model in CHECKPOINTS:
            report["checkpoint"][model] = measure_checkpoint(model, arguments.repeats, Path(folder) / model)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    print(table(report))
    print(f"\nwritten to {arguments.output}")


def table(report: dict[str, Any]) -> str:
    """Markdown, to be read and to be pasted."""
    about = report["conditions"]
    lines = [
        f"{about['cpu']}, {about['cpus']} CPUs (load {about['load_average']:.1f} before), one thread a process; torch "
        f"{about['torch']}, Python {about['python']}, {about['date']}.",
        "",
        "| small CNN | 1 process | 2 processes | ratio |",
        "|---|---|---|---|",
    ]
    for size, row in report["training"].items():
        (slow, fast), (early, late) = row["images_per_s"], row["first_step_s"]
        what = f"images/s, {row['data']}, global batch {size}"
        lines.append(f"| {what} | {slow:,.0f} | {fast:,.0f} | {fast / slow:.2f} |")
        lines.append(f"| from the command to the end of the first step, s | {early:.1f} | {late:.1f} | |")
    lines += ["", "| checkpoint, with SGD's momentum | size, MB | save, s | load, s |", "|---|---|---|---|"]
    for model, row in report["checkpoint"].items():
        lines.append(f"| {model} | {row['megabytes']:.1f} | {row['save_s']:.2f} | {row['load_s']:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
