"""Precision, recall and F1 of each class, and their plain mean, from a confusion matrix."""

import unicodedata
from typing import Any

import torch


def class_scores(confusion: torch.Tensor, classes: tuple[str, ...]) -> list[dict[str, Any]]:
    """Name, precision, recall, F1 and number of samples of each class.

    confusion: int64 [C, C], true class down, predicted class across. A score without a denominator is 0, as in
    scikit-learn.
    """
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


def report(confusion: torch.Tensor, classes: tuple[str, ...]) -> str:
    """The scores as a table, and the confusion matrix, int64 [C, C], below it."""
    width = max(len("class"), *map(_columns, classes))
    padded = {name: name + " " * (width - _columns(name)) for name in classes}
    lines = [f"  {'class':<{width}}  precision  recall      f1  samples"]
    for row in class_scores(confusion, classes):
        scores = f"{row['precision']:9.4f}  {row['recall']:6.4f}  {row['f1']:6.4f}  {row['samples']:7}"
        lines.append(f"  {padded[row['class']]}  {scores}")
    cell = max(5, len(str(int(confusion.max()))) + 1)
    lines.append("  confusion matrix: true class down, predicted class across")
    for name, counts in zip(classes, confusion.tolist(), strict=True):
        lines.append(f"  {padded[name]}  {''.join(f'{count:{cell}}' for count in counts)}")
    return "\n".join(lines)


def _columns(text: str) -> int:
    """Columns of a terminal: a Chinese character takes two."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)
