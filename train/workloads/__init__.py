"""What is trained: a workload is a model, its samples, and functions that say what a batch means.

A user's own is a module with `build(config) -> Workload`, named by its import path: `--workload mypkg.job:build`.
"""

import importlib
import os
from dataclasses import replace
from typing import Any

from torch.utils.data import IterableDataset, TensorDataset

from rankup import UserError

from ..config import Config
from ..data.samples import MapSamples, Samples, TensorSamples
from .workload import Sums, Workload

__all__ = ["Sums", "TensorSamples", "Workload", "load"]


def load(config: Config, *, pretrained: bool = True) -> Workload:
    """Build the workload that the settings name. Raises UserError. `pretrained` False: a checkpoint's weights will
    replace those that the model begins with, so these need not exist."""
    if ":" in config.workload:
        return _load_own(config)
    found: Workload = importlib.import_module(f".{config.workload}", __name__).build(config, pretrained=pretrained)
    return found


def _load_own(config: Config) -> Workload:
    module_name, _, path = config.workload.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # an import inside the user's module failed: the traceback says where
        raise UserError(
            f'workload must be "images", "text" or module:function, got "{config.workload}": no module "{error.name}" '
            f"in {os.getcwd()} or on PYTHONPATH."
        ) from None
    build_own: Any = module
    for name in path.split("."):
        build_own = getattr(build_own, name, None)
    if not callable(build_own):
        raise UserError(f'workload: {module_name} ({module.__file__}) must have a function "{path}", got none.')
    workload = build_own(config)
    if not isinstance(workload, Workload):
        got = type(workload).__name__
        raise UserError(f"workload: {config.workload} must return a train.workloads.Workload, got {got}.")
    # Evaluated samples are the same whatever the run's seed, even those that draw random numbers
    train = _samples(config, "train", workload.train, seed=config.seed)
    return replace(workload, train=train, evaluation=_samples(config, "evaluation", workload.evaluation, seed=0))


def _samples(config: Config, purpose: str, given: Any, *, seed: int) -> Samples:
    """`given` itself, or samples made of a map-style Dataset: of what takes an index, as Hugging Face's does, whose
    method `batch` means something else. Raises UserError for anything else, and for none."""
    samples: Any = given
    if type(given) is TensorDataset and len(given.tensors) == 2:  # by index, many times faster than one by one
        samples = TensorSamples(*given.tensors)
    elif hasattr(given, "__getitem__") and not isinstance(given, IterableDataset):
        samples = MapSamples(given, seed=seed)
    if not hasattr(samples, "batch") or not hasattr(given, "__len__"):
        rule = "a map-style Dataset, with __getitem__ and __len__, or samples with batch() and __len__"
        raise UserError(f"workload: {purpose} of {config.workload} must be {rule}, got {type(given).__name__}.")
    if len(samples) == 0:
        raise UserError(f"workload: {config.workload} must have samples to use for {purpose}, got none.")
    return samples  # type: ignore[no-any-return]
