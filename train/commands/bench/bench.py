"""How fast do the ranks exchange, and what does that mean for the model in the settings? README.md says how to read it.

Measures on the group that the launcher started. One process alone has nobody to exchange with: it measures its step.
"""

import json
import re
from dataclasses import asdict
from typing import Any

import torch

from train.commands.bench import cost_model
from train.commands.bench.collectives import POINT_TO_POINT, SOCKETS, Row, measure
from train.commands.bench.job import describe_job
from train.commands.bench.report import write_report
from train.config.options import BenchOptions
from train.errors import ConfigError
from train.group.device import pick_backend
from train.group.group import on_rank0
from train.group.join import join
from train.process.context import Context
from train.process.status_file import StatusFile

FORECAST_RANKS = (2, 8, 64, 512)
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def bench(context: Context, options: BenchOptions) -> None:
    """Measure, print, and write `bench.json`, `bench.md` and `bench.png` to the context's directory.

    Raises ConfigError for sizes that are no numbers, UserError for a model that can't be built, and JoinError and
    PeerLost as training does.
    """
    config, log = context.config, context.log
    sizes = sorted({parse_size(word) for word in options.sizes.split(",") if word})  # in bytes
    torch.set_num_threads(config.num_threads)
    # Not shared: an earlier bench that was killed has left a status that says "running"
    status = StatusFile(context.run_dir, context.launch, shared=False)
    with join(config, context.launch, log=log, stop=context.stop, status=status) as group:
        group.watch.enter("setup", config.setup_timeout_s)
        job = on_rank0(group, lambda: describe_job(config, group, options.step_ms))
        rows = []
        if group.world_size > 1:
            rows = measure(
                group, sizes, spec=pick_backend(config.backend, group.device), samples=options.iterations,
                seconds=options.seconds, timeout_s=config.step_timeout_s + options.seconds,
            )
        outcome = {
            "ranks": group.world_size, "hosts": sorted(set(group.hosts)), "device": str(group.device.type),
            "torch": torch.__version__, "job": job, "collectives": [asdict(row) for row in rows],
            "plain": compare_with_sockets(rows), **expectation(rows, job, group.world_size),
        }
        if group.is_rank0:
            log.info(write_report(outcome, rows, context.run_dir))
            if options.as_json:
                print(json.dumps(outcome), flush=True)


def parse_size(word: str) -> int:
    """ "64K" -> 65536 bytes. Raises ConfigError."""
    found = re.fullmatch(r"(\d+)([KMG]?)(I?B)?", word.strip().upper())
    size = int(found[1]) * UNITS[found[2]] if found else 0
    if not 4 <= size <= 2**40:
        raise ConfigError(f'--sizes must be numbers of bytes such as 1K,1M,64M, at least 4, got "{word}".')
    return size


def expectation(rows: list[Row], job: dict[str, Any], ranks: int) -> dict[str, Any]:
    """The link, and how long the job's exchange is expected to take with other numbers of ranks.

    "missing" says why there is no expectation; it is empty if there is one.
    """
    backend = rows[-1].backend if rows else ""  # the accelerator's own, where there is one: it is measured last
    points = [(row.size, row.median_s) for row in rows if row.operation == "all-reduce" and row.backend == backend]
    if len(points) < 2:
        alone, short = "one process alone has no link to measure: start several", "a line needs two sizes at least"
        return {"link": None, "expected": [], "missing": alone if ranks == 1 else short}
    link = cost_model.fit_all_reduce(points, ranks)
    size, step_s = job["gradient_bytes"], job["step_s"]
    return {
        "link": {"backend": backend, **asdict(link), "sizes": len(points)},
        "expected": cost_model.expected(link, size, step_s, FORECAST_RANKS),
        "here_s": sum(cost_model.ring_s(link, ranks, part) for part in cost_model.buckets(size)),
        "missing": "",
    }


def compare_with_sockets(rows: list[Row]) -> dict[str, Any] | None:
    """Each backend's point-to-point bandwidth divided by that of plain TCP, at the largest size that all have.

    None if one of the two was not measured.
    """
    speeds = {(row.backend, row.size): row.algorithm for row in rows if row.operation == POINT_TO_POINT}
    backends = {backend for backend, _ in speeds}
    common = [size for _, size in speeds if all((backend, size) in speeds for backend in backends)]
    if SOCKETS not in backends or len(backends) == 1 or not common:
        return None
    size = max(common)
    plain = speeds[SOCKETS, size]
    ratios = {backend: speeds[backend, size] / plain for backend in sorted(backends - {SOCKETS})}
    return {"size": size, "speed": plain, "ratio": ratios}
