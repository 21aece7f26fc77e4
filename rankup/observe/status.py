"""The command `status` shows the state of a run. It needs only the run's files. This module does not import torch.

A killed job can't report its end, so the age of its last heartbeat counts: rank 0 replaces its report every two
seconds (`rankup.observe.goodput`), and its lease as often.
"""

import json
import signal
import sys
import time
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rankup.agent.ends import End, cause_of
from rankup.agent.network import fits
from rankup.agent.protocol import END
from rankup.agent.status_files import Report
from rankup.env.rank_env import ranges
from rankup.errors import UserError
from rankup.observe.goodput import duration, goodput, one_line, read_reports
from rankup.observe.logs import find_run, is_run
from rankup.places.files import open_regular, read_json, snapshot_text
from rankup.timing import LONG_S, NOW_S, REPORT_S, RUN_SILENT_S

MOST_RESTARTS, MOST_SETTINGS = 5, 20  # on the screen


def status(runs: Path, run: str = "", *, as_json: bool = False) -> str:
    """Return what to print about `run`, see `find_run`, or about all runs in the folder `runs`. Raises UserError."""
    folder, now = find_run(runs, run) if run else None, time.time()
    try:
        paths = [folder] if folder else sorted(path for path in runs.glob("*") if is_run(path))
        # The run with the newest heartbeat comes first
        found = sorted((look(path, now=now) for path in paths), key=lambda each: float(each["last_sign_s"]))
        if as_json:
            return json.dumps(found[0] if folder else found) + "\n"
        return as_text(screen(found[0], now=now) if folder else overview(found, where=str(runs)))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, OSError) as error:
        raise UserError(
            f"status: {folder or runs} must hold files that a run has written, got a damaged status.json, run.json or "
            "file in status/. Remove it."
        ) from error


