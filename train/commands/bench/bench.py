"""How fast is the wire between the ranks, and what does that mean for the model in the settings? `bench.md` says how to read it.

Measures on the group that the launcher started; one process alone measures its step and says what it can't.
"""

import json
import math
import os
import statistics
import time
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import nn

from train.commands.bench import cost_model
from train.commands.bench.collectives import SOCKETS, Row, as_dicts, measure
from train.commands.chart import lines
from train.config import Config
from train.data.loader import BatchLoader
from train.data.samples import Order, derive_seed, seed_everything
from train.errors import ConfigError, UserError
from train.group.group import Group, join, pick_backend
from train.parallel import wrap
from train.parallel.optimizer import build_optimizer
from train.process.env import Launch
from train.process.log import Log
from train.process.status import write_json
from train.process.stop import StopRequest
from train.workloads import Workload, load

COUNTS = (2, 8, 64, 512)
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
WARM_STEPS, STEPS = 3, 10


def bench(
    config: Config, launch: Launch, *, run_dir: Path, log: Log, stop: StopRequest, wanted: str, iterations: int,
    seconds: float, step_ms: float, as_json: bool,
) -> dict[str, Any]:
    """Measure, print, and write `bench.json`, `bench.md` and `bench.png` to `run_dir`.

    Raises ConfigError for sizes and numbers that can't be, JoinError and PeerLost as training does.
    """
    chosen = [parse_size(word) for word in wanted.split(",") if word]
    if iterations < 1 or seconds <= 0 or step_ms < 0:
        got = f"{iterations}, {seconds:g} and {step_ms:g}"
        raise ConfigError(f"--iterations must be >= 1, --seconds > 0 and --step-ms >= 0, got {got}.")
    torch.set_num_threads(config.num_threads)
    attempt = os.environ.get("RANKUP_ATTEMPT", "")
    with join(config, launch, log=log, stop=stop, run_dir=run_dir, attempt=attempt) as group:
        if group.is_rank0:
            group.claim_status_file(lambda: True)  # an earlier one that was killed says "running" for ever
        group.watch.enter("setup", config.setup_timeout_s)
        job = group.broadcast(_tried(config, group, step_ms) if group.is_rank0 else None)
        if "mistake" in job:
            raise UserError(job["mistake"], printed_elsewhere=not group.is_rank0)
        rows = []
        if group.world_size > 1:
            rows = measure(
                group, sorted(set(chosen)), spec=pick_backend(config.backend, group.device), iterations=iterations,
                seconds=seconds, timeout_s=config.step_timeout_s + seconds, note=log.info,
            )
        outcome = {
            "ranks": group.world_size, "hosts": sorted(set(group.hosts)), "device": str(group.device.type),
            "torch": torch.__version__, "job": job, "collectives": as_dicts(rows), "plain": over_plain(rows),
            **expectation(rows, job, group.world_size),
        }
        if group.is_rank0:
            _write(outcome, rows, run_dir, log)
            if as_json:
                print(json.dumps(outcome), flush=True)
    return outcome


def parse_size(word: str) -> int:
    """ "64K" -> 65536 bytes. Raises ConfigError."""
    number, unit = word.strip().upper().removesuffix("IB").removesuffix("B"), ""
    if number[-1:] in UNITS and number[-1:]:
        number, unit = number[:-1], number[-1]
    if not number.isdecimal() or not 4 <= int(number) * UNITS[unit] <= 2**40:
        raise ConfigError(f'--sizes must be numbers of bytes such as 1K,1M,64M, at least 4, got "{word}".')
    return int(number) * UNITS[unit]


# The job ------------------------------------------------------------------------------------------------------


