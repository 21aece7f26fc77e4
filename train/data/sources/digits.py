"""The handwritten digits that ship with the program, 8 x 8 pixels: samples/make_digits.py made them."""

from pathlib import Path

from train.config import Config
from train.data.sources.fetch import Say
from train.data.sources.mnist_family import Family, read_halves
from train.data.sources.sets import ImageSet

FAMILY = Family(
    name="digits", title="digits", folder="digits", classes=tuple("0123456789"), mean=0.2873, std=0.3537,
    counts={True: 1_438, False: 359}, digest="27dce9ae", mirror=False,
)
FOLDER = Path(__file__).parents[2] / "samples" / "digits"


def load(config: Config, say: Say) -> tuple[ImageSet, ImageSet]:
    """uint8 [1438, 1, 8, 8] to train on and [359, 1, 8, 8] to test on. Raises DataError if a file is damaged."""
    return read_halves(FOLDER, FAMILY)
