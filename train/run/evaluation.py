"""Exact evaluation: every sample counts once, whatever the world size, and so does every bit of the loss.

Batches are the same for every world size and are dealt out in turn. Each leaves its sums in a row of its own; the rows of
all ranks are added (every other rank has zeros there) and only then summed in order, so that 1 and 4 ranks agree exactly.
A padded sampler counts some samples twice, and an average of averages is none (pytorch issue 25162).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from train.config import Config
from train.data import Samples
from train.data.batch import to_device
from train.data.loader import open_loader
from train.data.order import evaluation_batches, num_batches
from train.errors import UserError
from train.group.group import Group
from train.parallel.model import share_buffers
from train.parallel.precision import autocast
from train.workloads import Sums, Workload

PADDING = -2  # the number of a batch that was counted already


@dataclass(frozen=True, slots=True)
class Result:
    """Means over all samples, by name, and the sums that are no scalars, such as a confusion matrix."""

    metrics: dict[str, float]
    count: int
    tables: Sums


@torch.no_grad()
def evaluate(
    config: Config, group: Group, workload: Workload, model: nn.Module, *, pad: bool = False
) -> Result | None:
    """Evaluate the plain module (a DDP wrapper would wait for ranks that have no batch left). All ranks take part and get
    the same result; None if a stop was asked for. Raises UserError where no "count" is among the sums."""
    total = num_batches(len(workload.evaluation), config.eval_batch_size)
    share_buffers(model, group)
    rows: dict[str, torch.Tensor] = {}
    tables: Sums = {}
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        for number, _, batch in batches_of_rank(config, group, workload.evaluation, pad=pad):
            if batch is None:
                return None
            with autocast(config, group.device):
                sums = workload.evaluate(model, batch)
            if number == PADDING:
                continue
            for name, value in sums.items():
                value = torch.as_tensor(value)
                if value.ndim == 0:
                    rows.setdefault(name, torch.zeros(total, dtype=torch.float64))[number] = value.double()
                else:
                    tables[name] = tables[name] + value.cpu() if name in tables else value.cpu()
    finally:
        # Not model.train(): a part that the user keeps in eval mode, as a frozen batch norm, stays in it
        for module, training in modes:
            module.training = training
    # Rank 0 always has a batch; others may have none, and then don't know the names.
    names, shapes = group.broadcast((sorted(rows), {n: (tuple(t.shape), str(t.dtype)) for n, t in tables.items()}))
    totals = {n: float(group.sum(rows.get(n, torch.zeros(total, dtype=torch.float64))).sum()) for n in names}
    for name in sorted(shapes):
        shape, dtype = shapes[name]
        own = tables.get(name, torch.zeros(shape, dtype=getattr(torch, dtype.removeprefix("torch."))))
        tables[name] = group.sum(own)
    count = int(totals.pop("count", 0))
    if count < 1:
        raise UserError(
            f'workload {config.workload}: evaluate must return "count", the number of samples in the batch, got '
            f"{', '.join(names) or 'nothing'}."
        )
    metrics = {name: value / count for name, value in totals.items()}
    return Result(metrics | (workload.derived(tables) if workload.derived else {}), count, tables)


def batches_of_rank(
    config: Config, group: Group, samples: Samples, *, pad: bool = False
) -> Iterator[tuple[int, torch.Tensor, Any]]:
    """This rank's batches of `samples` without augmentation: (number of the batch, sample numbers, batch).

    All ranks agree before each turn, also those that have no batch left: where any was asked to stop, the batch is None.
    `together`: the model itself waits for all ranks, so that one without a batch gets the first sample, as number AGAIN.
    """
    numbered = list(evaluation_batches(len(samples), config.eval_batch_size, group.rank, group.world_size))
    feed = open_loader(
        samples, [index for _, index in numbered], device=group.device, stop=group.stop, num_workers=config.num_workers,
        prefetch_factor=config.prefetch_factor,
    )
    try:
        for turn in range(-(-num_batches(len(samples), config.eval_batch_size) // group.world_size)):
            mine = turn < len(numbered)
            batch = feed.next() if mine else None
            if group.max(int(group.stop.requested or (mine and batch is None))):
                yield -1, torch.empty(0, dtype=torch.int64), None
                return
            if mine:
                number, (_, indices) = numbered[turn]
                yield number, indices, batch
            elif pad:
                first = torch.zeros(1, dtype=torch.int64)
                yield PADDING, first, to_device(samples.batch(first, None), group.device)
    finally:
        feed.close()
