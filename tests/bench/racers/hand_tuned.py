"""A loop tuned by hand, by somebody who has time: the least that each step can be with PyTorch alone.

From PyTorch's performance tuning guide: channels_last, a fused optimizer, gradients that are views of the buckets (a
static graph was slower), no buffers to send, no loss read in the loop. Besides: no DataLoader, but images in memory
(of the GPU, where there is one), taken by index.
The guide also advises another malloc, for the page faults of each step. Here glibc's is set up instead, as by rankup:
see train/parallel/allocator.py.
"""

import warnings
from collections.abc import Iterator
from itertools import count

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankup.loop.seeds import derive_seed
from tests.bench.racers import shared
from train.parallel.allocator import keep_freed_memory


def shares(task: shared.Task, num_samples: int) -> Iterator[torch.Tensor]:
    """This process's sample numbers of each step, int64 [B] on the device, without an end."""
    for epoch in count():
        generator = torch.Generator().manual_seed(derive_seed(shared.SEED, epoch))
        order = torch.randperm(num_samples, generator=generator).to(task.here)
        for chosen in order[: num_samples // task.batch_size * task.batch_size].split(task.batch_size):
            yield chosen[shared.rank() :: shared.world_size()]


def main() -> None:
    task = shared.read_task()
    keep_freed_memory()
    on_gpu = task.device == "cuda"
    if shared.world_size() > 1:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    images, labels = (tensor.to(task.here) for tensor in shared.load_images(task.data, task.model, train=True))
    plain = shared.build_model(task.model).to(task.here, memory_format=torch.channels_last)
    model = torch.compile(plain) if task.compile else plain
    if shared.world_size() > 1:
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)  # torch 2.14 renamed it
        model = DistributedDataParallel(
            model, device_ids=[task.here.index] if on_gpu else None,
            gradient_as_bucket_view=True, broadcast_buffers=False,
        )
    optimizer = torch.optim.SGD(plain.parameters(), shared.LR, shared.MOMENTUM, fused=True)
    clock = shared.Clock(task)
    for chosen in shares(task, len(labels)):
        with torch.autocast(task.here.type, torch.bfloat16, enabled=task.precision == "bf16"):
            loss = nn.functional.cross_entropy(model(shared.normalize(images[chosen])), labels[chosen])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if clock.step():
            break
    shared.finish(task, clock, plain)
    if shared.world_size() > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
