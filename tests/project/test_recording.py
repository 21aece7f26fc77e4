"""The picture of a kill: docker/kill.svg, and the script that draws it."""

import re
from xml.etree import ElementTree

from tests.bench.recording import COLUMNS, COMMAND, ROWS, draw
from tests.rigs.jobs import ROOT

LINES = [(0.1 * number, f"[node0 r0/2] step {number} <&> " + "x" * (number % 3) * 100) for number in range(ROWS + 9)]


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("}text")]


def test_recording_shows_every_line_once_and_cuts_long_ones() -> None:
    shown = texts(draw(LINES))
    assert [text.split(" <&>")[0] for text in shown] == [text.split(" <&>")[0] for _, text in LINES]
    assert max(map(len, shown)) == COLUMNS


def test_recording_shows_lines_at_their_times_and_the_last_ones_where_nothing_moves() -> None:
    svg = draw(LINES)
    moves = re.findall(r"([\d.]+)%\{transform:translateY\((-?[\d.]+)px\)\}", svg)
    times = [float(percent) for percent, _ in moves]
    assert times == sorted(times)
    assert times[-1] == 100
    assert len(moves) == len(LINES) + 1
    assert len(set(re.findall(r"@keyframes (l\d+)", svg))) == ROWS
    (still,) = re.findall(r"#all\{transform:translateY\((-?[\d.]+)px\)\}", svg)
    assert float(still) == float(moves[-1][1]) < 0


def test_recording_that_is_shown_holds_a_kill_and_a_run_that_goes_on() -> None:
    path = ROOT / "docker" / "kill.svg"
    shown = texts(path.read_text(encoding="utf-8"))
    assert path.stat().st_size < 500_000
    before, after = shown[: shown.index(COMMAND)], shown[shown.index(COMMAND) :]
    assert any("epoch 1:" in text for text in before)
    assert any(", rescued by rank 0 on node0; no finished step was lost" in text for text in after)
    assert any("weights digest" in text for text in after)
