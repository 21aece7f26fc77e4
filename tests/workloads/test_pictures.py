"""Confusion matrices can be read, whatever the number of classes and their names."""

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.rigs.jobs import ROOT, environment
from tests.rigs.legible import assert_legible
from train.workloads import pictures
from train.workloads.pictures import (
    LETTERS,
    NAMED,
    WIDTH,
    confusion_pictures,
    new_figure,
    readable,
    shorten,
)

FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


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


@pytest.mark.parametrize("classes", [names(2), FASHION, names(NAMED), ("a", "b" * 300, "美食", "$x_1$ & _")])
@pytest.mark.parametrize("samples", [9, 1_000, 1_000_000])
def test_matrix_of_few_classes_has_all_names(classes: tuple[str, ...], samples: int) -> None:
    labels = readable(classes, limit=LETTERS)
    with new_figure(WIDTH + 60) as figure:
        pictures.draw_matrix(figure, confused(len(classes), samples), labels)
        found = assert_legible(figure)
    assert set(labels) <= set(found)
    for number, name in enumerate(classes):
        assert labels[number] in (name, f"{name[:9]}…{name[-5:]}", f"class {number}")
    if samples == 1_000_000:
        assert "100" in found  # percent


@pytest.mark.parametrize("count", [2, NAMED, NAMED + 1])
def test_confusion_pictures_are_pictures(count: int) -> None:
    found = confusion_pictures(confused(count), names(count))
    assert found.keys() == ({"eval/confusion"} if count <= NAMED else set())
    for picture in found.values():
        assert picture.dtype == torch.uint8
        assert picture.shape[::2] == (3, WIDTH)
        assert int(picture.float().std()) > 0


def test_pictures_draw_no_random_number() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    confusion_pictures(confused(20), names(20))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]


# matplotlib stays out of the way ---------------------------------------------------------------------------------

RARE = "\U00010600"  # Linear A: nobody has read it since the Bronze Age, and no usual font has it
DRAW = f"""
import torch
from train.workloads.pictures import draw_matrix, new_figure, readable, to_tensor
names = ("plain", {RARE!r} * 2, "a\\tb $_$", "")
labels = readable(names, limit=12)
with new_figure(300) as figure:
    draw_matrix(figure, torch.eye(4, dtype=torch.int64), labels)
    # A character that is drawn as an empty box is a warning
    print(ascii(labels), *to_tensor(figure).shape, flush=True)
"""

def run(code: str, **env: str) -> str:
    """What `code` prints, in a process of its own where a warning is an error. stderr must be empty."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=environment() | env, cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    return ran.stdout.strip()


@pytest.mark.parametrize("home", ["/dev/null", "new"])
def test_figures_need_no_home_and_leave_nothing_but_the_cache_of_fonts(home: str, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    env = {name: "" for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR")}
    env |= {"HOME": str(tmp_path / home), "TMPDIR": str(tmp_path / "tmp")}  # an absolute one stays as it is
    env["RANKUP_CACHE"] = str(tmp_path / "cache")
    drawn = run(f"import os; del os.environ['MPLCONFIGDIR']\n{DRAW}\nos._exit(0)", **env)
    assert drawn == r"['plain', 'class 1', 'a b $_$', 'class 3'] 3 300 1000"
    assert sorted(os.listdir(tmp_path)) == ["cache", "tmp"]
    assert os.listdir(tmp_path / "tmp") == []


def test_figures_ignore_settings_of_the_user_and_keep_them(tmp_path: Path) -> None:
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nfont.size: 90\nbackend: tkagg\n")
    told = run(f"{DRAW}\nimport matplotlib\nprint(matplotlib.rcParams['font.size'])", MPLCONFIGDIR=str(tmp_path))
    assert told.splitlines()[-1] == "90.0"


@pytest.mark.parametrize(
    "line", ["--help", "show", "train --dataset digits --model mlp --max-steps 1 --tensorboard=false --run-dir {}"]
)
def test_figures_are_not_imported_where_nothing_is_drawn(line: str, tmp_path: Path) -> None:
    arguments = line.format(tmp_path).split()
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "train.main", *arguments], env=dict(os.environ), cwd=ROOT,
        capture_output=True, text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert "train.config" in ran.stderr
    assert "matplotlib.figure" not in ran.stderr  # sympy has a module whose name ends in matplotlib


def test_long_names_keep_both_ends() -> None:
    assert shorten("n02116738 African hunting dog", 16) == "n02116738 …g dog"
    assert shorten("sixteen letters!", 16) == "sixteen letters!"
    assert shorten("一个很长很长的中文类别名称", 16) == "一个很长很…名称"
