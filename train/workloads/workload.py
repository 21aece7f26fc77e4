"""What a workload is."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..data.samples import Samples

LOG = logging.getLogger("rankup")  # rank 0 prints what it is told

# Sums over the samples of a batch, by name; "count" is the number of samples. Scalars are divided by the count in the
# end, so "accuracy" is the number of right answers here. Tensors are only added up; "confusion", a matrix int64 [C, C]
# with the true class down, is shown in TensorBoard.
Sums = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Workload:
    """A model, its samples, and what a batch means. The functions get what `Samples.batch` returned, on the device.

    Only the first four are needed. The others add to its output and to what `evaluate` and `predict` write.
    """

    model: nn.Module
    # Either may be any map-style Dataset where an own workload is built: `load` makes samples of it.
    train: Samples
    evaluation: Samples
    loss: Callable[[nn.Module, Any], torch.Tensor]  # the mean over the batch, a scalar
    evaluate: Callable[[nn.Module, Any], Sums] | None = None  # None: the loss alone
    predict: Callable[[nn.Module, Any], tuple[torch.Tensor, torch.Tensor]] | None = None  # labels, probabilities: [B]
    data_name: str = "own"  # compared between ranks, and with the checkpoint that is resumed or evaluated
    data_origin: str = ""  # one line for the log
    classes: tuple[str, ...] = ()
    unit: str = "samples"  # what the speed counts: samples/s
    # Sample number -> its name in predictions, such as a file's.
    input_name: Callable[[int], str] = lambda index: str(index)
    # The path of `predict --input` -> samples, and their names by number.
    open_input: Callable[[str], tuple[Samples, Callable[[int], str]]] | None = None
    # Evaluated sums -> more metrics, those that are no means.
    derived: Callable[[Sums], dict[str, float]] | None = None

    def sums(self, model: nn.Module, batch: Any) -> Sums:
        """What a batch adds to the evaluation: from `evaluate`, or else the loss, a mean over the samples."""
        if self.evaluate is not None:
            return self.evaluate(model, batch)
        # The length of the first tensor that has one
        found = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))
        count = next((len(tensor) for tensor in found if tensor.ndim and len(tensor)), 0)
        return {"count": torch.tensor(count), "loss": self.loss(model, batch).double() * count}
