"""Hugging Face Accelerate's loop with `prepare` and `accelerator.backward`, as in its quick tour.

For speed it follows its documentation: mixed precision by its own switch, `split_batches=False` (each process loads its
own batches and none are cut up), DDP's options through DistributedDataParallelKwargs (gradients as views of the
buckets; a static graph was slower), no `gather` and no `.item()` in the loop. The images are in memory and are fetched
a batch at a time, so no loader slows it down.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from torch.utils.data import DataLoader

from bench.racers import shared


def main() -> None:
    task = shared.read_task()
    accelerator = Accelerator(
        cpu=True, mixed_precision="bf16" if task.precision == "bf16" else "no",
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    dataset = shared.InMemory(task)
    loader = DataLoader(
        dataset, batch_size=task.share, drop_last=True, collate_fn=shared.as_it_is,
        sampler=shared.SameOrder(dataset, num_replicas=1, rank=0),  # `prepare` gives each process its part
    )
    plain = shared.build_model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=shared.LR, momentum=shared.MOMENTUM)
    model, optimizer, loader = accelerator.prepare(plain, optimizer, loader)
    clock = shared.Clock(task)
    for _ in range(clock.epochs(len(loader))):  # the loader tells the sampler its epoch
        for images, labels in loader:
            optimizer.zero_grad()
            # `prepare` has wrapped the model's forward in autocast
            loss = nn.functional.cross_entropy(model(shared.normalize(images)), labels)
            accelerator.backward(loss)
            optimizer.step()
            if clock.step():
                break
    shared.finish(task, clock, accelerator.unwrap_model(model, keep_fp32_wrapper=False))
    accelerator.end_training()


if __name__ == "__main__":
    main()
