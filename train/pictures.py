"""Pictures for TensorBoard, drawn with Pillow (torchvision brings it along): uint8 [3, H, W]."""

import torch
from PIL import Image, ImageDraw

CELL = 44


def confusion_picture(matrix: torch.Tensor, classes: tuple[str, ...]) -> torch.Tensor:
    """A confusion matrix, int64 [C, C] (true class down, predicted class across), each row shaded by its share."""
    count = len(classes)
    cell = CELL if count <= 20 else max(6, 900 // count)
    margin = 110 if count <= 20 else 8
    image = Image.new("RGB", (margin + count * cell + 4, margin + count * cell + 4), "white")
    draw = ImageDraw.Draw(image)
    shares = matrix.double() / matrix.sum(1, keepdim=True).clamp(min=1)
    for row in range(count):
        for column in range(count):
            share = float(shares[row, column])
            x, y = margin + column * cell, margin + row * cell
            shade = tuple(int(255 - share * (255 - dark)) for dark in (8, 48, 107))
            draw.rectangle((x, y, x + cell - 2, y + cell - 2), fill=shade)
            if count <= 20 and matrix[row, column]:
                ink = "white" if share > 0.5 else "black"
                draw.text((x + cell / 2, y + cell / 2), str(int(matrix[row, column])), fill=ink, anchor="mm")
        if count <= 20:
            draw.text((margin - 6, margin + (row + 0.5) * cell), classes[row][:16], fill="black", anchor="rm")
            draw.text((margin + (row + 0.5) * cell, margin - 6), classes[row][:6], fill="black", anchor="mb")
    if count <= 20:
        draw.text((6, 6), "true: down\npredicted: across", fill="gray")
    return to_tensor(image)


def grid_picture(images: torch.Tensor, captions: list[str], *, columns: int = 5) -> torch.Tensor:
    """Images, uint8 [N, C, H, W], in a grid, each with its caption below."""
    side, text = 112, 14
    rows = -(-len(captions) // columns)
    sheet = Image.new("RGB", (columns * (side + 8), rows * (side + text + 8)), "white")
    draw = ImageDraw.Draw(sheet)
    for number, caption in enumerate(captions):
        x, y = (number % columns) * (side + 8), (number // columns) * (side + text + 8)
        pixels = images[number].expand(3, -1, -1).permute(1, 2, 0).contiguous()
        picture = Image.fromarray(pixels.numpy(), "RGB").resize((side, side), Image.Resampling.NEAREST)
        sheet.paste(picture, (x + 4, y + 4))
        draw.text((x + 4, y + side + 6), caption[:20], fill="black")
    return to_tensor(sheet)


def to_tensor(image: Image.Image) -> torch.Tensor:
    data = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return data.view(image.height, image.width, 3).permute(2, 0, 1).contiguous()
