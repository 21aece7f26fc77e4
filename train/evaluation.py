"""Exact evaluation: every sample counts once, whatever the world size, and so does every bit of the loss.

Batches are the same for every world size and are dealt out in turn. Each leaves its sums in a row of its own; the rows of
all ranks are added (every other rank has zeros there) and only then summed in order, so that 1 and 4 ranks agree exactly.
A padded sampler counts some samples twice, and an average of averages is none (pytorch issue 25162).
"""

from dataclasses import dataclass

import torch
from torch import nn

from train import parallel
from train.config import Config
from train.data import Feed, evaluation_keys, num_batches
from train.group import Group
from train.workloads import Sums, Workload


@dataclass(frozen=True, slots=True)
class Result:
    """Means over all samples, by name, and the sums that are no scalars, such as a confusion matrix."""

    metrics: dict[str, float]
    count: int
    tables: Sums


@torch.no_grad()
def evaluate(config: Config, group: Group, workload: Workload, model: nn.Module) -> Result | None:
    """Evaluate the plain module (a DDP wrapper would wait for ranks that have no batch left). All ranks take part and get
    the same result; None if a stop was asked for."""
    total = num_batches(len(workload.evaluation), config.eval_batch_size)
    numbered = list(evaluation_keys(len(workload.evaluation), config.eval_batch_size, group.rank, group.world_size))
    feed = Feed(
        workload.evaluation, [key for _, key in numbered], device=group.device, stop=group.stop,
        num_workers=config.num_workers, prefetch_factor=config.prefetch_factor,
    )  # fmt: skip
    rows: dict[str, torch.Tensor] = {}
    tables: Sums = {}
    model.eval()
    try:
        for turn in range(-(-total // group.world_size)):
            mine = turn < len(numbered)
            batch = feed.next() if mine else None
            if group.agree(int(group.stop.asked or (mine and batch is None))):
                return None
            if not mine:
                continue
            with parallel.autocast(config, group.device):
                sums = workload.evaluate(model, batch)
            for name, value in sums.items():
                if value.ndim == 0:
                    rows.setdefault(name, torch.zeros(total, dtype=torch.float64))[numbered[turn][0]] = value.double()
                else:
                    tables[name] = tables[name] + value.cpu() if name in tables else value.cpu()
    finally:
        feed.close()
        model.train()
    # Rank 0 always has a batch; others may have none, and then don't know the names.
    names, shapes = group.broadcast((sorted(rows), {n: (tuple(t.shape), str(t.dtype)) for n, t in tables.items()}))
    totals = {n: float(group.sum(rows.get(n, torch.zeros(total, dtype=torch.float64))).sum()) for n in names}
    for name in sorted(shapes):
        shape, dtype = shapes[name]
        own = tables.get(name, torch.zeros(shape, dtype=getattr(torch, dtype.removeprefix("torch."))))
        tables[name] = group.sum(own)
    count = int(totals.pop("count"))
    return Result({name: value / count for name, value in totals.items()}, count, tables)