def watch(runs: Path, run: str = "") -> None:
    """Redraw the status until the run has ended, or until Ctrl-C. In a pipe, print only the last screen."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # so that `Live` restores the terminal's cursor
    with suppress(KeyboardInterrupt), Live(auto_refresh=False) as live:
        while True:
            live.update(Text.from_ansi(status(runs, run).rstrip("\n")), refresh=True)
            if run:
                found = look(find_run(runs, run), now=time.time())
                silent = found["last_sign_s"] > RUN_SILENT_S
                # A run that failed or was stopped may be restarting
                if found["state"] == "finished" or (found["state"] in ("failed", "stopped") and silent):
                    return
            time.sleep(REPORT_S)


# What the files say ---------------------------------------------------------------------------------------------------


def look(run_dir: Path, *, now: float) -> dict[str, Any]:
    """Return the state of the run in this folder, for `--json`. `now`: the `time.time()` from which ages are counted.

    Unknown values are None or empty. A script that does not import rankup reports no steps, and a job that was killed
    while it started has reported nothing.
    """
    summary, reports = read_json(run_dir / "status.json"), read_reports(run_dir)
    attempt, state = summary.get("attempt", ""), summary.get("state", "unknown")
    newest = reports[-1] if reports else None
    live = newest if newest is not None and newest.attempt == attempt else None
    beats = [_modified(run_dir / "lease.json"), newest.time if newest else 0.0] if state == "running" else [0.0]
    last_sign_s = max(0.0, now - max(_modified(run_dir / "status.json"), *beats))
    # An attempt that finished the run was not restarted, although a later one may have read the run or added epochs
    earlier = [(report, step) for report, step in zip(reports, _last_steps(reports), strict=True)
               if report is not live and not report.finished]
    return {
        "run": run_dir.name, "folder": str(run_dir), "state": state, "attempt": attempt,
        # Without a lease and a report there are no heartbeats to miss, nor after the run has ended
        "silent": any(beats) and last_sign_s > RUN_SILENT_S, "last_sign_s": round(last_sign_s, 1),
        "code": summary.get("code"), "why": summary.get("why", ""), "world_size": summary.get("world_size"),
        "step": newest.step if newest else None, "total_steps": newest.total_steps if newest else None,
        "unit": newest.unit if newest else "", "per_s": newest.per_s if newest else None,
        "remaining_s": live.remaining_s if live and state == "running" else None,
        "last_step_s": round(max(0.0, now - live.time) + live.open_s, 1) if live and state == "running" else None,
        "metrics": newest.metrics if newest else {}, "settings": _settings(run_dir / "config.yaml"),
        "snapshot": summary.get("snapshot", {}),
        "ranks": _ranks(summary, live, newest), "restarts": [_end(run_dir, *each) for each in earlier],
        "nodes": live.nodes if live else [],
        "goodput": goodput(reports) if any(report.total_steps or report.step for report in reports) else None,
    }


def _settings(path: Path) -> dict[str, str]:
    """Return the settings of the run in `config.yaml`, as they are written there."""
    with suppress(OSError, ValueError):
        with open_regular(path) as file:
            text = file.read().decode()
        lines = (line.partition("  #")[0].partition(": ") for line in text.splitlines())
        return {name: value.strip() for name, colon, value in lines if colon and name[:1] != "#"}
    return {}


def _modified(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _last_steps(reports: list[Report]) -> list[int]:
    """Return the last finished step of each attempt. A killed attempt's report is up to two seconds old, but the
    attempt after it may have resumed from a later step in memory."""
    resumed = [*(report.first_step for report in reports[1:]), 0]  # nothing follows the last one
    return [max(report.step, step) for report, step in zip(reports, resumed, strict=False)]


def _ranks(summary: dict[str, Any], live: Report | None, newest: Report | None) -> list[dict[str, Any]]:
    """Return each known rank: how it ended, or its step and phase when rank 0 last heard from it. The step is None if
    the rank has not restored the state of a run that has steps, for example because the run had finished."""
    heartbeats = {heartbeat["rank"]: heartbeat for heartbeat in live.ranks} if live else {}
    ends = {end["rank"]: end for end in summary.get("ranks", {}).values()}
    found = [{**heartbeats.get(rank, {}), **ends.get(rank, {})} for rank in sorted(ends or heartbeats)]
    none = None if newest is not None and newest.step else 0
    return [{**rank, "step": rank.get("step") or none} for rank in found]


def _end(run_dir: Path, report: Report, step: int) -> dict[str, Any]:
    """Return how an earlier attempt ended after `step`, from its ranks' files. `code` and `why` are the cause's."""
    files = sorted((run_dir / "status" / report.attempt).glob("rank-*.json"))
    ends = [End.read(end) for end in map(read_json, files) if fits(end, END)]
    cause = cause_of(ends)[1] if ends else None
    return {
        "attempt": report.attempt, "time": report.time, "step": step, "code": cause.code if cause else None,
        "why": cause.why if cause else "", "lasted_s": report.time - report.began,
    }


# What people see ------------------------------------------------------------------------------------------------------


def as_text(shown: RenderableType) -> str:
    """Return `shown` as text, as wide as the terminal, or in a pipe as wide as necessary."""
    width = None if sys.stdout.isatty() else 10_000
    console = Console(width=width, markup=False, emoji=False, highlight=False)
    with console.capture() as captured:
        console.print(shown)
    return "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def overview(runs: list[dict[str, Any]], *, where: str) -> RenderableType:
    """Return a table of all runs in the folder `where`, one line for each."""
    table = _table("run", "state", "step", "speed", "left", "restarts", "goodput")
    for run in runs:
        state = _state(run).partition(":")[0].partition(";")[0]
        step = f"{run['step']}/{run['total_steps']}" if run["total_steps"] else run["step"] or ""
        share = f"{run['goodput']['share']:.0%}" if run["goodput"] else ""
        restarts = len(run["restarts"]) or ""
        _add(table, run["run"], state, step, _speed(run), _left(run), restarts, share, style=_style(run))
    return table if runs else f"no runs in {where}"


def screen(run: dict[str, Any], *, now: float) -> RenderableType:
    """Return the screen of one run. `run`: what `look` returned for `now`."""
    shown = {name: value for name, value in run["metrics"].items() if not name.endswith("_per_s")}  # shown as "step"
    settings = ", ".join(f"{name} {value}" for name, value in run["settings"].items())
    if len(run["settings"]) > MOST_SETTINGS:
        settings = f"{len(run['settings'])} in config.yaml"
    facts = {
        "run": run["folder"], "state": _state(run), "step": _steps(run), "attempt": run["attempt"],
        "snapshot": snapshot_text(**run["snapshot"]) if run["snapshot"] else "", "settings": settings,
        "metrics": ", ".join(f"{name} {value:.4g}" for name, value in sorted(shown.items())),
        "goodput": one_line(run["goodput"]) if run["goodput"] else "",
    }
    top = Table.grid(padding=(0, 2, 0, 0))
    top.add_column(style="bold", no_wrap=True)
    top.add_column(overflow="fold")
    for name, value in facts.items():
        if value:
            _add(top, name, value, style=_style(run) if name == "state" else "")
    nodes = _table("node", "host", "state", "since", "ranks", "why")
    for node in run["nodes"]:
        since = f"{duration(now - node['since'])} ago"
        _add(nodes, node["node"], node["host"], node["state"], since, node["ranks"], node["why"])
    restarts = _table(f"restarts ({len(run['restarts'])})", "")
    for end in run["restarts"][-MOST_RESTARTS:]:
        _add(restarts, time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(end["time"])), _how(end))
    tables = [table for table in (_rank_table(run, now), nodes, restarts) if table.row_count]
    return Group(top, *(part for table in tables for part in ("", table)))


def _table(*header: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for title in header:
        table.add_column(title, overflow="fold")
    return table


def _add(table: Table, *cells: Any, style: str = "") -> None:
    table.add_row(*map(str, cells), style=style)


def _style(run: dict[str, Any]) -> str:
    return "red" if run["silent"] or run["state"] == "failed" else "green" if run["state"] == "finished" else ""


def _state(run: dict[str, Any]) -> str:
    state, ago = run["state"], duration(run["last_sign_s"])
    if run["silent"]:
        # After kill -9, a lost machine, or the loss of the disk on which the end was recorded
        return f"no heartbeat for {ago}; no end was recorded"
    if state == "running":
        return "running" if run["ranks"] else "running: it is starting, or its code reports no steps"
    if state == "unknown":
        return "unknown: there is no status.json"
    code = f" with exit code {run['code']}" if run["code"] not in (0, None) else ""
    why = f": {run['why']}" if run["why"] and state != "finished" else ""
    return f"{state}{code}, {ago} ago{why}"


def _speed(run: dict[str, Any]) -> str:
    per_s = run["per_s"] or 0.0
    number = f"{per_s:,.0f}" if per_s >= 10 else f"{per_s:.2g}"  # steps may take many seconds
    return f"{number} {run['unit']}/s" if per_s else ""


def _left(run: dict[str, Any]) -> str:
    return duration(run["remaining_s"]) if run["remaining_s"] is not None and not run["silent"] else ""


def _steps(run: dict[str, Any]) -> str:
    step, total = run["step"], run["total_steps"]
    if not (step or total):
        return ""
    text = f"{step:,} of {total:,} ({step / total:.0%})" if total else f"{step:,}"
    return ", ".join(filter(None, [text, _speed(run), f"about {left} left" if (left := _left(run)) else ""]))


def _rank_table(run: dict[str, Any], now: float) -> Table:
    """Return the table of the ranks. Neighbouring ranks in the same state share a row."""
    table = _table("rank", "host", "step", "phase", "last heartbeat")

    def stands(rank: dict[str, Any]) -> tuple[Any, ...]:
        silent = now - rank.get("seen", now) > RUN_SILENT_S
        return rank["host"], rank.get("state"), rank.get("code"), rank.get("phase"), rank.get("waiting"), silent

    for _, group in groupby(run["ranks"], key=stands):
        alike = list(group)
        # The rank that was heard from longest ago represents the row
        oldest = min(alike, key=lambda rank: float(rank.get("seen", now)))
        # A script that does not import rankup reports no steps
        step = ranges({rank["step"] for rank in alike if rank["step"] is not None}) if run["total_steps"] else ""
        _add(table, ranges(rank["rank"] for rank in alike), oldest["host"], step, _phase(oldest), _sign(oldest, now))
    return table


def _phase(rank: dict[str, Any]) -> str:
    if "state" in rank:
        return str(rank["state"]) + (f" with exit code {rank['code']}" if rank["code"] else "")
    phase = rank["phase"] + (", waits for others" if rank["waiting"] else "")
    if rank["for_s"] > LONG_S:
        phase += f", for {duration(rank['for_s'])}" + (f": {rank['location']}" if rank.get("location") else "")
    return str(phase)


def _sign(rank: dict[str, Any], now: float) -> str:
    """Return when rank 0 last heard from the rank, or "" if the rank has ended."""
    if "state" in rank:
        return ""
    silent_s = now - rank["seen"]
    if silent_s > RUN_SILENT_S:
        return f"none for {duration(silent_s)}"
    return "now" if silent_s < NOW_S else f"{duration(silent_s)} ago"


def _how(end: dict[str, Any]) -> str:
    """Describe how an earlier attempt ended."""
    after = f"step {end['step']}" if end["step"] else duration(end["lasted_s"])
    if end["code"] is None:
        return f"after {after}: no rank recorded why: it was killed, or its machine was lost"
    return f"after {after}: " + f"{end['why']} (exit code {end['code']})".lstrip()
