"""Helpers of the benchmarks: run a command, read when steps ended, name the machine and versions, write Markdown."""

import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from tests.rigs.jobs import ROOT, environment


def run(*command: str | Path | float, env: Mapping[str, str] | None = None) -> tuple[str, float]:
    """Run a command. Return its output and the seconds that it took. Exit if the command fails."""
    began_s = time.perf_counter()
    ended = subprocess.run(
        [str(word) for word in command], cwd=ROOT, env=environment({"PYTHONWARNINGS": "ignore", **(env or {})}),
        text=True, timeout=3600, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )
    if ended.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} ended with {ended.returncode}:\n{ended.stdout[-8000:]}")
    return ended.stdout, time.perf_counter() - began_s


def step_ends(run: Path, newest_bytes: int = 0) -> dict[int, float]:
    """Return the end of each step that has a line in the run's metrics, as time.time(). `newest_bytes`: unless 0,
    read only this many bytes at the end of the file."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return {}
    with path.open("rb") as metrics:
        at = max(0, path.stat().st_size - newest_bytes) if newest_bytes else 0
        metrics.seek(at)
        lines = metrics.read().decode(errors="replace").splitlines(keepends=True)
    whole = [line for line in lines[bool(at) :] if '"train/loss"' in line and line.endswith("\n")]
    return {entry["step"]: entry["time"] for entry in map(json.loads, whole)}


def cpu_model() -> str:
    """Return the CPU's name, such as "Intel(R) Xeon(R) Processor @ 2.50GHz", or at least its architecture."""
    path = Path("/proc/cpuinfo")  # Linux only; platform.processor() is empty there
    for line in path.read_text().splitlines() if path.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def conditions() -> str:
    """Return in one line the conditions that belong to all figures."""
    return (
        f"{os.cpu_count()} CPUs of {cpu_model()}, load {os.getloadavg()[0]:.1f}, torch {version('torch')}, Python "
        f"{platform.python_version()}, {datetime.date.today()}"
    )


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]
