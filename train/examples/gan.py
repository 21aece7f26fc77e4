"""A GAN with two networks and two optimizers. It saves a moving average of the generator.

The images are the digits in train/samples, stored in the format of MNIST.
"""

import copy
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchvision.datasets import MNIST

import rankup

DATA = Path(__file__).parents[1] / "samples" / "digits"
EPOCHS, NOISE, PIXELS = 3, 16, 64


def generator_network() -> nn.Module:
    return nn.Sequential(nn.Linear(NOISE, 64), nn.ReLU(), nn.Linear(64, PIXELS), nn.Tanh())


def critic_network() -> nn.Module:
    return nn.Sequential(nn.Linear(PIXELS, 64), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(64, 1))


def main() -> None:
    job = rankup.init(run="runs/gan")
    device = job.device
    torch.manual_seed(0)

    dataset = TensorDataset(MNIST(DATA).data.reshape(-1, PIXELS) / 127.5 - 1)  # between -1 and 1
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler, drop_last=True)
    generator = DistributedDataParallel(generator_network().to(device))
    critic = DistributedDataParallel(critic_network().to(device))
    average = copy.deepcopy(generator.module)
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    c_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))
    torch.manual_seed(1 + dist.get_rank())  # each rank draws other noise
    job.track(generator=generator, critic=critic, average=average, g_optimizer=g_optimizer, c_optimizer=c_optimizer)

    for epoch in job.epochs(EPOCHS):
        for (real,) in job.batches(loader):
            with job.step():
                real = real.to(device)
                fake = generator(torch.randn(len(real), NOISE, device=device))
                scores = critic(torch.cat([real, fake.detach()])).chunk(2)
                c_loss = F.softplus(-scores[0]).mean() + F.softplus(scores[1]).mean()
                c_optimizer.zero_grad()
                c_loss.backward()
                c_optimizer.step()

                g_loss = F.softplus(-critic(fake)).mean()
                g_optimizer.zero_grad()
                g_loss.backward()
                g_optimizer.step()
                with torch.no_grad():
                    for old, new in zip(average.parameters(), generator.parameters(), strict=True):
                        old.lerp_(new, 0.05)
        if dist.get_rank() == 0:
            print(f"finished epoch {epoch}")

    if dist.get_rank() == 0:
        torch.save(average.state_dict(), "gan.pt")


if __name__ == "__main__":
    main()
