"""A typical ImageNet loop: augmented images from worker processes, SGD with a schedule, the accuracy of each epoch.

The images are the digits in train/samples, stored in the format of MNIST, so that the example runs in seconds.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms
from torchvision.datasets import MNIST

import rankup

DATA = Path(__file__).parents[1] / "samples" / "digits"
EPOCHS, WORKERS = 3, 1


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Flatten(), nn.Dropout(0.1), nn.Linear(16 * 4 * 4, 10),
    )


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[list[torch.Tensor]], device: torch.device) -> tuple[int, int]:
    """Return how many images this rank has got right, and how many it has seen."""
    model.eval()
    right = seen = 0
    for images, labels in batches:
        right += model(images.to(device)).argmax(1).eq(labels.to(device)).sum().item()
        seen += len(labels)
    model.train()
    return right, seen


def main() -> None:
    job = rankup.init(run="runs/imagenet")
    device = job.device
    torch.manual_seed(0)

    augmented = transforms.Compose([transforms.RandomCrop(8, padding=1), transforms.ToTensor()])
    train_set = MNIST(DATA, train=True, transform=augmented)
    val_set = MNIST(DATA, train=False, transform=transforms.ToTensor())
    sampler = DistributedSampler(train_set, drop_last=True)
    loader = DataLoader(train_set, 32, sampler=sampler, num_workers=WORKERS, drop_last=True)
    val_loader = DataLoader(val_set, 64, sampler=DistributedSampler(val_set, shuffle=False))
    model = DistributedDataParallel(network().to(device))
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, epochs=EPOCHS, steps_per_epoch=len(loader))
    job.track(model=model, optimizer=optimizer, scheduler=scheduler)

    for epoch in job.epochs(EPOCHS):
        for images, labels in job.batches(loader):
            loss = criterion(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            with job.step(loss=loss):
                optimizer.step()
                scheduler.step()
        accuracy = job.log(accuracy=evaluate(model, job.eval_batches(val_loader), device))["accuracy"]
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.4f}")
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "imagenet.pt")


if __name__ == "__main__":
    main()
