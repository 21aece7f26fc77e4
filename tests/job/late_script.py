"""A user's loop in which rank 1 sleeps, or ends early, at its fourth step. The words: the run, where, the exchange."""

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

import rankup

_, run, where, exchange = sys.argv
torch.set_num_threads(1)
job = rankup.init(run, step_timeout_s=6, tensorboard=False, save_every_steps=0)
late = job.rank == 1
group = dist.new_group()


def sleep(gradient: torch.Tensor) -> torch.Tensor:
    if late and job.step_number == 3:
        time.sleep(1000)
    return gradient


class Data(IterableDataset):
    def __iter__(self):
        for number in range(3 if late and where == "uneven" else 8):
            if where == "data" and late and number == 3:
                time.sleep(1000)
            yield torch.ones(4)


class Slow(torch.autograd.Function):
    """Its backward pass takes long, so that its rank has not begun to exchange any gradient."""

    @staticmethod
    def forward(context, value):
        return value.clone()

    @staticmethod
    def backward(context, gradient):
        return sleep(gradient)


net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
model = DistributedDataParallel(net, bucket_cap_mb=0.00001) if exchange == "ddp" else net  # several exchanges
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
job.track(model=model, optimizer=optimizer)
if where == "hook":
    net[0].weight.register_hook(sleep)  # after the exchange of the second layer has begun
for batch in job.batches(DataLoader(Data(), batch_size=None)):
    if where == "code":
        sleep(batch)
    if late and job.step_number == 3 and where == "finish":
        job.finish()
        sys.exit()
    if late and job.step_number == 3 and where == "evaluation":
        job.gather(1)
    if late and job.step_number == 3 and where == "group":
        dist.all_reduce(torch.ones(1), group=group)
    output = model(batch)
    loss = (Slow.apply(output) if where == "backward" else output).sum()
    optimizer.zero_grad()
    loss.backward()
    if exchange == "all_reduce":
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
    elif exchange == "barrier":
        dist.barrier()
    elif exchange == "objects":
        dist.broadcast_object_list([job.step_number], src=0)  # rank 0 does not wait, and gets ahead by several steps
    with job.step(loss=loss):
        optimizer.step()
job.finish()
