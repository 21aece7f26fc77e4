"""Lightning's Trainer with `barebones=True`, its own mode for raw speed, in which it reports, saves and checks nothing.

Its documentation advises against this mode for real training, which is slower. From its pages "Speed up model training"
and "DDP optimizations" come gradients as views of the buckets (a static graph was slower) and mixed precision by its
own switch. The images are in memory and are fetched a batch at a time, so no loader slows it down.
"""

import logging
import warnings

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

from bench.racers import shared


class Module(lightning.LightningModule):
    """The model and its training step. Lightning calls the hook in which the clock counts after each batch."""

    def __init__(self, task: shared.Task) -> None:
        super().__init__()
        self.plain, self.clock = shared.build_model(), shared.Clock(task)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.plain(shared.normalize(batch[0])), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=shared.LR, momentum=shared.MOMENTUM)

    def on_train_batch_end(self, *_: object) -> None:
        self.clock.step()


def main() -> None:
    warnings.filterwarnings("ignore")  # advice that does not apply here, such as more workers
    logging.getLogger("lightning").setLevel(logging.ERROR)
    task = shared.read_task()
    together = DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=shared.world_size(),
        strategy=together if shared.world_size() > 1 else "auto",
        precision="bf16-mixed" if task.precision == "bf16" else None,
        max_steps=task.steps, max_epochs=-1, barebones=True, use_distributed_sampler=False,
    )
    dataset = shared.InMemory(task)
    loader = DataLoader(
        dataset, batch_size=task.share, drop_last=True, collate_fn=shared.as_it_is,
        # Lightning tells the sampler its epoch
        sampler=shared.SameOrder(dataset, num_replicas=shared.world_size(), rank=shared.rank()),
    )
    module = Module(task)
    trainer.fit(module, loader)
    shared.finish(task, module.clock, module.plain)


if __name__ == "__main__":
    main()
