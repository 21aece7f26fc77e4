"""FSDP2: each rank holds a part of every parameter. A small network learns which of two numbers is larger."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import rankup

EPOCHS, NUMBERS, WIDTH = 3, 32, 48


def network() -> nn.Sequential:
    """Map two numbers below 32, int64 of shape (batch, 2), to scores, float32 of shape (batch, 32)."""
    return nn.Sequential(
        nn.Embedding(NUMBERS, WIDTH), nn.Flatten(),
        nn.Linear(2 * WIDTH, 96), nn.GELU(), nn.Linear(96, NUMBERS),
    )


def main() -> None:
    job = rankup.init(run="runs/fsdp")
    device = job.device
    torch.manual_seed(0)

    pairs = torch.cartesian_prod(torch.arange(NUMBERS), torch.arange(NUMBERS))
    dataset = TensorDataset(pairs, pairs.max(1).values)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    model = network().to(device)
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in (model[2], model[4]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job.track(model=model, optimizer=optimizer)

    for epoch in job.epochs(EPOCHS):
        for numbers, larger in job.batches(loader):
            loss = F.cross_entropy(model(numbers.to(device)), larger.to(device))
            optimizer.zero_grad()
            loss.backward()
            with job.step(loss=loss):
                optimizer.step()
        if dist.get_rank() == 0:
            print(f"finished epoch {epoch}")

    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(weights, "fsdp.pt")


if __name__ == "__main__":
    main()
