"""Every way to train, side by side: one after the other, several times, over the same work. No torch here."""

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tqdm import tqdm

from train.commands.chart import bar_chart
from train.config import Config
from train.errors import ConfigError, Stopped
from train.process.addresses import free_port
from train.process.cpus import cpu_quota
from train.process.log import Log
from train.process.status import read_json, write_json
from train.process.stop import StopRequest


@dataclass(frozen=True, slots=True)
class Way:
    """Its settings; `several` processes or one; by whom they are started, `launch` or a key of STARTERS; what it `needs`, as a
    key of `_missing`."""

    settings: tuple[str, ...] = ()
    several: bool = True
    needs: str = ""
    start: str = "launch"


WAYS = {
    "none": Way(("--parallel", "none"), several=False),
    "dp": Way(("--parallel", "dp"), several=False, needs="gpus"),
    "ddp": Way(("--parallel", "ddp")),
    "ddp-spawn": Way(("--parallel", "ddp", "--launcher", "spawn")),
    "ddp-torchrun": Way(("--parallel", "ddp"), start="torchrun"),
    "ddp-torch-launch": Way(("--parallel", "ddp"), start="torch-launch"),
    "ddp-mpirun": Way(("--parallel", "ddp"), needs="mpirun", start="mpirun"),
    "ddp-bf16": Way(("--parallel", "ddp", "--precision", "bf16")),
    "ddp-compress": Way(("--parallel", "ddp", "--compress", "bf16")),
    "ddp-powersgd": Way(("--parallel", "ddp", "--compress", "powersgd", "--powersgd-start", "2")),
    "fsdp": Way(("--parallel", "fsdp")),
    "apex": Way(needs="apex"),
    "horovod": Way(("--parallel", "horovod"), needs="horovod"),
}
# Others' programs that start the processes, before `-m train.main train`
TORCHS = ("--nproc-per-node", "{nproc}", "--master-port", "{port}")
STARTERS = {
    "torchrun": (sys.executable, "-m", "torch.distributed.run", *TORCHS),
    "torch-launch": (sys.executable, "-m", "torch.distributed.launch", *TORCHS),
    # Each process may use all CPUs, as those of the other ways; root has to say that it means it
    "mpirun": ("mpirun", "-np", "{nproc}", "--oversubscribe", "--bind-to", "none",
               *(("--allow-run-as-root",) if getattr(os, "geteuid", lambda: 1)() == 0 else ()), sys.executable),
}
# None of them ends when whoever started it is killed, and their processes end with them
TIED = """import os, sys
from train.process.stop import die_with_parent
die_with_parent(int(sys.argv[1]))
os.execvp(sys.argv[2], sys.argv[2:])"""


def compare(
    config: Config, words: list[str], directory: Path, *, ways: str, nproc: int, repeats: int, log: Log, stop: StopRequest
) -> dict[str, Any]:
    """Run what has not run yet, and write compare.json, compare.md and compare.png in `directory`.

    `words`: the user's settings, as flags. Raises ConfigError, and Stopped where a stop was asked for.
    """
    chosen = [name.strip() for name in ways.split(",")] if ways else list(WAYS)
    if unknown := [name for name in chosen if name not in WAYS]:
        raise ConfigError(f'--ways must be of {", ".join(WAYS)}, got "{unknown[0]}".')
    if repeats < 1 or nproc < 2:
        raise ConfigError(f"--repeats must be >= 1 and --processes >= 2, got {repeats} and {nproc}.")
    steps = config.max_steps or 60
    conditions = {"steps": steps, "nproc": nproc, "settings": words, **_conditions()}
    earlier = read_json(directory / "compare.json")
    if earlier is not None and (config.fresh or earlier["conditions"] != conditions):
        if not config.fresh:
            raise ConfigError(f"{directory} holds a comparison under other conditions. Set --fresh, or another --name.")
        shutil.move(directory, directory.with_name(f"{directory.name}-before-{time.strftime('%Y%m%dT%H%M%S')}"))
        earlier = None
    directory.mkdir(parents=True, exist_ok=True)
    runs: list[dict[str, Any]] = earlier["runs"] if earlier else []
    # The repeats outermost, so that a machine that is busy for a while slows all ways down alike
    todo = [(name, repeat) for repeat in range(repeats) for name in chosen]
    reasons = {name: why for name in chosen if (why := _missing(WAYS[name].needs))}
    for name, repeat in _shown(todo, log):
        known = any(run["way"] == name and (run["repeat"] == repeat or "reason" in run) for run in runs)
        if name in reasons or known:
            continue
        runs.append({"way": name, "repeat": repeat, **_one(name, repeat, words, directory, steps, nproc, config, stop)})
        write_json(directory / "compare.json", {"conditions": conditions, "runs": runs})
    reasons |= {run["way"]: run["reason"] for run in runs if "reason" in run}
    rows = summed(runs, [name for name in chosen if name not in reasons])
    unit = next((run["unit"] for run in runs if "unit" in run), "samples")
    outcome = {"conditions": conditions, "unit": unit, "ways": rows, "missing": reasons, "runs": runs}
    write_json(directory / "compare.json", outcome)
    (directory / "compare.md").write_text(table(outcome), encoding="utf-8")
    if rows:
        title = f"{outcome['unit']}/s, {steps} steps, {repeats} runs each, {nproc} processes (none: 1)"
        bar_chart({name: row["per_s"] for name, row in rows.items()}, title, path=directory / "compare.png")
    log.info(f"{table(outcome)}\n{directory}/compare.json, compare.md, compare.png")
    return outcome


