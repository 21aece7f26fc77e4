"""A script that saves with torch.distributed.checkpoint (DCP), and resumes from its newest checkpoint.

It names, finds and publishes its checkpoints itself."""

import argparse
import hashlib
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel


def state_of(net, optimizer, step):
    model_state, optimizer_state = get_state_dict(net, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": torch.tensor(step)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint-dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--save-every", type=int, default=4)
    parser.add_argument("--seconds-per-step", type=float, default=0.0)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    torch.manual_seed(4)
    net = DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    start = 0
    # DCP writes .metadata last: a folder that has it is complete
    complete = [found.parent for found in args.checkpoint_dir.glob("step-*/.metadata")]
    if complete:
        newest = max(complete)
        state = state_of(net, optimizer, 0)
        dcp.load(state, checkpoint_id=newest)
        set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        start = int(state["step"])
        print(f"rank {rank} goes on from {newest.name}", flush=True)

    for step in range(start + 1, args.steps + 1):
        torch.manual_seed(1000 * step + rank)  # a repeated step gets the same samples
        loss = nn.functional.cross_entropy(net(torch.rand(16, 64)), torch.randint(10, (16,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % args.save_every == 0:
            dcp.save(state_of(net, optimizer, step), checkpoint_id=args.checkpoint_dir / f"step-{step:06}")
        time.sleep(args.seconds_per_step)

    if rank == 0:
        weights = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
        print(f"Result: world size {dist.get_world_size()}, weights {hashlib.sha256(weights).hexdigest()[:16]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
