"""A loop with Accelerate and rankup's lines: the loader is not given to Accelerate."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rankup


def main():
    job = rankup.init(run="runs/accelerate")
    accelerator = Accelerator(cpu=True)
    dataset = TensorDataset(torch.rand(240, 16), torch.randint(4, (240,)))
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    job.track(model=model, optimizer=optimizer, scheduler=scheduler)
    for _ in job.epochs(3):
        for x, y in job.batches(DataLoader(dataset, batch_size=24, shuffle=True)):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            with job.step(loss=loss):
                optimizer.step()
                scheduler.step()
            optimizer.zero_grad()
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), "accelerate_loop.pt")


if __name__ == "__main__":
    main()
