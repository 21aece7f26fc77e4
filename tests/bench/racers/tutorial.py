"""The loop of PyTorch's own DDP tutorial (beginner/ddp_series_fault_tolerance, multigpu_torchrun.py), part by part.

Variant "loader": the data as PyTorch's quickstart has them, torchvision's FashionMNIST and its transforms, behind a
DataLoader with a DistributedSampler. The tutorial has no workers. PyTorch's performance tuning guide recommends them,
but two processes on the two CPUs of README's table were slower with one each, and with two. With a GPU each process has
four, which is not measured.
Variant "memory": the same loop on images in memory, fetched a batch at a time, so that no loader slows it down.
Nothing else that the tutorial does not have: no channels_last, DDP and SGD as they are by default.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.bench.racers import shared


def open_loader(task: shared.Task) -> DataLoader:
    """Batches of this process's share, on the host: uint8 from memory, or normalised float32 from torchvision."""
    options = {"batch_size": task.share, "drop_last": True, "pin_memory": task.device == "cuda"}
    if task.variant == "memory":
        dataset = shared.InMemory(task)
        options |= {"collate_fn": shared.as_it_is}
    else:
        from torchvision import transforms

        transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(shared.MEAN, shared.STD)])
        dataset = shared.torchvision_set(task.data, train=True, transform=transform)
        if task.device == "cuda":
            options |= {"num_workers": 4, "persistent_workers": True}
    sampler = shared.SameOrder(dataset, num_replicas=shared.world_size(), rank=shared.rank())
    return DataLoader(dataset, sampler=sampler, **options)


def main() -> None:
    task = shared.read_task()
    if shared.world_size() > 1:
        dist.init_process_group("nccl" if task.device == "cuda" else "gloo")
    loader = open_loader(task)
    plain = shared.build_model(task.model).to(task.here)
    model = torch.compile(plain) if task.compile else plain
    if shared.world_size() > 1:
        model = DistributedDataParallel(model, device_ids=[task.here.index] if task.device == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=shared.LR, momentum=shared.MOMENTUM)
    clock = shared.Clock(task)
    for epoch in range(clock.epochs(len(loader))):
        loader.sampler.set_epoch(epoch)
        for source, targets in loader:
            source, targets = source.to(task.here), targets.to(task.here)
            if source.dtype == torch.uint8:
                source = shared.normalize(source)
            optimizer.zero_grad()
            with torch.autocast(task.here.type, torch.bfloat16, enabled=task.precision == "bf16"):
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