def _shown(todo: list[tuple[str, int]], log: Log) -> Iterator[tuple[str, int]]:
    """A bar over the whole on a terminal, a line for each run elsewhere."""
    bar = tqdm(todo, unit="run", disable=not sys.stderr.isatty())
    for number, (name, repeat) in enumerate(bar, 1):
        bar.set_description(name)
        if bar.disable:
            log.info(f"run {number}/{len(todo)}: {name}, repeat {repeat + 1}")
        yield name, repeat


def _one(
    name: str, repeat: int, words: list[str], directory: Path, steps: int, nproc: int, config: Config, stop: StopRequest
) -> dict[str, Any]:
    """Run one way once, in a process of its own; what it measured, or the reason why it can't run here."""
    way = WAYS[name]
    run = directory / "runs" / f"{name}-{repeat}"
    own = ["--run-dir", str(run.parent), "--name", run.name, "--max-steps", str(steps), "--log-every-steps", "1", "--fresh",
           "--evaluate-every-epochs", "1000000", "--tensorboard=false", "--progress", "none"]
    output = directory / f"{run.name}.log"
    command, env = _command(way, nproc)
    command += [*words, *way.settings, *own]
    path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), *filter(None, [env.get("PYTHONPATH", "")])])
    with output.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env={**env, "PYTHONPATH": path})
        while process.poll() is None:
            if stop.requested:
                process.terminate()
                process.wait()
                raise Stopped(f"{stop.signal_name}: the comparison stopped in {name}. The same command goes on from there.")
            time.sleep(0.05)
    if process.returncode != 0:
        lines = [line for line in output.read_text(errors="replace").splitlines() if "error" in line.lower()]
        why = lines[0] if lines else f"code {process.returncode}"
        return {"reason": f"{why} (exit code {process.returncode}, {output.name})"}
    result = read_json(run / "result.json") or {}
    unit = next(name for name in result if name.endswith("_per_s")).removesuffix("_per_s")
    per_s = result[f"{unit}_per_s"]
    return {
        "unit": unit, "per_s": per_s, "step_s": _step_times(run / "metrics.jsonl"),
        "epoch_s": result["steps_per_epoch"] * config.batch_size / per_s,
        "peak_memory_mb": result["peak_memory_mb"], "metrics": result["metrics"], "digest": result["digest"],
        "world_size": result["world_size"], "hosts": result["hosts"],
    }


def _command(way: Way, nproc: int) -> tuple[list[str], dict[str, str]]:
    """What starts it, up to the settings, and the environment: all of it ends when this process does."""
    program = ["-m", "train.main"]
    if way.several and way.start != "launch":
        values = {"{nproc}": str(nproc), "{port}": str(free_port())}
        starter = [values.get(word, word) for word in STARTERS[way.start]]
        return [sys.executable, "-c", TIED, str(os.getpid()), *starter, *program, "train"], dict(os.environ)
    start = ["launch", "--nproc", str(nproc), "--max-restarts", "0"] if way.several else ["train"]
    return [sys.executable, *program, *start], {**os.environ, "RANKUP_PARENT": str(os.getpid())}


