"""matplotlib stays out of the way: not imported at the start, silent, with any home, any font, any settings."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen

from tests.rigs.jobs import ROOT, environment
from train.process.figures import shorten

RARE = "\U00010600"  # Linear A: nobody has read it since the Bronze Age, and no usual font has it
DRAW = f"""
from train.process.figures import draw_bars, new_figure, readable, to_pixels
labels = readable(["plain", {RARE!r} * 2, "a\\tb $_$", ""], limit=12)
with new_figure(300) as figure:
    draw_bars(figure, [(label, 1.0, "") for label in labels], "a title")
    print(ascii(labels), to_pixels(figure).shape, flush=True)
"""

# A character that is drawn as an empty box is a warning
CONFUSION = f"""
import torch
from train.workloads.pictures import confusion_pictures, has_numbers
confusion_pictures(torch.eye(2, dtype=torch.int64), ("plain", {RARE!r}))
assert not has_numbers(("plain", {RARE!r}))
"""


def run(code: str, **env: str) -> str:
    """What `code` prints, in a process of its own where a warning is an error. stderr must be empty."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=environment() | env, cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    return ran.stdout.strip()


@pytest.mark.parametrize("home", ["/dev/null", "/proc", "new"])
def test_figures_need_no_home_and_leave_nothing_behind(home: str, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    env = {name: "" for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR")}
    env |= {"HOME": str(tmp_path / home), "TMPDIR": str(tmp_path / "tmp")}  # an absolute one stays as it is
    run(f"import os; del os.environ['MPLCONFIGDIR']\n{DRAW}\nos._exit(0)", **env)
    assert list((tmp_path / "tmp").iterdir()) == []
    assert (tmp_path / "new" / ".cache" / "matplotlib").exists() == (home == "new")


def test_figures_number_names_that_no_font_has() -> None:
    assert run(DRAW) == r"['plain', 'class 1', 'a b $_$', 'class 3'] (300, 1000, 3)"


def test_figures_find_an_installed_font(tmp_path: Path) -> None:
    """Though the cache of fonts is older than the font."""
    run(DRAW, HOME=str(tmp_path), XDG_CACHE_HOME="", XDG_CONFIG_HOME="", XDG_DATA_HOME=str(tmp_path / "data"))
    pen = TTGlyphPen(None)
    for step, point in enumerate([(0, 0), (0, 900), (900, 900), (900, 0)]):
        (pen.lineTo if step else pen.moveTo)(point)
    pen.closePath()
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder([".notdef", "rare"])
    builder.setupCharacterMap({ord(RARE): "rare"})
    builder.setupGlyf(dict.fromkeys((".notdef", "rare"), pen.glyph()))
    builder.setupHorizontalMetrics(dict.fromkeys((".notdef", "rare"), (1000, 0)))
    builder.setupHorizontalHeader(ascent=900, descent=-100)
    builder.setupNameTable({"familyName": "Minoan", "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    (tmp_path / "data" / "fonts").mkdir(parents=True)
    builder.save(tmp_path / "data" / "fonts" / "minoan.ttf")
    (tmp_path / "data" / "fonts" / "broken.ttf").write_bytes(b"no font")
    found = run(DRAW, HOME=str(tmp_path), XDG_CACHE_HOME="", XDG_CONFIG_HOME="", XDG_DATA_HOME=str(tmp_path / "data"))
    run(CONFUSION, HOME=str(tmp_path), XDG_CACHE_HOME="", XDG_CONFIG_HOME="", XDG_DATA_HOME=str(tmp_path / "data"))
    assert found == r"['plain', '\U00010600\U00010600', 'a b $_$', 'class 3'] (300, 1000, 3)"


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
    assert "train.process" in ran.stderr
    assert "matplotlib.figure" not in ran.stderr  # sympy has a module whose name ends in matplotlib


def test_long_names_keep_both_ends() -> None:
    assert shorten("n02116738 African hunting dog", 16) == "n02116738 …g dog"
    assert shorten("sixteen letters!", 16) == "sixteen letters!"
    assert shorten("一个很长很长的中文类别名称", 16) == "一个很长很…名称"
