"""The comparison's table, chart and conditions. No torch here."""

import platform
import shutil
import statistics
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rankup.agent.processes import cpu_quota
from train.commands.machine import cpu_model
from train.commands.markdown import markdown_table
from train.process.figures import draw_bars, new_figure
from train.process.status import write_json


def sum_up(runs: list[dict[str, Any]], names: list[str]) -> dict[str, dict[str, Any]]:
    """For each variant: medians over its runs, and of its steps over the steps of all its runs."""
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        own = [run for run in runs if run["variant"] == name]
        steps = sorted(seconds for run in own for seconds in run["step_s"]) or [0.0]
        found[name] = {
            "runs": len(own),
            "per_s": statistics.median(run["per_s"] for run in own),
            "step_median_ms": 1000 * statistics.median(steps),
            "step_p95_ms": 1000 * steps[int(0.95 * len(steps))],
            "epoch_s": statistics.median(run["epoch_s"] for run in own),
            "peak_memory_mb": max(run["peak_memory_mb"] for run in own),
            "accuracy": statistics.median(run["metrics"].get("accuracy", 0.0) for run in own),
        }
    alone = found.get("none", {}).get("per_s")
    for row in found.values():
        row["relative"] = row["per_s"] / alone if alone else None
    return found


def format_comparison(outcome: dict[str, Any]) -> str:
    """Markdown: a row for each variant that ran, then why the others did not run, and the conditions."""
    header = ("variant", f"{outcome['unit']}/s", "step, median", "step, p95", "an epoch", "peak memory a process",
              "accuracy", "of one process")
    cells = (
        (name, f"{row['per_s']:,.0f}", f"{row['step_median_ms']:.1f} ms", f"{row['step_p95_ms']:.1f} ms",
         f"{row['epoch_s']:.1f} s", f"{row['peak_memory_mb']:,.0f} MB", f"{row['accuracy']:.4f}",
         f"{row['relative']:.2f}" if row["relative"] else "")
        for name, row in outcome["variants"].items()
    )
    missing = [f"- {name}: not here. {why}" for name, why in outcome["missing"].items()]
    conditions = "; ".join(f"{name} {value}" for name, value in outcome["conditions"].items() if value not in ("", []))
    return "\n".join([*markdown_table(header, cells), "", *missing, f"- {conditions}", ""])


def write_report(outcome: dict[str, Any], directory: Path, *, repeats: int) -> str:
    """Write compare.json, compare.md and, if anything ran, compare.png. Returns the text for the terminal."""
    text, variants, conditions = format_comparison(outcome), outcome["variants"], outcome["conditions"]
    write_json(directory / "compare.json", outcome)
    (directory / "compare.md").write_text(text, encoding="utf-8")
    if variants:
        title = f"{outcome['unit']}/s, {conditions['steps']} steps, {repeats} runs each"
        speeds = {name: row["per_s"] for name, row in variants.items()}
        bar_chart(speeds, f"{title}, {conditions['nproc']} processes (none: 1)", path=directory / "compare.png")
    return f"{text}\n{directory}/compare.json, compare.md, compare.png"


def bar_chart(values: Mapping[str, float], title: str, *, path: Path) -> None:
    """One bar for each name, as long as its value."""
    with new_figure(120 + 60 * len(values)) as figure:
        draw_bars(figure, [(name, value, f"{value:,.0f}") for name, value in values.items()], title)
        figure.savefig(path)


def conditions_of_machine(root: Path) -> dict[str, Any]:
    """Hardware and versions, and the commit of the program in `root` if it is a git checkout."""
    commit = ""
    if shutil.which("git"):
        # A checkout of another user, as in a container, would be refused otherwise
        command = ["git", "-c", "safe.directory=*", "rev-parse", "HEAD"]
        commit = subprocess.run(command, cwd=root, capture_output=True, text=True).stdout.strip()[:9]
    return {
        "cpu": cpu_model(), "cpus": cpu_quota(), "torch": version("torch"), "python": platform.python_version(),
        "commit": commit,
    }
