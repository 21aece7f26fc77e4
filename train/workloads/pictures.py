"""The picture of a confusion matrix, uint8 [3, H, W]: legible on a phone too, with any names of classes.

matplotlib draws it, imported where something is drawn: 0.4 s that no start pays. It is silent whatever the machine
lacks. Never pyplot, whose state threads share.
"""

import logging
import os
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
FONTS = ("DejaVu Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Zen Hei", "PingFang SC", "Microsoft YaHei")
LETTERS = 15  # of a name
NAMED = 20  # with more classes, the names and counts of a matrix would be too small to read


def confusion_pictures(matrix: torch.Tensor, classes: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """The picture of a confusion matrix, int64 [C, C], by its name: true class down, predicted class across.

    None with more than NAMED classes.
    """
    if len(classes) > NAMED:
        return {}
    with new_figure(WIDTH + 60) as figure:
        draw_matrix(figure, matrix, readable(classes, limit=LETTERS))
        return {"eval/confusion": to_tensor(figure)}


def draw_matrix(figure: "Figure", matrix: torch.Tensor, labels: Sequence[str]) -> None:
    """The matrix with the names of all classes, and in each cell its percent of the row."""
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
    lines = [line - 0.5 for line in range(1, count)]
    axes.hlines(lines, -0.5, count - 0.5, color="#e0e0e0", linewidth=1)
    axes.vlines(lines, -0.5, count - 0.5, color="#e0e0e0", linewidth=1)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    set_title(figure, "Confusion matrix. Shade and number: a cell's percent of its row")


# Figures -------------------------------------------------------------------------------------------------------------


@contextmanager
def new_figure(height: int) -> Iterator["Figure"]:
    """An empty figure, WIDTH x `height` pixels. Draw and save it in the block: there matplotlib's settings are ours.

    A user's own matplotlibrc may ask for LaTeX or a window, and their workload may have changed settings too.
    """
    matplotlib = _import()
    from matplotlib.figure import Figure

    ours = {name: value for name, value in matplotlib.rcParamsDefault.items() if not name.startswith("backend")}
    # A name such as "$5 to $10" is no formula
    ours |= {
        "font.family": _families(matplotlib), "font.size": TEXT, "text.parse_math": False, "axes.linewidth": 1.5,
        "axes.edgecolor": "#808080", "figure.constrained_layout.use": True, "figure.constrained_layout.w_pad": 0.15,
        "figure.constrained_layout.h_pad": 0.15, "savefig.dpi": "figure",
    }
    with matplotlib.rc_context(ours):
        yield Figure(figsize=(WIDTH / DPI, height / DPI), dpi=DPI)


def set_title(figure: "Figure", text: str) -> None:
    """`text` at the upper left, in as many lines as it takes."""
    figure.suptitle(textwrap.fill(text, 58), x=0.02, ha="left", size=TEXT, color="#303030")


def to_tensor(figure: "Figure") -> torch.Tensor:
    """The figure as uint8 [3, H, W]."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return torch.from_numpy(np.array(canvas.buffer_rgba())[:, :, :3]).permute(2, 0, 1).contiguous()


def readable(names: Sequence[str], *, limit: int) -> list[str]:
    """Labels for classes: names of at most `limit` characters, and `class 3` where no font has a name's characters."""
    clean = ["".join(c if c.isprintable() else " " for c in name).strip() for name in names]
    manager = _import().font_manager
    fonts = [manager.get_font(manager.findfont(family)) for family in _families(_import())]
    missing = {c for c in set().union(*clean) if not any(font.get_char_index(ord(c)) for font in fonts)}
    return [
        f"class {number}" if not name or missing & set(name) else shorten(name, limit)
        for number, name in enumerate(clean)
    ]


def shorten(text: str, limit: int) -> str:
    """Both ends of a long text: names of classes often begin alike. A Chinese character is as wide as two."""
    wide = any(ord(c) > 0x2E7F for c in text)
    limit = limit // 2 if wide else limit
    return text if len(text) <= limit else f"{text[: limit - limit // 3 - 1]}…{text[-(limit // 3) :]}"


def _families(matplotlib: Any) -> list[str]:
    """Those of FONTS that this machine has."""
    there = {font.name for font in matplotlib.font_manager.fontManager.ttflist}
    return [family for family in FONTS if family in there]


def _import() -> Any:
    """matplotlib. Its cache of fonts lies in ours: a home that can't be written would cost a warning and a folder."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it also says that it looks for fonts
    os.environ.setdefault("MPLCONFIGDIR", str(writable_cache() / "matplotlib"))
    import matplotlib.font_manager

    return matplotlib
