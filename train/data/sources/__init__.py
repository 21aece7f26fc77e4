"""Data sets by name. Each becomes samples, in memory or in files that are decoded one at a time. No torch here."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

from ...config.data import SOURCES, DataSettings


def load(config: DataSettings) -> tuple[Any, Any]:
    """Return the training and the test samples of `config.dataset`, both TensorSamples or both FileSamples, limited by
    limit_train and limit_eval, with `image_size`. Download the data set if it is not on this machine. Raises UserError,
    which names the file, if data are missing or damaged."""
    train, test = resolve_name(f"{__name__}.{SOURCES.get(config.dataset, SOURCES['hf:PATH_OR_NAME'])}")(config)
    return train.cut(config.limit_train, config.image_size), test.cut(config.limit_eval, config.image_size)
