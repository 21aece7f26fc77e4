"""Every kind of image file is decoded to the upright picture that PIL gives, also when torchvision decodes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from tests.rigs.photographs import photograph
from train.data import file_samples as decoding
from train.data.file_samples import decode


def difference(path: Path) -> int:
    """Return the largest difference of any pixel from PIL's upright picture."""
    with Image.open(path) as file:
        upright = ImageOps.exif_transpose(file)
        rgb = upright.convert("RGBA").convert("RGB") if "transparency" in file.info else upright.convert("RGB")
    found, expected = decode(str(path)), torch.from_numpy(np.array(rgb)).permute(2, 0, 1)
    assert (found.shape, found.dtype) == (expected.shape, torch.uint8)
    return int((found.int() - expected.int()).abs().max())


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list of the formats that torchvision decoded."""
    done: list[str] = []

    def recorded(format: str, usual: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def record(*given: Any) -> torch.Tensor:
            image = usual(*given)
            if image.ndim == 3:
                done.append(format)
            return image

        return record

    monkeypatch.setattr(decoding, "_FASTER", {name: recorded(name, usual) for name, usual in decoding._FASTER.items()})
    return done


@pytest.mark.parametrize(("format", "options"), [
    ("JPEG", {}), ("JPEG", {"quality": 30}), ("JPEG", {"subsampling": 0}), ("JPEG", {"progressive": True}),
    ("WEBP", {}), ("WEBP", {"lossless": True}),
    # Phones write such files: a second picture follows the first
    ("MPO", {"save_all": True, "append_images": [photograph(2, width=101, height=67)]}),
])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_common_formats_are_decoded_by_torchvision_as_by_pil(
    tmp_path: Path, fast: list[str], mode: str, format: str, options: Any
) -> None:
    path = tmp_path / "a.png"  # the content counts, not the name
    photograph(1, width=101, height=67).convert(mode).save(path, format, **options)
    # Pixels are equal if both libraries use the same libjpeg. Other versions may round in another way
    assert difference(path) <= 3
    assert fast == [format]


def transparent(picture: Image.Image) -> Image.Image:
    picture.putalpha(100)
    return picture


OTHERS: dict[str, tuple[Callable[[Image.Image], Image.Image], dict[str, Any]]] = {
    "cmyk.jpg": (lambda p: p.convert("CMYK"), {}),
    "16bit.png": (lambda p: Image.fromarray((np.arange(2400, dtype=np.uint16) * 27).reshape(40, 60)), {}),
    "palette.bmp": (lambda p: p.quantize(16), {}),
    "transparent.png": (lambda p: p.quantize(16), {"transparency": 3}),
    "alpha.png": (transparent, {}),
    "alpha.webp": (transparent, {"lossless": True}),
    "grey-alpha.png": (lambda p: p.convert("LA"), {}),
    "animated.webp": (lambda p: p, {"save_all": True, "append_images": [photograph(4, width=60, height=40)],
                                    "lossless": True}),
    **{f"plain.{suffix}": (lambda p: p, {}) for suffix in ("png", "bmp", "tif", "ppm")},
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.filterwarnings("error")
def test_other_formats_are_decoded_by_pil(tmp_path: Path, fast: list[str], name: str) -> None:
    change, options = OTHERS[name]
    change(photograph(3, width=60, height=40)).save(tmp_path / name, **options)
    assert difference(tmp_path / name) == 0
    assert fast == []


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif"])
@pytest.mark.parametrize("orientation", [*range(10), 65535])
def test_orientation_is_applied_as_by_pil(tmp_path: Path, suffix: str, orientation: int) -> None:
    exif, path = Image.Exif(), tmp_path / f"a.{suffix}"
    exif[0x0112] = orientation
    photograph(5, width=480, height=320).save(path, exif=exif)
    assert difference(path) <= 3
    turned = 5 <= orientation <= 8
    assert decode(str(path)).shape == ((3, 480, 320) if turned else (3, 320, 480))
    if suffix == "jpg":  # a reduced size is turned too
        assert decode(str(path), at_least=64).shape == ((3, 120, 80) if turned else (3, 80, 120))


def test_orientation_in_xmp_is_applied(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    photograph(5, width=48, height=32).save(path, xmp=b'<x:xmpmeta><rdf tiff:Orientation="6"/></x:xmpmeta>')
    assert decode(str(path)).shape == (3, 48, 32)
    assert difference(path) <= 3


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")  # PIL warns when it opens the file
def test_picture_with_damaged_exif_is_decoded(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    photograph(5, width=48, height=32).save(path, exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xffgarbage")
    assert decode(str(path)).shape == (3, 32, 48)


def test_orientation_is_applied_although_another_tag_has_an_odd_type(tmp_path: Path) -> None:
    exif, path = Image.Exif(), tmp_path / "a.jpg"
    exif[0x0112], exif[0x0128] = 6, 2
    odd = exif.tobytes().replace(b"\x01\x28\x00\x03", b"\x01\x28\x00\x07")  # ResolutionUnit: UNDEFINED, no SHORT
    photograph(5, width=48, height=32).save(path, exif=odd)
    assert decode(str(path)).shape == (3, 48, 32)


@pytest.mark.parametrize(("at_least", "size"), [(None, (640, 960)), (321, (640, 960)), (320, (320, 480)),
                                                (100, (160, 240)), (8, (80, 120))])
def test_large_jpeg_is_decoded_at_the_smallest_sufficient_size(
    tmp_path: Path, at_least: int | None, size: tuple[int, int]
) -> None:
    path = tmp_path / "a.jpg"
    photograph(6, width=960, height=640).save(path, quality=90)
    assert decode(str(path), at_least=at_least).shape == (3, *size)
