"""What ddp sends instead of whole fp32 gradients: halves, or PowerSGD's low-rank factors, with what these remember."""

from typing import Any

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from train.config import Config
from train.group.group import Group

HOOKS = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}


class Compressor:
    """Compresses the gradients of a DDP module as the settings say. Without any, and without DDP, it does nothing."""

    def __init__(self, model: nn.Module, config: Config, group: Group) -> None:
        self.group = group
        self.memory: PowerSGDState | None = None
        if config.compress == "none" or config.parallel == "horovod":  # which compresses in its optimizer
            return
        if not isinstance(model, DistributedDataParallel):
            group.log.info("compress  one process sends no gradients: nothing to compress")
        elif config.compress == "powersgd":
            # Stacked or not changes nothing but the speed; an epsilon keeps a gradient of zeros from becoming NaN
            self.memory = PowerSGDState(
                None, config.powersgd_rank, config.powersgd_start, orthogonalization_epsilon=1e-8,
                random_seed=config.seed,
            )
            model.register_comm_hook(self.memory, powerSGD_hook)
        else:
            model.register_comm_hook(None, HOOKS[config.compress])

    def state(self) -> dict[str, Any]:
        """For the checkpoint: what was not sent yet differs from rank to rank. All ranks call this."""
        if self.memory is None:
            return {}
        own = {index: tensor.cpu() for index, tensor in self.memory.error_dict.items()}
        shared = {
            name: {index: tensor.cpu() for index, tensor in factors.items()}
            for name, factors in (("p", self.memory.p_memory_dict), ("q", self.memory.q_memory_dict))
        }
        return {"iter": self.memory.iter, **shared, "errors": self.group.gather(own)}

    def start(self, state: dict[str, Any]) -> None:
        """After the warm-up: begin at the first step, or with what a checkpoint holds."""
        memory, device = self.memory, self.group.device
        if memory is None:
            return
        memory.iter = state.get("iter", 0)  # the warm-up's passes were counted
        if not state:
            return
        if len(state["errors"]) != self.group.world_size:
            self.group.log.info(
                f"  compress: what {len(state['errors'])} ranks had not sent yet does not fit {self.group.world_size}: left out"
            )
            return
        memory.p_memory_dict = {index: tensor.to(device) for index, tensor in state["p"].items()}
        memory.q_memory_dict = {index: tensor.to(device) for index, tensor in state["q"].items()}
        memory.error_dict = {index: tensor.to(device) for index, tensor in state["errors"][self.group.rank].items()}
