"""What bench prints and writes: a table of the measurements, and what they mean for the model in the settings."""

import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from train.commands.bench import cost_model
from train.commands.bench.collectives import Row
from train.commands.chart import line_chart
from train.commands.markdown import markdown_table
from train.process.status import write_json

ASSUMED = (
    "Expected, not measured: each rank keeps this batch, every link is as measured here, all are used at once, the "
    "faster of ring and tree counts, no rank is slower than another."
)


def write_report(outcome: dict[str, Any], rows: list[Row], run_dir: Path) -> str:
    """Write `bench.json`, `bench.md` and, if anything was measured, `bench.png`. Returns the text for the terminal."""
    text = "\n".join([*format_rows(rows), *format_meaning(outcome)])
    write_json(run_dir / "bench.json", outcome)
    (run_dir / "bench.md").write_text(f"{text}\n", encoding="utf-8")
    if rows:
        curves = {
            f"{operation}, {backend}": [(row.size, row.bus) for row in found]
            for (operation, backend), found in groupby(rows, key=lambda row: (row.operation, row.backend))
        }
        title = f"Bus bandwidth, {_place(outcome)}"
        names = ("size of a message", "bus bandwidth")
        line_chart(curves, title, labels=names, formats=(_bytes, _rate), path=run_dir / "bench.png")
    return f"{text}\n{run_dir}/: bench.json, bench.md{', bench.png' if rows else ''}"


def format_rows(rows: Sequence[Row]) -> list[str]:
    """Markdown: a row for each operation, backend and size."""
    if not rows:
        return []
    header = ("operation", "backend", "size", "median", "p95", "algorithm", "bus", "steady")
    cells = (
        (r.operation, r.backend, _bytes(r.size), _time(r.median_s), _time(r.p95_s), _rate(r.algorithm), _rate(r.bus),
         f"{r.steadiness:.2f}")
        for r in rows
    )
    return [*markdown_table(header, cells), ""]


def format_meaning(outcome: dict[str, Any]) -> list[str]:
    """The lines about the job: what it sends, and how long that is expected to take."""
    job, link = outcome["job"], outcome["link"]
    size = job["gradient_bytes"]
    count = len(cost_model.buckets(size))
    found = [
        f"- model: {job['parameters']:,} parameters; a step exchanges {_bytes(size)} of gradients (compress "
        f"{job['compress']}) in {count} message{'s' if count > 1 else ''}",
        f"- step: {_time(job['step_s'])} without exchange, batch {job['batch_a_rank']} a rank ({job['step_from']})",
    ]
    if plain := outcome["plain"]:
        reached = ", ".join(f"{backend} {ratio:.2f}" for backend, ratio in plain["ratio"].items())
        found.append(
            f"- plain sockets: {_rate(plain['speed'])} between rank 0 and rank {outcome['ranks'] - 1}, "
            f"{_bytes(plain['size'])} there and back; point to point reaches this part of it: {reached}"
        )
    if link is None:
        return [*found, f"- no expectation: {outcome['missing']}"]
    # Two points always lie on a line: its error would be 0 and mean nothing
    many = link["sizes"] > 2
    fit = f"off by {link['error']:.0%} at the median of the sizes" if many else "through two sizes alone, unproven"
    speed = _rate(1 / link["beta_s"]) if link["beta_s"] else "more bandwidth than these sizes show"
    found += [
        f"- link: {_time(link['alpha_s'])} a message, {speed}; the line is {fit} (all-reduce on {link['backend']}, "
        f"{_place(outcome)})",
        f"- here: the exchange of a step takes {_time(outcome['here_s'])} on {outcome['ranks']} ranks",
        "",
    ]
    header = ("ranks", "ring", "tree", "efficiency, nothing hidden", "hidden as far as it fits")
    cells = (
        (str(row["ranks"]), _time(row["ring_s"]), _time(row["tree_s"]), f"{row['efficiency']:.0%}",
         f"{row['efficiency_hidden']:.0%}")
        for row in outcome["expected"]
    )
    one_host = " All ranks were on one host: a link between machines is slower." if len(outcome["hosts"]) == 1 else ""
    return [*found, *markdown_table(header, cells), "", ASSUMED + one_host]


def _place(outcome: dict[str, Any]) -> str:
    return f"{outcome['ranks']} ranks on {', '.join(outcome['hosts'][:4])}"


def _bytes(count: float) -> str:
    power = min(3, int(math.log(count, 1024))) if count >= 1 else 0
    value = count / 1024**power
    digits = 0 if value >= 100 or power == 0 else 1 if value % 1 else 0
    return f"{value:.{digits}f} {['B', 'KiB', 'MiB', 'GiB'][power]}"


def _rate(bytes_a_second: float) -> str:
    """In powers of ten, as network cards are labelled."""
    power, unit = (9, "GB/s") if bytes_a_second >= 1e9 else (6, "MB/s") if bytes_a_second >= 1e6 else (3, "kB/s")
    return f"{bytes_a_second / 10**power:.3g} {unit}"


def _time(seconds: float) -> str:
    power, unit = (0, "s") if seconds >= 1 else (3, "ms") if seconds >= 1e-3 else (6, "us")
    return f"{seconds * 10**power:.3g} {unit}"
