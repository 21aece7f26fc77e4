"""A plain loop with the five lines of Accelerate in it."""

import hashlib

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(3)
    dataset = TensorDataset(torch.rand(256, 64), torch.randint(10, (256,)))
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(dataset, batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
    plain = accelerator.unwrap_model(model)
    weights = b"".join(p.detach().numpy().tobytes() for p in plain.parameters())
    if accelerator.is_main_process:
        digest = hashlib.sha256(weights).hexdigest()[:16]
        print(f"Result: world size {accelerator.num_processes}, weights {digest}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
