"""Pictures for TensorBoard, drawn with Pillow, which torchvision needs anyway: uint8 [3, H, W]."""

import torch
from PIL import Image, ImageDraw

CELL = 44  # pixels
NAMED = 20  # with more classes than this, names and counts would be too small to read
SIDE = 900  # pixels of the whole matrix then
LINE = "#dddddd"
HEAD = 18  # pixels for the line of explanation at the top


def confusion_picture(matrix: torch.Tensor, classes: tuple[str, ...]) -> torch.Tensor:
    """A confusion matrix, int64 [C, C] (true class down, predicted class across): uint8 [3, H, W].

    A cell is shaded by its share of the row's samples, from white to dark blue.
    """
    count = len(classes)
    named = count <= NAMED
    cell = CELL if named else max(1, SIDE // count)
    labels = [_label(name, limit=16) for name in classes] if named else []
    upright = any(label.width > cell - 4 for label in labels)
    left = max([8, *(label.width + 14 for label in labels)])
    top = HEAD + (max(label.width for label in labels) + 12 if upright else 20 if named else 4)
    image = Image.new("RGB", (max(left + count * cell + 2, 380), top + count * cell + 2), "white")
    draw = ImageDraw.Draw(image)
    draw.text((4, 3), "true class down, predicted class across; shades are shares of a row", fill="gray")
    shares = matrix.double() / matrix.sum(1, keepdim=True).clamp(min=1)
    shades = (255 - shares[:, :, None] * torch.tensor([247.0, 207.0, 148.0])).to(torch.uint8)
    whole = Image.fromarray(shades.numpy()).resize((count * cell, count * cell), Image.Resampling.NEAREST)
    image.paste(whole, (left, top))
    for row, column in ((r, c) for r in range(count) for c in range(count) if named):
        x, y = left + column * cell, top + row * cell
        draw.rectangle((x, y, x + cell, y + cell), outline=LINE)
        if number := int(matrix[row, column]):
            ink = "white" if shares[row, column] > 0.45 else "black"
            draw.text((x + cell / 2, y + cell / 2), str(number), fill=ink, anchor="mm")
    for number, label in enumerate(labels):
        across = label.transpose(Image.Transpose.ROTATE_90) if upright else label
        image.paste(label, (left - 6 - label.width, top + number * cell + (cell - label.height) // 2))
        image.paste(across, (left + number * cell + (cell - across.width) // 2, top - 6 - across.height))
    return to_tensor(image)


def _label(text: str, *, limit: int) -> Image.Image:
    """A text of at most `limit` characters, in the smallest picture that it fits into."""
    short = text if len(text) <= limit else text[: limit - 1] + "…"
    left, top, right, bottom = ImageDraw.Draw(Image.new("RGB", (1, 1))).textbbox((0, 0), short)
    picture = Image.new("RGB", (int(right - left) + 1, int(bottom - top) + 2), "white")
    ImageDraw.Draw(picture).text((-left, -top), short, fill="black")
    return picture


def grid_picture(images: torch.Tensor, captions: list[str], *, columns: int = 5) -> torch.Tensor:
    """Images, uint8 [N, C, H, W] with C = 1 or 3, in a grid, each with its caption below: uint8 [3, H', W']."""
    side, text = 112, 14
    rows = -(-len(captions) // columns)
    sheet = Image.new("RGB", (columns * (side + 8), HEAD + rows * (side + text + 8)), "white")
    draw = ImageDraw.Draw(sheet)
    draw.text((4, 3), "true class / predicted class", fill="gray")
    for number, caption in enumerate(captions):
        x, y = (number % columns) * (side + 8), HEAD + (number // columns) * (side + text + 8)
        pixels = images[number].expand(3, -1, -1).permute(1, 2, 0).contiguous()
        picture = Image.fromarray(pixels.numpy()).resize((side, side), Image.Resampling.NEAREST)
        sheet.paste(picture, (x + 4, y + 4))
        draw.text((x + 4, y + side + 6), caption[:20], fill="black")
    return to_tensor(sheet)


def to_tensor(image: Image.Image) -> torch.Tensor:
    """An RGB picture as uint8 [3, H, W]."""
    data = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return data.view(image.height, image.width, 3).permute(2, 0, 1).contiguous()
