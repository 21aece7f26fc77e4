"""What the loop needs to know of whatever is trained."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from train.data import Samples

# Sums over the samples of a batch, by name; "count" is their number. Scalars are divided by the count in the end, so
# that "accuracy" is the number of right answers here; tensors, such as a confusion matrix, are only added up.
Sums = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Workload:
    """Everything the loop needs to know. `loss` and `evaluate` get a batch as `Samples.batch` made it, on the device."""

    model: nn.Module
    train: Samples
    evaluation: Samples
    loss: Callable[[nn.Module, Any], torch.Tensor]  # the mean over the batch, a scalar
    evaluate: Callable[[nn.Module, Any], Sums]
    predict: Callable[[nn.Module, Any], tuple[torch.Tensor, torch.Tensor]] | None = None  # labels, probabilities: [B]
    data_name: str = "own"
    data_origin: str = ""
    classes: tuple[str, ...] = ()
    unit: str = "samples"  # what the speed counts: samples/s
    # Names of the samples to predict (files), and samples for a path that `predict --input` gives.
    input_name: Callable[[int], str] = lambda index: str(index)
    open_input: Callable[[str], tuple[Samples, Callable[[int], str]]] | None = None
    # What follows from the evaluated sums that are no means: more metrics, and a table with the same for programs.
    derived: Callable[[Sums], dict[str, float]] | None = None
    report: Callable[[Sums], tuple[str, dict[str, Any]]] | None = None
    pictures: Callable[[nn.Module, Sums, torch.device], dict[str, torch.Tensor]] | None = None
    # ^ for TensorBoard, from the evaluated sums and the model: name -> uint8 [3, H, W]
    notes: list[str] = field(default_factory=list)  # one line each, printed by rank 0
