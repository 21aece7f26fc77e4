"""The picture of a confusion matrix, uint8 [3, H, W]: legible on a phone too.

matplotlib draws it, imported where something is drawn: 0.4 s that no start pays. Never pyplot, whose state threads
share.
"""

import logging
import os
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..data.sources.fetch import writable_cache

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 1000  # pixels: a phone shows them at a third of this, so TEXT is 10 pixels there
TEXT = 28  # pixels, as a point is one at this resolution
DPI = 72
# The first comes with matplotlib: Latin, Greek, Cyrillic, Arabic. The others are for Chinese and Japanese, if installed
FONTS = ["DejaVu Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Zen Hei", "PingFang SC", "Microsoft YaHei"]
LETTERS = 15  # of a name
NAMED = 20  # with more classes, the names and counts of a matrix would be too small to read


def confusion_pictures(matrix: torch.Tensor, classes: Sequence[str]) -> dict[str, torch.Tensor]:
    """The picture of a confusion matrix, int64 [C, C], by its name: true class down, predicted class across.

    None with more than NAMED classes.
    """
    if len(classes) > NAMED:
        return {}
    # Its cache of fonts lies in ours: a home that can't be written would cost a warning and a folder
    os.environ.setdefault("MPLCONFIGDIR", str(writable_cache() / "matplotlib"))
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it also says that it looks for fonts
    import matplotlib

    # A name such as "$5 to $10" is no formula
    ours: Any = {"font.family": FONTS, "font.size": TEXT, "text.usetex": False, "text.parse_math": False}
    with matplotlib.rc_context(ours), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # it draws a box then
        return {"eval/confusion": to_tensor(draw_matrix(matrix, [shorten(name, LETTERS) for name in classes]))}


def draw_matrix(matrix: torch.Tensor, labels: Sequence[str]) -> "Figure":
    """The matrix with the names of all classes, and in each cell its percent of the row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / DPI, (WIDTH + 60) / DPI), dpi=DPI, layout="constrained")
    count, shares = len(labels), matrix.double() / matrix.sum(1, keepdim=True).clamp(min=1)
    axes = figure.subplots()
    axes.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1)
    cell = 0.7 * WIDTH / count
    size = min(TEXT, 0.9 * cell / (0.64 * len("100")))
    for row, column in (shares >= 0.005).nonzero().tolist():
        ink, percent = "white" if shares[row, column] > 0.5 else "black", f"{100 * shares[row, column]:.0f}"
        axes.text(column, row, percent, ha="center", va="center", color=ink, size=size)
    letters = min(TEXT, 0.6 * cell)
    upright = max(map(len, labels)) * 0.64 * letters > cell
    axes.set_xticks(range(count), labels, rotation=90 if upright else 0, size=letters)
    axes.set_yticks(range(count), labels, size=letters)
    axes.tick_params(length=0)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    figure.suptitle("Confusion matrix, percent of each row", x=0.02, ha="left", size=TEXT)
    return figure


def to_tensor(figure: "Figure") -> torch.Tensor:
    """The figure as uint8 [3, H, W]."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return torch.from_numpy(np.array(canvas.buffer_rgba())[:, :, :3]).permute(2, 0, 1).contiguous()


def shorten(text: str, limit: int) -> str:
    """Both ends of a long text: names of classes often begin alike. A Chinese character is as wide as two."""
    text = "".join(character if character.isprintable() else " " for character in text)
    limit = limit // 2 if any(ord(character) > 0x2E7F for character in text) else limit
    return text if len(text) <= limit else f"{text[: limit - limit // 3 - 1]}…{text[-(limit // 3) :]}"
