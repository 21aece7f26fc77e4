"""Fashion-MNIST: 70,000 pictures of clothes (Xiao et al. 2017), the default. It has a substitute without a network."""

from pathlib import Path

from train.config import Config
from train.data.sources import digits
from train.data.sources.fetch import NotFetched, Say
from train.data.sources.mnist_family import Family, locate, read_halves
from train.data.sources.sets import ImageSet

FAMILY = Family(
    name="fashion-mnist", title="Fashion-MNIST", folder="FashionMNIST",
    classes=("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    mean=0.2860, std=0.3530, counts={True: 60_000, False: 10_000}, digest="ced07e3c",
    debian_dir=Path("/usr/share/datasets/fashion-mnist"), debian_package="dataset-fashion-mnist",
)


def load(config: Config, say: Say) -> tuple[ImageSet, ImageSet]:
    """uint8 [60000, 1, 28, 28] to train on and [10000, 1, 28, 28] to test on; or the digits that ship.

    The digits take its place where it cannot be fetched and the user named no data_dir: a first try without a network
    shall train something. `say` gets a line then. Raises DataError, see `locate`.
    """
    try:
        folder = locate(FAMILY, data_dir=config.data_dir, timeout_s=config.download_timeout_s, say=say)
    except NotFetched as error:
        if config.data_dir is not None:
            raise
        say(f"{error} Using the small dataset digits instead; to use your own copy, set data_dir.")
        return digits.load(config, say)
    return read_halves(folder, FAMILY)
