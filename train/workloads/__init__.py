"""What is trained: a workload is a model, its samples, and functions that say what a batch means.

A user's own is a module with `build(config) -> Workload`, named by its import path: `--workload mypkg.job:build`.
"""

import importlib
import os
from typing import Any

from train.config import Config
from train.errors import ConfigError, DataError
from train.workloads.workload import Sums, Workload

__all__ = ["Sums", "Workload", "load"]


def load(config: Config, *, pretrained: bool = True) -> Workload:
    """Build the workload that the settings name.

    `pretrained` False: a checkpoint's weights will replace those that the model begins with, so these need not exist.
    Raises ConfigError where the import path leads nowhere, DataError for data that cannot be used.
    """
    if config.workload == "images":
        # Not one of the contradictions in config/: `evaluate --bert-dir` learns the workload from the checkpoint.
        if config.bert_dir is not None:
            got = f"got {config.bert_dir}. Set --workload text."
            raise ConfigError(f"bert_dir must be null with workload images, {got}")
        from train.workloads import images

        return images.build(config)
    if config.workload == "text":
        from train.workloads import text

        return text.build(config, pretrained=pretrained)
    return _load_own(config)


def _load_own(config: Config) -> Workload:
    module_name, _, path = config.workload.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # an import inside the user's module failed: the traceback says where
        raise ConfigError(
            f'workload must be "images", "text" or module:function, got "{config.workload}": no module "{error.name}" '
            f"in {os.getcwd()} or on PYTHONPATH."
        ) from None
    build_own: Any = module
    for name in path.split("."):
        build_own = getattr(build_own, name, None)
    if not callable(build_own):
        raise ConfigError(f'workload: {module_name} ({module.__file__}) must have a function "{path}", got none.')
    workload = build_own(config)
    if not isinstance(workload, Workload):
        got = type(workload).__name__
        raise ConfigError(f"workload: {config.workload} must return a train.workloads.Workload, got {got}.")
    for purpose, samples in (("train", workload.train), ("evaluation", workload.evaluation)):
        if len(samples) == 0:
            raise DataError(f"workload: {config.workload} must have samples to use for {purpose}, got none.")
    return workload
