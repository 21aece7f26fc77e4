"""Exact evaluation: every sample counts once, whatever the world size, and the loss is the same to the last bit.

The ranks take the same batches in turn. Each batch leaves its sums in a row of its own. The rows of all ranks are
added, where every other rank has zeros, and only then summed in the order of the batches: floating-point sums depend on
their order. A padded sampler would count some samples twice, and an average of the ranks' averages weighs samples by
how many their rank had (pytorch/pytorch#25162).
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
    count: int  # of samples
    tables: Sums  # the sums that are tensors of one dimension or more, such as a confusion matrix, on the CPU


@torch.no_grad()
def evaluate(
    config: Config, group: Group, workload: Workload, model: nn.Module, batches: Iterable[Any]
) -> Result:
    """Evaluate `model`, the plain module, on this rank's `batches`. All ranks take part and get the same result. Raises
    UserError where the workload's sums have no "count"."""
    training = [module for module in model.modules() if module.training]  # others are kept in eval mode by the user
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
    """What this rank's batches add up to, on the CPU: the scalars, float64 [number of batches of all ranks], zero for
    those of other ranks; and the tensors, summed over this rank's batches."""
    num_rows = -(-len(workload.evaluation) // config.eval_batch_size)
    rows: Sums = {}
    tables: Sums = {}
    for turn, batch in enumerate(batches):
        with autocast(config, group.device):
            sums = workload.sums(model, to_device(batch, group.device))
        number = turn * group.world_size + group.rank
        if number >= num_rows:
            continue  # it has kept this rank busy, since FSDP's forward waits for all
        for name, value in sums.items():
            value = torch.as_tensor(value)
            if value.ndim == 0:
                rows.setdefault(name, torch.zeros(num_rows, dtype=torch.float64))[number] = value.double()
            else:
                tables[name] = tables[name] + value.cpu() if name in tables else value.cpu()
    return rows, tables


def _add_over_ranks(group: Group, sums: Sums) -> Sums:
    # Rank 0 always has a batch. A rank without one does not know which sums there are.
    own = {name: (list(value.shape), str(value.dtype).removeprefix("torch.")) for name, value in sorted(sums.items())}
    found = group.broadcast(own).items()
    zeros = {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in found}
    return {name: group.sum(sums.get(name, none)) for name, none in zeros.items()}


def evaluation_loader(config: Config, group: Group, samples: Samples, *, own: bool = False) -> DataLoader[Any]:
    """The batches of all ranks, without augmentation. `own`: this rank's, which `Job.eval_batches` would give it."""
    numbers: Any = BatchSampler(range(len(samples)), config.eval_batch_size, drop_last=False)
    if own:
        numbers = [*numbers][group.rank :: group.world_size]
    return load_batches(samples, numbers, num_workers=config.num_workers, device=group.device)
