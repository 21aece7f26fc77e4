"""Charts as PNG files, drawn with Pillow, which torchvision needs anyway."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WIDTH, HEAD = 900, 46  # pixels; the title stands in the head
COLOURS = ("#3070b0", "#c05030", "#308050", "#9050a0", "#b08020", "#208090", "#808080", "#303030")


def bar_chart(values: Mapping[str, float], title: str, *, path: Path) -> None:
    """One bar for each name, as long as its value."""
    row, left, right = 34, 150, 120
    image, draw = _canvas(HEAD + row * len(values) + 12, title, font_size=16)
    largest = max([*values.values(), 1e-9])
    for number, (name, value) in enumerate(values.items()):
        top = HEAD + number * row
        length = (WIDTH - left - right) * value / largest
        draw.text((left - 10, top + row / 2), name, fill="black", anchor="rm")
        draw.rectangle((left, top + 5, left + length, top + row - 5), fill=COLOURS[0])
        draw.text((left + length + 8, top + row / 2), f"{value:,.0f}", fill="black", anchor="lm")
    image.save(path)


def line_chart(
    curves: Mapping[str, Sequence[tuple[float, float]]], title: str, *, labels: tuple[str, str], path: Path
) -> None:
    """Curves through points. Both axes are logarithmic, with a grid line at each power of ten. `labels`: of x and y."""
    height, left, right, top, bottom = 560, 90, 230, HEAD, 60
    points = [point for curve in curves.values() for point in curve]
    exponents = [[math.log10(max(point[axis], 1e-12)) for point in points] or [0.0, 1.0] for axis in (0, 1)]
    low = [math.floor(min(values)) for values in exponents]
    high = [max(math.ceil(max(values)), low[axis] + 1) for axis, values in enumerate(exponents)]

    def pixel(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(max(x, 1e-12)) - low[0]) / (high[0] - low[0])
        up = (math.log10(max(y, 1e-12)) - low[1]) / (high[1] - low[1])
        return left + across * (WIDTH - left - right), height - bottom - up * (height - top - bottom)

    image, draw = _canvas(height, title, font_size=14)
    for power in range(low[0], high[0] + 1):
        foot = pixel(10**power, 10 ** low[1])
        draw.line((*foot, *pixel(10**power, 10 ** high[1])), fill="#dddddd")
        draw.text(foot, f"\n1e{power}", fill="gray", anchor="ma")
    for power in range(low[1], high[1] + 1):
        start = pixel(10 ** low[0], 10**power)
        draw.line((*start, *pixel(10 ** high[0], 10**power)), fill="#dddddd")
        draw.text((left - 8, start[1]), f"1e{power}", fill="gray", anchor="rm")
    draw.text((left, height - 24), f"{labels[0]}; up: {labels[1]}", fill="gray")
    for number, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        draw.line([pixel(*point) for point in curve], fill=colour, width=3)
        for x, y in (pixel(*point) for point in curve):
            draw.ellipse((x - 3, y - 3, x + 3, y + 3), fill=colour)
        draw.text((WIDTH - right + 14, top + 22 * number), name, fill=colour)
    image.save(path)


def _canvas(height: int, title: str, *, font_size: int) -> tuple[Any, Any]:
    """An image with its title, and what draws on it."""
    # Here: Pillow takes 0.1 s to import, and most commands draw nothing
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (WIDTH, height), "white")
    draw = ImageDraw.Draw(image)
    draw.font = ImageFont.load_default(font_size)
    draw.text((12, 12), title, fill="#333333")
    return image, draw
