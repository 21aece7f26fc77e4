"""Methods and launchers side by side: the same training with each, one after the other, several times. No torch here.

A variant is what one row of the table shows: a method of training in parallel, a launcher, and the settings that go
with them.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tqdm import tqdm

from rankup.env.addresses import free_port
from rankup.errors import ConfigError, Stopped
from train.commands.compare_report import conditions_of_machine, sum_up, write_report
from train.config.options import CompareOptions
from train.process.context import Context, runs_folder
from train.process.status import read_json, write_json

STEPS = 60  # of a run, where --max-steps does not say
ROOT = Path(__file__).resolve().parents[2]
MAIN = str(ROOT / "train" / "main.py")


@dataclass(frozen=True, slots=True)
class Variant:
    """Settings and launcher of one row. `needs`: a key of `_find_obstacle`."""

    settings: tuple[str, ...]
    needs: str = ""
    launcher: str = "launch"  # or "train", which is one process, or a key of LAUNCHERS


VARIANTS = {
    "none": Variant(("--parallel", "none"), launcher="train"),
    "dp": Variant(("--parallel", "dp"), needs="gpus", launcher="train"),
    "ddp": Variant(("--parallel", "ddp")),
    "ddp-spawn": Variant(("--parallel", "ddp"), launcher="spawn"),
    "ddp-torchrun": Variant(("--parallel", "ddp"), launcher="torchrun"),
    "ddp-torch-launch": Variant(("--parallel", "ddp"), launcher="torch-launch"),
    "ddp-mpirun": Variant(("--parallel", "ddp"), needs="mpirun", launcher="mpirun"),
    "ddp-bf16": Variant(("--parallel", "ddp", "--precision", "bf16")),
    "ddp-compress": Variant(("--parallel", "ddp", "--compress", "bf16")),
    "fsdp": Variant(("--parallel", "fsdp")),
    "horovod": Variant(("--parallel", "horovod"), needs="horovod"),
}
# Launchers that are not ours. Each stands before the program's file and `train`
TORCH_OPTIONS = ("--nproc-per-node", "{nproc}", "--master-port", "{port}")
LAUNCHERS = {
    "torchrun": (sys.executable, "-m", "torch.distributed.run", *TORCH_OPTIONS),
    "torch-launch": (sys.executable, "-m", "torch.distributed.launch", *TORCH_OPTIONS),
    # Each process may use all CPUs, as with the other launchers. mpirun refuses to run as root unless it is allowed to
    "mpirun": ("mpirun", "-np", "{nproc}", "--oversubscribe", "--bind-to", "none",
               *(("--allow-run-as-root",) if os.geteuid() == 0 else ()), sys.executable),
}
# These launchers survive their parent, though their ranks end with them: so tie the launcher to this process. With -P:
# a train.py of the user's in the current folder would be taken for the package
START_TIED = """import os, sys
from train.process.stop import die_with_parent
die_with_parent(int(sys.argv[1]))
os.execvp(sys.argv[2], sys.argv[2:])"""


def compare(context: Context, options: CompareOptions) -> None:
    """Run what has not run yet, and write compare.json, compare.md and compare.png in the comparison's own directory.

    Raises ConfigError, and Stopped if a stop was requested.
    """
    config, log = context.config, context.log
    directory = runs_folder(config) / (config.name or "compare")
    own = ("--fresh=", "--name=", "--run_dir=")  # of the comparison, not of the trainings that it starts
    words = [word for word in context.request.words() if not word.startswith(own)]
    chosen = _choose(options.only)
    steps = config.max_steps or STEPS
    conditions = {"steps": steps, "nproc": options.processes, "settings": words, **conditions_of_machine(ROOT)}
    runs = _earlier_runs(directory, conditions, fresh=config.fresh)
    reasons = {name: why for name in chosen if (why := _find_obstacle(VARIANTS[name].needs))}
    # The repeats are the outer loop: a machine that is busy for a while then slows all variants down alike
    todo = [(name, repeat) for repeat in range(options.repeats) for name in chosen]
    bar = tqdm(todo, unit="run", disable=None)  # on a terminal; elsewhere a line for each run
    for number, (name, repeat) in enumerate(bar, 1):
        bar.set_description(name)
        if bar.disable:
            log.info(f"run {number}/{len(todo)}: {name}, repeat {repeat + 1}")
        known = any(run["variant"] == name and (run["repeat"] == repeat or "reason" in run) for run in runs)
        if name in reasons or known:
            continue
        run_dir = directory / "runs" / f"{name}-{repeat}"
        found = _run(context, name, run_dir, [*words, "--max-steps", str(steps)], processes=options.processes)
        runs.append({"variant": name, "repeat": repeat, **found})
        write_json(directory / "compare.json", {"conditions": conditions, "runs": runs})
    reasons |= {run["variant"]: run["reason"] for run in runs if "reason" in run}
    outcome = {
        "conditions": conditions, "unit": next((run["unit"] for run in runs if "unit" in run), "samples"),
        "variants": sum_up(runs, [name for name in chosen if name not in reasons]), "missing": reasons, "runs": runs,
    }
    log.info(write_report(outcome, directory, repeats=options.repeats))


def _choose(only: str) -> list[str]:
    chosen = [name.strip() for name in only.split(",")] if only else list(VARIANTS)
    if unknown := [name for name in chosen if name not in VARIANTS]:
        raise ConfigError(f'--only must be of {", ".join(VARIANTS)}, got "{unknown[0]}".')
    return chosen


def _earlier_runs(directory: Path, conditions: dict[str, Any], *, fresh: bool) -> list[dict[str, Any]]:
    """The runs that an earlier comparison under the same conditions has done; `fresh` puts it aside."""
    earlier = read_json(directory / "compare.json")
    if earlier is not None and not fresh and earlier["conditions"] != conditions:
        raise ConfigError(f"{directory} holds a comparison under other conditions. Set --fresh, or another --name.")
    if earlier is not None and fresh:
        shutil.move(directory, directory.with_name(f"{directory.name}-before-{time.strftime('%Y%m%dT%H%M%S')}"))
        earlier = None
    directory.mkdir(parents=True, exist_ok=True)
    return list(earlier["runs"]) if earlier else []


def _run(context: Context, name: str, run: Path, words: list[str], *, processes: int) -> dict[str, Any]:
    """Train the variant in processes of its own, in the directory `run`. Raises Stopped.

    Returns what the run measured, or {"reason": why it failed}.
    """
    variant, output = VARIANTS[name], run.parents[1] / f"{run.name}.log"
    own = ["--run-dir", str(run.parent), "--name", run.name, "--log-every-steps", "1", "--fresh",
           "--evaluate-every-epochs", "1000000", "--tensorboard=false", "--progress", "none", "--no-advice"]
    command, env = _command(variant, processes)
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH", "")])])
    with output.open("w") as file:
        words = [*command, *words, *variant.settings, *own]
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=env)
        while process.poll() is None:
            if context.stop.requested:
                process.terminate()
                process.wait()
                raise Stopped(f"{context.stop.signal_name}: the comparison stopped in {name}. "
                              "The same command goes on from there.")
            time.sleep(0.05)
    if process.returncode != 0:
        lines = [line for line in output.read_text(errors="replace").splitlines() if "error" in line.lower()]
        why = lines[0] if lines else f"code {process.returncode}"
        return {"reason": f"{why} (exit code {process.returncode}, {output.name})"}
    return _measured(run, context.config.batch_size)


def _command(variant: Variant, processes: int) -> tuple[list[str], dict[str, str]]:
    """The command up to the settings, and the environment. All of its processes end when this one does."""
    env = dict(os.environ)
    if variant.launcher in LAUNCHERS:
        values = {"{nproc}": str(processes), "{port}": str(free_port())}
        launcher = [values.get(word, word) for word in LAUNCHERS[variant.launcher]]
        return [sys.executable, "-P", "-c", START_TIED, str(os.getpid()), *launcher, MAIN, "train"], env
    several = ["-m", "rankup", "launch", "--nproc", str(processes), "--max-restarts", "0"]
    if variant.launcher == "spawn":
        several += ["--start", "spawn"]
    words = [MAIN, "train"] if variant.launcher == "train" else [*several, MAIN, "train"]
    return [sys.executable, *words], {**env, "RANKUP_PARENT": str(os.getpid())}


def _measured(run: Path, batch_size: int) -> dict[str, Any]:
    """"step_s": seconds between the ends of neighbouring steps. Steps without a logged neighbour are left out."""
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    times = {entry["step"]: entry["time"] for entry in entries if "train/loss" in entry}
    result = read_json(run / "result.json") or {}
    unit = next(name for name in result if name.endswith("_per_s")).removesuffix("_per_s")
    per_s = result[f"{unit}_per_s"]
    return {
        "unit": unit, "per_s": per_s, "epoch_s": result["steps_per_epoch"] * batch_size / per_s,
        "step_s": [round(times[step] - times[step - 1], 4) for step in sorted(times) if step - 1 in times],
        **{name: result[name] for name in ("peak_memory_mb", "metrics", "digest", "world_size", "hosts")},
    }


def _find_obstacle(need: str) -> str:
    """Why a variant that needs this can't run on this machine; "" if it can."""
    if need == "gpus":
        count = len(_output_of("nvidia-smi", "-L").splitlines())
        return "" if count > 1 else f"DataParallel divides a batch over two GPUs or more, here are {count}."
    if need == "mpirun":
        found = "Open MPI" in _output_of("mpirun", "--version")
        return "" if found else "No mpirun of Open MPI. On Debian and Ubuntu: sudo apt install openmpi-bin"
    if need == "horovod" and find_spec("horovod") is None:
        return "Horovod is not installed; make horovod builds it."
    return ""


def _output_of(program: str, *arguments: str) -> str:
    """What it prints; "" if it is not installed."""
    found = shutil.which(program)
    return subprocess.run([found, *arguments], capture_output=True, text=True).stdout if found else ""
