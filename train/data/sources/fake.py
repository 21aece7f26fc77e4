"""Made-up images with something to learn, for trying a launch where no data is at hand."""

import torch

from ...config import Config
from ..samples import TensorSamples
from .fetch import Say

GRID = 4  # each class is a pattern of 4 x 4 squares per channel


def load(config: Config, say: Say) -> tuple[TensorSamples, TensorSamples]:
    """`fake_samples` images to train on, a quarter as many to test on: uint8 [N, 3, S, S], S = image_size or 32."""
    return _half(config, train=True), _half(config, train=False)


def _half(config: Config, *, train: bool) -> TensorSamples:
    """An image is its class's pattern (0 or 64) plus noise (0..191).

    Only integers are drawn at random, so that every kind of CPU makes the same images. They do not depend on the
    run's seed.
    """
    samples, num_classes, image_size = config.fake_samples, config.fake_classes, config.image_size or 32
    count = samples if train else max(1, samples // 4)
    shared = torch.Generator().manual_seed(20)
    patterns = torch.randint(0, 2, (num_classes, 3, GRID, GRID), generator=shared, dtype=torch.uint8) * 64
    cell = torch.arange(image_size) * GRID // image_size

    own = torch.Generator().manual_seed(21 if train else 22)
    labels = (torch.arange(count) % num_classes)[torch.randperm(count, generator=own)]
    images = torch.randint(0, 192, (count, 3, image_size, image_size), generator=own, dtype=torch.uint8)
    for start in range(0, count, 1024):
        piece = patterns[labels[start : start + 1024]]
        images[start : start + 1024] += piece[:, :, cell][:, :, :, cell]
    classes = tuple(f"class {number}" for number in range(num_classes))
    return TensorSamples(
        images, labels, classes, mean=(0.5,) * 3, std=(0.25,) * 3, name="fake", origin="made up, no real images"
    )
