"""Training by a loop of one's own, with Hugging Face Accelerate."""

import argparse

import torch
from accelerate import Accelerator
from rings import Net, Rings, criterion
from torch.utils.data import DataLoader


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="of each process")
    args = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    model = Net()
    train_loader = DataLoader(Rings(512, seed=1), args.batch_size, shuffle=True)
    test_loader = DataLoader(Rings(200, seed=2), args.batch_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)

    for epoch in range(args.epochs):
        model.train()
        for points, labels in train_loader:
            loss = criterion(model(points), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()

        model.eval()
        total, right = 0.0, 0
        with torch.no_grad():
            for points, labels in test_loader:
                scores, labels = accelerator.gather_for_metrics((model(points), labels))
                total += criterion(scores, labels).item() * len(labels)
                right += (scores.argmax(1) == labels).sum().item()
        accelerator.print(f"epoch {epoch + 1}: loss {total / 200:.7f}, accuracy {right / 200:.4f}")

    accelerator.save(accelerator.unwrap_model(model).state_dict(), "rings.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
