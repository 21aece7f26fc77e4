"""ddp: each rank holds the whole model, and DistributedDataParallel averages the gradients during backward.

With `compress` the ranks send halves, or PowerSGD's low-rank factors, instead of whole fp32 gradients.
"""

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from train.config import Config
from train.group.group import Group
from train.parallel.method import Method
from train.parallel.shared_gradients import SharedGradients, average

HOOKS = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
ONE_BUCKET_MB = 100_000  # more than any model has


class DDP(Method):
    """DistributedDataParallel, one device for each rank."""

    needs_process_group: ClassVar[bool] = True

    def __init__(self, config: Config, group: Group) -> None:
        super().__init__(config, group)
        self.powersgd: PowerSGDState | None = None

    @property
    def every_rank_has_all(self) -> bool:
        """PowerSGD's errors differ from rank to rank."""
        return self.config.compress != "powersgd"

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model in DDP, which sends rank 0's weights to all ranks while it is made."""
        config, device = self.config, self.group.device
        # A kernel of one input channel can be laid out in two equal ways, and backward picks the other one: harmless
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
        # From 2.14 on it has another name beside, which torch before does not know
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        # With several buckets PowerSGD's second all-reduces start in different orders on different ranks. gloo pairs
        # collectives by the order in which each rank starts them, so it would take one bucket's for another's.
        one_bucket = config.compress == "powersgd" and device.type == "cpu"
        wrapped = DistributedDataParallel(
            model,
            # On the CPU device_ids must be absent; on a GPU they keep everything off cuda:0.
            device_ids=None if device.type == "cpu" else [device.index],
            # Gradients live in the buckets that are sent: one copy of all gradients less, in memory and in time
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # `train.parallel.buffers` does it, at the end of a step
            static_graph=config.static_graph,
            find_unused_parameters=config.find_unused_parameters,
            bucket_cap_mb=ONE_BUCKET_MB if one_bucket else None,
        )
        if config.compress == "powersgd":
            # An epsilon keeps a gradient of zeros from becoming NaN when its factors are made orthogonal
            self.powersgd = PowerSGDState(
                None, config.powersgd_rank, config.powersgd_start, orthogonalization_epsilon=1e-8,
                random_seed=config.seed,
            )
            wrapped.register_comm_hook(self.powersgd, powerSGD_hook)
        elif config.compress != "none":
            wrapped.register_comm_hook(None, HOOKS[config.compress])
        elif self.group.link is not None and self.group.world_size == 2 and device.type == "cpu":
            # Not for more ranks: their sums would be others than gloo's, and than those of ranks on several hosts
            wrapped.register_comm_hook(SharedGradients(self.group.link, self.group.rank), average)
        return wrapped

    def micro_batch(self, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """DDP decides in forward whether the next backward exchanges gradients: forward has to be inside as well."""
        assert isinstance(model, DistributedDataParallel)
        return nullcontext() if last else model.no_sync()

    # PowerSGD -------------------------------------------------------------------------------------------------

    def memory(self) -> dict[str, Any]:
        """What PowerSGD carries on: its count of steps, its factors p and q (equal on all ranks), and for each rank the
        error, the part of its gradients that it has not sent yet. All by the number of the bucket, as float tensors."""
        if self.powersgd is None:
            return {}
        own_errors = _on(torch.device("cpu"), self.powersgd.error_dict)
        return {
            "iter": self.powersgd.iter,
            "p": _on(torch.device("cpu"), self.powersgd.p_memory_dict),
            "q": _on(torch.device("cpu"), self.powersgd.q_memory_dict),
            "errors": self.group.gather_tensors(own_errors),
        }

    def after_warm_up(
        self, plain: nn.Module, optimizer: torch.optim.Optimizer, memory: dict[str, Any]
    ) -> torch.optim.Optimizer:
        if self.powersgd is None:
            return optimizer
        # The hook counted the warm-up's passes, and `powersgd_start` counts from the first step
        self.powersgd.iter = memory.get("iter", 0)
        errors = memory.get("errors", [])
        if memory and len(errors) != self.group.world_size:
            self.group.log.info(
                f"  compress: what {len(errors)} ranks had not sent yet does not fit {self.group.world_size}: left out"
            )
        elif memory:
            device = self.group.device
            self.powersgd.p_memory_dict = _on(device, memory["p"])
            self.powersgd.q_memory_dict = _on(device, memory["q"])
            self.powersgd.error_dict = _on(device, errors[self.group.rank])
        return optimizer


def _on(device: torch.device, tensors: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    return {bucket: tensor.to(device) for bucket, tensor in tensors.items()}
