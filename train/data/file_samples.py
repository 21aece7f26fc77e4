"""Image files, also those in shards, as samples: decoded when a batch asks for them, or taken from the node's cache of
decoded images."""

from collections.abc import Callable

import torch

from rankup.loop.seeds import derive_seed, seed_host

from ..config.settings import Augment
from .crops import center_crop, random_crop, shift_and_flip_into
from .random_numbers import random_numbers
from .sources.decode import decode, decode_bytes
from .sources.sets import FileSet, version_of


class FileSamples:
    """The images of a FileSet, prepared by DataLoader workers, as many as `num_workers` says.

    Without augmentation the shorter side is resized to `files.shorter_side`, and the middle is cut out. `augment`, for
    training: True shifts and mirrors this middle; imagenet takes a random part of the whole image in its place;
    trivial does one random change of colour or shape to that part besides (TrivialAugmentWide).
    """

    def __init__(self, files: FileSet, *, augment: Augment = False, seed: int = 0, channels: int = 3) -> None:
        """`channels`: 3, or 1 to average the colours for a model that was trained on grey images."""
        self.files, self.augment, self.seed, self.channels = files, augment, seed, channels
        self.change = _trivial_augment() if augment == "trivial" else None

    def __len__(self) -> int:
        return len(self.files)

    @property
    def storage(self) -> torch.Tensor | None:
        """The numbers of the samples as they lie in shards, int64 [N]; None: in order."""
        return self.files.storage

    def batch(self, indices: torch.Tensor, epoch: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Images uint8 [B, C, S, S] and labels int64 [B]. Raises DataError for a file that cannot be decoded.

        The random numbers of an image are those of its own (seed, epoch, number): neither the ranks nor the workers
        change a pixel. Those of imagenet and trivial come from torch's random state, which is seeded for each image.
        """
        size = self.files.image_size
        images = torch.empty(len(indices), 3, size, size, dtype=torch.uint8)
        numbers = random_numbers(self.seed, epoch or 0, indices, 3).tolist()
        for place, index, own in zip(images, indices.tolist(), numbers, strict=True):
            if epoch is None or self.augment is False:
                place.copy_(self._middle(index))
            elif self.augment is True:
                shift_and_flip_into(place, self._middle(index), own, mirror=self.files.mirror)
            else:
                place.copy_(self._random_part(index, epoch))
        if self.channels == 1:
            images = images.float().mean(1, keepdim=True).round().to(torch.uint8)
        return images, self.files.labels[indices]

    def _middle(self, index: int) -> torch.Tensor:
        """The middle of one image, uint8 [3, S, S]: from the cache, or decoded and put there."""
        cache, contents = self.files.cache, self.files.contents
        if cache is None:
            return self._decode_middle(index)
        path = self.files.paths[index]
        # Before the file is read: if it changes meanwhile, the entry is out of date
        version = version_of(path) if contents is None else contents.version(index)
        image = cache.read(index, path, version)
        if image is None:
            image = self._decode_middle(index)
            cache.write(index, version, image)
        return image

    def _decode_middle(self, index: int) -> torch.Tensor:
        files = self.files
        # ImageNet's recipe says how each pixel is made: nothing is decoded at a reduced size for it
        whole = self._decode(index, at_least=None if files.margin else files.image_size)
        return center_crop(whole, shorter_side=files.shorter_side, size=files.image_size)

    def _random_part(self, index: int, epoch: int) -> torch.Tensor:
        image = self._decode(index)
        seed_host(derive_seed(self.seed, epoch, index))
        part = random_crop(image, size=self.files.image_size)
        return part if self.change is None else self.change(part)

    def _decode(self, index: int, *, at_least: int | None = None) -> torch.Tensor:
        path, contents = self.files.paths[index], self.files.contents
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
