"""Draw the README's tables of recovery and of the race: bench/recovery.svg and bench/race.svg.

    python bench/charts.py      # after README.md has new figures from recovery.py or race.py
"""

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent
WIDTH, LINE, NAMES, NUMBERS = 480, 22, 200, 56  # pixels

Bar = tuple[str, float, str]  # name, length, and the number beside the bar. A name that begins with ~ gives a grey bar


def cells(readme: str, title: str) -> list[list[str]]:
    """Return the table whose header has the cell `title`: the header and the rows, without the line between them."""
    (table,) = re.findall(rf"(?m)^\|.*\| {title} \|.*\n(?:\|.*\n)+", readme)
    rows = [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return [rows[0], *rows[2:]]


def draw(title: str, bars: Sequence[Bar]) -> str:
    """Return an SVG of bars with their names and numbers, for light and dark pages."""
    longest = max(length for _, length, _ in bars)
    parts = []
    for number, (name, length, text) in enumerate(bars, 1):
        y, width = LINE * number + 8, (WIDTH - NAMES - NUMBERS) * length / longest
        kind = "other" if name.startswith("~") else "own"
        parts.append(f'<text y="{y + 13}">{escape(name.removeprefix("~"))}</text>')
        parts.append(f'<rect class="{kind}" x="{NAMES}" y="{y}" width="{width:.1f}" height="{LINE - 6}" rx="2"/>')
        parts.append(f'<text x="{NAMES + width + 6:.1f}" y="{y + 13}">{text}</text>')
    height = LINE * (len(bars) + 1) + 8
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="640" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title><style>",
        "text{font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;fill:#1f2328}",
        ".title{font-weight:bold}.own{fill:#1a7f37}.other{fill:#8c959f}",
        "@media (prefers-color-scheme:dark){text{fill:#c9d1d9}.own{fill:#3fb950}.other{fill:#6e7681}}",
        f'</style><text class="title" y="14">{escape(title)}</text>', *parts, "</svg>", "",
    ])


def charts(readme: str) -> dict[str, str]:
    """Return the pictures by file name."""
    head, *rows = cells(readme, "rank 0")
    seconds = next(row for row in rows if row[0] == "two containers")
    lost = [(what if what != "the whole job, cold" else f"~{what}", float(took), took)
            for what, took in zip(head[1:], seconds[1:], strict=True)]
    _, *racers = cells(readme, "images/s")
    speeds = [(name if name == "rankup" else f"~{_short(name)}", float(speed.replace(",", "")), speed)
              for name, speed, *_ in racers]
    return {"recovery.svg": draw("Two containers: seconds from a kill to the next step", lost),
            "race.svg": draw("Two processes on two CPUs, fp32: images/s", speeds)}


def _short(name: str) -> str:
    return re.sub(r"^PyTorch's |, by .*|, barebones.*", "", name)


if __name__ == "__main__":
    for name, picture in charts((HERE.parent / "README.md").read_text()).items():
        (HERE / name).write_text(picture)
