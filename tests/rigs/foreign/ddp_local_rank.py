"""A script from the time of `python -m torch.distributed.launch`: it gets its local rank as an argument."""

import argparse
import hashlib

import torch
import torch.distributed as dist
from torch import nn


def main():
    parser = argparse.ArgumentParser()
    # Launchers before torch 2.0 wrote the option with an underscore
    parser.add_argument("--local_rank", "--local-rank", type=int, required=True)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    dist.init_process_group(backend="gloo", init_method="env://")
    if torch.cuda.is_available():
        torch.cuda.set_device(args.local_rank)
    print(f"local rank {args.local_rank} is rank {dist.get_rank()}", flush=True)

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    net = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    torch.manual_seed(100 + dist.get_rank())  # each process draws its own samples
    for _ in range(args.steps):
        loss = nn.functional.cross_entropy(net(torch.rand(16, 64)), torch.randint(10, (16,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    if dist.get_rank() == 0:
        weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        print(f"Result: world size {dist.get_world_size()}, weights {hashlib.sha256(weights).hexdigest()[:16]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
