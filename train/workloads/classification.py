"""What a batch means to a classifier: its loss, its sums for an evaluation, its predictions; scores of classes
as a table."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.cells import cell_len  # a Chinese character takes two columns
from torch import nn
from torch.nn import functional

from .workload import Sums

Batch = tuple[torch.Tensor, torch.Tensor]  # what the model is given, and labels, int64 [B]
TOP = 5
MOST = 100  # classes in a table


@dataclass(frozen=True, kw_only=True)
class Classification:
    """For batches of inputs [B, ...] and labels, int64 [B]; the model's output is logits [B, num_classes]."""

    num_classes: int
    label_smoothing: float
    prepare: Callable[[torch.Tensor], torch.Tensor] | None = None  # inputs -> what the model takes, on the device

    def logits(self, model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model(self.prepare(inputs) if self.prepare else inputs)
        return logits

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Cross entropy with label smoothing, the mean over the batch: a scalar."""
        logits = self.logits(model, batch[0])
        labels = batch[1].to(logits.device)  # DataParallel gathers the outputs on its first device
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
        if self.num_classes > TOP:  # also the samples whose label is among the five most probable
            sums["accuracy_top5"] = (logits.topk(TOP, 1).indices == labels[:, None]).sum()
        return sums

    def predict(self, model: nn.Module, batch: Batch) -> Batch:
        """Labels, int64 [B], and their probabilities, float32 [B]."""
        probabilities, labels = self.logits(model, batch[0]).float().softmax(1).max(1)
        return labels, probabilities


def class_scores(confusion: torch.Tensor, classes: tuple[str, ...]) -> list[dict[str, Any]]:
    """Name, precision, recall, F1 (0 without a denominator, as in scikit-learn) and number of samples of each class,
    from the matrix, int64 [C, C], true class down."""
    matrix = confusion.double()
    right, guessed, true = matrix.diagonal(), matrix.sum(0), matrix.sum(1)
    columns = (right / guessed.clamp(min=1), right / true.clamp(min=1), 2 * right / (guessed + true).clamp(min=1), true)
    return [
        {"class": name, "precision": precision, "recall": recall, "f1": f1, "samples": int(samples)}
        for name, precision, recall, f1, samples in zip(classes, *(column.tolist() for column in columns), strict=True)
    ]


def macro_f1(confusion: torch.Tensor) -> float:
    """The mean F1 of the classes that are in the data or were predicted, each with the same weight; int64 [C, C]."""
    both = confusion.sum(0) + confusion.sum(1)
    scores = 2 * confusion.diagonal().double() / both
    return float(scores[both > 0].mean()) if both.any() else 0.0


def report(sums: Sums, classes: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    """The scores as a table with the matrix `confusion` of these sums, int64 [C, C], below it; and both as values.
    Nothing where there is no such matrix of these classes, and for more than MOST: the table is too wide to read."""
    confusion = sums.get("confusion")
    if confusion is None or confusion.shape != (len(classes), len(classes)) or len(classes) > MOST:
        return "", {}
    scores = class_scores(confusion, classes)
    width = max(len("class"), *map(cell_len, classes))
    padded = {name: name + " " * (width - cell_len(name)) for name in classes}
    lines = [f"  {'class':<{width}}  precision  recall      f1  samples"]
    for row in scores:
        numbers = f"{row['precision']:9.4f}  {row['recall']:6.4f}  {row['f1']:6.4f}  {row['samples']:7}"
        lines.append(f"  {padded[row['class']]}  {numbers}")
    cell = max(5, len(str(int(confusion.max()))) + 1)
    lines.append("  confusion matrix: true class down, predicted class across")
    for name, counts in zip(classes, confusion.tolist(), strict=True):
        lines.append(f"  {padded[name]}  {''.join(f'{count:{cell}}' for count in counts)}")
    return "\n".join(lines), {"classes": scores, "confusion": confusion.tolist()}
