"""Lightning's Trainer, as its quick start has it. It has to be told how many processes and nodes there are."""

import argparse
import hashlib

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class LitClassifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--num-nodes", type=int, default=1)
    args = parser.parse_args()
    L.seed_everything(7)
    dataset = TensorDataset(torch.rand(256, 64), torch.randint(10, (256,)))
    module = LitClassifier()
    trainer = L.Trainer(
        accelerator="cpu", devices=args.devices, num_nodes=args.num_nodes, strategy="ddp", max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(dataset, batch_size=16, shuffle=True))
    if trainer.is_global_zero:
        weights = b"".join(p.detach().numpy().tobytes() for p in module.parameters())
        print(f"Result: world size {trainer.world_size}, weights {hashlib.sha256(weights).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
