"""What `status` shows: one run on a screen, or all runs, a line each. No torch here."""

import time
from itertools import groupby
from typing import Any

from train.run.goodput import duration, one_line

NOW_S = 5.0  # younger signs of life are "now": they come every two seconds
SILENT_S = 10.0  # of a rank, whose signs of life rank 0 notes every two seconds
LONG_S = 10.0  # in one step, or in a phase without steps: worth a word
SCRIPT = "script"  # `train.group.watchdog.SCRIPT`, which imports torch
MOST_ROWS = 16  # of ranks; with more of them those that stand alike share a row
MOST_RESTARTS = 5
CLOCK = "%Y-%m-%d %H:%M:%S"


def screen(run: dict[str, Any], *, now: float) -> str:
    """One run. `run`: of `status.look`, `now`: the time it was made with."""
    rows = {"run": run["folder"], "state": _state(run)}
    if run["total_steps"]:
        rows["step"] = _steps(run)
    if run["attempt"]:
        number = f"{len(run['restarts']) + 1}: " if run["restarts"] else ""
        since = f", began {duration(run['age_s'])} ago" if run["age_s"] is not None else ""
        rows["attempt"] = f"{number}{run['attempt']}{since}"
    if run["metrics"]:
        rows["metrics"] = ", ".join(f"{name} {value:.4g}" for name, value in sorted(run["metrics"].items()))
    if run["goodput"]:
        rows["goodput"] = one_line(run["goodput"])
    if run["script"]:
        rows["script"] = one_line(run["script"])
    if run["tracker"]:
        rows["tracker"] = run["tracker"]
    lines = [f"{name:<8} {value}" for name, value in rows.items()]
    if run["ranks"]:
        table = [("rank", "host", "step", "phase", "of a step", "last sign of life"), *_rank_rows(run, now)]
        lines += ["", *_aligned(table)]
    if run["restarts"]:
        lines += ["", *_restart_lines(run["restarts"])]
    return "".join(f"{line}\n" for line in lines)


def overview(runs: list[dict[str, Any]], *, where: str) -> str:
    """All runs of the folder `where`."""
    if not runs:
        return f"no runs in {where}\n"
    table: list[tuple[str, ...]] = [("run", "state", "step", "speed", "left", "restarts", "goodput")]
    for run in runs:
        steps = f"{run['step']}/{run['total_steps']}" if run["total_steps"] else ""
        left = duration(run["remaining_s"]) if run["remaining_s"] is not None else ""
        table.append((
            run["run"], _state(run, short=True), steps,
            f"{run['per_s']:,.0f} {run['unit']}/s" if run["per_s"] else "", left if not run["silent"] else "",
            str(len(run["restarts"]) or ""), f"{run['goodput']['share']:.0%}" if run["goodput"] else "",
        ))
    return "".join(f"{line}\n" for line in _aligned(table))


def _state(run: dict[str, Any], *, short: bool = False) -> str:
    state, ago = run["state"], duration(run["last_sign_s"])
    if run["silent"]:
        # Nobody wrote an end: kill -9, a lost machine, or a disk that this machine sees no longer
        return f"no sign of life for {ago}" if short else f"no sign of life for {ago}; nobody wrote down an end"
    if state == "running":
        return "running" if run["ranks"] or short else "running: it starts, or it runs code that reports no steps"
    if state == "unknown":
        return "unknown: there is no status.json" if not short else state
    code = f" with exit code {run['code']}" if run["code"] not in (0, None) else ""
    why = f": {run['why']}" if run["why"] and state != "finished" and not short else ""
    return f"{state}{code}, {ago} ago{why}"


def _steps(run: dict[str, Any]) -> str:
    step, total = run["step"], run["total_steps"]
    text = f"{step:,} of {total:,} ({step / total:.0%})"
    if run["per_s"]:
        text += f", {run['per_s']:,.0f} {run['unit']}/s"
    if run["remaining_s"] is not None and not run["silent"]:
        text += f", about {duration(run['remaining_s'])} left"
    return text


def _rank_rows(run: dict[str, Any], now: float) -> list[tuple[str, ...]]:
    """Rank, host, step, phase, sign of life; neighbours that stand alike share a row where there are many ranks."""
    ranks = run["ranks"]

    def stands(rank: dict[str, Any]) -> tuple[object, ...]:
        alone = rank["rank"] if len(ranks) <= MOST_ROWS else None
        silent = now - rank.get("seen", now) > SILENT_S
        return alone, rank["host"], rank.get("state"), rank.get("phase"), rank.get("waiting"), silent

    rows: list[tuple[str, ...]] = []
    for _, group in groupby(ranks, key=stands):
        alike = list(group)
        # Of several, the one that was heard of longest ago stands for all
        oldest = min(alike, key=lambda rank: float(rank.get("seen", now)))
        numbers, steps = ([rank[name] for rank in alike] for name in ("rank", "step"))
        phase, sign = _rank_words(oldest, now)
        shown = _span(steps) if run["total_steps"] else ""  # a script of the user's own says nothing of its steps
        rows.append((_span(numbers), oldest["host"], shown, phase, _parts(alike), sign))
    return rows


def _parts(ranks: list[dict[str, Any]]) -> str:
    """What takes how long of a step; of several ranks, the mean."""
    known = [parts for rank in ranks if (parts := rank.get("of_a_step_s"))]
    means = {name: sum(parts[name] for parts in known) / len(known) for name in known[0]} if known else {}
    return ", ".join(f"{name} {1000 * mean:.3g} ms" for name, mean in means.items())


def _span(numbers: list[int]) -> str:
    first, last = min(numbers), max(numbers)
    return str(first) if first == last else f"{first}-{last}"


def _rank_words(rank: dict[str, Any], now: float) -> tuple[str, str]:
    """The phase of a rank, and its sign of life."""
    if "state" in rank:
        return rank["state"] + (f" with exit code {rank['code']}" if rank["code"] else ""), ""
    silent_s = now - rank["seen"]
    own = rank["phase"] == SCRIPT  # the rank's process only waits for the user's, so its place says nothing
    phase = rank["phase"] + (", waits for others" if rank["waiting"] and not own else "")
    if rank["for_s"] > LONG_S:
        place = f": {rank['place']}" if rank.get("place") and not own else ""
        phase += f", for {duration(rank['for_s'])}{place}"
    if silent_s > SILENT_S:
        return phase, f"none for {duration(silent_s)}"
    return phase, "now" if silent_s < NOW_S else f"{duration(silent_s)} ago"


def _restart_lines(restarts: list[dict[str, Any]]) -> list[str]:
    """Why each attempt before this one ended, the last ones only."""
    lines = [f"restarts ({len(restarts)}{', the last ones' if len(restarts) > MOST_RESTARTS else ''})"]
    for end in restarts[-MOST_RESTARTS:]:
        when = time.strftime(CLOCK, time.localtime(end["time"]))
        how = "no rank wrote down why: killed, or the machine was lost"
        if end["code"] is not None:
            how = f"{end['why']} (exit code {end['code']})"
        after = f"{duration(end['script_s'])} of the script" if end["script_s"] else f"step {end['step']}"
        lines.append(f"  {when}  after {after}: {how}")
    return lines


def _aligned(table: list[tuple[str, ...]]) -> list[str]:
    """The lines of a table, without the columns that have nothing below their title."""
    columns = [column for column in zip(*table, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    rows = zip(*columns, strict=True)
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