def _tried(config: Config, group: Group, step_ms: float) -> dict[str, Any]:
    """What the settings' model sends, and how long a step of one rank's share of the batch takes; on rank 0, alone."""
    seed_everything(derive_seed(config.seed))
    try:
        workload = load(config)
        model = wrap.prepare(workload.model, config, group.device)
    except UserError as error:
        return {"mistake": str(error)}
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    each = max(1, config.batch_size // (group.world_size * config.accumulate))
    step_s, how = step_ms / 1000, "given by --step-ms"
    if not step_ms:
        step_s = config.accumulate * _step_s(config, group, workload, model, each)
        how = f"measured on rank 0 alone, median of {STEPS}"
    return {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "gradient_bytes": gradient_bytes(parameters, config.compress, config.powersgd_rank),
        "compress": config.compress, "batch_a_rank": each * config.accumulate, "step_s": step_s, "step_from": how,
    }


def gradient_bytes(parameters: list[nn.Parameter], compress: str, rank: int) -> int:
    """What one rank hands to the exchange in a step. PowerSGD: two factors of each matrix, where they are smaller."""
    total = 0
    for parameter in parameters:
        whole = parameter.numel() * parameter.element_size()
        if compress in ("fp16", "bf16"):
            total += parameter.numel() * 2
        elif compress == "powersgd" and parameter.dim() > 1:
            rows = parameter.shape[0]
            factors = (rows + parameter.numel() // rows) * rank * parameter.element_size()
            total += min(whole, factors)
        else:
            total += whole
    return total


def _step_s(config: Config, group: Group, workload: Workload, model: nn.Module, batch_size: int) -> float:
    """Seconds of one forward and backward pass and update, the median of a few, without anybody else."""
    batch_size = min(batch_size, len(workload.train))
    order = Order(len(workload.train), batch_size, config.seed)
    optimizer = build_optimizer(model, config, group.device)
    feed = BatchLoader(
        workload.train, order.keys(0, WARM_STEPS + STEPS), device=group.device, stop=group.stop, num_workers=0,
        prefetch_factor=2,
    )
    times = []
    try:
        model.train()
        for _ in range(WARM_STEPS + STEPS):
            batch = feed.next()
            began_s = time.perf_counter()
            with wrap.autocast(config, group.device):
                loss = workload.loss(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if group.device.type != "cpu":
                torch.accelerator.synchronize(group.device)
            times.append(time.perf_counter() - began_s)
    finally:
        feed.close()
    return statistics.median(times[WARM_STEPS:])


# What it means ------------------------------------------------------------------------------------------------


def expectation(rows: list[Row], job: dict[str, Any], ranks: int) -> dict[str, Any]:
    """The link, and what the job's exchange is expected to take at other numbers of ranks. Empty where nothing supports it."""
    backend = rows[-1].backend if rows else ""
    points = [(row.size, row.median_s) for row in rows if row.operation == "all-reduce" and row.backend == backend]
    if len(points) < 2:
        why = "one process alone has no wire: start several" if ranks == 1 else "two sizes at least are needed for a line"
        return {"link": None, "expected": [], "missing": why}
    link = cost_model.fit_all_reduce(points, ranks)
    return {
        "link": {"backend": backend, "alpha_s": link.alpha_s, "beta_s": link.beta_s, "error": link.error, "sizes": len(points)},
        "expected": cost_model.expected(link, job["gradient_bytes"], job["step_s"], COUNTS),
        "here_s": cost_model.expected(link, job["gradient_bytes"], job["step_s"], [ranks])[0]["ring_s"],
        "missing": "",
    }


def over_plain(rows: list[Row]) -> dict[str, Any] | None:
    """Each backend's point to point over that of a plain connection, at the largest size that all have."""
    speeds = {(row.backend, row.size): row.algorithm for row in rows if row.operation == "point to point"}
    backends = {backend for backend, _ in speeds}
    common = [size for _, size in speeds if all((backend, size) in speeds for backend in backends)]
    if SOCKETS not in backends or len(backends) == 1 or not common:
        return None
    size = max(common)
    plain = speeds[SOCKETS, size]
    return {"size": size, "speed": plain, "ratio": {b: speeds[b, size] / plain for b in sorted(backends - {SOCKETS})}}


def _write(outcome: dict[str, Any], rows: list[Row], run_dir: Path, log: Log) -> None:
    text = "\n".join([*table(rows), *meaning(outcome)])
    files = ["bench.json", "bench.md"]
    write_json(run_dir / "bench.json", outcome)
    (run_dir / "bench.md").write_text(f"{text}\n", encoding="utf-8")
    if rows:
        series = {
            f"{operation}, {backend}": [(row.size, row.bus) for row in of]
            for (operation, backend), of in groupby(rows, key=lambda row: (row.operation, row.backend))
        }
        title = f"bus bandwidth, {outcome['ranks']} ranks on {', '.join(outcome['hosts'][:4])}"
        lines(series, title, ("bytes", "bytes/s"), run_dir / "bench.png")
        files.append("bench.png")
    log.info(f"{text}\n{run_dir}/: {', '.join(files)}")


def table(rows: list[Row]) -> list[str]:
    """Markdown: a row for each operation, backend and size."""
    if not rows:
        return []
    head = ["| operation | backend | size | median | p95 | algorithm | bus | steady |", "|---|---|---|---|---|---|---|---|"]
    return head + [
        f"| {r.operation} | {r.backend} | {_bytes(r.size)} | {_time(r.median_s)} | {_time(r.p95_s)} | {_rate(r.algorithm)} | "
        f"{_rate(r.bus)} | {r.steadiness:.2f} |"
        for r in rows
    ] + [""]


def meaning(outcome: dict[str, Any]) -> list[str]:
    """The lines on the job: what it sends, and what that is expected to cost."""
    job, link = outcome["job"], outcome["link"]
    size = job["gradient_bytes"]
    count = len(cost_model.buckets(size))
    found = [
        f"- model: {job['parameters']:,} parameters; a step exchanges {_bytes(size)} of gradients (compress {job['compress']}) "
        f"in {count} message{'s' if count > 1 else ''}",
        f"- step: {_time(job['step_s'])} without exchange, batch {job['batch_a_rank']} a rank ({job['step_from']})",
    ]
    if plain := outcome["plain"]:
        reached = ", ".join(f"{backend} {ratio:.2f}" for backend, ratio in plain["ratio"].items())
        found.append(
            f"- plain sockets: {_rate(plain['speed'])} between rank 0 and rank {outcome['ranks'] - 1}, {_bytes(plain['size'])} "
            f"there and back; of that point to point reaches: {reached}"
        )
    if link is None:
        return [*found, f"- no expectation: {outcome['missing']}"]
    # Through two points there is always a line
    off = f"off by {link['error']:.0%} at the median of the sizes" if link["sizes"] > 2 else "through two sizes alone, unproven"
    speed = _rate(1 / link["beta_s"]) if link["beta_s"] else "more bandwidth than these sizes show"
    found += [
        f"- link: {_time(link['alpha_s'])} a message, {speed}; the line is {off} "
        f"(all-reduce on {link['backend']}, {outcome['ranks']} ranks on {', '.join(outcome['hosts'][:4])})",
        f"- here: the exchange of a step takes {_time(outcome['here_s'])} on {outcome['ranks']} ranks",
        "", "| ranks | ring | tree | efficiency, nothing hidden | hidden as far as it fits |", "|---|---|---|---|---|",
    ]
    for row in outcome["expected"]:
        found.append(
            f"| {row['ranks']} | {_time(row['ring_s'])} | {_time(row['tree_s'])} | {row['efficiency']:.0%} | "
            f"{row['efficiency_hidden']:.0%} |"
        )
    assumed = (
        "Expected, not measured: each rank keeps this batch, every link is as measured here, all are used at once, the quicker "
        "of ring and tree counts, no rank is slower than another."
    )
    one_host = " All ranks were on one host: between machines the link is another." if len(outcome["hosts"]) == 1 else ""
    return [*found, "", assumed + one_host]


def _bytes(count: float) -> str:
    power = min(3, int(math.log(count, 1024))) if count >= 1 else 0
    value = count / 1024**power
    return f"{value:.{0 if value >= 100 or power == 0 else 1 if value % 1 else 0}f} {['B', 'KiB', 'MiB', 'GiB'][power]}"


def _rate(bytes_a_second: float) -> str:
    """In powers of ten, as networks are sold."""
    for factor, unit in ((1e9, "GB/s"), (1e6, "MB/s")):
        if bytes_a_second >= factor:
            return f"{bytes_a_second / factor:.3g} {unit}"
    return f"{bytes_a_second / 1e3:.3g} kB/s"


def _time(seconds: float) -> str:
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
