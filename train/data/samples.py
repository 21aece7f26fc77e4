"""Samples: what a workload trains on, batch by batch; their order; what is done with any batch.

Random numbers depend on what they are for, not on what was drawn before them: neither the world size, nor a restart,
nor the number of workers changes an order or a pixel.
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
    """What a workload trains on or is evaluated with."""

    def __len__(self) -> int: ...

    def batch(self, indices: torch.Tensor, epoch: int | None) -> Any:
        """The samples `indices` (int64 [B]) as one batch of tensors; augmented for that epoch unless it is None."""


@dataclass(eq=False)
class TensorSamples:
    """Images held in memory and batched by index: 75 times faster, as measured, than torchvision's sample by sample. A
    batch is normalised on the device: a quarter of the bytes are copied. Own workloads need the first two only."""

    images: torch.Tensor  # uint8 [N, C, H, W]
    labels: torch.Tensor  # int64 [N]
    classes: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()  # mean, std: one per channel, of images / 255
    std: tuple[float, ...] = ()
    name: str = ""
    origin: str = ""  # where the images came from, one line
    augment: bool = False  # shift the images of a training batch ...
    mirror: bool = True  # ... and mirror half of them
    seed: int = 0

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: torch.Tensor, epoch: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Images uint8 [B, C, H, W] and labels int64 [B]."""
        images = self.images[indices]
        if self.augment and epoch is not None:
            images = shift_and_flip(images, random_numbers(self.seed, epoch, len(self))[indices], mirror=self.mirror)
        return images, self.labels[indices]

    def cut(self, count: int, size: int | None) -> "TensorSamples":
        """The first `count` samples, all of them with 0, as `size` x `size` pixels; None: in their own size."""
        count = count or len(self)
        images = self.images if count >= len(self) else self.images[:count].clone()  # so that the rest can be freed
        return replace(self, images=resize(images, size, size) if size else images, labels=self.labels[:count])


def resize(images: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """uint8 [B, C, H, W] -> uint8 [B, C, height, width], bilinear with antialiasing: the same pixels as
    torchvision.transforms.v2 gives, which takes 0.3 s to import in each process."""
    if images.shape[2:] == (height, width):
        return images
    return torch.nn.functional.interpolate(images, size=(height, width), mode="bilinear", antialias=True)


def shift_and_flip(images: torch.Tensor, numbers: torch.Tensor, *, mirror: bool = True) -> torch.Tensor:
    """Shift each image of [B, C, H, W] by up to an eighth of its height, filled with black, and mirror half of them.
    numbers: float [B, 3] in [0, 1), for the shift down, the shift across, and mirroring."""
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


@dataclass(eq=False)
class MapSamples:
    """Any map-style torch Dataset. Each sample is drawn with the random state of its own (seed, epoch, number)."""

    dataset: Dataset[Any]
    seed: int = 0

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # Dataset declares no length, map-style ones have it

    def batch(self, indices: torch.Tensor, epoch: int | None) -> Any:
        """The samples `indices` (int64 [B]) in torch's default_collate. Raises what the Dataset raises."""
        samples = []
        for index in indices.tolist():
            seed_host(derive_seed(self.seed, -1 if epoch is None else epoch, index))
            samples.append(self.dataset[index])
        return default_collate(samples)


@lru_cache(maxsize=1)  # drawn once an epoch, half a millisecond for 60,000 samples
def random_numbers(seed: int, epoch: int, num_samples: int) -> torch.Tensor:
    """Three uniform numbers in [0, 1) for each sample: float32 [num_samples, 3]."""
    return torch.rand(num_samples, 3, generator=torch.Generator().manual_seed(derive_seed(seed, epoch)))


# The order of the training samples, and how torch's DataLoader loads them ---------------------------------------------


@dataclass(eq=False, slots=True)
class EpochSampler:
    """A batch sampler: the whole global batches of an epoch, whose order depends on the seed and the epoch alone. It
    gives a sample's number in the whole run, epoch * num_samples + sample: augmentation depends on both."""

    num_samples: int
    batch_size: int
    seed: int
    lengths: torch.Tensor | None = None  # int64 [num_samples]: samples of similar length shall share a batch ...
    pool: int = 50  # ... chosen from this many batches
    now: int = 0  # the epoch

    def __len__(self) -> int:
        return self.num_samples // self.batch_size

    def set_epoch(self, epoch: int) -> None:
        self.now = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order, before = self.epoch(self.now), self.now * self.num_samples
        for begin in range(0, len(self) * self.batch_size, self.batch_size):
            yield (order[begin : begin + self.batch_size] + before).tolist()

    def epoch(self, epoch: int) -> torch.Tensor:
        """All samples in the order of that epoch, int64 [num_samples]."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch))
        order = torch.randperm(self.num_samples, generator=generator)
        if self.lengths is None:
            return order
        # The tail that is left out stays a random one. The rest is cut into pools, each is sorted by length and cut
        # into batches, and the batches are shuffled.
        whole = len(self) * self.batch_size
        pools = torch.split(order[:whole], self.pool * self.batch_size)
        sorted_pools = [pool[self.lengths[pool].argsort(stable=True)] for pool in pools]
        batches = torch.cat(sorted_pools).view(-1, self.batch_size)
        shuffled = batches[torch.randperm(len(batches), generator=generator)]
        return torch.cat([shuffled.flatten(), order[whole:]])


def load_batches(
    samples: Samples, numbers: Iterable[list[int]], *, accumulate: int = 0, num_workers: int, device: torch.device
) -> DataLoader[Any]:
    """A loader of the batches `numbers`, a batch sampler. With `accumulate`, a batch is that many micro-batches of
    training, with numbers as `EpochSampler` gives them: for each the batch's size as a multiple of its own, and what
    `Samples.batch` returned."""
    workers: dict[str, Any] = {}
    if num_workers:
        workers = {
            "num_workers": num_workers, "persistent_workers": True, "pin_memory": device.type == "cuda",
            "prefetch_factor": 1 if accumulate > 1 else 2,  # whole steps, so as many samples
            "multiprocessing_context": "fork",  # Python 3.14's default would import everything once more
        }
    return DataLoader(_Batches(samples, accumulate), batch_sampler=numbers, collate_fn=itemgetter(0), **workers)


@dataclass(eq=False)
class _Batches(Dataset[Any]):
    samples: Samples
    accumulate: int

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        """One item, the whole batch: to take samples at once is much faster than one by one."""
        indices = torch.tensor(numbers)
        if not self.accumulate:
            return [self.samples.batch(indices, None)]
        epoch = numbers[0] // len(self.samples)
        # The first parts are the larger ones
        parts = (indices - epoch * len(self.samples)).tensor_split(self.accumulate)
        return [[(len(indices) / len(part), self.samples.batch(part, epoch)) for part in parts]]

    def __len__(self) -> int:
        return len(self.samples)


def to_device(batch: Any, device: torch.device) -> Any:
    """Move all tensors of a batch: a tensor, or a tuple, list or dict of batches."""
    return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf, batch)
