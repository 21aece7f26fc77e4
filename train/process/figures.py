"""Figures by matplotlib: legible on a phone too, with any names, and silent whatever the machine lacks. No torch here.

matplotlib is imported where something is drawn: 0.4 s that no start pays. Never pyplot, whose state threads share.
"""

import logging
import os
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

WIDTH = 1000  # pixels: a phone shows them at a third of this, so TEXT is 10 pixels there
TEXT, SMALL = 28, 22  # pixels, as a point is one at this resolution
DPI = 72
COLOUR = "#2a6fb0"
FONT = "DejaVu Sans"  # matplotlib brings it: Latin, Greek, Cyrillic, Arabic, but neither Chinese nor Japanese
# Parts of file names of fonts with Chinese, best first; other installed fonts are looked at after them
PREFERRED = (
    "notosanscjk",
    "notosanssc",
    "sourcehansans",
    "wqy",
    "pingfang",
    "hiragino",
    "heiti",
    "msyh",
    "simhei",
    "droidsansfallback",
    "arial unicode",
    "simsun",
)
_fallbacks: dict[str, str] = {}  # family -> file, of the fonts found so far for what FONT lacks


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
        "font.family": [FONT, *_fallbacks],
        "font.size": TEXT,
        "text.parse_math": False,
        "axes.linewidth": 1.5,
        "axes.edgecolor": "#808080",
        "figure.constrained_layout.use": True,
        "figure.constrained_layout.w_pad": 0.15,
        "figure.constrained_layout.h_pad": 0.15,
        "savefig.dpi": "figure",
    }
    with matplotlib.rc_context(ours):
        yield Figure(figsize=(WIDTH / DPI, height / DPI), dpi=DPI)


def set_title(figure: "Figure", text: str) -> None:
    """`text` at the upper left, in as many lines as it takes."""
    figure.suptitle(textwrap.fill(text, 58), x=0.02, ha="left", size=TEXT, color="#303030")


def to_pixels(figure: "Figure") -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """The figure as uint8 [H, W, 3]."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return np.array(canvas.buffer_rgba())[:, :, :3]


def readable(names: Sequence[str], *, limit: int) -> list[str]:
    """Labels for classes: names of at most `limit` characters, and `class 3` where no font has a name's characters.

    Ask before `new_figure`, which takes the fonts found by then.
    """
    clean = ["".join(c if c.isprintable() else " " for c in name).strip() for name in names]
    missing = {c for name in clean for c in name} - _drawable()
    if missing:
        missing -= _find_fallbacks(missing)
    return [
        f"class {number}" if not name or missing & set(name) else shorten(name, limit)
        for number, name in enumerate(clean)
    ]


def shorten(text: str, limit: int) -> str:
    """Both ends of a long text: names of classes often begin alike. A Chinese character is as wide as two."""
    wide = any(ord(c) > 0x2E7F for c in text)
    limit = limit // 2 if wide else limit
    return text if len(text) <= limit else f"{text[: limit - limit // 3 - 1]}…{text[-(limit // 3) :]}"


def draw_bars(figure: "Figure", values: Sequence[tuple[str, float, str]], title: str) -> None:
    """Horizontal bars from the top down: name, length, and a text at the right. About 60 pixels high each."""
    names, lengths, texts = zip(*values, strict=True)
    axes = figure.subplots()
    axes.barh(range(len(names)), lengths, color=COLOUR, height=0.7)
    axes.set_xlim(0, max([*lengths, 1e-9]))
    axes.set_xticks([])
    # The layout makes room for labels of an axis, whatever their length; texts behind the bars would hang over
    for side, labels in ((axes, names), (axes.twinx(), texts)):
        side.set_ylim(len(names) - 0.5, -0.5)
        side.set_yticks(range(len(names)), labels)
        side.tick_params(length=0, pad=8)
        side.spines[["top", "right", "bottom"]].set_visible(False)
    set_title(figure, title)


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
    home = os.path.expanduser("~")
    folders = [
        os.path.join(os.environ.get(variable) or os.path.join(home, usual), "matplotlib")
        for variable, usual in (("XDG_CONFIG_HOME", ".config"), ("XDG_CACHE_HOME", ".cache"))
    ]
    for folder in folders if sys.platform == "linux" else [os.path.join(home, ".matplotlib")]:
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError:
            return False
        if not os.access(folder, os.W_OK | os.X_OK):
            return False
    return True


def _drawable() -> set[str]:
    """The characters that FONT and the fonts found so far have."""
    manager = _import().font_manager
    files = [manager.findfont(FONT), *_fallbacks.values()]
    return {chr(code) for file in files for code in manager.get_font(file).get_charmap()}


def _find_fallbacks(missing: set[str]) -> set[str]:
    """Use installed fonts for the characters `missing`. Returns those found."""
    matplotlib = _import()
    from matplotlib.ft2font import FT2Font

    def rank(file: str) -> int:
        name = os.path.basename(file).lower()
        return next((place for place, part in enumerate(PREFERRED) if part in name), len(PREFERRED))

    found: set[str] = set()
    # Not the font manager's own list: it is a cache, and a font that was installed since would not be in it
    for file in sorted(matplotlib.font_manager.findSystemFonts(), key=lambda file: (rank(file), file)):
        try:
            font = FT2Font(file)
            has = {c for c in missing - found if font.get_char_index(ord(c))}
            if not has or not font.scalable:  # coloured emoji are pictures of one size
                continue
            matplotlib.font_manager.fontManager.addfont(file)
        except (OSError, RuntimeError):
            continue  # not a font that FreeType can read
        _fallbacks[font.family_name] = file
        found |= has
        if found == missing:
            break
    return found
