"""Data sources: each named data set becomes samples, in memory or in files that are decoded one at a time."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ...config import Config
from ...config.settings import SOURCES

if TYPE_CHECKING:
    from ..file_samples import FileSamples
    from ..samples import TensorSamples


def load(config: Config) -> tuple[TensorSamples, TensorSamples] | tuple[FileSamples, FileSamples]:
    """The training half and the test half of `config.dataset`, cut to limit_train and limit_eval, in `image_size`. The
    set is downloaded if it is nowhere. Raises UserError, one line with the file's path, for data that are missing or
    damaged."""
    module, _, function = SOURCES.get(config.dataset, SOURCES["hf:PATH_OR_NAME"]).partition(":")
    train, test = getattr(importlib.import_module(f".{module}", __package__), function)(config)
    return train.cut(config.limit_train, config.image_size), test.cut(config.limit_eval, config.image_size)
