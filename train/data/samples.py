"""Samples and their order.

The order depends on the seed and the epoch alone; rank r takes its slice of each global batch. Augmentation draws from a
hash of (seed, epoch, sample), so that neither the world size, nor a restart, nor a number of workers changes a pixel.
"""

import hashlib
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import Dataset, default_collate

BatchIndex = tuple[int | None, torch.Tensor]  # the epoch (None: evaluation, no augmentation) and sample numbers, int64 [B]


class Samples(Protocol):
    """What a workload trains on or is evaluated with."""

    def __len__(self) -> int: ...

    def batch(self, indices: torch.Tensor, epoch: int | None) -> Any:
        """The samples `indices` (int64 [B]) as one batch of tensors; augmented for that epoch unless it is None."""


def derive_seed(*numbers: int) -> int:
    """A seed of 63 bits from several numbers. Sums and products of seeds collide: seed 1 epoch 2, seed 2 epoch 1."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True, slots=True)
class Order:
    """Which samples each rank sees at each step. The last partial global batch of an epoch is left out."""

    num_samples: int
    batch_size: int
    seed: int
    rank: int = 0
    world_size: int = 1
    accumulate: int = 1
    lengths: torch.Tensor | None = None  # int64 [num_samples]: samples of like length shall share a batch
    pool: int = 0  # ... out of so many global batches; 0: lengths are not looked at

    @property
    def steps_per_epoch(self) -> int:
        return self.num_samples // self.batch_size

    def epoch(self, epoch: int) -> torch.Tensor:
        """All sample numbers in the order of that epoch, int64 [num_samples]."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch))
        order = torch.randperm(self.num_samples, generator=generator)
        if self.lengths is None or self.pool == 0:
            return order
        # The tail that is left out stays a random one. The rest is cut into pools, each sorted by length and cut into
        # batches, and the batches are shuffled: the same for any number of ranks, since each takes its slice of a batch.
        whole = self.steps_per_epoch * self.batch_size
        pools = torch.split(order[:whole], self.pool * self.batch_size)
        sorted_pools = [pool[self.lengths[pool].argsort(stable=True)] for pool in pools]
        batches = torch.cat(sorted_pools).view(-1, self.batch_size)
        shuffled = batches[torch.randperm(len(batches), generator=generator)]
        return torch.cat([shuffled.flatten(), order[whole:]])

    def keys(self, first_step: int, last_step: int) -> Iterator[BatchIndex]:
        """This rank's micro-batches of the steps first_step .. last_step-1, `accumulate` a step."""
        order, known = torch.empty(0, dtype=torch.int64), -1
        share = self.batch_size // self.world_size
        micro = share // self.accumulate
        for step in range(first_step, last_step):
            epoch, position = divmod(step, self.steps_per_epoch)
            if epoch != known:
                order, known = self.epoch(epoch), epoch
            start = position * self.batch_size + self.rank * share
            for part in range(self.accumulate):
                yield epoch, order[start + part * micro : start + (part + 1) * micro]


def evaluation_keys(num_samples: int, batch_size: int, rank: int, world_size: int) -> Iterator[tuple[int, BatchIndex]]:
    """(number of the batch, key) of this rank's evaluation batches. Batches are the same for every world size and are
    dealt out in turn, so that each sample counts once and sums can be added in one order."""
    for number in range(rank, num_batches(num_samples, batch_size), world_size):
        stop = min((number + 1) * batch_size, num_samples)
        yield number, (None, torch.arange(number * batch_size, stop))


def num_batches(num_samples: int, batch_size: int) -> int:
    return -(-num_samples // batch_size)


def random_numbers(seed: int, epoch: int, indices: torch.Tensor, count: int) -> torch.Tensor:
    """`count` uniform numbers in [0, 1) for each sample, float64 [B, count]: splitmix64 of (seed, epoch, sample, column)."""
    start = torch.tensor(derive_seed(seed, epoch), dtype=torch.int64)
    z = start + (indices[:, None] * count + torch.arange(count)[None, :] + 1) * -7046029254386353131  # 0x9E37...15
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):  # int64 wraps as uint64 does
        z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))) * factor
    z = z ^ ((z >> 31) & ((1 << 33) - 1))
    return ((z >> 11) & ((1 << 53) - 1)).double() / float(1 << 53)


class TensorSamples:
    """Images held in memory and batched by index: 75 times faster here than a torchvision data set sample by sample.

    images: uint8 [N, C, H, W]; labels: int64 [N]. A batch is (uint8 [B, C, H, W], int64 [B]); it is normalised on the
    device, which takes a quarter of the bytes across. `augment` shifts, and mirrors unless `mirror` is False.
    """

    in_memory = True

    def __init__(
        self, images: torch.Tensor, labels: torch.Tensor, *, augment: bool = False, mirror: bool = True, seed: int = 0
    ) -> None:
        self.images, self.labels, self.augment, self.mirror, self.seed = images, labels, augment, mirror, seed

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: torch.Tensor, epoch: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        images = self.images[indices]
        if self.augment and epoch is not None:
            images = shift_and_flip(images, random_numbers(self.seed, epoch, indices, 3), mirror=self.mirror)
        return images, self.labels[indices]


def shift_and_flip(images: torch.Tensor, numbers: torch.Tensor, *, mirror: bool = True) -> torch.Tensor:
    """Shift each image of [B, C, H, W] by up to an eighth of its size and mirror half of them; numbers: [B, 3]."""
    size, (height, width) = len(images), images.shape[-2:]
    reach = max(1, height // 8)
    padded = torch.nn.functional.pad(images, (reach, reach, reach, reach))
    top, left = ((numbers[:, i] * (2 * reach + 1)).long() for i in (0, 1))
    rows = top[:, None] + torch.arange(height)
    columns = left[:, None] + torch.arange(width)
    if mirror:
        columns = torch.where((numbers[:, 2] < 0.5)[:, None], columns.flip(1), columns)
    pick = torch.arange(size)[:, None, None]
    return padded.permute(0, 2, 3, 1)[pick, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


class MapSamples:
    """Any map-style torch Dataset. Each sample is drawn with the random state of its own (seed, epoch, number)."""

    def __init__(self, dataset: Dataset[Any], *, seed: int = 0) -> None:
        self.dataset, self.seed = dataset, seed

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # Dataset declares no length, map-style ones have it

    def batch(self, indices: torch.Tensor, epoch: int | None) -> Any:
        samples = []
        for index in indices.tolist():
            seed_host(derive_seed(self.seed, -1 if epoch is None else epoch, index))
            samples.append(self.dataset[index])
        return default_collate(samples)


def seed_everything(seed: int) -> None:
    """Python's, torch's and, where it is loaded already, numpy's random state of this process, for all devices."""
    torch.manual_seed(seed)
    seed_host(seed)


def seed_host(seed: int) -> None:
    """The same without accelerators, which takes 20 µs instead of 400: for each sample."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
