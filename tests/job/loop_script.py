"""A loop of a user's own: DDP, batch norm, dropout, momentum, a schedule. It prints the digest of its weights."""

import hashlib
import os
import sys

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import rankup

job = rankup.init(sys.argv[1], seed=3, save_every_steps=int(os.environ.get("SAVE_EVERY", "0")) or None)
points = torch.randn(100, 8, generator=torch.Generator().manual_seed(1))
dataset = TensorDataset(points, points.sum(1).sign().long().clamp(0))
loader = DataLoader(dataset, batch_size=12, shuffle=True, drop_last=True)  # 4 are left out
net = torch.nn.Sequential(
    torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(16, 2)
).to(job.device)
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
job.track(model=model, optimizer=optimizer, scheduler=scheduler)

die = os.environ.get("DIE", "")  # "rank:step:signal", once
for _epoch in job.epochs(3):
    model.train()
    for x, y in job.batches(loader):
        loss = torch.nn.functional.cross_entropy(model(x.to(job.device)), y.to(job.device)) * job.weight
        optimizer.zero_grad()
        loss.backward()
        with job.step(loss=loss):
            optimizer.step()
            scheduler.step()
        if die.split(":")[:2] == [str(job.rank), str(job.step_number)] and not os.path.exists(f"{sys.argv[1]}.died"):
            open(f"{sys.argv[1]}.died", "w").close()
            os.kill(os.getpid(), int(die.split(":")[2]))
    model.eval()
    right = total = 0
    with torch.no_grad():
        for x, y in job.eval_batches(loader):
            right += int((net(x.to(job.device)).argmax(1).cpu() == y).sum())
            total += len(y)
    seen = job.gather([right, total])
    assert sum(each[1] for each in seen) == 96
    job.log(accuracy=sum(each[0] for each in seen) / 96)
if job.is_main:
    state = net.state_dict()
    print("digest", hashlib.sha256(b"".join(state[name].cpu().numpy().tobytes() for name in sorted(state))).hexdigest())
job.finish()
