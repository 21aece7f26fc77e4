"""Data sources: each named data set becomes samples, in memory or in files that are decoded one at a time.

No torch here: the command line checks `dataset` against the names below before anything slow is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ...config import Config
from ...config.load import is_choice
from .fetch import Say, print_to_stderr

if TYPE_CHECKING:
    from ..file_samples import FileSamples
    from ..samples import TensorSamples

# `dataset` -> its module in this folder, with a function load(config, say) -> (training half, test half).
# A name with a colon stands for all that begin like it. A new data set is a new file here and a line in this table.
SOURCES = {
    "fashion-mnist": "mnist_family",
    "mnist": "mnist_family",
    "cifar10": "cifar10",
    "imagefolder": "imagefolder",
    "digits": "mnist_family",
    "fake": "fake",
    "hf:PATH_OR_NAME": "huggingface",
}


def load(
    config: Config, *, say: Say = print_to_stderr
) -> tuple[TensorSamples, TensorSamples] | tuple[FileSamples, FileSamples]:
    """The training half and the test half of `config.dataset`, cut to their first limit_train and limit_eval samples.

    Looks where the set may be and downloads it if it is nowhere, one process per node; `say` gets a line when that
    takes time. Fashion-MNIST, the default, gives way to the digits that ship with the program if it is neither found
    nor downloaded and no data_dir is given: `.name` says which set it is, and all ranks of a job must compare it.
    With image_size, images in memory are scaled to that height and width.
    Raises UserError, one line with the file's path, for data that are missing, damaged or not what they claim to be.
    """
    module = next(SOURCES[name] for name in SOURCES if is_choice(config.dataset, name))
    train, test = importlib.import_module(f".{module}", __package__).load(config, say)
    train, test = train.first(config.limit_train), test.first(config.limit_eval)
    return train.scaled(config.image_size), test.scaled(config.image_size)
