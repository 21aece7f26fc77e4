"""Samples in memory, the order of the training samples, and the loading of batches.

Random numbers depend only on what they are used for, not on numbers drawn before. So neither world size, nor restarts,
nor the number of workers change the order or a pixel.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, default_collate

from rankup.seeds import derive_seed, seed_host


class Samples(Protocol):
    """What a workload trains on, or is evaluated with."""

    def __len__(self) -> int: ...

    def batch(self, indices: torch.Tensor, epoch: int | None) -> Any:
        """Return the samples `indices` (int64 [B]) as one batch of tensors, augmented for `epoch` unless it is None."""


@dataclass(eq=False)
class TensorSamples:
    """Images in memory. Taking a batch by index is 75 times faster than torchvision's loading of single samples. Bytes
    go to the device, a quarter of floats, and are normalised there. A user gives at least the first two fields."""

    images: torch.Tensor  # uint8 [N, C, H, W]
    labels: torch.Tensor  # int64 [N]
    classes: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()  # mean, std: one per channel, of images / 255
    std: tuple[float, ...] = ()
    name: str = ""
    origin: str = ""  # where the images come from, one line
    augment: bool = False  # shift the images of a training batch ...
    mirror: bool = True  # ... and mirror half of them
    seed: int = 0

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: torch.Tensor, epoch: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return images, uint8 [B, C, H, W], and labels, int64 [B]."""
        images = self.images[indices]
        if self.augment and epoch is not None:
            images = shift_and_flip(images, random_numbers(self.seed, epoch, len(self))[indices], mirror=self.mirror)
        return images, self.labels[indices]

    def cut(self, count: int, size: int | None) -> "TensorSamples":
        """Return the first `count` samples (0: all), resized to `size` x `size` pixels (None: their own size)."""
        count = count or len(self)
        images = self.images if count >= len(self) else self.images[:count].clone()  # a copy, so the rest can be freed
        return replace(self, images=resize(images, size, size) if size else images, labels=self.labels[:count])


