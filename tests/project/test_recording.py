"""The pictures of the README: the kill, docker/kill.svg, the charts of its tables, and the scripts that draw them."""

import re
from xml.etree import ElementTree

from tests.bench.charts import charts
from tests.bench.recording import COLUMNS, COMMAND, ROWS, abridged, draw
from tests.rigs.jobs import ROOT

LINES = [(0.1 * number, f"[node0 r0/2] step {number} <&> " + "x " * (number % 3) * 50) for number in range(ROWS + 9)]


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("}text")]


def test_recording_shows_the_kill_after_three_seconds_and_all_that_follows_in_time() -> None:
    said = [(0.0, "[node0 r0/2] step 1"), (8.0, "[node0 r0/2] step 2"), (10.0, COMMAND),
            (10.1, "[node0 r0/2] data   x"),
            (12.0, "[node0 r0/2] resumed from step 2"), (60.0, "[node0 r0/2] step 3"), (70.0, "up: node0 ended with 0")]
    assert abridged(said) == [(1.0, "step 2"), (3.0, COMMAND), (5.0, "resumed from step 2"), (8.5, "..."),
                              (9.0, "up: node0 ended with 0")]


def test_recording_shows_lines_wrapped_at_their_times_and_the_last_ones_where_nothing_moves() -> None:
    svg = draw(LINES)
    shown = texts(svg)
    assert " ".join(" ".join(shown).split()) == " ".join(" ".join(text for _, text in LINES).split())
    assert COLUMNS - 3 < max(map(len, shown)) <= COLUMNS
    moves = re.findall(r"([\d.]+)%\{transform:translateY\((-?[\d.]+)px\)\}", svg)
    times = [float(percent) for percent, _ in moves]
    assert times == sorted(times)
    assert (times[-1], len(moves)) == (100, len(shown) + 1)
    assert len(set(re.findall(r"@keyframes (l\d+)", svg))) == ROWS
    (still,) = re.findall(r"#all\{transform:translateY\((-?[\d.]+)px\)\}", svg)
    assert float(still) == float(moves[-1][1]) < 0


def test_recording_that_is_shown_holds_a_kill_and_a_run_that_goes_on() -> None:
    path = ROOT / "docker" / "kill.svg"
    shown = texts(path.read_text(encoding="utf-8"))
    assert path.stat().st_size < 500_000
    before, _, after = " ".join(" ".join(shown).split()).partition(COMMAND)
    assert "epoch 1:" in before
    assert ", rescued by rank 0 on node0; no finished step was lost" in after
    assert "weights digest" in after


def test_charts_show_the_figures_of_the_tables() -> None:
    for name, picture in charts((ROOT / "README.md").read_text()).items():
        assert (ROOT / "tests" / "bench" / name).read_text() == picture
        assert f"](tests/bench/{name})" in (ROOT / "README.md").read_text()
