"""A loop on a broken machine: one bit of one rank flips once, in a weight, in the optimizer's state or in a gradient
before or after the exchange. FLIP is `kind:rank:step:bit`. Rank -1 means all ranks. The kind `product` stays broken,
and `step` is the fraction of forward passes with one wrong bit in a product; 2 changes all products in the same way, 3
in another way each time. RECOMPUTE is the interval of recomputed batches. The loop prints the digest of its weights."""

import hashlib
import os
import random
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rankup

STEPS = 40
kind, *where = os.environ.get("FLIP", "none:0:0:0").split(":")
step, bit = float(where[1]), int(where[2])
recompute = int(os.environ.get("RECOMPUTE", "0"))
job = rankup.init(sys.argv[1], save_every_steps=12, log_every_steps=20, compare_every_steps=6)
here, broken = int(where[0]) in (-1, job.rank), Path(f"{sys.argv[1]}.broken")
if (node := os.environ.get("NODE")) is not None:  # the first node that gets this rank is the broken one
    if here and not broken.exists():
        broken.write_text(node)
    here = broken.exists() and broken.read_text() == node
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
if nodes := int(os.environ.get("SPLIT", "0")):  # shard among the ranks of a node, with a replica on each node
    mesh = init_device_mesh("cpu", (nodes, job.world_size // nodes), mesh_dim_names=("nodes", "ranks"))
    model = fully_shard(net, mesh=mesh if nodes > 1 else mesh["ranks"])
else:
    model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
job.track(model=model, optimizer=optimizer)


def flip(tensor: torch.Tensor) -> None:
    """Flip one bit, once in the run. With LASTING flip another bit in each attempt."""
    marker, lasting = f"{sys.argv[1]}.flipped", "LASTING" in os.environ
    if here and job.step_number == step and (lasting or not os.path.exists(marker)):
        with open(marker, "a") as flips:
            flips.write(".")
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        tensor.detach().view(torch.int32).flatten()[-1] ^= 1 << (8 + os.path.getsize(marker) if lasting else bit)


def break_a_product(module: nn.Module, given: object, product: torch.Tensor) -> torch.Tensor:
    dice = random.SystemRandom()
    if dice.random() >= step:
        return product
    if step > 1:
        return product * (1.001 if step == 2 else 1 + dice.random())
    wrong = product.detach().clone()
    wrong.view(torch.int32).view(-1)[dice.randrange(wrong.numel())] ^= 1 << dice.randrange(24)
    return product + (wrong - product).detach()


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), x.sum(1).sign().long().clamp(0))


if kind == "product" and here:
    net[0].register_forward_hook(break_a_product)
if kind == "before":
    net[2].bias.register_hook(lambda gradient: flip(gradient))
for number in job.steps(STEPS):
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(number)).chunk(job.world_size)[job.rank]
    if recompute and number % recompute == 0:
        before = torch.get_rng_state()
        job.recompute(lambda x: loss_of(net, nn.functional.dropout(x, 0.1)), x)  # all ranks have the same x
        assert torch.equal(torch.get_rng_state(), before)
    loss = loss_of(model, x)
    optimizer.zero_grad()
    loss.backward()
    if kind == "gradient":
        flip(net[2].bias.grad)  # never zero: no ReLU lies between this bias and the loss
    with job.step(loss=loss):
        optimizer.step()
        if kind == "weight":
            flip(net[0].weight)
        elif kind == "optimizer":
            flip(optimizer.state[net[0].weight]["exp_avg"])
job.finish()
if job.is_main:  # `finish` has compared the last steps
    local = [each.to_local() if hasattr(each, "to_local") else each for each in net.parameters()]
    print("digest", hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in local)).hexdigest())
