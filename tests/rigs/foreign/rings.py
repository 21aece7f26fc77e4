"""The data, model and criterion of the scripts `before_*.py` and of their workload."""

import torch
from torch import nn
from torch.utils.data import Dataset


class Rings(Dataset):
    """Points of the plane. The label says whether a point lies on the inner disc or on the ring around it."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.points = torch.randn(count, 2, generator=generator)
        self.labels = (self.points.norm(dim=1) > 1.2).long()

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return self.points[index], self.labels[index]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(2, 32)
        self.out = nn.Linear(32, 2)

    def forward(self, points):
        return self.out(torch.tanh(self.hidden(points)))


criterion = nn.CrossEntropyLoss()
