"""Is a figure legible: all its texts inside it, none over another, none too small."""

from itertools import combinations

from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from train.workloads.classification import WIDTH, to_tensor

SMALLEST = 15.5  # of WIDTH; a phone shows a figure at about a third of it


def texts(figure: Figure) -> list[Text]:
    """Those that are drawn."""
    to_tensor(figure)
    found = [*figure.texts, *([figure._suptitle] if figure._suptitle else [])]
    found += [text for legend in figure.legends for text in legend.get_texts()]
    for axes in figure.axes:
        found += [*axes.texts, axes.title, axes.xaxis.label, axes.yaxis.label]
        found += [label for axis in (axes.xaxis, axes.yaxis) for label in tick_labels(axis)]
    return [text for text in dict.fromkeys(found) if text.get_visible() and text.get_text().strip()]


def tick_labels(axis: Axis) -> list[Text]:
    low, high = sorted(axis.get_view_interval())
    ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    return [label for tick in ticks for label in (tick.label1, tick.label2)]


def assert_legible(figure: Figure) -> list[str]:
    """Returns the texts."""
    found = texts(figure)
    boxes = {text: text.get_window_extent() for text in found}
    whole = figure.bbox
    assert whole.width == WIDTH
    for text, box in boxes.items():
        inside = whole.x0 <= box.x0 and whole.y0 <= box.y0 and box.x1 <= whole.x1 and box.y1 <= whole.y1
        assert inside, (text.get_text(), box, whole)
        assert text.get_size() >= SMALLEST, (text.get_text(), text.get_size())
    for one, other in combinations(found, 2):
        shared = Bbox.intersection(boxes[one], boxes[other])
        assert shared is None or min(shared.width, shared.height) < 2, (one.get_text(), other.get_text(), shared)
    return [text.get_text() for text in found]
