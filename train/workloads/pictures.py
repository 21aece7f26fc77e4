"""Pictures for TensorBoard and trackers, uint8 [3, H, W]: legible on a phone too, with any names of classes.

matplotlib draws them, imported where something is drawn: 0.4 s that no start pays. It is silent whatever the machine
lacks. Never pyplot, whose state threads share.
"""

import logging
import os
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 1000  # pixels: a phone shows them at a third of this, so TEXT is 10 pixels there
TEXT, SMALL = 28, 22  # pixels, as a point is one at this resolution
DPI = 72
FONT = "DejaVu Sans"  # matplotlib brings it: Latin, Greek, Cyrillic, Arabic, but neither Chinese nor Japanese
LETTERS = 15  # of a name
NAMED = 20  # with more classes, the names and counts of a matrix would be too small to read
CELLS = 400  # rows of a matrix that the picture can tell apart; with more classes, cells are put together
SMALLEST = 16  # pixels of a count; where counts would be smaller, a cell has its percent of the row
PAIRS = 15  # classes most often confused that are listed then
COLUMNS = 4  # of misclassified images
SIDE, HEAD = WIDTH // COLUMNS - 16, 60  # pixels: of such an image, and of the line of explanation
ROW = SIDE + 2 * TEXT + 28
_fallbacks: dict[str, str] = {}  # family -> file, of the fonts found so far for what FONT lacks


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
        pictures = {"eval/confusion": to_tensor(figure)}
    if len(classes) > NAMED and int(matrix.sum() - matrix.trace()):
        with new_figure(120 + 58 * PAIRS) as figure:
            draw_pairs(figure, matrix, labels)
            pictures["eval/most_confused"] = to_tensor(figure)
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
    names = [f"{labels[true]} → {labels[guess]}" for true, guess in pairs]
    texts = [f"{number:,} of {int(totals[true]):,}" for (true, _), number in zip(pairs, most.tolist(), strict=True)]
    axes = figure.subplots()
    axes.barh(range(len(pairs)), most.tolist(), color="#2a6fb0", height=0.7)
    axes.set_xlim(0, max([*most.tolist(), 1]))
    axes.set_xticks([])
    # The layout makes room for labels of an axis, whatever their length; texts behind the bars would hang over
    for side, words in ((axes, names), (axes.twinx(), texts)):
        side.set_ylim(len(pairs) - 0.5, -0.5)
        side.set_yticks(range(len(pairs)), words)
        side.tick_params(length=0, pad=8)
        side.spines[["top", "right", "bottom"]].set_visible(False)
    set_title(figure, "Most often confused: true class → predicted class")


def grid_picture(images: torch.Tensor, names: list[tuple[str, str]]) -> torch.Tensor:
    """Images, uint8 [N, C, H, W] with C = 1 or 3, each above its true and its predicted class: uint8 [3, H', W']."""
    rows = -(-len(names) // COLUMNS)
    with new_figure(HEAD + rows * ROW) as figure:
        draw_grid(figure, images, names)
        return to_tensor(figure)


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
        "font.family": [FONT, *_fallbacks], "font.size": TEXT, "text.parse_math": False, "axes.linewidth": 1.5,
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
    """Labels for classes: names of at most `limit` characters, and `class 3` where no font has a name's characters.

    Ask before `new_figure`, which takes the fonts found by then.
    """
    clean = ["".join(c if c.isprintable() else " " for c in name).strip() for name in names]
    missing = _without_glyphs({c for name in clean for c in name})
    return [
        f"class {number}" if not name or missing & set(name) else shorten(name, limit)
        for number, name in enumerate(clean)
    ]


def shorten(text: str, limit: int) -> str:
    """Both ends of a long text: names of classes often begin alike. A Chinese character is as wide as two."""
    wide = any(ord(c) > 0x2E7F for c in text)
    limit = limit // 2 if wide else limit
    return text if len(text) <= limit else f"{text[: limit - limit // 3 - 1]}…{text[-(limit // 3) :]}"


def _without_glyphs(wanted: set[str]) -> set[str]:
    """Those of these characters that no font of this machine has. Fonts that are needed go to `_fallbacks`."""
    manager = _import().font_manager
    from matplotlib.ft2font import FT2Font

    for file in (manager.findfont(FONT), *_fallbacks.values()):
        wanted = {c for c in wanted if not manager.get_font(file).get_char_index(ord(c))}
    # Not the font manager's own list: it is a cache, and a font that was installed since would not be in it
    for file in sorted(manager.findSystemFonts()) if wanted else ():
        try:
            font = FT2Font(file)
            has = {c for c in wanted if font.get_char_index(ord(c))}
            if has and font.scalable:  # coloured emoji are pictures of one size
                manager.fontManager.addfont(file)
                _fallbacks[font.family_name] = file
                wanted -= has
        except (OSError, RuntimeError):
            continue  # not a font that FreeType can read
    return wanted


def _import() -> Any:
    """matplotlib. Its cache of fonts is in the home directory; where that can't be written, it is made for this import.

    matplotlib would do so by itself, but with a warning, and leave a folder behind when a process ends by os._exit.
    """
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it also says that it looks for fonts
    if "MPLCONFIGDIR" in os.environ or _can_write_home():
        import matplotlib.font_manager
    else:
        with tempfile.TemporaryDirectory(prefix="rankup-fonts-") as folder:
            os.environ["MPLCONFIGDIR"] = folder
            try:
                import matplotlib.font_manager
            finally:
                del os.environ["MPLCONFIGDIR"]
    return matplotlib


def _can_write_home() -> bool:
    """Whether matplotlib can have its folders there."""
    for variable, usual in (("XDG_CONFIG_HOME", "~/.config"), ("XDG_CACHE_HOME", "~/.cache")):
        folder = os.path.join(os.environ.get(variable) or os.path.expanduser(usual), "matplotlib")
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError:
            return False
        if not os.access(folder, os.W_OK | os.X_OK):
            return False
    return True
