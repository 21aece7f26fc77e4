"""Compare methods and launchers: run the same training with each of them, and write a table and a chart.

    make compare ARGS="--only none,ddp,fsdp --repeats 3 --dataset digits --batch-size 512"

Arguments that are not options of this file are settings of `train`. The variants take turns in each repeat, so that a
busy minute slows all of them. The files compare.json, compare.md and compare.svg are written to --output. A variant
that cannot run here is listed with the reason.
"""

import argparse
import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.charts import draw
from bench.machine import conditions, markdown_table, step_ends
from tests.rigs.jobs import MAIN, ROOT, environment, free_port

OPTIONS = ("--nproc-per-node", "{nproc}", "--master-port", "{port}")
# The words before the program's file
LAUNCHERS = {
    "python": (sys.executable,),
    "launch": (sys.executable, "-m", "rankup", "launch", "--max-restarts", "0", "--nproc", "{nproc}"),
    "torchrun": (sys.executable, "-m", "torch.distributed.run", *OPTIONS),
    "torch-launch": (sys.executable, "-m", "torch.distributed.launch", *OPTIONS),
    # Each process may use all CPUs, as with the other launchers. mpirun needs an option to run as root
    "mpirun": ("mpirun", "-np", "{nproc}", "--oversubscribe", "--bind-to", "none", "--allow-run-as-root",
               sys.executable),
}
VARIANTS = {  # name: settings, launcher
    "none": ("--parallel none", "python"),
    "dp": ("--parallel dp", "python"),
    "ddp": ("--parallel ddp", "launch"),
    "ddp-torchrun": ("--parallel ddp", "torchrun"),
    "ddp-torch-launch": ("--parallel ddp", "torch-launch"),
    "ddp-mpirun": ("--parallel ddp", "mpirun"),
    "ddp-bf16": ("--parallel ddp --precision bf16", "launch"),
    "ddp-compress": ("--parallel ddp --compress bf16", "launch"),
    "fsdp": ("--parallel fsdp", "launch"),
    "horovod": ("--parallel horovod", "launch"),
}


def obstacle(variant: str) -> str:
    """Return why this variant cannot run on this machine, or ""."""
    if variant == "dp" and torch.cuda.device_count() < 2:
        return f"DataParallel needs two GPUs or more, this machine has {torch.cuda.device_count()}."
    if variant == "ddp-mpirun" and shutil.which("mpirun") is None:
        return "No mpirun of Open MPI. On Debian and Ubuntu: sudo apt install openmpi-bin"
    if variant == "horovod" and importlib.util.find_spec("horovod") is None:
        return "Horovod is not installed; make horovod builds it."
    return ""


def train(name: str, run: Path, settings: list[str], *, processes: int, steps: int) -> dict[str, Any]:
    """Run one training. Return its figures, or {"reason": why it failed}."""
    (fixed, launcher), log = VARIANTS[name], run.with_suffix(".log")
    values = {"{nproc}": str(processes), "{port}": str(free_port())}
    command = [values.get(word, word) for word in LAUNCHERS[launcher]]
    own = ["--run-dir", str(run.parent), "--name", run.name, "--max-steps", str(steps), "--log-every-steps", "1",
           "--evaluate-every-epochs", "1000000", "--tensorboard=false", "--fresh"]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        code = subprocess.run(
            [*command, str(MAIN), "train", *settings, *fixed.split(), *own], stdout=file,
            stderr=subprocess.STDOUT, env=environment({"PYTHONWARNINGS": "ignore"}),
        ).returncode
    if code != 0:
        said = [line for line in log.read_text(errors="replace").splitlines() if "error" in line.lower()]
        return {"reason": f"{said[0] if said else 'it failed'} (exit code {code}, {log})"}
    ends_s = step_ends(run)
    result = json.loads((run / "result.json").read_text())
    unit = next(key for key in result if key.endswith("_per_s")).removesuffix("_per_s")
    return {
        "unit": unit, "per_s": result[f"{unit}_per_s"], "world_size": result["world_size"], "digest": result["digest"],
        "peak_memory_mb": result["peak_memory_mb"], "accuracy": result["metrics"].get("accuracy", 0.0),
        "step_ms": [1000 * (ends_s[step] - ends_s[step - 1]) for step in sorted(ends_s) if step - 1 in ends_s],
    }


def sum_up(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return medians for each variant: of its runs, and of the steps of all its runs."""
    rows: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(run["variant"] for run in runs if "reason" not in run):
        own = [run for run in runs if run["variant"] == name and "reason" not in run]
        steps = sorted(step for run in own for step in run["step_ms"])
        rows[name] = {
            "runs": len(own), "per_s": statistics.median(run["per_s"] for run in own),
            "median_ms": statistics.median(steps), "p95_ms": steps[int(0.95 * len(steps))],
            "peak_memory_mb": max(run["peak_memory_mb"] for run in own),
            "accuracy": statistics.median(run["accuracy"] for run in own),
        }
    for row in rows.values():
        row["relative"] = row["per_s"] / rows["none"]["per_s"] if "none" in rows else None
    return rows


def report(outcome: dict[str, Any], output: Path) -> str:
    """Write the three files. Return the table."""
    rows, unit = outcome["variants"], outcome["unit"]
    header = ("variant", f"{unit}/s", "step, median", "step, p95", "peak memory a process", "accuracy",
              "of one process")
    cells = [
        (name, f"{row['per_s']:,.0f}", f"{row['median_ms']:.1f} ms", f"{row['p95_ms']:.1f} ms",
         f"{row['peak_memory_mb']:,.0f} MB", f"{row['accuracy']:.4f}",
         f"{row['relative']:.2f}" if row["relative"] else "")
        for name, row in rows.items()
    ]
    missing = [f"- {name} was not run: {why}" for name, why in outcome["missing"].items()]
    text = "\n".join([*markdown_table(header, cells), "", *missing, f"- {outcome['conditions']}", ""])
    (output / "compare.json").write_text(json.dumps(outcome, indent=1))
    (output / "compare.md").write_text(text)
    if rows:
        bars = [(name, row["per_s"], f"{row['per_s']:,.0f}") for name, row in rows.items()]
        (output / "compare.svg").write_text(draw(f"{unit}/s", bars))
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(VARIANTS), help="variants to run (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="of each variant except none and dp (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each variant (%(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="steps of each run (%(default)s)")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "compare")
    given, settings = parser.parse_known_args()
    chosen = given.only.split(",")
    if unknown := set(chosen) - VARIANTS.keys():
        parser.error(f"--only must be of {', '.join(VARIANTS)}, got {', '.join(sorted(unknown))}")
    missing = {name: why for name in chosen if (why := obstacle(name))}
    runs: list[dict[str, Any]] = []
    for repeat in range(given.repeats):
        for name in [name for name in chosen if name not in missing]:
            print(f"repeat {repeat + 1} of {given.repeats}: {name}", flush=True)
            run = given.output / "runs" / f"{name}-{repeat}"
            found = train(name, run, settings, processes=given.processes, steps=given.steps)
            runs.append({"variant": name, **found})
            if "reason" in found:
                missing[name] = found["reason"]
    given.output.mkdir(parents=True, exist_ok=True)
    outcome = {
        "conditions": f"{given.steps} steps, {given.processes} processes (none, dp: 1), {conditions()}",
        "unit": next((run["unit"] for run in runs if "unit" in run), "samples"), "variants": sum_up(runs),
        "missing": missing, "runs": runs,
    }
    print(report(outcome, given.output))
    print(f"{given.output}/compare.json, compare.md, compare.svg")


if __name__ == "__main__":
    main()
