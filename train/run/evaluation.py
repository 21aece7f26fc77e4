"""Exact evaluation: every sample counts once, whatever the world size, and the loss is the same to the last bit.

The batches are the same for every world size, and the ranks take them in turn. Each batch leaves its sums in a row of
its own. The rows of all ranks are added, where every other rank has zeros, and only then summed in the order of the
batches: floating-point sums depend on their order, and so 1 and 4 ranks agree exactly.

The usual short cuts do not: a padded sampler counts some samples twice, and an average of the ranks' averages weighs
samples by how many their rank had (pytorch issue 25162).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rankup import Group, UserError

from ..config import Config
from ..data import Samples
from ..data.loader import Loader
from ..data.order import evaluation_batches, num_batches
from ..data.samples import to_device
from ..parallel.model import autocast, eval_mode
from ..workloads import Sums, Workload

# In place of a batch's number: it is there to pass the time with, and was counted already
PADDING = -2


@dataclass(frozen=True, slots=True)
class Result:
    metrics: dict[str, float]  # means over all samples, by name
    count: int  # of samples
    tables: Sums  # the sums that are tensors of one dimension or more, such as a confusion matrix, on the CPU


@torch.no_grad()
def evaluate(
    config: Config, group: Group, workload: Workload, model: nn.Module, *, pad: bool = False,
    loader: Loader | None = None,
) -> Result | None:
    """Evaluate `model`, the plain module: a DDP wrapper would wait for ranks that have no batch left.

    All ranks take part and get the same result, or None if a stop was requested on any of them. `pad`, `loader`: see
    `batches_of_rank`. Raises UserError where the workload's sums have no "count".
    """
    with eval_mode(model):
        sums = _sums_of_rank(config, group, workload, model, pad=pad, loader=loader)
    if sums is None:
        return None
    rows, tables = (_add_over_ranks(group, part) for part in sums)
    totals = {name: float(row.sum()) for name, row in rows.items()}
    names = ", ".join(totals)
    count = int(totals.pop("count", 0))
    if count < 1:
        raise UserError(
            f'workload {config.workload}: evaluate must return "count", the number of samples in the batch, got '
            f"{names or 'nothing'}."
        )
    metrics = {name: value / count for name, value in totals.items()}
    return Result(metrics | (workload.derived(tables) if workload.derived else {}), count, tables)


def _sums_of_rank(
    config: Config, group: Group, workload: Workload, model: nn.Module, *, pad: bool, loader: Loader | None
) -> tuple[Sums, Sums] | None:
    """What this rank's batches add up to, on the CPU; None if any rank was asked to stop.

    First the scalars, by name: float64 [number of batches of all ranks], zero for the batches of other ranks. Then the
    tensors, summed over this rank's batches.
    """
    num_rows = num_batches(len(workload.evaluation), config.eval_batch_size)
    rows: Sums = {}
    tables: Sums = {}
    for number, _, batch in batches_of_rank(config, group, workload.evaluation, pad=pad, loader=loader):
        if batch is None:
            return None
        with autocast(config, group.device):
            sums = workload.sums(model, batch)
        if number == PADDING:
            continue
        for name, value in sums.items():
            value = torch.as_tensor(value)
            if value.ndim == 0:
                rows.setdefault(name, torch.zeros(num_rows, dtype=torch.float64))[number] = value.double()
            else:
                tables[name] = tables[name] + value.cpu() if name in tables else value.cpu()
    return rows, tables


def _add_over_ranks(group: Group, sums: Sums) -> Sums:
    """The sums of all ranks, the same on each."""
    # Rank 0 always has a batch. A rank without one does not know which sums there are.
    own = {name: (list(value.shape), str(value.dtype).removeprefix("torch.")) for name, value in sorted(sums.items())}
    found = group.broadcast(own).items()
    zeros = {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in found}
    return {name: group.sum(sums.get(name, none)) for name, none in zeros.items()}


def batches_of_rank(
    config: Config, group: Group, samples: Samples, *, pad: bool = False, loader: Loader | None = None
) -> Iterator[tuple[int, torch.Tensor, Any]]:
    """This rank's batches of `samples`, without augmentation: (number of the batch, sample numbers int64 [B], batch).

    All ranks agree before each turn, those that have no batch left included: where any was asked to stop, the batch is
    None, and it is the last. `pad`: the model's forward waits for all ranks, so a rank that has no batch left gets the
    first sample as a batch, with the number PADDING. It must not be counted. `loader`: a training's, whose next batches
    are these; None: one of their own.
    """
    numbered = list(evaluation_batches(len(samples), config.eval_batch_size, group.rank, group.world_size))
    num_turns = -(-num_batches(len(samples), config.eval_batch_size) // group.world_size)
    own = None
    if loader is None:
        loader = own = Loader(
            samples, [index for _, index in numbered], device=group.device, stop=group.stop,
            num_workers=config.num_workers,
        )
    try:
        for turn in range(num_turns):
            has_batch = turn < len(numbered)
            batch = loader.next() if has_batch else None
            if group.max(int(group.stop.requested or (has_batch and batch is None))):
                yield -1, torch.empty(0, dtype=torch.int64), None
                return
            if has_batch:
                number, (_, indices) = numbered[turn]
                yield number, indices, batch
            elif pad:
                first = torch.zeros(1, dtype=torch.int64)
                yield PADDING, first, to_device(samples.batch(first, None), group.device)
    finally:
        if own is not None:
            own.close()
