"""What the pages of figures need: the machine and the versions, tables in Markdown, a chart."""

import datetime
import importlib.metadata
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


def cpu_model() -> str:
    """The CPU's name, such as "Intel(R) Xeon(R) Processor @ 2.50GHz"; at least its architecture."""
    path = Path("/proc/cpuinfo")  # Linux only; platform.processor() is empty there
    for line in path.read_text().splitlines() if path.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def conditions() -> str:
    """What figures must not be read without, in one line."""
    return (
        f"{os.cpu_count()} CPUs of {cpu_model()}, load {os.getloadavg()[0]:.1f}, torch "
        f"{importlib.metadata.version('torch')}, Python {platform.python_version()}, {datetime.date.today()}"
    )


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table with these columns."""
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]


def bar_chart(values: Mapping[str, float], title: str, *, path: Path) -> None:
    """One bar for each name, as long as its value, with the value beside it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.4 * len(values)), layout="constrained")
    axes.bar_label(axes.barh(list(values), list(values.values())), fmt="{:,.0f}", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_title(title)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
