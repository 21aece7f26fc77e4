"""Training on one GPU, or on the CPU where there is none."""

import argparse

import torch
from rings import Net, Rings, criterion
from torch.utils.data import DataLoader


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
