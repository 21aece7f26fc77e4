"""Decoding: every kind of file gives the picture that PIL gives, upright, whoever decodes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from tests.rigs.photographs import photograph
from train.data.sources import decode as decoding
from train.data.sources.decode import decode

ORIENTATION = 0x0112


def as_pil_has_it(path: Path) -> torch.Tensor:
    with Image.open(path) as file:
        upright = ImageOps.exif_transpose(file)
        return torch.from_numpy(np.array(upright.convert("RGB"))).permute(2, 0, 1)


def difference(path: Path) -> int:
    """The largest difference of any pixel from PIL's picture."""
    found, expected = decode(str(path)), as_pil_has_it(path)
    assert (found.shape, found.dtype) == (expected.shape, torch.uint8)
    return int((found.int() - expected.int()).abs().max())


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The formats that torchvision decoded."""
    done: list[str] = []
    usual = decoding._decode_fast

    def record(data: bytearray, format: str) -> torch.Tensor | None:
        image = usual(data, format)
        if image is not None:
            done.append(format)
        return image

    monkeypatch.setattr(decoding, "_decode_fast", record)
    return done


@pytest.mark.parametrize(
    "options", [{}, {"quality": 30}, {"subsampling": 0}, {"subsampling": 1}, {"progressive": True}], ids=str
)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_jpeg_is_decoded_fast_and_as_pil_does(tmp_path: Path, fast: list[str], mode: str, options: Any) -> None:
    picture = photograph(1, width=101, height=67).convert(mode)
    picture.save(tmp_path / "a.jpg", **options)
    # Equal where both libraries are built with the same libjpeg; versions may round in another way
    assert difference(tmp_path / "a.jpg") <= 3
    assert fast == ["JPEG"]


@pytest.mark.parametrize("options", [{}, {"lossless": True}], ids=str)
def test_webp_is_decoded_fast_and_as_pil_does(tmp_path: Path, fast: list[str], options: Any) -> None:
    photograph(1, width=101, height=67).save(tmp_path / "a.webp", **options)
    assert difference(tmp_path / "a.webp") <= 3
    assert fast == ["WEBP"]


def test_picture_of_a_phone_that_holds_a_second_one_is_decoded_fast(tmp_path: Path, fast: list[str]) -> None:
    photograph(1, width=90, height=60).save(
        tmp_path / "a.jpg", "MPO", save_all=True, append_images=[photograph(2, width=90, height=60)]
    )
    assert difference(tmp_path / "a.jpg") <= 3
    assert fast == ["MPO"]


def save_other(kind: str, path: Path) -> None:
    picture = photograph(3, width=60, height=40)
    if kind == "cmyk.jpg":
        picture.convert("CMYK").save(path)
    elif kind == "16bit.png":
        Image.fromarray((np.arange(2400, dtype=np.uint16) * 27).reshape(40, 60)).save(path)
    elif kind in ("palette.png", "palette.bmp"):
        picture.quantize(16).save(path)
    elif kind == "transparent.png":
        picture.quantize(16).save(path, transparency=3)
    elif kind == "alpha.png":
        picture.putalpha(100)
        picture.save(path)
    elif kind == "alpha.webp":
        picture.putalpha(100)
        picture.save(path, lossless=True)
    elif kind == "grey-alpha.png":
        picture.convert("LA").save(path)
    elif kind == "animated.webp":
        picture.save(path, save_all=True, append_images=[photograph(4, width=60, height=40)], lossless=True)
    else:
        picture.save(path)


@pytest.mark.parametrize(
    "kind",
    ["cmyk.jpg", "16bit.png", "palette.png", "palette.bmp", "transparent.png", "alpha.png", "alpha.webp",
     "grey-alpha.png", "animated.webp", "plain.png", "plain.bmp", "plain.tif", "plain.ppm"],
)
@pytest.mark.filterwarnings("error")
def test_everything_else_is_as_pil_has_it(tmp_path: Path, fast: list[str], kind: str) -> None:
    path = tmp_path / kind
    save_other(kind, path)
    with Image.open(path) as file:
        rgb = file.convert("RGBA").convert("RGB") if "transparency" in file.info else file.convert("RGB")
    assert torch.equal(decode(str(path)), torch.from_numpy(np.array(rgb)).permute(2, 0, 1))
    assert fast == []


def test_file_with_the_name_of_another_format_is_decoded_by_its_contents(tmp_path: Path) -> None:
    photograph(1, width=30, height=20).save(tmp_path / "a.jpg", "PNG")
    photograph(1, width=30, height=20).save(tmp_path / "a.png", "JPEG", quality=95)
    assert difference(tmp_path / "a.jpg") == 0
    assert difference(tmp_path / "a.png") <= 3


# EXIF orientation -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif"])
@pytest.mark.parametrize("orientation", [*range(10), 65535])
def test_orientation_is_applied_as_pil_does(tmp_path: Path, suffix: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    path = tmp_path / f"a.{suffix}"
    photograph(5, width=48, height=32).save(path, exif=exif)
    assert difference(path) <= 3
    assert decode(str(path)).shape == ((3, 48, 32) if 5 <= orientation <= 8 else (3, 32, 48))


def test_orientation_that_an_editor_wrote_as_xmp_is_applied(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    photograph(5, width=48, height=32).save(path, xmp=b'<x:xmpmeta><rdf tiff:Orientation="6"/></x:xmpmeta>')
    assert decode(str(path)).shape == (3, 48, 32)
    assert difference(path) <= 3


def test_orientation_is_applied_to_a_reduced_picture(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    path = tmp_path / "a.jpg"
    photograph(5, width=480, height=320).save(path, exif=exif)
    assert decode(str(path), at_least=64).shape == (3, 120, 80)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")  # PIL's, as it opens the file
def test_damaged_exif_does_not_cost_the_picture(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    photograph(5, width=48, height=32).save(path, exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xffgarbage")
    assert decode(str(path)).shape == (3, 32, 48)


# Reduced sizes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("at_least", "size"), [(None, (640, 960)), (321, (640, 960)), (320, (320, 480)),
                                                (160, (160, 240)), (100, (160, 240)), (8, (80, 120))])
def test_large_jpeg_is_decoded_at_a_reduced_size_that_is_large_enough(
    tmp_path: Path, at_least: int | None, size: tuple[int, int]
) -> None:
    path = tmp_path / "a.jpg"
    photograph(6, width=960, height=640).save(path, quality=90)
    assert decode(str(path), at_least=at_least).shape == (3, *size)


# Damage ---------------------------------------------------------------------------------------------------------
