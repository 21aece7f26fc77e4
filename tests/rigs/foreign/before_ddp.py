"""Training on several GPUs by DistributedDataParallel, started by torchrun."""

import argparse
import hashlib
import os

import torch
import torch.distributed as dist
from rings import Net, Rings, criterion
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="of each process")
    args = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    model = DistributedDataParallel(Net().to(device))
    train_set, test_set = Rings(512, seed=1), Rings(200, seed=2)
    train_sampler = DistributedSampler(train_set)
    test_sampler = DistributedSampler(test_set, shuffle=False)
    train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler)
    test_loader = DataLoader(test_set, args.batch_size, sampler=test_sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        model.train()
        for points, labels in train_loader:
            points, labels = points.to(device), labels.to(device)
            loss = criterion(model(points), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        model.eval()
        sums = torch.zeros(3, device=device)
        with torch.no_grad():
            for points, labels in test_loader:
                points, labels = points.to(device), labels.to(device)
                scores = model(points)
                total, right = criterion(scores, labels) * len(labels), (scores.argmax(1) == labels).sum()
                sums += torch.tensor([total, right, len(labels)], device=device)
        dist.all_reduce(sums)
        if rank == 0:
            loss, accuracy = (sums[:2] / sums[2]).tolist()
            print(f"epoch {epoch + 1}: loss {loss:.7f}, accuracy {accuracy:.4f}")

    if rank == 0:
        torch.save(model.module.state_dict(), "rings.pt")
        weights = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
        print(f"Result: world size {dist.get_world_size()}, weights {hashlib.sha256(weights).hexdigest()[:16]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
