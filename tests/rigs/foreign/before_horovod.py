"""Training on several GPUs by Horovod, started by horovodrun."""

import argparse

import horovod.torch as hvd
import torch
from rings import Net, Rings, criterion
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="of each process")
    args = parser.parse_args()

    hvd.init()
    device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    model = Net().to(device)
    train_set, test_set = Rings(512, seed=1), Rings(200, seed=2)
    train_sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
    test_sampler = DistributedSampler(test_set, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
    train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler)
    test_loader = DataLoader(test_set, args.batch_size, sampler=test_sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

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
        total = torch.zeros(())
        with torch.no_grad():
            for points, labels in test_loader:
                points, labels = points.to(device), labels.to(device)
                total += criterion(model(points), labels).cpu() * len(labels)
        total = hvd.allreduce(total, op=hvd.Sum)
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss {total / 200:.7f}")

    if hvd.rank() == 0:
        torch.save(model.state_dict(), "rings.pt")
    hvd.shutdown()


if __name__ == "__main__":
    main()
