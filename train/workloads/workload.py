"""The class `Workload`, and `load`, which builds the workload that the settings name."""

import importlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset, TensorDataset

from rankup import UserError

from ..config import Config
from ..config.workload import RULE
from ..data.samples import MapSamples, Samples
from ..data.samples import TensorSamples as TensorSamples

LOG = logging.getLogger("rankup")  # rank 0 prints its lines

# Sums over the samples of a batch, by name. "count" is the number of samples. At the end of an evaluation scalars are
# divided by the count, so "accuracy" is the number of correct answers here. Tensors are only added up. "confusion", a
# matrix int64 [C, C] with the true class down, is shown in TensorBoard.
Sums = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Workload:
    """A model, its samples, and functions of a batch. The functions get what `Samples.batch` returned, on the device.

    Only the first four fields are required. The others add to the output of `train`, `evaluate` and `predict`.
    """

    model: nn.Module
    # A user's workload may have any map-style Dataset here: `load` turns it into samples.
    train: Samples
    evaluation: Samples
    loss: Callable[[nn.Module, Any], torch.Tensor]  # the mean over the batch, a scalar
    evaluate: Callable[[nn.Module, Any], Sums] | None = None  # None: evaluation gives only the loss
    predict: Callable[[nn.Module, Any], tuple[torch.Tensor, torch.Tensor]] | None = None  # labels, probabilities: [B]
    data_name: str = "own"  # must be equal on all ranks and in the checkpoint that is resumed or evaluated
    data_origin: str = ""  # one line for the log
    classes: tuple[str, ...] = ()
    unit: str = "samples"  # what the speed counts: samples/s
    # The number of a sample -> its name in predictions, such as a file name.
    input_name: Callable[[int], str] = lambda index: str(index)
    # The path given to `predict --input` -> samples, and a function that names each by its number.
    open_input: Callable[[str], tuple[Samples, Callable[[int], str]]] | None = None
    # The sums of an evaluation -> more metrics, which are not means over samples.
    derived: Callable[[Sums], dict[str, float]] | None = None

    def sums(self, model: nn.Module, batch: Any) -> Sums:
        """Return the sums of a batch: those of `evaluate`, or else count and loss."""
        if self.evaluate is not None:
            return self.evaluate(model, batch)
        # The number of samples is the length of the first tensor that has a length
        found = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))
        count = next((len(tensor) for tensor in found if tensor.ndim and len(tensor)), 0)
        return {"count": torch.tensor(count), "loss": self.loss(model, batch).double() * count}


def load(config: Config, *, pretrained: bool = True) -> Workload:
    """Build the workload that the settings name. Raises UserError. `pretrained`: load pretrained weights if the
    settings name any. False: the caller loads a checkpoint, so these files need not exist."""
    if ":" in config.workload:
        return _load_own(config)
    found: Workload = importlib.import_module(f".{config.workload}", __package__).build(config, pretrained=pretrained)
    return found


def _load_own(config: Config) -> Workload:
    module_name, _, path = config.workload.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # an import inside the user's module failed, and the traceback says where
        raise UserError(
            f'workload must be {RULE}, got "{config.workload}": no module "{error.name}" in {os.getcwd()} or on '
            "PYTHONPATH."
        ) from None
    if not hasattr(module, "__file__"):
        raise UserError(f'workload must be {RULE}, got "{config.workload}": {module_name} is built into Python.')
    build_own: Any = module
    for name in path.split("."):
        build_own = getattr(build_own, name, None)
    if not callable(build_own):
        raise UserError(f'workload: {module_name} ({module.__file__}) must have a function "{path}", got none.')
    workload = build_own(config)
    if not isinstance(workload, Workload):
        got = type(workload).__name__
        raise UserError(f"workload: {config.workload} must return a train.workloads.Workload, got {got}.")
    # Evaluation uses seed 0, so that samples that draw random numbers are the same in all runs
    train = _samples(config, "train", workload.train, seed=config.seed)
    return replace(workload, train=train, evaluation=_samples(config, "evaluation", workload.evaluation, seed=0))


def _samples(config: Config, purpose: str, given: Any, *, seed: int) -> Samples:
    """Turn a map-style Dataset into samples; return samples unchanged. What has an index counts as a Dataset, because
    the method `batch` of Hugging Face's means something else. Raises UserError for other types, and if it is empty."""
    samples: Any = given
    if type(given) is TensorDataset and len(given.tensors) == 2:  # indexing a batch is many times faster
        samples = TensorSamples(*given.tensors)
    elif hasattr(given, "__getitem__") and not isinstance(given, IterableDataset):
        samples = MapSamples(given, seed=seed)
    if not hasattr(samples, "batch") or not hasattr(given, "__len__"):
        rule = "a map-style Dataset, with __getitem__ and __len__, or samples with batch() and __len__"
        raise UserError(f"workload: {purpose} of {config.workload} must be {rule}, got {type(given).__name__}.")
    if len(samples) == 0:
        raise UserError(f"workload: {config.workload} must have samples to use for {purpose}, got none.")
    return samples  # type: ignore[no-any-return]
