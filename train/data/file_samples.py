"""Samples of image files, or of images in the rows of a table. They are decoded when a batch needs them."""

import io
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import ExifTags, Image
from torchvision.transforms import RandomCrop, RandomResizedCrop
from torchvision.transforms.functional import center_crop

from rankup import UserError
from rankup.seeds import derive_seed, seed_host

from ..config.data import Augment
from . import one_line
from .samples import resize

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # those of ImageNet, as usual for photographs
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # the random crops for ImageNet: share of the area, width / height


@dataclass(eq=False)
class FileSamples:
    """Image files. Without augmentation the shorter side is resized, and the centre is cropped. In training, `augment`
    True shifts and mirrors this centre crop; imagenet takes a random crop of the whole image instead; trivial also
    makes one random change of colour or shape to the random crop (TrivialAugmentWide)."""

    paths: Sequence[str]
    labels: torch.Tensor  # int64 [N]
    classes: tuple[str, ...]
    name: str
    origin: str  # one line
    mean: tuple[float, ...] = MEAN  # mean, std: one per channel, of images / 255
    std: tuple[float, ...] = STD
    image_size: int = 224  # height and width in a batch
    margin: bool = False  # resize the shorter side to 8/7 of a centre crop, as in ImageNet's recipe (256 for 224)
    # Returns the bytes of image n, if `paths` are only names. A bytearray: torch warns of bytes, which can't be written
    contents: Callable[[int], bytearray] | None = None
    augment: Augment = False
    seed: int = 0
    channels: int = 3  # 1: average the colours, for a model that was trained on grey images

    def __len__(self) -> int:
        return len(self.paths)

    def cut(self, count: int, size: int | None) -> "FileSamples":
        """Return the first `count` samples (0: all), to be decoded to `size` x `size` pixels (None: 224 x 224)."""
        count = count or len(self)
        return replace(self, paths=self.paths[:count], labels=self.labels[:count], image_size=size or 224)

    def batch(self, indices: torch.Tensor, epoch: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return images, uint8 [B, C, S, S], and labels, int64 [B]. Raises UserError if a file can't be decoded."""
        images = torch.empty(len(indices), 3, self.image_size, self.image_size, dtype=torch.uint8)
        for place, index in zip(images, indices.tolist(), strict=True):
            place.copy_(self._middle(index) if epoch is None or not self.augment else self._augmented(index, epoch))
        if self.channels == 1:
            images = images.float().mean(1, keepdim=True).round().to(torch.uint8)
        return images, self.labels[indices]

    def _middle(self, index: int) -> torch.Tensor:
        # With `margin` decode at full size, because ImageNet's recipe defines each pixel
        size = self.image_size
        whole = self._decode(index, at_least=None if self.margin else size)
        height, width = whole.shape[1:]
        shorter = round(size * 256 / 224) if self.margin else size
        longer = shorter * max(height, width) // min(height, width)
        height, width = (shorter, longer) if height <= width else (longer, shorter)
        middle: torch.Tensor = center_crop(resize(whole[None], height, width)[0], [size, size])
        return middle

    def _augmented(self, index: int, epoch: int) -> torch.Tensor:
        """Return the augmented image `index`, uint8 [3, S, S]: its centre crop, shifted by up to an eighth over black,
        or a random crop (https://arxiv.org/abs/1409.4842). Half of the images are mirrored. Random numbers are drawn
        as torchvision's RandomCrop or RandomResizedCrop, and RandomHorizontalFlip, draw them from torch."""
        size = self.image_size
        image = self._middle(index) if self.augment is True else self._decode(index)
        seed_host(derive_seed(self.seed, epoch, index))
        if self.augment is True:
            part: torch.Tensor = RandomCrop(size, padding=max(1, size // 8))(image)
        else:
            top, left, height, width = RandomResizedCrop.get_params(image, SCALE, RATIO)
            part = resize(image[None, :, top : top + height, left : left + width], size, size)[0]
        part = part.flip(2) if torch.rand(1) < 0.5 else part
        if self.augment == "trivial":  # https://arxiv.org/abs/2103.10158, as in torchvision's own training script
            from torchvision.transforms import v2  # here because it takes 0.3 s, and only this recipe needs it

            part = v2.TrivialAugmentWide(interpolation=v2.InterpolationMode.BILINEAR)(part)
        return part

    def _decode(self, index: int, *, at_least: int | None = None) -> torch.Tensor:
        return decode(self.paths[index], self.contents(index) if self.contents else None, at_least=at_least)


# Decode to upright RGB: JPEG and WebP by torchvision, other formats by PIL --------------------------------------------

# PIL's name of a format -> torchvision's operator, which is faster: JPEG 1.2 to 2 times, WebP 1.6 times, PNG not. Many
# phones write MPO: a JPEG followed by more pictures. Do not use the functions in torchvision.io: for each image they
# warn that TorchCodec will replace them. If a later torchvision has no such operators, PIL decodes everything.
_OPERATORS = {"JPEG": "decode_jpeg", "MPO": "decode_jpeg", "WEBP": "decode_webp"}
_FASTER = {name: getattr(torch.ops.image, of) for name, of in _OPERATORS.items() if hasattr(torch.ops.image, of)}
# EXIF orientation -> how to turn the picture upright. Do not use ImageOps.exif_transpose: it rewrites the EXIF block,
# and raises if any tag in the block has an unusual type.
_TURNS = {2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
          5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
          8: Image.Transpose.ROTATE_90}
_RGB = 3  # torchvision.io.ImageReadMode.RGB

Image.preinit()  # load PIL's most common formats once in the fork server, not at the first image of each rank


def read_file(path: str) -> bytearray:
    """Read a file. Raises UserError, which names the file, if it is missing or can't be read."""
    try:
        return bytearray(Path(path).read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from error


def decode(path: str, data: bytearray | None = None, *, at_least: int | None = None) -> torch.Tensor:
    """Decode the image in the file `path`, or in `data`: uint8 [3, H, W], RGB, with the strides of [H, W, 3], turned as
    its EXIF orientation says. `at_least`: a JPEG may be decoded at 1/2, 1/4 or 1/8 of its size if each side keeps this
    many pixels: large photographs take a third of the time. Raises UserError if it can't be decoded safely."""
    data = read_file(path) if data is None else data
    try:
        # PIL reads only the header here, in 25 µs. It finds the format, and refuses images of over 179 million pixels.
        with Image.open(io.BytesIO(data)) as file:
            whole = file.size
            if at_least is not None:
                file.draft("RGB", (at_least, at_least))
            # For CMYK and transparency torchvision gives other colours than PIL. It can't decode at reduced sizes
            if file.mode in ("RGB", "L") and file.size == whole and file.format in _FASTER and _turn(file) is None:
                with suppress(RuntimeError):  # PIL may read what torchvision refuses, or explains better what is wrong
                    image: torch.Tensor = _FASTER[file.format](torch.frombuffer(data, dtype=torch.uint8), _RGB)
                    if image.ndim == 3:  # an animation has four dimensions
                        return image
            file.load()  # PIL itself turns a TIFF here, and then removes its orientation
            turn = _turn(file)
            upright = file if turn is None else file.transpose(turn)
            # PIL warns when it drops the transparency of a palette, unless the image passes through RGBA.
            rgb = upright.convert("RGBA").convert("RGB") if "transparency" in file.info else upright.convert("RGB")
            return torch.from_numpy(np.array(rgb)).permute(2, 0, 1)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise UserError(f"{path}: has too many pixels to be decoded safely. Make it smaller.") from error
    # Catch every exception: for damaged files PIL's decoders also raise SyntaxError, struct.error and IndexError.
    except Exception as error:
        raise UserError(f"{path}: is no image that can be decoded ({one_line(error)}). Remove or repair it.") from error


def _turn(file: Image.Image) -> Image.Transpose | None:
    # Use PIL's reader, not torchvision's: PIL also reads the orientation in XMP, which image editors write.
    try:
        return _TURNS.get(file.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:
        return None  # the EXIF data are damaged, as in one file of ImageNet, but the picture is good
