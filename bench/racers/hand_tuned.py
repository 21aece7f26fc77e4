"""A loop tuned by hand, as fast as a step can be with PyTorch alone.

From PyTorch's performance tuning guide it has channels_last, a fused optimizer, gradients that are views of the buckets
(a static graph was slower), no broadcast of buffers, and no read of the loss in the loop. It has no DataLoader either,
but takes images from memory by index. The guide also advises another malloc, because of the page faults of each step.
This loop sets up glibc's malloc instead, as rankup does (see `keep_freed_memory` in train/parallel/model.py). The
variant "rankup" adds the lines of rankup/loop.md. The difference in speed is the cost of these lines.
"""

import contextlib
import warnings
from collections.abc import Iterator
from itertools import count

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankup
from bench.racers import shared
from rankup.seeds import derive_seed
from train.parallel.model import keep_freed_memory


class Shares:
    """An endless iterable of this process's sample numbers for each step, int64 [B]."""

    def __init__(self, task: shared.Task, num_samples: int) -> None:
        self.task, self.num_samples = task, num_samples

    def __iter__(self) -> Iterator[torch.Tensor]:
        size, end = self.task.batch_size, self.num_samples // self.task.batch_size * self.task.batch_size
        for epoch in count():
            generator = torch.Generator().manual_seed(derive_seed(shared.SEED, epoch))
            order = torch.randperm(self.num_samples, generator=generator)
            for chosen in order[:end].split(size):
                yield chosen[shared.rank() :: shared.world_size()]


def main() -> None:
    task = shared.read_task()
    keep_freed_memory()
    job = rankup.init(f"{task.result}.run", fresh=True, save_every_steps=0) if task.variant == "rankup" else None
    if shared.world_size() > 1 and job is None:
        dist.init_process_group("gloo")
    images, labels = shared.load_images(task.data, train=True)
    plain = model = shared.build_model().to(memory_format=torch.channels_last)
    if shared.world_size() > 1:
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)  # torch 2.14 renamed it
        model = DistributedDataParallel(plain, gradient_as_bucket_view=True, broadcast_buffers=False)
    optimizer = torch.optim.SGD(plain.parameters(), shared.LR, shared.MOMENTUM, fused=True)
    if job is not None:
        job.track(model=model, optimizer=optimizer)
    clock, own = shared.Clock(task), Shares(task, len(labels))
    for chosen in own if job is None else job.batches(own):
        with task.autocast():
            loss = nn.functional.cross_entropy(model(shared.normalize(images[chosen])), labels[chosen])
        loss.backward()
        with contextlib.nullcontext() if job is None else job.step(loss=loss):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if clock.step():
            break
    shared.finish(task, clock, plain)
    if job is not None:
        job.finish()
    elif shared.world_size() > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
