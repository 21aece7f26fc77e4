"""What a batch means to a classifier: its loss, its sums for an evaluation, its predictions."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from .workload import Sums

Batch = tuple[torch.Tensor, torch.Tensor]  # what the model is given, and labels, int64 [B]
TOP = 5


class Classification:
    """For batches of inputs [B, ...] and labels, int64 [B]; the model's output is logits [B, num_classes].

    `prepare` turns the inputs of a batch into what the model takes, on the device. With `top5`, evaluation also counts
    the samples whose label is among the five most probable, where there are more than five classes.
    """

    def __init__(
        self, *, num_classes: int, label_smoothing: float,
        prepare: Callable[[torch.Tensor], torch.Tensor] | None = None, top5: bool = False,
    ) -> None:
        self.num_classes, self.label_smoothing, self.prepare = num_classes, label_smoothing, prepare
        self.top5 = top5 and num_classes > TOP

    def logits(self, model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        """The model's output, [B, num_classes]."""
        logits: torch.Tensor = model(self.prepare(inputs) if self.prepare else inputs)
        return logits

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Cross entropy with label smoothing, the mean over the batch: a scalar."""
        logits = self.logits(model, batch[0])
        labels = batch[1].to(logits.device)  # DataParallel gathers the outputs on output_device
        return functional.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)

    def evaluate(self, model: nn.Module, batch: Batch) -> Sums:
        """Sums over the batch: count, loss (without smoothing), right answers, confusion matrix (int64 [C, C])."""
        logits, labels = self.logits(model, batch[0]).float(), batch[1]
        guess = logits.argmax(1)
        pairs = torch.bincount(labels * self.num_classes + guess, minlength=self.num_classes**2)
        sums = {
            "count": torch.tensor(len(labels)),
            "loss": functional.cross_entropy(logits, labels, reduction="sum"),
            "accuracy": (guess == labels).sum(),
            "confusion": pairs.view(self.num_classes, self.num_classes),
        }
        if self.top5:
            sums["accuracy_top5"] = (logits.topk(TOP, 1).indices == labels[:, None]).sum()
        return sums

    def predict(self, model: nn.Module, batch: Batch) -> Batch:
        """Labels, int64 [B], and their probabilities, float32 [B]."""
        probabilities, labels = self.logits(model, batch[0]).float().softmax(1).max(1)
        return labels, probabilities
