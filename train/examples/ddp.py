"""A first DistributedDataParallel loop: random points, a small network, one sampler that splits the data."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import rankup


class Points(Dataset):
    """Points of a plane with the number of the quadrant that they lie in."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.points = torch.randn(size, 2, generator=generator)
        self.quadrants = 2 * (self.points[:, 0] > 0).long() + (self.points[:, 1] > 0).long()

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.points[index], self.quadrants[index]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    job = rankup.init(run="runs/ddp")
    torch.manual_seed(0)

    dataset = Points(1024)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    model = DistributedDataParallel(Net().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    job.track(model=model, optimizer=optimizer)

    for epoch in job.epochs(args.epochs):
        sampler.set_epoch(epoch)
        for points, quadrants in job.batches(loader):
            loss = criterion(model(points.to(device)), quadrants.to(device))
            optimizer.zero_grad()
            loss.backward()
            with job.step(loss=loss):
                optimizer.step()
        if dist.get_rank() == 0:
            print(f"finished epoch {epoch}")

    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "ddp.pt")


if __name__ == "__main__":
    main()
