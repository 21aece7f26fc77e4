"""One image made as large as the model wants it: the same pixels as torchvision.transforms.v2 gives.

v2 itself is not imported: 0.3 s in each process, for what interpolate does.
"""

from collections.abc import Sequence

import torch
from torchvision.transforms import RandomResizedCrop

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # of the crops for ImageNet: share of the area, width / height


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
