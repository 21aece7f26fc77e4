"""A first DistributedDataParallel loop: a small network learns in which quadrant of a plane a point lies."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import rankup

EPOCHS = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def main() -> None:
    job = rankup.init(run="runs/ddp")
    device = job.device
    torch.manual_seed(0)

    plane = torch.randn(1024, 2)
    dataset = TensorDataset(plane, 2 * (plane[:, 0] > 0).long() + (plane[:, 1] > 0).long())
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    model = DistributedDataParallel(Net().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    job.track(model=model, optimizer=optimizer)

    for epoch in job.epochs(EPOCHS):
        for points, quadrants in job.batches(loader):
            loss = criterion(model(points.to(device)), quadrants.to(device))
            optimizer.zero_grad()
            loss.backward()
            with job.step(loss=loss):
                optimizer.step()
        if dist.get_rank() == 0:
            print(f"finished epoch {epoch}")

    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "runs/ddp.pt")


if __name__ == "__main__":
    main()
