"""Charts, drawn with Pillow (torchvision brings it along)."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

ROW, LEFT, WIDTH, HEAD = 34, 150, 900, 46


def bars(values: Mapping[str, float], title: str, path: Path) -> None:
    """One bar for each name, as long as its value, as a PNG."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(16)
    image = Image.new("RGB", (WIDTH, HEAD + ROW * len(values) + 12), "white")
    draw = ImageDraw.Draw(image)
    draw.text((12, 12), title, fill="#333333", font=font)
    largest = max([*values.values(), 1e-9])
    for number, (name, value) in enumerate(values.items()):
        top = HEAD + number * ROW
        length = (WIDTH - LEFT - 120) * value / largest
        draw.text((LEFT - 10, top + ROW / 2), name, fill="black", font=font, anchor="rm")
        draw.rectangle((LEFT, top + 5, LEFT + length, top + ROW - 5), fill="#3070b0")
        draw.text((LEFT + length + 8, top + ROW / 2), f"{value:,.0f}", fill="black", font=font, anchor="lm")
    image.save(path)


def lines(series: Mapping[str, Sequence[tuple[float, float]]], title: str, labels: tuple[str, str], path: Path) -> None:
    """Curves through points, both axes logarithmic with a line for each power of ten, as a PNG. `labels`: of x and y."""
    from PIL import Image, ImageDraw, ImageFont

    height, left, right, top, bottom = 560, 90, 230, HEAD, 60
    points = [point for curve in series.values() for point in curve]
    xs, ys = ([math.log10(max(point[axis], 1e-12)) for point in points] or [0.0, 1.0] for axis in (0, 1))
    low, high = (math.floor(min(xs)), math.floor(min(ys))), (math.ceil(max(xs)), math.ceil(max(ys)))
    high = (max(high[0], low[0] + 1), max(high[1], low[1] + 1))

    def at(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(max(x, 1e-12)) - low[0]) / (high[0] - low[0])
        up = (math.log10(max(y, 1e-12)) - low[1]) / (high[1] - low[1])
        return left + across * (WIDTH - left - right), height - bottom - up * (height - top - bottom)

    font = ImageFont.load_default(14)
    image = Image.new("RGB", (WIDTH, height), "white")
    draw = ImageDraw.Draw(image)
    draw.text((12, 12), title, fill="#333333", font=font)
    for power in range(low[0], high[0] + 1):
        draw.line((*at(10**power, 10 ** low[1]), *at(10**power, 10 ** high[1])), fill="#dddddd")
        draw.text(at(10**power, 10 ** low[1]), f"\n1e{power}", fill="gray", font=font, anchor="ma")
    for power in range(low[1], high[1] + 1):
        draw.line((*at(10 ** low[0], 10**power), *at(10 ** high[0], 10**power)), fill="#dddddd")
        draw.text((left - 8, at(1, 10**power)[1]), f"1e{power}", fill="gray", font=font, anchor="rm")
    draw.text((left, height - 24), f"{labels[0]}; up: {labels[1]}", fill="gray", font=font)
    colours = ("#3070b0", "#c05030", "#308050", "#9050a0", "#b08020", "#208090", "#808080", "#303030")
    for number, (name, curve) in enumerate(series.items()):
        colour = colours[number % len(colours)]
        draw.line([at(*point) for point in curve], fill=colour, width=3)
        for x, y in (at(*point) for point in curve):
            draw.ellipse((x - 3, y - 3, x + 3, y + 3), fill=colour)
        draw.text((WIDTH - right + 14, top + 22 * number), name, fill=colour, font=font)
    image.save(path)
