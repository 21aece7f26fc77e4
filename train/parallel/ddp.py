"""ddp: each rank holds the whole model, and DistributedDataParallel averages the gradients during backward.

With `compress` the ranks send halves instead of whole fp32 gradients.
"""

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DataParallel, DistributedDataParallel

from rankup import UserError

from .method import Method
from .shared_gradients import average, share_gradients

HOOKS = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}


class DDP(Method):
    """DistributedDataParallel, one device for each rank."""

    needs_process_group: ClassVar[bool] = True

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model in DDP, which sends rank 0's weights to all ranks while it is made."""
        config, device = self.config, self.group.device
        # A kernel of one input channel can be laid out in two equal ways, and backward picks the other one: harmless
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
        # From 2.14 on it has another name beside, which torch before does not know
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        wrapped = DistributedDataParallel(
            model,
            # On the CPU device_ids must be absent; on a GPU they keep everything off cuda:0.
            device_ids=None if device.type == "cpu" else [device.index],
            # Gradients live in the buckets that are sent: one copy of all gradients less, in memory and in time
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # the job shares them, at the end of a step
            find_unused_parameters=config.find_unused_parameters,
        )
        if config.compress != "none":
            wrapped.register_comm_hook(None, HOOKS[config.compress])
        elif self.group.world_size == 2 and device.type == "cpu":
            # Not for more ranks: their sums would be others than gloo's, and than those of ranks on several hosts
            self.exchange = share_gradients(self.group)
            if self.exchange is not None:
                wrapped.register_comm_hook(self.exchange, average)
        return wrapped

    def micro_batch(self, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """DDP decides in forward whether the next backward exchanges gradients: forward has to be inside as well."""
        assert isinstance(model, DistributedDataParallel)
        return nullcontext() if last else model.no_sync()


class DataParallelMethod(Method):
    """Copies the module to each GPU in every step and gathers the outputs on one: no second process is involved."""

    one_device_per_rank: ClassVar[bool] = False

    def refuse(self) -> None:
        """Devices that are not there, or named twice."""
        count, ids = self._num_devices(), self._device_ids()
        on_gpus = self.group.device.type == "cuda"
        out_of_range = on_gpus and any(number >= count for number in ids)
        if out_of_range or len(set(ids)) != len(ids):
            raise UserError(
                f"device_ids must each name another one of the {count} visible GPUs, got {','.join(map(str, ids))}. "
                "CUDA_VISIBLE_DEVICES numbers them anew, from 0."
            )

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model over `device_ids`, in that order, or as it is where there is one device."""
        group, ids = self.group, self._device_ids()
        if group.device.type == "cuda" and len(ids) > 1:
            return DataParallel(model, device_ids=ids)
        group.log.info(f"dp     one device ({group.device}): trains as one process does without DataParallel")
        return model

    def _num_devices(self) -> int:
        return torch.cuda.device_count() if self.group.device.type == "cuda" else 1

    def _device_ids(self) -> list[int]:
        if self.config.device_ids:
            return [int(word) for word in self.config.device_ids.split(",")]
        return list(range(self._num_devices()))
