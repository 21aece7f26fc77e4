"""`status`: how a run stands, read from its files alone, by anybody who can read them. No torch here.

A job that is killed says nothing, so what counts is how old its last sign of life is: rank 0 replaces its report every
two seconds (`train.run.goodput`), and its lease as often.
"""

import contextlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rankup.errors import UserError, root_cause
from rankup.observe.tracker import address_of
from train.commands.status_screen import overview, screen
from train.config.options import StatusOptions
from train.config.schema import nearest
from train.process.context import Context, runs_folder
from train.process.status import read_json
from train.run.goodput import Report, goodput, read_reports

# Five reports late: a network file system shows another machine's writes some seconds later
SILENT_S = 10.0
# An agent starts lost ranks again within a second: a run that has ended for so long stays so, for --watch
ENDED_S = 10.0
TAIL = 2**20  # bytes of the metrics that are looked at: a line of a thousand ranks has a tenth of that
STEP_TIME = re.compile(r"ranks/(\w+)_s/(\d+)")  # a name in the metrics


def status(context: Context, options: StatusOptions) -> Iterator[str]:
    """What to print, text by text; one that redraws a terminal begins with the control codes for it.

    Raises UserError where there is no such run.
    """
    runs = runs_folder(context.config)
    name = options.run or context.config.name
    folder = _find(runs, name) if name else None
    on_terminal = sys.stdout.isatty() and not options.as_json
    height = 0
    while True:
        now = time.time()
        found = [look(folder, now=now)] if folder else look_at_all(runs, now=now)
        if options.as_json:
            yield json.dumps(found[0] if folder else found) + "\n"
        else:
            text = screen(found[0], now=now) if folder else overview(found, where=str(runs))
            if on_terminal and options.watch:
                lines = _fitting(text)
                back = f"\x1b[{height}A\x1b[J" if height else ""
                text, height = back + "".join(f"{line}\n" for line in lines), len(lines)
            yield text
        over = folder is not None and _is_over(found[0])
        if not options.watch or over:
            return
        time.sleep(options.interval_s)
        if not on_terminal and not options.as_json:
            yield "\n"


def _fitting(text: str) -> list[str]:
    """The lines of `text` that fit the terminal: to draw over what has scrolled away is impossible."""
    size = shutil.get_terminal_size()
    return [line[: size.columns] for line in text.splitlines()[: size.lines - 1]]


def _find(runs: Path, name: str) -> Path:
    """The folder of the run `name`, which may be a folder itself. Raises UserError."""
    for folder in (Path(name), runs / name):
        if _is_run(folder):
            return folder
    names = [path.name for path in _all(runs)]
    near = nearest(name, names)
    hint = f"Did you mean {near}?" if near else f"There are: {', '.join(names) or 'none'}."
    raise UserError(f"status: RUN must be a run in {runs}/ or its folder, got {name}. {hint}")


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("status.json", "run.json"))


def _all(runs: Path) -> list[Path]:
    return sorted(path for path in runs.glob("*") if _is_run(path))


def look_at_all(runs: Path, *, now: float) -> list[dict[str, Any]]:
    """`look` at each run of a folder, the one that was heard of last in front."""
    found = [look(path, now=now) for path in _all(runs)]
    return sorted(found, key=lambda run: float(run["last_sign_s"]))


def look(run_dir: Path, *, now: float) -> dict[str, Any]:
    """How the run in this folder stands, for `--json`. `now`: of `time.time()`. Ages, in `_s`, are seconds before it.

    What is not known is None or empty: a script of the user's own reports no steps, and a job that was killed while it
    started has reported nothing. `script`: where the time of such a script's run went, as `goodput` of a training.
    """
    summary = read_json(run_dir / "status.json") or {}
    reports = read_reports(run_dir)
    newest = reports[-1] if reports else None
    attempt, state = summary.get("attempt", ""), summary.get("state", "unknown")
    beats = [_modified(run_dir / "lease.json"), newest.time if newest else 0.0] if state == "running" else [0.0]
    last_sign_s = max(0.0, now - max(_modified(run_dir / "status.json"), *beats))
    live = newest if newest is not None and newest.attempt == attempt else None
    # An attempt that finished the run was not restarted, though a later one may have looked at it or added epochs
    earlier = [report for report in reports if report is not live and not report.finished]
    spent = goodput(reports) if reports else {"shares": ()}
    return {
        "run": run_dir.name, "folder": str(run_dir), "state": state, "attempt": attempt,
        # A script of the user's own beats nowhere: its silence says nothing
        "silent": any(beats) and last_sign_s > SILENT_S, "last_sign_s": round(last_sign_s, 1),
        "code": summary.get("code"), "why": summary.get("why", ""), "world_size": summary.get("world_size"),
        "step": newest.step if newest else None, "total_steps": newest.total_steps if newest else None,
        "unit": newest.unit if newest else "", "per_s": newest.per_s if newest else None,
        "remaining_s": live.remaining_s if live and state == "running" else None,
        "age_s": round(now - live.began, 1) if live else None, "metrics": newest.metrics if newest else {},
        "ranks": _ranks(summary, live, _step_times(run_dir)), "restarts": [_end(run_dir, report) for report in earlier],
        "goodput": spent if any(report.total_steps for report in reports) else None,
        "script": spent if "script" in spent["shares"] else None,
        "tracker": address_of(run_dir, (read_json(run_dir / "run.json") or {}).get("run", "")),
    }


def _modified(path: Path) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def _ranks(
    summary: dict[str, Any], live: Report | None, times: dict[int, dict[str, float]]
) -> list[dict[str, Any]]:
    """Each rank that is known: how it ended, or where it stood when rank 0 last heard of it. `times`: of a step."""
    signs = {sign["rank"]: {**sign, "of_a_step_s": times.get(sign["rank"], {})} for sign in live.ranks} if live else {}
    ends = {end["rank"]: end for end in summary.get("ranks", {}).values()}
    return [{**signs.get(rank, {}), **ends.get(rank, {})} for rank in sorted(ends or signs)]


def _step_times(run_dir: Path) -> dict[int, dict[str, float]]:
    """Seconds of a step by rank and part (data, compute, waiting), as the metrics last had them."""
    try:
        with (run_dir / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        found: dict[int, dict[str, float]] = {}
        with contextlib.suppress(ValueError):  # a line that was cut, or is being written
            for name, value in json.loads(line).items():
                if (match := STEP_TIME.fullmatch(name)) and value is not None:
                    found.setdefault(int(match[2]), {})[match[1]] = value
        if found:
            return found
    return {}


def _end(run_dir: Path, report: Report) -> dict[str, Any]:
    """How an earlier attempt ended, as its ranks wrote it down; code and reason are those of the cause."""
    files = sorted((run_dir / "status" / report.attempt).glob("rank-*.json"))
    ends = [end for path in files if isinstance(end := read_json(path), dict)]
    code = root_cause([end["code"] for end in ends]) if ends else None
    cause = next((end for end in ends if end["code"] == code), {})
    return {
        "attempt": report.attempt, "time": report.time, "step": report.step, "code": code, "why": cause.get("why", ""),
        "script_s": report.seconds.get("script", 0.0),
    }


def _is_over(run: dict[str, Any]) -> bool:
    state, ago_s = str(run["state"]), float(run["last_sign_s"])
    return state == "finished" or (state in ("failed", "stopped") and ago_s > ENDED_S)
