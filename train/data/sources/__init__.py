"""Data sources: each named data set becomes samples, in memory or in files that are decoded one at a time."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ...config import Config
from ...config.settings import SOURCES
from .fetch import Say, print_to_stderr

if TYPE_CHECKING:
    from ..file_samples import FileSamples
    from ..samples import TensorSamples

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
    module, _, function = SOURCES.get(config.dataset, SOURCES["hf:PATH_OR_NAME"]).partition(":")
    train, test = getattr(importlib.import_module(f".{module}", __package__), function)(config, say)
    train, test = train.first(config.limit_train), test.first(config.limit_eval)
    return train.scaled(config.image_size), test.scaled(config.image_size)
