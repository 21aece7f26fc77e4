"""dp: one process, DataParallel over all GPUs that it sees."""

from typing import ClassVar

import torch
from torch import nn
from torch.nn.parallel import DataParallel

from rankup import UserError

from .method import Method


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
