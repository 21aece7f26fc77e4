"""In the manner of PyTorch's ImageNet example: one process is started on each node, and it spawns that node's workers.

The arguments and their meaning are those of the example: with --multiprocessing-distributed, --world-size and --rank
count nodes, and -1 means "from the environment". The images are fake, and the model is small: to import torchvision's
would take each process longer than to train.
"""

import argparse
import hashlib
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

WORKERS_OF_A_NODE = 2  # where there are no GPUs to count

parser = argparse.ArgumentParser(description="ImageNet-like training")
parser.add_argument("-b", "--batch-size", default=16, type=int, help="of all workers of a node together")
parser.add_argument("--epochs", default=1, type=int)
parser.add_argument("--images", default=48, type=int)
parser.add_argument("--lr", default=0.01, type=float)
parser.add_argument("--world-size", default=-1, type=int, help="number of nodes")
parser.add_argument("--rank", default=-1, type=int, help="node rank")
parser.add_argument("--dist-url", default="tcp://127.0.0.1:23456")
parser.add_argument("--dist-backend", default="gloo")
parser.add_argument("--multiprocessing-distributed", action="store_true")


def main():
    args = parser.parse_args()
    if args.dist_url == "env://" and args.world_size == -1:
        args.world_size = int(os.environ["WORLD_SIZE"])
    args.distributed = args.world_size > 1 or args.multiprocessing_distributed
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
    if args.distributed:
        if args.dist_url == "env://" and args.rank == -1:
            args.rank = int(os.environ["RANK"])
        if args.multiprocessing_distributed:
            args.rank = args.rank * ngpus_per_node + gpu
        dist.init_process_group(args.dist_backend, args.dist_url, world_size=args.world_size, rank=args.rank)
        args.batch_size = args.batch_size // ngpus_per_node
        net = nn.parallel.DistributedDataParallel(model)
    else:
        net = model

    images = TensorDataset(torch.rand(args.images, 3, 32, 32), torch.randint(10, (args.images,)))
    sampler = DistributedSampler(images) if args.distributed else None
    loader = DataLoader(images, args.batch_size, sampler=sampler)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    net.train()
    for epoch in range(args.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for i, (pixels, target) in enumerate(loader):
            loss = criterion(net(pixels), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if args.rank <= 0:
                print(f"Epoch: [{epoch}][{i + 1}/{len(loader)}]  Loss {loss.item():.4e}", flush=True)

    if args.rank <= 0:
        weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        digest = hashlib.sha256(weights).hexdigest()[:16]
        print(f"Result: world size {max(1, args.world_size)}, weights {digest}", flush=True)
    if args.distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
