"""Image files, also those in shards, as samples: decoded when a batch asks for them, or taken from the node's cache of
decoded images."""

from collections.abc import Callable, Sequence

import torch
from torchvision.transforms import RandomResizedCrop

from rankup.loop.seeds import derive_seed, seed_host

from ..config.settings import Augment
from .samples import random_numbers
from .sources.decode import decode, decode_bytes
from .sources.sets import FileSet, version_of

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # of the crops for ImageNet: share of the area, width / height


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


def center_crop(image: torch.Tensor, *, shorter_side: int, size: int) -> torch.Tensor:
    """Resize the shorter side of uint8 [3, H, W], and cut out the middle: uint8 [3, size, size]."""
    height, width = image.shape[1:]
    longer_side = shorter_side * max(height, width) // min(height, width)
    height, width = (shorter_side, longer_side) if height <= width else (longer_side, shorter_side)
    top, left = round((height - size) / 2), round((width - size) / 2)
    return resize(image, height, width)[:, top : top + size, left : left + size]


def random_crop(image: torch.Tensor, *, size: int) -> torch.Tensor:
    """ImageNet's crop for training: a random part of uint8 [3, H, W], resized to [3, size, size]; half are mirrored.

    The numbers come from torch's random state, in torchvision's order, so RandomResizedCrop and RandomHorizontalFlip
    with the same state give the same pixels. https://arxiv.org/abs/1409.4842 has the recipe.
    """
    top, left, height, width = RandomResizedCrop.get_params(image, SCALE, RATIO)
    cropped = resize(image[:, top : top + height, left : left + width], size, size)
    return cropped.flip(2) if torch.rand(1) < 0.5 else cropped


def shift_and_flip_into(
    place: torch.Tensor, image: torch.Tensor, numbers: Sequence[float], *, mirror: bool = True
) -> None:
    """What `shift_and_flip` makes of one image, uint8 [3, S, S], written to `place`, of the same shape.

    Moving a rectangle takes 40 µs at 224 x 224; the indices of single pixels, which suit small images, take 800.
    numbers: three in [0, 1), see there.
    """
    size = image.shape[1]
    reach = max(1, size // 8)
    down, right = (reach - int(number * (2 * reach + 1)) for number in numbers[:2])
    (rows, from_rows), (columns, from_columns) = _overlap(size, down), _overlap(size, right)
    part = image[:, from_rows, from_columns]
    if mirror and numbers[2] < 0.5:
        part = part.flip(2)
        columns = slice(size - columns.stop, size - columns.start)
    place.zero_()
    place[:, rows, columns] = part


def _overlap(size: int, shift: int) -> tuple[slice, slice]:
    """Where `size` pixels that move by `shift` arrive, without those that leave the image, and where they come from."""
    return slice(max(0, shift), size + min(0, shift)), slice(max(0, -shift), size - max(0, shift))
