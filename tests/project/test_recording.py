"""The README's pictures: docker/kill.svg, which shows a kill, and the charts that are drawn from its tables."""

import re
from xml.etree import ElementTree

import pytest

from bench.charts import charts
from bench.recording import BEFORE_S, COLUMNS, COMMAND, ROWS
from tests.rigs.jobs import ROOT


def test_recording_shows_a_kill_after_three_seconds_and_the_resume() -> None:
    """Each wrapped line appears at its time. A reader without animations sees the last lines."""
    path = ROOT / "docker" / "kill.svg"
    svg = path.read_text(encoding="utf-8")
    shown = [each.text or "" for each in ElementTree.fromstring(svg).iter() if each.tag.endswith("}text")]
    assert path.stat().st_size < 500_000
    before, _, after = " ".join(" ".join(shown).split()).partition(COMMAND)
    assert "epoch 1:" in before
    assert ", rescued by rank 0 on node0; no finished step was lost" in after
    assert "weights digest" in after
    assert COLUMNS - 3 < max(map(len, shown)) <= COLUMNS

    (whole_s,) = map(float, re.findall(r"animation:([\d.]+)s", svg))
    moves = re.findall(r"([\d.]+)%\{transform:translateY\((-?[\d.]+)px\)\}", svg)
    times = [float(percent) for percent, _ in moves]
    assert times == sorted(times)
    assert (times[-1], len(moves)) == (100, len(shown) + 1)
    typed = next(number for number, line in enumerate(shown) if line.startswith("$ "))
    assert times[typed] / 100 * whole_s == pytest.approx(BEFORE_S, abs=0.01)
    assert len(set(re.findall(r"@keyframes (l\d+)", svg))) == ROWS
    (still,) = re.findall(r"#all\{transform:translateY\((-?[\d.]+)px\)\}", svg)
    assert float(still) == float(moves[-1][1]) < 0


def test_charts_show_the_figures_of_the_tables() -> None:
    for name, picture in charts((ROOT / "README.md").read_text()).items():
        assert (ROOT / "bench" / name).read_text() == picture
        assert f"](bench/{name})" in (ROOT / "README.md").read_text()
