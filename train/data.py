"""Samples, their order, and the way of a batch to the device.

The order depends on the seed and the epoch alone; rank r takes its slice of each global batch. Augmentation draws from a
hash of (seed, epoch, sample), so that neither the world size, nor a restart, nor a number of workers changes a pixel.
"""

import contextlib
import hashlib
import os
import queue
import random
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from train.errors import DataError, PeerLost
from train.stop import SIGNALS, StopRequest, die_with_parent

Key = tuple[int | None, torch.Tensor]  # the epoch (None: evaluation, no augmentation) and sample numbers, int64 [B]


class Samples(Protocol):
    """What a workload trains on or is evaluated with."""

    def __len__(self) -> int: ...

    def batch(self, indices: torch.Tensor, epoch: int | None) -> Any:
        """The samples `indices` (int64 [B]) as one batch of tensors; augmented for that epoch unless it is None."""


def mix(*numbers: int) -> int:
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

    @property
    def steps_per_epoch(self) -> int:
        return self.num_samples // self.batch_size

    def epoch(self, epoch: int) -> torch.Tensor:
        """All sample numbers in the order of that epoch, int64 [num_samples]."""
        generator = torch.Generator().manual_seed(mix(self.seed, epoch))
        return torch.randperm(self.num_samples, generator=generator)

    def keys(self, first_step: int, last_step: int) -> Iterator[Key]:
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


def evaluation_keys(num_samples: int, batch_size: int, rank: int, world_size: int) -> Iterator[tuple[int, Key]]:
    """(number of the batch, key) of this rank's evaluation batches. Batches are the same for every world size and are
    dealt out in turn, so that each sample counts once and sums can be added in one order."""
    for number in range(rank, num_batches(num_samples, batch_size), world_size):
        stop = min((number + 1) * batch_size, num_samples)
        yield number, (None, torch.arange(number * batch_size, stop))


def num_batches(num_samples: int, batch_size: int) -> int:
    return -(-num_samples // batch_size)


def random_numbers(seed: int, epoch: int, indices: torch.Tensor, count: int) -> torch.Tensor:
    """`count` uniform numbers in [0, 1) for each sample, float64 [B, count]: splitmix64 of (seed, epoch, sample, column)."""
    start = torch.tensor(mix(seed, epoch), dtype=torch.int64)
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
            seed_everything(mix(self.seed, -1 if epoch is None else epoch, index))
            samples.append(self.dataset[index])
        return default_collate(samples)


def seed_everything(seed: int) -> None:
    """Python's, torch's and, where it is loaded already, numpy's random state of this process."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


# On the way to the device -------------------------------------------------------------------------------------


class Feed:
    """The batches of this rank, in order; prepared ahead by worker processes where there are any.

    With workers, a thread waits for them: the loop itself only ever waits for a queue, a moment at a time, and so sees a
    stop request while a disk is slow.
    """

    def __init__(
        self, samples: Samples, keys: Iterable[Key], *, device: torch.device, stop: StopRequest, num_workers: int,
        prefetch_factor: int,
    ) -> None:  # fmt: skip
        self.device, self.stop = device, stop
        self._samples, self._keys = samples, iter(keys)
        self._queue: queue.Queue[Any] | None = None
        # What lies in memory is faster taken by index than sent by a worker
        if num_workers > 0 and not getattr(samples, "in_memory", False):
            self._start(samples, num_workers, prefetch_factor)

    def next(self) -> Any | None:
        """The next batch on the device, or None if a stop was asked for while waiting. Raises StopIteration at the end,
        DataError for an unreadable sample."""
        if self._queue is None:
            epoch, indices = next(self._keys)
            return to_device(self._samples.batch(indices, epoch), self.device)
        while not self.stop.asked:
            try:
                item = self._queue.get(timeout=0.1)
            except queue.Empty:
                continue
            if isinstance(item, BaseException):
                raise _explained(item)
            return to_device(item, self.device)
        return None

    def close(self) -> None:
        self._closed.set() if self._queue is not None else None

    def _start(self, samples: Samples, num_workers: int, prefetch_factor: int) -> None:
        loader: DataLoader[Any] = DataLoader(
            _Batches(samples),
            sampler=self._keys,
            batch_size=None,  # a key is a whole batch already
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            worker_init_fn=_WorkerStart(os.getpid()),
            generator=torch.Generator().manual_seed(0),  # its base seed must not be drawn from the model's random state
            pin_memory=self.device.type == "cuda",
        )
        with _signals_held():
            iterator = iter(loader)
        self._queue = queue.Queue(maxsize=1)
        self._closed = threading.Event()
        threading.Thread(target=self._pull, args=(iterator, self._queue), name="feed", daemon=True).start()

    def _pull(self, iterator: Iterator[Any], ready: "queue.Queue[Any]") -> None:
        item: Any = None
        while not isinstance(item, BaseException) and not self._closed.is_set():
            try:
                item = next(iterator)
            except BaseException as error:
                item = error
            while not self._closed.is_set():
                with contextlib.suppress(queue.Full):
                    ready.put(item, timeout=0.5)
                    break


class _Batches(Dataset[Any]):
    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __getitem__(self, key: Any) -> Any:
        epoch, indices = key
        try:
            return self.samples.batch(indices, epoch)
        except DataError as error:  # as a value: torch would wrap the one line in a traceback of the worker's
            return error


class _WorkerStart:
    """First thing in a worker: ignore what is meant for the loop, and die with it."""

    def __init__(self, parent: int) -> None:
        self.parent = parent

    def __call__(self, worker: int) -> None:
        for name in SIGNALS:
            if hasattr(signal, name):
                # A batch system signals the whole process group: a worker that died of it took the checkpoint along.
                signal.signal(getattr(signal, name), signal.SIG_IGN)
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _stop_signals())
        die_with_parent(self.parent)
        torch.set_num_threads(1)


def _stop_signals() -> list[signal.Signals]:
    return [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Hold the stop signals back while workers are born: between its birth and its first line a worker would die of one."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _stop_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def to_device(batch: Any, device: torch.device) -> Any:
    """Move all tensors of a batch (tuple, list, dict or tensor); a DataError that a worker sent is raised here."""
    if isinstance(batch, DataError):
        raise batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {name: to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def _explained(error: BaseException) -> BaseException:
    """What the death of a worker process means."""
    text = str(error)
    if "Bus error" in text or "No space left on device" in text or "shared memory" in text:
        return DataError(
            "/dev/shm must hold the batches of all DataLoader workers, got no space left. Enlarge it (docker run "
            "--shm-size=1g, shm_size in compose, an emptyDir of medium Memory at /dev/shm), or set --num-workers 0."
        )
    if "DataLoader worker" in text and ("killed by signal" in text or "exited unexpectedly" in text):
        return PeerLost(f"a DataLoader worker died: {text.splitlines()[0]} (out of memory is the usual reason)")
    return error
