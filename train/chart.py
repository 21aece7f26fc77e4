"""A bar chart, drawn with Pillow (torchvision brings it along)."""

from collections.abc import Mapping
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
