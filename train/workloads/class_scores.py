"""What a confusion matrix says: precision, recall and F1 of each class, and their plain mean."""

from typing import Any

import torch


def class_scores(confusion: torch.Tensor, classes: tuple[str, ...]) -> list[dict[str, Any]]:
    """For each class of int64 [C, C] (true class down, predicted class across): its name, precision, recall, F1 and how many
    samples it truly has. What has no denominator is 0, as scikit-learn has it."""
    matrix = confusion.double()
    right, guessed, true = matrix.diagonal(), matrix.sum(0), matrix.sum(1)
    columns = (right / guessed.clamp(min=1), right / true.clamp(min=1), 2 * right / (guessed + true).clamp(min=1), true)
    return [
        {"class": name, "precision": precision, "recall": recall, "f1": f1, "samples": int(samples)}
        for name, precision, recall, f1, samples in zip(classes, *(column.tolist() for column in columns), strict=True)
    ]


def macro_f1(confusion: torch.Tensor) -> float:
    """The mean F1 of the classes that are in the data or were predicted, each with the same weight."""
    matrix = confusion.double()
    both = matrix.sum(0) + matrix.sum(1)
    seen = both > 0
    return float((2 * matrix.diagonal()[seen] / both[seen]).mean()) if seen.any() else 0.0


def report(confusion: torch.Tensor, classes: tuple[str, ...]) -> str:
    """The scores as a table, and the matrix below it."""
    width = max(len("class"), *(_cells(name) for name in classes))
    lines = [f"  {'class':<{width}}  precision  recall      f1  samples"]
    for row in class_scores(confusion, classes):
        name = row["class"] + " " * (width - _cells(row["class"]))
        lines.append(f"  {name}  {row['precision']:9.4f}  {row['recall']:6.4f}  {row['f1']:6.4f}  {row['samples']:7}")
    cell = max(5, len(str(int(confusion.max()))) + 1)
    lines.append("  confusion matrix: true class down, predicted class across")
    for name, row in zip(classes, confusion.tolist(), strict=True):
        lines.append(f"  {name}{' ' * (width - _cells(name))}  {''.join(f'{value:{cell}}' for value in row)}")
    return "\n".join(lines)


def _cells(text: str) -> int:
    """Columns of a terminal: a Chinese character takes two."""
    import unicodedata

    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)
