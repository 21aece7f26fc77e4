"""torchft: the loop tuned by hand with torchft's Manager, DistributedDataParallel and Optimizer around it.

Each process is a replica group of its own, and rank 0 runs the lighthouse, which torchft's README runs beside the job.
A step is a quorum, the all-reduce of the gradients by gloo, and a vote whether to apply it.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from bench.racers import shared
from bench.racers.hand_tuned import Shares
from train.parallel.model import keep_freed_memory


def lighthouse() -> tuple[LighthouseServer | None, str]:
    """Return rank 0's lighthouse, or None on other ranks, and its address."""
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "0"))
    store = dist.TCPStore(address, port, is_master=shared.world_size() == 1)  # torchrun's own, or one of this process
    server = None
    if shared.rank() == 0:
        server = LighthouseServer(bind="127.0.0.1:0", min_replicas=shared.world_size(), join_timeout_ms=60_000)
        store.set("lighthouse", server.address())
    return server, store.get("lighthouse").decode()


def main() -> None:
    task = shared.read_task()
    keep_freed_memory()
    server, address = lighthouse()
    images, labels = shared.load_images(task.data, train=True)
    plain = shared.build_model().to(memory_format=torch.channels_last)
    fused = torch.optim.SGD(plain.parameters(), shared.LR, shared.MOMENTUM, fused=True)
    own = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)), min_replica_size=shared.world_size(),
        load_state_dict=lambda state: None, state_dict=dict, replica_id=f"racer{shared.rank()}", rank=0, world_size=1,
        store_addr="127.0.0.1", store_port=own.port, lighthouse_addr=address,
    )
    model, optimizer = DistributedDataParallel(manager, plain), Optimizer(manager, fused)
    clock = shared.Clock(task)
    for chosen in Shares(task, len(labels)):
        optimizer.zero_grad()  # begins the quorum
        with task.autocast():
            loss = nn.functional.cross_entropy(model(shared.normalize(images[chosen])), labels[chosen])
        loss.backward()
        optimizer.step()  # votes
        if clock.step():
            break
    shared.finish(task, clock, plain)
    manager.shutdown(wait=False)
    if server is not None:
        server.shutdown()


if __name__ == "__main__":
    main()
