"""What is about to be trained, and how, in three lines at the start."""

from train.config import Config
from train.data.order import Order
from train.group.group import Group
from train.parallel.optimizer import peak_rate
from train.workloads import Workload


def describe(config: Config, group: Group, workload: Workload, order: Order, *, method: str) -> str:
    """Data, model and batch. `method`: its name in METHODS."""
    origin = f", {workload.data_origin}" if workload.data_origin else ""
    name = config.model if config.workload == "images" else config.workload
    num_parameters = sum(parameter.numel() for parameter in workload.model.parameters())
    together = "" if method == "none" else f", {method}"
    split = f" = {group.world_size} ranks x {config.batch_size // group.world_size}" if group.world_size > 1 else ""
    split += f" in {config.accumulate} parts" if config.accumulate > 1 else ""
    return (
        f"data   {workload.data_name}, {len(workload.train):,} + {len(workload.evaluation):,} samples{origin}\n"
        f"model  {name}, {num_parameters:,} parameters, {config.precision} on {group.device}{together}\n"
        f"batch  {config.batch_size} global{split}, peak learning rate {peak_rate(config):g}, "
        f"{order.steps_per_epoch} steps an epoch"
    )
