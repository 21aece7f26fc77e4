"""Confusion matrices can be read, whatever the number of classes and their names."""

import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rigs.jobs import ROOT, environment
from train.workloads.classification import NAMED, WIDTH, confusion_pictures

SMALLEST = 15.5  # of WIDTH; a phone shows a figure at about a third of it
FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


def texts(figure: Any) -> list[Any]:
    """Those that are drawn."""
    from matplotlib.text import Text

    found = figure.findobj(lambda each: isinstance(each, Text) and each.get_visible() and bool(each.get_text().strip()))
    return [text for text in found if isinstance(text, Text)]


def assert_legible(figure: Any) -> list[str]:
    """All its texts are inside it, none over another, none too small. Returns them."""
    from matplotlib.transforms import Bbox

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


def names(count: int) -> tuple[str, ...]:
    return tuple(f"n{number:08} African animal" for number in range(count))


def confused(count: int, samples: int = 900) -> torch.Tensor:
    """A matrix with mistakes in every row; no sample of class 1."""
    matrix = torch.eye(count, dtype=torch.int64) * samples
    for row in range(count):
        matrix[row, (row + 1) % count] += 1 + row % 7
        matrix[row, (row * 7) % count] += 1
    matrix[1] = 0
    return matrix


@pytest.mark.parametrize("classes", [names(2), FASHION, names(NAMED), ("a", "b" * 300, "$x_1$ & _", "")])
@pytest.mark.parametrize("samples", [9, 1_000_000])
def test_matrix_of_few_classes_has_all_names(
    classes: tuple[str, ...], samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # not by each process that collects tests

    drawn: list[list[str]] = []
    usual = FigureCanvasAgg.draw

    def record(canvas: FigureCanvasAgg) -> None:
        usual(canvas)
        drawn.append(assert_legible(canvas.figure))

    monkeypatch.setattr(FigureCanvasAgg, "draw", record)
    (picture,) = confusion_pictures(confused(len(classes), samples), classes).values()
    assert (picture.dtype, picture.shape) == (torch.uint8, (3, WIDTH + 60, WIDTH))
    assert {name[:15] for name in classes} - {""} <= set(drawn[0])
    if samples == 1_000_000:
        assert "100" in drawn[0]  # percent


def test_matrix_of_many_classes_is_not_drawn() -> None:
    assert confusion_pictures(confused(NAMED + 1), names(NAMED + 1)) == {}


# Linear A: nobody has read it since the Bronze Age, and no usual font has it
DRAW = """
import os, torch
os.environ.pop("MPLCONFIGDIR")
from train.workloads.classification import confusion_pictures
print(*confusion_pictures(torch.eye(3, dtype=torch.int64), ("plain", "\U00010600", "a\\tb $_$")), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("home", ["/dev/null", "new"])
def test_figures_need_no_home_and_leave_nothing_but_the_cache_of_fonts(home: str, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    env = {name: "" for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME")}
    env |= {"HOME": str(tmp_path / home), "TMPDIR": str(tmp_path / "tmp")}  # an absolute one stays as it is
    env |= {"RANKUP_CACHE": str(tmp_path / "cache"), "MPLCONFIGDIR": ""}
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", DRAW], env=environment() | env, cwd=ROOT, capture_output=True, text=True
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "eval/confusion\n", "")
    assert sorted(os.listdir(tmp_path)) == ["cache", "tmp"]
    assert os.listdir(tmp_path / "tmp") == []


@pytest.mark.parametrize(
    "line", ["show", "train --dataset digits --model mlp --max-steps 1 --tensorboard=false --run-dir {}"]
)
def test_figures_are_not_imported_where_nothing_is_drawn(line: str, tmp_path: Path) -> None:
    arguments = line.format(tmp_path).split()
    ran = subprocess.run([sys.executable, "-X", "importtime", "-m", "train.main", *arguments], env=dict(os.environ),
                         cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "train.config" in ran.stderr
    assert "matplotlib.figure" not in ran.stderr  # sympy has a module whose name ends in matplotlib
