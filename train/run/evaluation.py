"""Exact evaluation: each sample counts once, and any number of ranks gives the same loss, bit for bit.

The ranks take batches in turn. The sums of each batch are one row, which is zero on all other ranks. The ranks add up
their rows, and only then sum over the rows in the order of the batches, because the order changes floating-point sums.
A padded sampler would count some samples twice. In an average of the ranks' averages, samples of a rank with few
samples would weigh more (pytorch/pytorch#25162).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader

from rankup import Group, UserError

from ..config import Config
from ..data.samples import Samples, load_batches, to_device
from ..parallel.model import autocast
from ..workloads.workload import Sums, Workload


@dataclass(frozen=True, slots=True)
class Result:
    metrics: dict[str, float]  # means over all samples, by name
    count: int  # number of samples
    tables: Sums  # sums with one dimension or more, such as a confusion matrix, on the CPU


@torch.no_grad()
def evaluate(
    config: Config, group: Group, workload: Workload, model: nn.Module, batches: Iterable[Any]
) -> Result:
    """Evaluate `model`, the module without wrappers, on this rank's `batches`. All ranks call this and get the same
    result. Raises UserError if the workload's sums have no "count"."""
    training = [module for module in model.modules() if module.training]  # the user may keep others in eval mode
    model.eval()
    sums = _sums_of_rank(config, group, workload, model, batches)
    for module in training:
        module.training = True
    rows, tables = (_add_over_ranks(group, part) for part in sums)
    totals = {name: float(row.sum()) for name, row in rows.items()}
    names = ", ".join(totals) or "nothing"
    count = int(totals.pop("count", 0))
    if count < 1:
        raise UserError(f'{config.workload}: evaluate must return "count", the number of samples, got {names}.')
    metrics = {name: value / count for name, value in totals.items()}
    return Result(metrics | (workload.derived(tables) if workload.derived else {}), count, tables)


def _sums_of_rank(
    config: Config, group: Group, workload: Workload, model: nn.Module, batches: Iterable[Any]
) -> tuple[Sums, Sums]:
    """Return this rank's sums, on the CPU. Scalars: float64 [number of batches of all ranks], zero for other ranks'
    batches. Tensors: summed over this rank's batches."""
    num_rows = -(-len(workload.evaluation) // config.eval_batch_size)
    rows: Sums = {}
    tables: Sums = {}
    for turn, batch in enumerate(batches):
        with autocast(config, group.device):
            sums = workload.sums(model, to_device(batch, group.device))
        number = turn * group.world_size + group.rank
        if number >= num_rows:
            continue  # a padding batch: FSDP's forward needs all ranks
        for name, value in sums.items():
            value = torch.as_tensor(value)
            if value.ndim == 0:
                rows.setdefault(name, torch.zeros(num_rows, dtype=torch.float64))[number] = value.double()
            else:
                tables[name] = tables[name] + value.cpu() if name in tables else value.cpu()
    return rows, tables


def _add_over_ranks(group: Group, sums: Sums) -> Sums:
    # Rank 0 always has a batch. A rank without batches does not know the names and shapes of the sums.
    own = {name: (list(value.shape), str(value.dtype).removeprefix("torch.")) for name, value in sorted(sums.items())}
    found = group.broadcast(own).items()
    zeros = {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in found}
    return {name: group.sum(sums.get(name, none)) for name, none in zeros.items()}


def evaluation_loader(config: Config, group: Group, samples: Samples, *, own: bool = False) -> DataLoader[Any]:
    """Load the batches of all ranks, without augmentation. `own`: only this rank's, split as by `Job.eval_batches`."""
    numbers: Any = BatchSampler(range(len(samples)), config.eval_batch_size, drop_last=False)
    if own:
        numbers = [*numbers][group.rank :: group.world_size]
    return load_batches(samples, numbers, num_workers=config.num_workers, device=group.device)