def resize(images: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Resize uint8 [B, C, H, W] to uint8 [B, C, height, width], bilinear with antialiasing. The pixels equal those of
    torchvision.transforms.v2, which takes 0.3 s to import in each process."""
    if images.shape[2:] == (height, width):
        return images
    return torch.nn.functional.interpolate(images, size=(height, width), mode="bilinear", antialias=True)


def shift_and_flip(images: torch.Tensor, numbers: torch.Tensor, *, mirror: bool = True) -> torch.Tensor:
    """Shift each image of [B, C, H, W] by up to an eighth of its height, fill with black, and mirror half of them.
    `numbers`: float [B, 3] in [0, 1), for the vertical shift, the horizontal shift, and mirroring."""
    size, (height, width) = len(images), images.shape[-2:]
    reach = max(1, height // 8)
    padded = torch.nn.functional.pad(images, (reach, reach, reach, reach))
    top, left = ((numbers[:, i] * (2 * reach + 1)).long() for i in (0, 1))
    rows = top[:, None] + torch.arange(height)
    columns = left[:, None] + torch.arange(width)
    if mirror:
        columns = torch.where((numbers[:, 2] < 0.5)[:, None], columns.flip(1), columns)
    pick = torch.arange(size)[:, None, None]
    # Images of one channel leave here with NHWC strides. Strides decide which convolution algorithm runs, and so the
    # last bits of the weights. Other code for the same pixels would change the digests of augmented runs.
    return padded.permute(0, 2, 3, 1)[pick, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


@dataclass(eq=False)
class MapSamples:
    """Samples of any map-style torch Dataset. Before each sample the random state is set from (seed, epoch, number)."""

    dataset: Dataset[Any]
    seed: int = 0

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # map-style Datasets have a length, but do not declare it

    def batch(self, indices: torch.Tensor, epoch: int | None) -> Any:
        """Return the samples `indices` (int64 [B]) through default_collate. Raises what the Dataset raises."""
        samples = []
        for index in indices.tolist():
            seed_host(derive_seed(self.seed, -1 if epoch is None else epoch, index))
            samples.append(self.dataset[index])
        return default_collate(samples)


@lru_cache(maxsize=1)  # drawn once per epoch; 60,000 samples take half a millisecond
def random_numbers(seed: int, epoch: int, num_samples: int) -> torch.Tensor:
    """Draw three uniform numbers in [0, 1) for each sample: float32 [num_samples, 3]."""
    return torch.rand(num_samples, 3, generator=torch.Generator().manual_seed(derive_seed(seed, epoch)))


# The order of the training samples, and how torch's DataLoader loads them ---------------------------------------------


@dataclass(eq=False, slots=True)
class EpochSampler:
    """A batch sampler that yields the full global batches of an epoch. The order depends only on seed and epoch. It
    numbers samples over the whole run, epoch * num_samples + sample, because augmentation depends on both."""

    num_samples: int
    batch_size: int
    seed: int
    lengths: torch.Tensor | None = None  # int64 [num_samples]: put samples of similar length into one batch ...
    pool: int = 50  # ... out of the samples of this many batches
    now: int = 0  # the epoch whose order `__iter__` yields

    def __len__(self) -> int:
        return self.num_samples // self.batch_size

    def set_epoch(self, epoch: int) -> None:
        self.now = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order, before = self.epoch(self.now), self.now * self.num_samples
        for begin in range(0, len(self) * self.batch_size, self.batch_size):
            yield (order[begin : begin + self.batch_size] + before).tolist()

    def epoch(self, epoch: int) -> torch.Tensor:
        """Return all samples in the order of `epoch`, int64 [num_samples]."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch))
        order = torch.randperm(self.num_samples, generator=generator)
        if self.lengths is None:
            return order
        # The samples after the last full batch stay random ones. The others are split into pools, each pool is sorted
        # by length and split into batches, and all batches are shuffled.
        whole = len(self) * self.batch_size
        pools = torch.split(order[:whole], self.pool * self.batch_size)
        sorted_pools = [pool[self.lengths[pool].argsort(stable=True)] for pool in pools]
        batches = torch.cat(sorted_pools).view(-1, self.batch_size)
        shuffled = batches[torch.randperm(len(batches), generator=generator)]
        return torch.cat([shuffled.flatten(), order[whole:]])


def load_batches(
    samples: Samples, numbers: Iterable[list[int]], *, accumulate: int = 0, num_workers: int, device: torch.device
) -> DataLoader[Any]:
    """Return a DataLoader for the batch sampler `numbers`. For evaluation (`accumulate` is 0) a batch is what
    `Samples.batch` returns. For training it is a list of `accumulate` micro-batches, each (size of the batch / size of
    the micro-batch, what `Samples.batch` returned), and `numbers` is an `EpochSampler`."""
    workers: dict[str, Any] = {}
    if num_workers:
        workers = {
            "num_workers": num_workers, "persistent_workers": True, "pin_memory": device.type == "cuda",
            "prefetch_factor": 1 if accumulate > 1 else 2,  # a batch may already be several micro-batches
            "multiprocessing_context": "fork",  # Python 3.14's default would import everything again in each worker
        }
    return DataLoader(_Batches(samples, accumulate), batch_sampler=numbers, collate_fn=itemgetter(0), **workers)


@dataclass(eq=False)
class _Batches(Dataset[Any]):
    samples: Samples
    accumulate: int

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        """Return one item, the whole batch: taking all samples at once is much faster than one by one."""
        indices = torch.tensor(numbers)
        if not self.accumulate:
            return [self.samples.batch(indices, None)]
        epoch = numbers[0] // len(self.samples)
        # tensor_split makes the first parts larger if the sizes differ
        parts = (indices - epoch * len(self.samples)).tensor_split(self.accumulate)
        return [[(len(indices) / len(part), self.samples.batch(part, epoch)) for part in parts]]

    def __len__(self) -> int:
        return len(self.samples)


def to_device(batch: Any, device: torch.device) -> Any:
    """Move all tensors of a batch to `device`. A batch is a tensor, or a tuple, list or dict of batches."""
    return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf, batch)
