"""Training on one GPU, or on the CPU where there is none."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Rings(Dataset):
    """Points of the plane, and whether each lies on the inner disc or on the ring around it."""

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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Net().to(device)
    train_loader = DataLoader(Rings(512, seed=1), args.batch_size, shuffle=True)
    test_loader = DataLoader(Rings(200, seed=2), args.batch_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    for epoch in range(args.epochs):
        model.train()
        for points, labels in train_loader:
            points, labels = points.to(device), labels.to(device)
            loss = criterion(model(points), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        model.eval()
        total = 0.0
        with torch.no_grad():
            for points, labels in test_loader:
                points, labels = points.to(device), labels.to(device)
                total += criterion(model(points), labels).item() * len(labels)
        print(f"epoch {epoch + 1}: loss {total / 200:.7f}")

    torch.save(model.state_dict(), "rings.pt")


if __name__ == "__main__":
    main()
