"""Like PyTorch's ImageNet example: each node runs one process, which spawns that node's workers.

The arguments are the example's: with --multiprocessing-distributed, --world-size and --rank count nodes, and -1 means
"from the environment". The images are random, and the model is small."""

import argparse
import hashlib
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

WORKERS_OF_A_NODE = 2  # if there are no GPUs to count

parser = argparse.ArgumentParser(description="ImageNet-like training")
parser.add_argument("-b", "--batch-size", default=16, type=int, help="of all workers of a node together")
parser.add_argument("--world-size", default=-1, type=int, help="number of nodes")
parser.add_argument("--rank", default=-1, type=int, help="node rank")
parser.add_argument("--dist-url", default="tcp://127.0.0.1:23456")
parser.add_argument("--dist-backend", default="gloo")
parser.add_argument("--multiprocessing-distributed", action="store_true")


def main():
    args = parser.parse_args()
    if args.world_size == -1:
        args.world_size, args.rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    ngpus_per_node = torch.cuda.device_count() or WORKERS_OF_A_NODE
    if args.multiprocessing_distributed:
        args.world_size = ngpus_per_node * args.world_size
        mp.spawn(main_worker, nprocs=ngpus_per_node, args=(ngpus_per_node, args))
    else:
        main_worker(0, ngpus_per_node, args)


def main_worker(gpu, ngpus_per_node, args):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
        nn.Linear(256, 10),
    )
    if args.multiprocessing_distributed:
        args.rank = args.rank * ngpus_per_node + gpu
    dist.init_process_group(args.dist_backend, args.dist_url, world_size=args.world_size, rank=args.rank)
    net = nn.parallel.DistributedDataParallel(model)
    images = TensorDataset(torch.rand(48, 3, 32, 32), torch.randint(10, (48,)))
    loader = DataLoader(images, args.batch_size // ngpus_per_node, sampler=DistributedSampler(images))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9, weight_decay=1e-4)
    for i, (pixels, target) in enumerate(loader):
        loss = criterion(net(pixels), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if args.rank == 0:
            print(f"Epoch: [0][{i + 1}/{len(loader)}]  Loss {loss.item():.4e}", flush=True)

    if args.rank == 0:
        weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        print(f"Result: world size {args.world_size}, weights {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
