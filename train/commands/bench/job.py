"""The model in the settings: what a step of it exchanges between the ranks, and how long a step takes on one rank."""

import statistics
import time
from typing import Any

from torch import nn

from train.commands.ping_pong import wait_for_device
from train.config import Config
from train.data.loader import DirectLoader
from train.data.order import Order
from train.data.random_numbers import derive_seed, seed_everything
from train.group.group import Group
from train.parallel.model import autocast, prepare
from train.parallel.optimizer import build_optimizer
from train.workloads import Workload, load

WARM_STEPS, STEPS = 3, 10  # the first steps allocate memory and choose kernels


def describe_job(config: Config, group: Group, step_ms: float) -> dict[str, Any]:
    """Parameters, bytes and seconds of a step, for bench.json. No collective: rank 0 calls it alone.

    `step_ms`: milliseconds of a step if the user knows them; 0 measures them. Raises UserError for data or a model that
    can't be loaded.
    """
    seed_everything(derive_seed(config.seed), group.device)
    workload = load(config)
    model = prepare(workload, config, group)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    microbatch = max(1, config.batch_size // (group.world_size * config.accumulate))
    step_s, source = step_ms / 1000, "given by --step-ms"
    if not step_ms:
        step_s = config.accumulate * _measure_step_s(config, group, workload, model, microbatch)
        source = f"measured on rank 0 alone, median of {STEPS}"
    return {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "gradient_bytes": gradient_bytes(parameters, config.compress, config.powersgd_rank),
        "compress": config.compress, "batch_a_rank": microbatch * config.accumulate, "step_s": step_s,
        "step_from": source,
    }


def gradient_bytes(parameters: list[nn.Parameter], compress: str, rank: int) -> int:
    """Bytes that one rank hands to the exchange in a step. `rank`: of PowerSGD's factors.

    PowerSGD sends two factors of each matrix if they are smaller than the matrix, and everything else as it is.
    """
    total = 0
    for parameter in parameters:
        count, width = parameter.numel(), parameter.element_size()
        if compress in ("fp16", "bf16"):
            width = 2
        elif compress == "powersgd" and parameter.dim() > 1:
            rows = parameter.shape[0]
            count = min(count, (rows + count // rows) * rank)
        total += count * width
    return total


def _measure_step_s(config: Config, group: Group, workload: Workload, model: nn.Module, batch_size: int) -> float:
    """Seconds of one forward pass, backward pass and update: the median of a few, without any other rank."""
    batch_size = min(batch_size, len(workload.train))
    order = Order(len(workload.train), batch_size, config.seed)
    optimizer = build_optimizer(model, config, group.device)
    loader = DirectLoader(workload.train, order.batches(0, WARM_STEPS + STEPS), device=group.device)
    times = []
    model.train()
    for _ in range(WARM_STEPS + STEPS):
        batch = loader.next()
        began_s = time.perf_counter()
        with autocast(config, group.device):
            loss = workload.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        wait_for_device(group.device)
        times.append(time.perf_counter() - began_s)
    return statistics.median(times[WARM_STEPS:])
