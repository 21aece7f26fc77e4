"""Decode image files to upright RGB: JPEG and WebP by torchvision, everything else by PIL.

This module imports torchvision, 0.1 to 0.4 s: whoever holds images in memory does without it.
"""

import io
from pathlib import Path

import numpy as np
import torch
import torchvision  # noqa: F401 (it registers torch.ops.image)
from PIL import ExifTags, Image

from rankup import UserError

# PIL's name of a format -> torchvision's operator, which is faster: JPEG 1.2 to 2 times, WebP 1.6 times; PNG would not
# be. MPO is what many phones write: a JPEG with more pictures behind it. The functions in torchvision.io warn, for each
# image, that TorchCodec is to replace them; where a later torchvision lacks the operators, PIL decodes everything.
_OPERATORS = {"JPEG": "decode_jpeg", "MPO": "decode_jpeg", "WEBP": "decode_webp"}
_FASTER = {name: getattr(torch.ops.image, of) for name, of in _OPERATORS.items() if hasattr(torch.ops.image, of)}
# EXIF orientation -> how to turn the picture upright; others are
_TURNS = {2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
          5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
          8: Image.Transpose.ROTATE_90}
_RGB = 3  # the number of torchvision.io.ImageReadMode.RGB

Image.preinit()  # PIL's commonest formats: loaded by the fork server once, not at the first image of each rank


def decode(path: str, *, at_least: int | None = None) -> torch.Tensor:
    """One image file, see `decode_bytes`. Raises UserError, naming the file, if it is missing or can't be decoded."""
    try:
        data = bytearray(Path(path).read_bytes())
    except FileNotFoundError as error:
        raise UserError(f"{path}: is gone since the folder was listed.") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from error
    return decode_bytes(data, path, at_least=at_least)


def decode_bytes(data: bytearray, name: str, *, at_least: int | None = None) -> torch.Tensor:
    """The image in `data`: uint8 [3, H, W], RGB, turned as its EXIF orientation says. Its strides are those of
    [H, W, 3]. A bytearray, since torch warns of memory that can't be written, such as bytes; `name` is for messages.

    With `at_least`, a JPEG that is to be made smaller may be decoded at 1/2, 1/4 or 1/8, neither side below so many
    pixels: of large photographs that takes a third of the time.
    Raises UserError if it is truncated, no image, or too large to be decoded.
    """
    try:
        # PIL reads the head alone here, 25 µs. It says what the file is, and refuses one that would fill the memory.
        with Image.open(io.BytesIO(data)) as file:
            whole = file.size
            if at_least is not None:
                file.draft("RGB", (at_least, at_least))
            # Not CMYK or transparency, of which torchvision makes other colours than PIL, nor reduced sizes
            if file.mode in ("RGB", "L") and file.size == whole and file.format in _FASTER and _turn(file) is None:
                image = _decode_fast(data, file.format)
                if image is not None:
                    return image
            file.load()  # PIL turns a TIFF by itself, and forgets its orientation then
            turn = _turn(file)
            upright = file if turn is None else file.transpose(turn)
            # PIL warns when it drops the transparency of a palette, unless the image passes through RGBA.
            rgb = upright.convert("RGBA").convert("RGB") if "transparency" in file.info else upright.convert("RGB")
            return torch.from_numpy(np.array(rgb)).permute(2, 0, 1)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise UserError(f"{name}: has too many pixels to be decoded safely. Make it smaller.") from error
    # Every exception: for damaged files PIL's decoders also raise SyntaxError, struct.error and IndexError.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{name}: is no image that can be decoded ({reason}). Remove or repair it.") from error


def _decode_fast(data: bytearray, format: str) -> torch.Tensor | None:
    """uint8 [3, H, W] by torchvision, or None for what it refuses: PIL may read that, or says better what is wrong."""
    try:
        image: torch.Tensor = _FASTER[format](torch.frombuffer(data, dtype=torch.uint8), _RGB)
    except RuntimeError:
        return None
    return image if image.ndim == 3 else None  # an animation has four dimensions


def _turn(file: Image.Image) -> Image.Transpose | None:
    # PIL's reader and not torchvision's: it also knows the orientation in XMP, which editors write.
    try:
        return _TURNS.get(file.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:
        return None  # ImageNet has a file with damaged EXIF data too; the picture itself is whole
