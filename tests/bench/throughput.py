"""How fast is it here? Images/s with 1 and 2 processes, and the time to the first step. Saves: tests/bench/saves.py.

    make throughput   (or: python tests/bench/throughput.py --repeats 5 --steps 600)

Each number is the median of the repeats, which take turns, so that a machine that is busy for a while slows both sides
of a ratio. Prints a table with its conditions and writes runs/throughput.json. Nothing is asserted here.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.machine import conditions  # noqa: E402

WORLDS = (1, 2)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300, help="of each training that measures images/s")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[64, 512], help="global, in samples")
    parser.add_argument("--output", type=Path, default=ROOT / "runs/throughput.json")
    arguments = parser.parse_args()
    report: dict[str, Any] = {"conditions": conditions(), "training": {}}
    with tempfile.TemporaryDirectory() as folder:
        for size in arguments.batch_sizes:
            report["training"][size] = measure_training(arguments.repeats, arguments.steps, size, Path(folder))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    print(table(report))
    print(f"\nwritten to {arguments.output}")


def table(report: dict[str, Any]) -> str:
    """Markdown, to be read and to be pasted."""
    lines = [
        f"{report['conditions']}, one thread a process.",
        "",
        "| small CNN | 1 process | 2 processes | ratio |",
        "|---|---|---|---|",
    ]
    for size, row in report["training"].items():
        (slow, fast), (early, late) = row["images_per_s"], row["first_step_s"]
        what = f"images/s, {row['data']}, global batch {size}"
        lines.append(f"| {what} | {slow:,.0f} | {fast:,.0f} | {fast / slow:.2f} |")
        lines.append(f"| from the command to the end of the first step, s | {early:.1f} | {late:.1f} | |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
