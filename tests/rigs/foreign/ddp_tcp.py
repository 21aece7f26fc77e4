"""A script that takes the address, its rank and the world size as arguments, and reads no environment variable."""

import argparse
import hashlib

import torch
import torch.distributed as dist
from torch import nn


def train(steps):
    torch.manual_seed(2)
    model = nn.Linear(64, 10)
    net = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(100 + dist.get_rank())
    for _ in range(steps):
        loss = nn.functional.cross_entropy(net(torch.rand(16, 64)), torch.randint(10, (16,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dist-url", required=True, help="such as tcp://10.1.1.20:23456")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    dist.init_process_group("gloo", init_method=args.dist_url, rank=args.rank, world_size=args.world_size)
    model = train(args.steps)
    if args.rank == 0:
        weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        print(f"Result: world size {dist.get_world_size()}, weights {hashlib.sha256(weights).hexdigest()[:16]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
