"""Training by Lightning's Trainer."""

import argparse
import hashlib

import lightning as L
import torch
from rings import Net, Rings, criterion
from torch.utils.data import DataLoader


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, batch_index):
        points, labels = batch
        return criterion(self.net(points), labels)

    def validation_step(self, batch, batch_index):
        points, labels = batch
        self.log("loss", criterion(self.net(points), labels), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="of each process")
    parser.add_argument("--devices", type=int, default=2, help="processes of each node")
    parser.add_argument("--num-nodes", type=int, default=1)
    args = parser.parse_args()

    L.seed_everything(0)
    module = Module()
    train_loader = DataLoader(Rings(512, seed=1), args.batch_size, shuffle=True)
    test_loader = DataLoader(Rings(200, seed=2), args.batch_size)
    trainer = L.Trainer(
        devices=args.devices, num_nodes=args.num_nodes, strategy="ddp", max_epochs=args.epochs, logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, train_loader, test_loader)
    if trainer.is_global_zero:
        print(f"epoch {args.epochs}: loss {trainer.callback_metrics['loss']:.7f}")
        torch.save(module.net.state_dict(), "rings.pt")
        weights = b"".join(p.detach().numpy().tobytes() for p in module.parameters())
        print(f"Result: world size {trainer.world_size}, weights {hashlib.sha256(weights).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
