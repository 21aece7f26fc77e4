"""Pictures for TensorBoard and trackers: uint8 [3, H, W]."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from train.process.figures import (
    DPI,
    SMALL,
    TEXT,
    WIDTH,
    draw_bars,
    new_figure,
    readable,
    set_title,
    to_pixels,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LETTERS = 15  # of a name
NAMED = 20  # with more classes, the names and counts of a matrix would be too small to read
CELLS = 400  # rows of a matrix that the picture can tell apart; with more classes, cells are put together
SMALLEST = 16  # pixels of a count; where counts would be smaller, a cell has its percent of the row
PAIRS = 15  # classes most often confused that are listed then
COLUMNS = 4  # of misclassified images
SIDE, HEAD = WIDTH // COLUMNS - 16, 60  # pixels: of such an image, and of the line of explanation
ROW = SIDE + 2 * TEXT + 28


def confusion_pictures(matrix: torch.Tensor, classes: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Pictures by name of a confusion matrix, int64 [C, C]: true class down, predicted class across.

    Up to NAMED classes: the matrix with names and counts. With more: the matrix as an overview, with numbers at its
    sides, and the pairs of classes that are most often confused, with names.
    """
    labels = readable(classes, limit=LETTERS)
    with new_figure(WIDTH + 60) as figure:
        if len(classes) <= NAMED:
            draw_matrix(figure, matrix, labels)
        else:
            draw_overview(figure, matrix)
        pictures = {"eval/confusion": _tensor(figure)}
    if len(classes) > NAMED and int(matrix.sum() - matrix.trace()):
        with new_figure(120 + 58 * PAIRS) as figure:
            draw_pairs(figure, matrix, labels)
            pictures["eval/most_confused"] = _tensor(figure)
    return pictures


def has_numbers(classes: tuple[str, ...]) -> bool:
    """Whether the pictures of these classes have numbers where names would be."""
    return len(classes) > NAMED or any(
        label == f"class {number}" != classes[number] for number, label in enumerate(readable(classes, limit=LETTERS))
    )


def draw_matrix(figure: "Figure", matrix: torch.Tensor, labels: Sequence[str]) -> None:
    """The matrix with the names of all classes, and the counts in its cells."""
    count, shares = len(labels), _shares(matrix)
    axes = figure.subplots()
    axes.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1)
    cell = 0.7 * WIDTH / count
    texts = [[f"{number:,}" if number else "" for number in row] for row in matrix.tolist()]
    what = "its count"
    if max(len(text) for row in texts for text in row) * 0.64 * SMALLEST > cell:  # percent have three digits at most
        texts = [[f"{100 * share:.0f}" if share >= 0.005 else "" for share in row] for row in shares.tolist()]
        what = "percent of its row"
    size = min(TEXT, 0.9 * cell / (0.64 * max(1, *(len(text) for row in texts for text in row))))
    for row, column in matrix.nonzero().tolist():
        ink = "white" if shares[row, column] > 0.5 else "black"
        axes.text(column, row, texts[row][column], ha="center", va="center", color=ink, size=size)
    letters = min(TEXT, 0.6 * cell)
    upright = max(map(len, labels)) * 0.64 * letters > cell
    axes.set_xticks(range(count), labels, rotation=90 if upright else 0, size=letters)
    axes.set_yticks(range(count), labels, size=letters)
    axes.tick_params(length=0)
    lines = [line - 0.5 for line in range(1, count)]
    axes.hlines(lines, -0.5, count - 0.5, color="#e0e0e0", linewidth=1)
    axes.vlines(lines, -0.5, count - 0.5, color="#e0e0e0", linewidth=1)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    set_title(figure, f"Confusion matrix. Shade: a cell's share of its row; number: {what}")


def draw_overview(figure: "Figure", matrix: torch.Tensor) -> None:
    """The matrix without names. The shade grows with the root of the share, for rare confusions to be seen."""
    from matplotlib.colors import PowerNorm

    count, shares = len(matrix), _shares(matrix)
    together = -(-count // CELLS)
    if together > 1:  # the largest share of each square: a mean would drown it
        shares = F.max_pool2d(shares[None], together, ceil_mode=True)[0]
    axes = figure.subplots()
    image = axes.imshow(
        shares.numpy(),
        cmap="Blues",
        norm=PowerNorm(0.5, 0, 1),
        interpolation="nearest",
        extent=(-0.5, len(shares) * together - 0.5, len(shares) * together - 0.5, -0.5),
    )
    bar = figure.colorbar(image, ax=axes, location="bottom", fraction=0.04, pad=0.02, ticks=[0, 0.05, 0.25, 0.5, 1])
    bar.ax.set_xticklabels(["0", "5%", "25%", "50%", "100%"], size=SMALL)
    bar.set_label("share of the row", size=SMALL)
    axes.set_xlabel("predicted class, by number")
    axes.set_ylabel("true class, by number")
    most = ", each point the largest of its square" if together > 1 else ""
    set_title(figure, f"Confusion matrix of {count:,} classes{most}")


def draw_pairs(figure: "Figure", matrix: torch.Tensor, labels: Sequence[str]) -> None:
    """The pairs of classes that are most often confused."""
    count = len(labels)
    wrong = matrix.clone().fill_diagonal_(0).flatten()
    most, places = wrong.topk(min(PAIRS, int((wrong > 0).sum())))
    pairs = [divmod(place, count) for place in places.tolist()]
    totals = matrix.sum(1)
    bars = [
        (f"{labels[true]} → {labels[guess]}", float(number), f"{number:,} of {int(totals[true]):,}")
        for (true, guess), number in zip(pairs, most.tolist(), strict=True)
    ]
    draw_bars(figure, bars, "Most often confused: true class → predicted class")


def grid_picture(images: torch.Tensor, names: list[tuple[str, str]]) -> torch.Tensor:
    """Images, uint8 [N, C, H, W] with C = 1 or 3, each above its true and its predicted class: uint8 [3, H', W']."""
    rows = -(-len(names) // COLUMNS)
    with new_figure(HEAD + rows * ROW) as figure:
        draw_grid(figure, images, names)
        return _tensor(figure)


def draw_grid(figure: "Figure", images: torch.Tensor, names: list[tuple[str, str]]) -> None:
    figure.set_layout_engine("none")
    height = round(figure.get_figheight() * DPI)
    sheet = np.full((height, WIDTH, 3), 255, np.uint8)
    figure.text(0.01, 1 - 12 / height, "black: the true class; red: what was predicted", va="top", color="#303030")
    for number, (true, guess) in enumerate(names):
        left = 8 + number % COLUMNS * (WIDTH // COLUMNS)
        top = HEAD + number // COLUMNS * ROW
        pixels = F.interpolate(images[number][None], (SIDE, SIDE))  # nearest
        sheet[top : top + SIDE, left : left + SIDE] = pixels[0].expand(3, -1, -1).permute(1, 2, 0).numpy()
        for line, text, colour in ((0, true, "black"), (1, guess, "#b00020")):
            y = 1 - (top + SIDE + 4 + line * (TEXT + 4)) / height
            figure.text(left / WIDTH, y, text, va="top", color=colour, size=TEXT - 2)
    figure.figimage(sheet)  # all in one, pixel for pixel: an axes for each takes a tenth of a second


def _shares(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.double() / matrix.sum(1, keepdim=True).clamp(min=1)


def _tensor(figure: "Figure") -> torch.Tensor:
    return torch.from_numpy(to_pixels(figure)).permute(2, 0, 1).contiguous()
