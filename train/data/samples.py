"""Samples: what a workload trains on, batch by batch. random_numbers.py says what their augmentation depends on."""

from typing import Any, Protocol

import torch
from torch.utils.data import Dataset, default_collate

from rankup.loop.seeds import derive_seed, seed_host

from .random_numbers import random_numbers


class Samples(Protocol):
    """What a workload trains on or is evaluated with."""

    def __len__(self) -> int: ...

    def batch(self, indices: torch.Tensor, epoch: int | None) -> Any:
        """The samples `indices` (int64 [B]) as one batch of tensors; augmented for that epoch unless it is None."""


class TensorSamples:
    """Images held in memory and batched by index: 75 times faster, as measured, than torchvision's sample by sample.

    images: uint8 [N, C, H, W]; labels: int64 [N]. A batch is (uint8 [B, C, H, W], int64 [B]); it is normalised on the
    device, so that a quarter of the bytes are copied there. `augment` shifts the images of a training batch, and
    mirrors half of them unless `mirror` is False. With `in_memory` False, DataLoader workers prepare the batches.
    """

    def __init__(
        self, images: torch.Tensor, labels: torch.Tensor, *, augment: bool = False, mirror: bool = True, seed: int = 0,
        in_memory: bool = True, storage: torch.Tensor | None = None,
    ) -> None:
        """`storage`: the numbers of the samples as they lie where they came from, int64 [N]; None: in order."""
        self.storage = storage
        self.images, self.labels, self.augment, self.mirror, self.seed = images, labels, augment, mirror, seed
        self.in_memory = in_memory

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: torch.Tensor, epoch: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Images uint8 [B, C, H, W] and labels int64 [B]."""
        images = self.images[indices]
        if self.augment and epoch is not None:
            images = shift_and_flip(images, random_numbers(self.seed, epoch, indices, 3), mirror=self.mirror)
        return images, self.labels[indices]


def shift_and_flip(images: torch.Tensor, numbers: torch.Tensor, *, mirror: bool = True) -> torch.Tensor:
    """Shift each image of [B, C, H, W] by up to an eighth of its height, filled with black, and mirror half of them.

    numbers: float64 [B, 3] in [0, 1), for the shift down, the shift across, and mirroring. torchvision.transforms.v2
    gives the same pixels image by image, but importing it takes a second in each process.
    """
    size, (height, width) = len(images), images.shape[-2:]
    reach = max(1, height // 8)
    padded = torch.nn.functional.pad(images, (reach, reach, reach, reach))
    top, left = ((numbers[:, i] * (2 * reach + 1)).long() for i in (0, 1))
    rows = top[:, None] + torch.arange(height)
    columns = left[:, None] + torch.arange(width)
    if mirror:
        columns = torch.where((numbers[:, 2] < 0.5)[:, None], columns.flip(1), columns)
    pick = torch.arange(size)[:, None, None]
    # Images of one channel leave here with the strides of NHWC. These choose the convolution's algorithm, and with it
    # the last bits of the weights: other code for the same pixels changes the digests of augmented runs.
    return padded.permute(0, 2, 3, 1)[pick, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


class MapSamples:
    """Any map-style torch Dataset. Each sample is drawn with the random state of its own (seed, epoch, number)."""

    def __init__(self, dataset: Dataset[Any], *, seed: int = 0) -> None:
        self.dataset, self.seed = dataset, seed

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # Dataset declares no length, map-style ones have it

    def batch(self, indices: torch.Tensor, epoch: int | None) -> Any:
        """The samples `indices` (int64 [B]) in torch's default_collate. Raises what the Dataset raises."""
        samples = []
        for index in indices.tolist():
            seed_host(derive_seed(self.seed, -1 if epoch is None else epoch, index))
            samples.append(self.dataset[index])
        return default_collate(samples)
