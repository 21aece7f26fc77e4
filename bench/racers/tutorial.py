"""The loop of PyTorch's own DDP tutorial (beginner/ddp_series_fault_tolerance, multigpu_torchrun.py), part by part.

The variant "loader" has the data of PyTorch's quickstart, torchvision's FashionMNIST with its transforms, in a
DataLoader with a DistributedSampler. The tutorial has no workers. PyTorch's performance tuning guide recommends them,
but on the two CPUs of README's table two processes were slower with one worker each, and with two.
The variant "memory" is the same loop on images in memory, fetched a batch at a time, so that no loader slows it down.
Like the tutorial, both have no channels_last, and DDP and SGD with their defaults.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from bench.racers import shared


def open_loader(task: shared.Task) -> DataLoader:
    """Return a loader of this process's batches on the host: uint8 from memory, or normalized float32 images."""
    options = {}
    if task.variant == "memory":
        dataset, options = shared.InMemory(task), {"collate_fn": shared.as_it_is}
    else:
        from torchvision import transforms

        transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(shared.MEAN, shared.STD)])
        dataset = shared.torchvision_set(task.data, train=True, transform=transform)
    sampler = shared.SameOrder(dataset, num_replicas=shared.world_size(), rank=shared.rank())
    return DataLoader(dataset, task.share, sampler=sampler, drop_last=True, **options)


def main() -> None:
    task = shared.read_task()
    if shared.world_size() > 1:
        dist.init_process_group("gloo")
    loader = open_loader(task)
    plain = model = shared.build_model()
    if shared.world_size() > 1:
        model = DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=shared.LR, momentum=shared.MOMENTUM)
    clock = shared.Clock(task)
    for epoch in range(clock.epochs(len(loader))):
        loader.sampler.set_epoch(epoch)
        for source, targets in loader:
            if source.dtype == torch.uint8:
                source = shared.normalize(source)
            optimizer.zero_grad()
            with task.autocast():
                loss = nn.functional.cross_entropy(model(source), targets)
            loss.backward()
            optimizer.step()
            if clock.step():
                break
    shared.finish(task, clock, plain)
    if shared.world_size() > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
