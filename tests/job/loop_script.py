"""A user's own loop with most of what loops have: DDP, batch norm, dropout, a GradScaler, two optimizers in one step, a
schedule, two accumulated batches for each step, a step that the scaler skips, a loader with its own state, and code
after the last batch. It prints the digest of everything that it tracks."""

import contextlib
import hashlib
import json
import os
import signal
import sys
import threading
import time
import warnings

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import rankup


class Noise(IterableDataset):
    """A data set with other random numbers on each rank. It has a state_dict."""

    first = at = 0

    def __iter__(self):
        self.at, self.first = self.first, 0
        while self.at < 100:
            self.at += 1
            yield torch.randn(16) + self.at

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.first = state["at"]


job = rankup.init(sys.argv[1], seed=3, save_every_steps=int(os.environ.get("SAVE_EVERY", "0")) or None)
plain = "PLAIN" in os.environ  # without layers that depend on the number of ranks
points = torch.randn(100, 8, generator=torch.Generator().manual_seed(1))
dataset = TensorDataset(points, points.sum(1).sign().long().clamp(0))
loader = DataLoader(dataset, batch_size=12, shuffle=True, drop_last=True)  # drops 4
warnings.filterwarnings("ignore", "'set_vital' is deprecated")
noise = StatefulDataLoader(Noise(), batch_size=None)
net = nn.Sequential(
    nn.Linear(8, 16), nn.Identity() if plain else nn.BatchNorm1d(16), nn.Dropout(0.0 if plain else 0.2), nn.ReLU()
)
last = nn.Linear(16, 2)
if os.environ.get("COMPILE") == str(job.rank):
    warnings.filterwarnings("ignore", "The .grad attribute")  # torch.compile reads .grad of every tensor
    last = torch.compile(last, backend="eager")
body, head = (DistributedDataParallel(each.to(job.device)) for each in (net, last))
if os.environ.get("COMPILE") == str(job.rank):
    body = torch.compile(body, backend="eager")
sgd = torch.optim.SGD(body.parameters(), lr=0.1, momentum=0.9)
adam = torch.optim.AdamW(head.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.MultiStepLR(sgd, [6, 6, 15], 0.5)  # keeps a Counter with int keys
scaler = torch.amp.GradScaler(job.device.type, init_scale=2.0**10, growth_interval=5)
best, history, passes = {"accuracy": 0.0, "epochs": 0}, [], torch.zeros(2)
tracked = {"body": body, "head": head, "sgd": sgd, "adam": adam, "scheduler": scheduler, "scaler": scaler, "best": best,
           "history": history, "passes": passes}
if "UNTRACKED" not in os.environ:
    job.track(**tracked)
else:  # iterate over two loaders at once
    uneven, even = job.batches(DataLoader(dataset, batch_size=10)), job.batches(loader)
    for (x, _), (y, _) in zip(uneven, even, strict=False):
        assert (uneven.weight, even.weight) == (len(x) * job.world_size / 10, 1.0)
        assert len(y) == 4
        assert job.weight == even.weight  # job.weight is that of the newest batch
        break

if job.is_main:
    names = sorted(each.name for each in threading.enumerate() if type(each) is threading.Thread)
    print(f"threads {' '.join(names)}\n", end="")  # in one write: other ranks print too
die = os.environ.get("DIE", "")  # "rank:step:signal", once
mistake, ahead = os.environ.get("MISTAKE", ""), int(os.environ.get("PREFETCH", "0"))
for _epoch in job.epochs(6):
    net.train()
    noises = iter(job.batches(noise, prefetch=ahead))
    for number, (x, y) in enumerate(job.batches(loader, prefetch=ahead)):
        accumulates = number % 2 == 0  # a run never resumes in the middle of a step
        more = 0.0 if accumulates or plain else next(noises).to(job.device)
        with body.no_sync() if accumulates else contextlib.nullcontext():
            seen = head(body(x.to(job.device)) + more)
            loss = nn.functional.cross_entropy(seen, y.to(job.device)) * job.weight / 2
            infinite = job.step_number == 6 and not accumulates
            scaler.scale(loss * float("inf") if infinite else loss).backward()
        if accumulates:
            continue
        if mistake == "outside":
            best["epochs"] += 1
        with job.step(loss=loss):
            before = [each.detach().clone() for each in net.parameters()]
            for optimizer in (sgd, adam):
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
            scheduler.step()
            assert all(map(torch.equal, before, net.parameters())) == infinite
        if die.split(":")[:2] == [str(job.rank), str(job.step_number)] and not os.path.exists(f"{sys.argv[1]}.died"):
            open(f"{sys.argv[1]}.died", "w").close()
            os.kill(os.getpid(), number := int(die.split(":")[2]))
            if number == signal.SIGTERM:  # otherwise the stop may come any number of steps later
                from tests.rigs.faulting_workload import stop_is_known

                while not stop_is_known(job.group.stop):
                    time.sleep(0.001)
    noises.close()
    net.eval()
    right = count = 0
    with torch.no_grad(), job.phase("evaluation", 600):
        for x, y in job.eval_batches(loader):
            right += int((head.module(net(x.to(job.device))).argmax(1).cpu() == y).sum())
            count += len(y)
    results = job.gather([right, count])
    assert sum(each[1] for each in results) == 96
    accuracy = sum(each[0] for each in results) / 96
    job.log(accuracy=accuracy)
    if mistake == "before":
        best["epochs"] += 1
    with job.change():
        best["accuracy"] = max(best["accuracy"], accuracy)
        best["epochs"] += 1
        history.append(accuracy)
        passes += 1
    if mistake == "epoch":
        best["epochs"] += 1
if job.is_main:
    state = {**net.state_dict(prefix="body."), **head.module.state_dict(prefix="head.")}
    last_epoch = scheduler.state_dict()["last_epoch"]
    digest = hashlib.sha256(repr((best, history, passes.tolist(), scaler.state_dict(), last_epoch)).encode())
    for name in sorted(state):
        digest.update(state[name].cpu().numpy().tobytes())
    print("weights", json.dumps([value for each in state.values() for value in each.flatten().tolist()]))
    print("digest", digest.hexdigest(), best)
job.finish()
