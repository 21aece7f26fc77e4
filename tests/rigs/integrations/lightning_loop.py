"""Lightning's Trainer with dropout, a schedule, a validation, fp16 whose loss scale grows until it skips steps, and
rankup's callback."""

import os
import warnings

import lightning as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rankup
from rankup.integrations.lightning import RankupCallback


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.net(x), y), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def main():
    warnings.simplefilter("ignore")  # Lightning gives advice as warnings
    job = rankup.init(run="runs/lightning")
    dataset = TensorDataset(torch.rand(240, 16), torch.randint(4, (240,)))
    module = Classifier()
    trainer = L.Trainer(
        accelerator="cpu", devices=job.world_size, strategy="ddp", max_steps=30, logger=False,
        max_epochs=int(os.environ.get("MAX_EPOCHS", 4)),  # -1: only the steps are limited
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[RankupCallback(job)],
        plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2))],
    )
    loader = DataLoader(dataset, batch_size=24, shuffle=True)
    trainer.fit(module, job.batches(loader), DataLoader(dataset, batch_size=60))
    if trainer.is_global_zero:
        torch.save(module.state_dict(), "lightning_loop.pt")


if __name__ == "__main__":
    main()
