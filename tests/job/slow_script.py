"""A compiled loop whose rank 1 is slower. It sleeps, which takes no CPU time from the other ranks."""

import threading
import time

import torch
from torch.nn.parallel import DistributedDataParallel

import rankup
from rankup.observe import stragglers

stragglers.WINDOW_S = 0.2  # in place of 5
job = rankup.init(log_every_steps=2)
model = torch.compile(DistributedDataParallel(torch.nn.Linear(8, 2).to(job.device)), backend="eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job.track(model=model, optimizer=optimizer)
names = sorted(each.name for each in threading.enumerate() if type(each) is threading.Thread)
print(f"threads {' '.join(names)}\n", end="")  # in one write: other ranks print too
for step in job.steps(100):
    time.sleep(0.1 if job.rank else 0.005)
    loss = model(torch.full((4, 8), step / 100, device=job.device)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    with job.step():
        optimizer.step()
