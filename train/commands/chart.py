"""Charts as PNG files."""

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from train.process.figures import COLOURS, SMALL, draw_bars, new_figure, set_title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curves = Mapping[str, Sequence[tuple[float, float]]]
Formats = tuple[Callable[[float], str], Callable[[float], str]]
MARKERS = "osD^vPX*"  # beside colours: not everybody tells these apart, and paper has none


def bar_chart(values: Mapping[str, float], title: str, *, path: Path) -> None:
    """One bar for each name, as long as its value."""
    with new_figure(120 + 60 * len(values)) as figure:
        draw_bars(figure, [(name, value, f"{value:,.0f}") for name, value in values.items()], title)
        figure.savefig(path)


def line_chart(curves: Curves, title: str, *, labels: tuple[str, str], formats: Formats, path: Path) -> None:
    """Curves through points. Both axes are logarithmic. `labels`, `formats`: of x and y, and of a value there.

    A value of 0 has no place on such an axis: it is left out.
    """
    with new_figure(760 + 40 * -(-len(curves) // 2)) as figure:
        draw_lines(figure, curves, title, labels=labels, formats=formats)
        figure.savefig(path)


def draw_lines(figure: "Figure", curves: Curves, title: str, *, labels: tuple[str, str], formats: Formats) -> None:
    """As `line_chart`."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes = figure.subplots()
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for (name, curve), colour, marker in zip(curves.items(), cycle(COLOURS), cycle(MARKERS)):
        points = [(x, y) for x, y in curve if x > 0 and y > 0]
        xs, ys = zip(*points, strict=True) if points else ((), ())
        axes.plot(xs, ys, color=colour, marker=marker, linewidth=3, markersize=9, label=name)
    for axis, base, label, form in zip((axes.xaxis, axes.yaxis), (2, 10), labels, formats, strict=True):
        axis.set_label_text(label)
        axis.set_major_locator(LogLocator(base, numticks=7))
        axis.set_major_formatter(FuncFormatter(lambda value, _, form=form: form(value)))
        axis.set_minor_formatter("")
    axes.tick_params(which="both", labelsize=SMALL)
    axes.grid(color="#dddddd")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=SMALL)
    set_title(figure, title)