def _step_times(path: Path) -> list[float]:
    """Seconds between the ends of neighbouring steps; over a save there is no neighbour."""
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    times = {entry["step"]: entry["time"] for entry in entries if "train/loss" in entry}
    return [round(times[step] - times[step - 1], 4) for step in sorted(times) if step - 1 in times]


def summed(runs: list[dict[str, Any]], names: list[str]) -> dict[str, dict[str, Any]]:
    """For each way: medians over its runs; step times over the steps of all of them."""
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        own = [run for run in runs if run["way"] == name]
        steps = sorted(seconds for run in own for seconds in run["step_s"]) or [0.0]
        found[name] = {
            "runs": len(own),
            "per_s": statistics.median(run["per_s"] for run in own),
            "step_median_ms": 1000 * statistics.median(steps),
            "step_p95_ms": 1000 * steps[min(len(steps) - 1, int(0.95 * len(steps)))],
            "epoch_s": statistics.median(run["epoch_s"] for run in own),
            "peak_memory_mb": max(run["peak_memory_mb"] for run in own),
            "accuracy": statistics.median(run["metrics"].get("accuracy", 0.0) for run in own),
        }
    alone = found.get("none", {}).get("per_s")
    for row in found.values():
        row["relative"] = row["per_s"] / alone if alone else None
    return found


def table(outcome: dict[str, Any]) -> str:
    """Markdown: a row for each way that ran, then the conditions and those that did not."""
    lines = [f"| way | {outcome['unit']}/s | step, median | step, p95 | an epoch | peak memory a process | accuracy | "
             "of one process |",
             "|---|---|---|---|---|---|---|---|"]
    for name, row in outcome["ways"].items():
        relative = f"{row['relative']:.2f}" if row["relative"] else ""
        lines.append(
            f"| {name} | {row['per_s']:,.0f} | {row['step_median_ms']:.1f} ms | {row['step_p95_ms']:.1f} ms | "
            f"{row['epoch_s']:.1f} s | {row['peak_memory_mb']:,.0f} MB | {row['accuracy']:.4f} | {relative} |"
        )
    lines += ["", *(f"- {name}: not here. {why}" for name, why in outcome["missing"].items())]
    shown = {name: value for name, value in outcome["conditions"].items() if value not in ("", [])}
    return "\n".join([*lines, f"- {'; '.join(f'{name} {value}' for name, value in shown.items())}", ""])


def _missing(need: str) -> str:
    """Why a way can't run on this machine, "" where it can."""
    if need == "gpus":
        found = shutil.which("nvidia-smi")
        listed = subprocess.run([found, "-L"], capture_output=True, text=True).stdout if found else ""
        count = len(listed.splitlines())
        return "" if count > 1 else f"DataParallel divides a batch over two GPUs or more, here are {count}."
    if need == "mpirun":
        found = shutil.which("mpirun")
        told = subprocess.run([found, "--version"], capture_output=True, text=True).stdout if found else ""
        return "" if "Open MPI" in told else "No mpirun of Open MPI. On Debian and Ubuntu: sudo apt install openmpi-bin"
    if need == "horovod" and find_spec("horovod") is None:
        return "Horovod is not installed; make horovod builds it."
    return "Apex removed its mixed precision in 2025; precision bf16 and fp16 stand in its place." if need == "apex" else ""


def _conditions() -> dict[str, Any]:
    """Hardware and versions."""
    from importlib.metadata import version

    here = Path(__file__).resolve().parents[2]
    commit = ""
    if shutil.which("git"):
        asked = ["git", "-c", "safe.directory=*", "rev-parse", "HEAD"]
        commit = subprocess.run(asked, cwd=here, capture_output=True, text=True).stdout.strip()[:9]
    model = [line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    return {
        "cpu": model[0] if model else platform.processor(), "cpus": cpu_quota(), "torch": version("torch"),
        "python": platform.python_version(), "commit": commit,
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
