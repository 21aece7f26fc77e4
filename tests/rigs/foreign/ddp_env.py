"""The first tutorial on DistributedDataParallel: started by torchrun, it finds the other processes by env://.

It reads nothing of the environment itself but LOCAL_RANK; `init_process_group` reads the rest.
"""

import argparse
import hashlib
import os

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(64, 32)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(32, 10)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    print(f"Running basic DDP example on rank {rank}, local rank {local_rank}.", flush=True)

    torch.manual_seed(0)
    dataset = TensorDataset(torch.rand(256, 64), torch.randint(10, (256,)))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    model = ToyModel()
    ddp_model = DDP(model)
    loss_fn = nn.CrossEntropyLoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.1)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss_fn(ddp_model(inputs), labels).backward()
            optimizer.step()
        if rank == 0:
            print(f"Finished epoch {epoch}", flush=True)

    if rank == 0:
        weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        print(f"Result: world size {dist.get_world_size()}, weights {hashlib.sha256(weights).hexdigest()[:16]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
