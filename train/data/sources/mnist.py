"""MNIST: 70,000 handwritten digits (LeCun et al. 1998)."""

from train.config import Config
from train.data.sources.fetch import Say
from train.data.sources.mnist_family import Family, locate, read_halves
from train.data.sources.sets import ImageSet

FAMILY = Family(
    name="mnist", title="MNIST", folder="MNIST", classes=tuple("0123456789"), mean=0.1307, std=0.3081,
    counts={True: 60_000, False: 10_000}, mirror=False,
)


def load(config: Config, say: Say) -> tuple[ImageSet, ImageSet]:
    """uint8 [60000, 1, 28, 28] to train on and [10000, 1, 28, 28] to test on. Raises DataError, see `locate`."""
    folder = locate(FAMILY, data_dir=config.data_dir, timeout_s=config.download_timeout_s, say=say)
    return read_halves(folder, FAMILY)
