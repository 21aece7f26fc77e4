"""Which batches of a workload each rank trains on, and what has to be checked before the first."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from rankup import Group, UserError

from ..config import Config
from ..data.order import BatchIndex, Order, evaluation_batches
from ..data.samples import to_device
from . import Workload


def build_order(config: Config, group: Group, workload: Workload) -> Order:
    """The order of the training samples for this rank.

    Raises UserError where ranks have different data, and for fewer samples than one global batch.
    """
    group.must_match(
        "the data", f"{workload.data_name}, {len(workload.train)} + {len(workload.evaluation)} samples",
        remedy="Give all nodes the same files, or set --data-dir.",
    )
    if len(workload.train) < config.batch_size:
        raise UserError(
            f"batch_size must be at most the number of training samples, {len(workload.train)}, got "
            f"{config.batch_size}. Set a smaller --batch-size."
        )
    return Order(
        len(workload.train), config.batch_size, config.seed, group.rank, group.world_size, config.accumulate,
        lengths=getattr(workload.train, "lengths", None), pool=config.length_pool,
    )


def all_batches(
    config: Config, group: Group, workload: Workload, order: Order, *, step: int, evaluated: int, total_steps: int
) -> Iterator[BatchIndex]:
    """This rank's batches of a run from `step` on, as the loop asks for them: of training, and of each evaluation.

    `evaluated`: see `Progress`.
    """
    training = order.batches(step, total_steps)
    while True:
        if step > evaluated and is_evaluated(config, step, total_steps, order.steps_per_epoch):
            numbered = evaluation_batches(
                len(workload.evaluation), config.eval_batch_size, group.rank, group.world_size
            )
            yield from (index for _, index in numbered)
        if step >= total_steps:
            return
        yield from islice(training, config.accumulate)
        step += 1


def is_evaluated(config: Config, step: int, total_steps: int, steps_per_epoch: int) -> bool:
    """Whether the weights of this step are evaluated."""
    return step >= total_steps or step % (steps_per_epoch * config.evaluate_every_epochs) == 0


def first_batch(group: Group, workload: Workload, order: Order) -> Any:
    """The first micro-batch of the first epoch, on the device. The warm-up uses it on every start, wherever it
    resumes."""
    epoch, indices = next(order.batches(0, 1))
    return to_device(workload.train.batch(indices, epoch), group.device)
