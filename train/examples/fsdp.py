"""FSDP2: each rank holds a part of every parameter. A small network learns which of two numbers is larger."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import rankup

NUMBERS, WIDTH = 32, 48


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


class Larger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(NUMBERS, WIDTH), nn.Embedding(NUMBERS, WIDTH)
        self.layers = nn.Sequential(Layer(), Layer())
        self.head = nn.Linear(WIDTH, NUMBERS)

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        """pairs: (batch, 2), numbers below 32. Returns scores of shape (batch, 32)."""
        return self.head(self.layers(self.first(pairs[:, 0]) + self.second(pairs[:, 1])))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    job = rankup.init(run="runs/fsdp")
    torch.manual_seed(0)

    pairs = torch.cartesian_prod(torch.arange(NUMBERS), torch.arange(NUMBERS))
    dataset = TensorDataset(pairs, pairs.max(1).values)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    model = Larger().to(device)
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job.track(model=model, optimizer=optimizer)

    for epoch in job.epochs(args.epochs):
        sampler.set_epoch(epoch)
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
