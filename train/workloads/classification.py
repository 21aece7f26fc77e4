"""Loss, evaluation sums and predictions of a classifier, and its scores for each class as a table."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.cells import cell_len  # a Chinese character takes two columns
from torch import nn
from torch.nn import functional

from .workload import Sums

Batch = tuple[torch.Tensor, torch.Tensor]  # inputs [B, ...], and labels, int64 [B]
TOP = 5
MOST = 100  # a table has at most this many classes


@dataclass(frozen=True, kw_only=True)
class Classification:
    """The functions of a classifier. A batch is inputs [B, ...] and labels, int64 [B]; logits are [B, num_classes]."""

    num_classes: int
    label_smoothing: float
    prepare: Callable[[torch.Tensor], torch.Tensor] | None = None  # turns inputs, on the device, into the model's

    def logits(self, model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model(self.prepare(inputs) if self.prepare else inputs)
        return logits

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the cross entropy with label smoothing, the mean over the batch: a scalar."""
        logits = self.logits(model, batch[0])
        labels = batch[1].to(logits.device)  # DataParallel gathers the outputs on its first device
        return functional.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)

    def evaluate(self, model: nn.Module, batch: Batch) -> Sums:
        """Return sums over the batch: count, unsmoothed loss, correct answers, confusion matrix (int64 [C, C])."""
        logits, labels = self.logits(model, batch[0]).float(), batch[1]
        guess = logits.argmax(1)
        pairs = torch.bincount(labels * self.num_classes + guess, minlength=self.num_classes**2)
        sums = {
            "count": torch.tensor(len(labels)),
            "loss": functional.cross_entropy(logits, labels, reduction="sum"),
            "accuracy": (guess == labels).sum(),
            "confusion": pairs.view(self.num_classes, self.num_classes),
        }
        if self.num_classes > TOP:  # also count the samples whose label is among the five most probable
            sums["accuracy_top5"] = (logits.topk(TOP, 1).indices == labels[:, None]).sum()
        return sums

    def predict(self, model: nn.Module, batch: Batch) -> Batch:
        """Return the most probable labels, int64 [B], and their probabilities, float32 [B]."""
        probabilities, labels = self.logits(model, batch[0]).float().softmax(1).max(1)
        return labels, probabilities


def class_scores(confusion: torch.Tensor, classes: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return name, precision, recall, F1 and number of samples of each class. A score without a denominator is 0, as in
    scikit-learn. `confusion`: int64 [C, C], true class down."""
    matrix = confusion.double()
    right, guessed, true = matrix.diagonal(), matrix.sum(0), matrix.sum(1)
    columns = (right / guessed.clamp(min=1), right / true.clamp(min=1), 2 * right / (guessed + true).clamp(min=1), true)
    return [
        {"class": name, "precision": precision, "recall": recall, "f1": f1, "samples": int(samples)}
        for name, precision, recall, f1, samples in zip(classes, *(column.tolist() for column in columns), strict=True)
    ]


def macro_f1(confusion: torch.Tensor) -> float:
    """Return the mean F1, not weighted, of the classes in the data or in predictions. `confusion`: int64 [C, C]."""
    both = confusion.sum(0) + confusion.sum(1)
    scores = 2 * confusion.diagonal().double() / both
    return float(scores[both > 0].mean()) if both.any() else 0.0


def report(sums: Sums, classes: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    """Return the scores of each class and the confusion matrix as a table, and both as values. Both are empty if `sums`
    have no matrix "confusion" of these classes, and for more than MOST classes, whose table is too wide to read."""
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
