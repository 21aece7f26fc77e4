"""Image files as samples, also those that lie in the rows of a table: decoded when a batch asks for them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torchvision.transforms import RandomResizedCrop

from rankup.seeds import derive_seed, seed_host

from ..config.settings import Augment
from .samples import random_numbers
from .sources.decode import decode, decode_bytes

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # of the crops for ImageNet: share of the area, width / height


class Contents(Protocol):
    """Image files that lie in something else, by the numbers of their samples."""

    def read(self, number: int) -> bytearray:
        """The bytes of a file. Raises UserError."""


@dataclass(eq=False)
class FileSamples:
    """Image files, prepared by DataLoader workers, as many as `num_workers` says.

    labels: int64 [N]; mean, std: one per channel, of images / 255; origin: one line. image_size: height and width that
    they get; margin: whether, where nothing is random, the shorter side is resized to 8/7 of it first, as ImageNet's
    recipe does (256 for 224); contents: what reads them where they lie in something else; `paths` are then names for
    messages alone.

    Without augmentation the shorter side is resized, and the middle is cut out. `augment`, for training: True shifts
    and mirrors this middle; imagenet takes a random part of the whole image in its place; trivial does one random
    change of colour or shape to that part besides (TrivialAugmentWide). channels: 3, or 1 to average the colours for a
    model that was trained on grey images.
    """

    paths: Sequence[str]
    labels: torch.Tensor
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    name: str
    origin: str
    image_size: int = 224
    mirror: bool = True
    margin: bool = False
    contents: Contents | None = None
    augment: Augment = False
    seed: int = 0
    channels: int = 3

    def __post_init__(self) -> None:
        self._change = _trivial_augment() if self.augment == "trivial" else None

    def __len__(self) -> int:
        return len(self.paths)

    def first(self, count: int) -> "FileSamples":
        """The first `count` samples, all of them with 0."""
        if not 0 < count < len(self):
            return self
        return replace(self, paths=self.paths[:count], labels=self.labels[:count].clone())

    def scaled(self, size: int | None) -> "FileSamples":
        """The same files, decoded to `size` x `size` pixels; None: to 224 x 224."""
        return self if size is None else replace(self, image_size=size)

    def batch(self, indices: torch.Tensor, epoch: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Images uint8 [B, C, S, S] and labels int64 [B]. Raises UserError for a file that cannot be decoded.

        The random numbers of an image are those of its own (seed, epoch, number): neither the ranks nor the workers
        change a pixel. Those of imagenet and trivial come from torch's random state, which is seeded for each image.
        """
        size = self.image_size
        images = torch.empty(len(indices), 3, size, size, dtype=torch.uint8)
        numbers = random_numbers(self.seed, epoch or 0, indices, 3).tolist()
        for place, index, own in zip(images, indices.tolist(), numbers, strict=True):
            if epoch is None or self.augment is False:
                place.copy_(self._middle(index))
            elif self.augment is True:
                place.copy_(shift_and_flip_one(self._middle(index), own, mirror=self.mirror))
            else:
                place.copy_(self._random_part(index, epoch))
        if self.channels == 1:
            images = images.float().mean(1, keepdim=True).round().to(torch.uint8)
        return images, self.labels[indices]

    def _middle(self, index: int) -> torch.Tensor:
        """The middle of one image, uint8 [3, S, S], once its shorter side is resized."""
        # ImageNet's recipe says how each pixel is made: nothing is decoded at a reduced size for it
        size = self.image_size
        whole = self._decode(index, at_least=None if self.margin else size)
        height, width = whole.shape[1:]
        shorter = round(size * 256 / 224) if self.margin else size
        longer = shorter * max(height, width) // min(height, width)
        height, width = (shorter, longer) if height <= width else (longer, shorter)
        top, left = round((height - size) / 2), round((width - size) / 2)
        return resize(whole, height, width)[:, top : top + size, left : left + size]

    def _random_part(self, index: int, epoch: int) -> torch.Tensor:
        """A random part of one image, uint8 [3, S, S]; half are mirrored. https://arxiv.org/abs/1409.4842

        The numbers come from torch's random state, in torchvision's order, so RandomResizedCrop and
        RandomHorizontalFlip with the same state give the same pixels.
        """
        image = self._decode(index)
        seed_host(derive_seed(self.seed, epoch, index))
        top, left, height, width = RandomResizedCrop.get_params(image, SCALE, RATIO)
        part = resize(image[:, top : top + height, left : left + width], self.image_size, self.image_size)
        part = part.flip(2) if torch.rand(1) < 0.5 else part
        return part if self._change is None else self._change(part)

    def _decode(self, index: int, *, at_least: int | None = None) -> torch.Tensor:
        path, contents = self.paths[index], self.contents
        if contents is None:
            return decode(path, at_least=at_least)
        return decode_bytes(contents.read(index), path, at_least=at_least)


def _trivial_augment() -> Callable[[torch.Tensor], torch.Tensor]:
    """https://arxiv.org/abs/2103.10158, as torchvision's own training script uses it: bilinear."""
    from torchvision.transforms import v2  # here: 0.3 s, which the other recipes do without

    change: Callable[[torch.Tensor], torch.Tensor] = v2.TrivialAugmentWide(
        interpolation=v2.InterpolationMode.BILINEAR
    )
    return change


# One image made as large as the model wants it: the same pixels as torchvision.transforms.v2 gives. v2 itself is not
# imported: 0.3 s in each process, for what interpolate does ---------------------------------------------------------


def resize(image: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """uint8 [3, H, W] -> uint8 [3, height, width]: bilinear with antialiasing, in whole numbers.

    Three channels with the strides of [H, W, 3], as `decode` gives them, take a quarter of PIL's time.
    """
    if image.shape[1:] == (height, width):
        return image
    size = (height, width)
    return torch.nn.functional.interpolate(image[None], size=size, mode="bilinear", antialias=True)[0]


def shift_and_flip_one(image: torch.Tensor, numbers: Sequence[float], *, mirror: bool) -> torch.Tensor:
    """What `shift_and_flip` makes of one image, uint8 [3, S, S], with its three numbers.

    A rectangle takes a twentieth of the time that the indices of single pixels do, which suit many small images.
    """
    size, reach = image.shape[1], max(1, image.shape[1] // 8)
    top, left = (int(number * (2 * reach + 1)) for number in numbers[:2])
    padded = torch.nn.functional.pad(image, (reach, reach, reach, reach))
    part = padded[:, top : top + size, left : left + size]
    return part.flip(2) if mirror and numbers[2] < 0.5 else part
