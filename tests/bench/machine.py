"""What the benchmarks share: a command and its end, when steps ended, the machine and the versions, Markdown."""

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
    """A command's output, and the seconds that it took. Ends this program if it fails."""
    began_s = time.perf_counter()
    ended = subprocess.run(
        [str(word) for word in command], cwd=ROOT, env=environment({"PYTHONWARNINGS": "ignore", **(env or {})}),
        text=True, timeout=3600, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )
    if ended.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} ended with {ended.returncode}:\n{ended.stdout[-8000:]}")
    return ended.stdout, time.perf_counter() - began_s


def step_ends(run: Path, newest_bytes: int = 0) -> dict[int, float]:
    """When each step ended that the run's metrics have a line of, as time.time() gives it. `newest_bytes`: of those in
    the last bytes of the file alone."""
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
    """The CPU's name, such as "Intel(R) Xeon(R) Processor @ 2.50GHz"; at least its architecture."""
    path = Path("/proc/cpuinfo")  # Linux only; platform.processor() is empty there
    for line in path.read_text().splitlines() if path.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def conditions() -> str:
    """What figures must not be read without, in one line."""
    return (
        f"{os.cpu_count()} CPUs of {cpu_model()}, load {os.getloadavg()[0]:.1f}, torch {version('torch')}, Python "
        f"{platform.python_version()}, {datetime.date.today()}"
    )


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table with these columns."""
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]
