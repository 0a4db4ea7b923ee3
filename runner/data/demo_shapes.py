"""Images of the demo's task shapes: some shapes of one kind, to be counted and named.

number ──▶ kind, count, cells of a 3 x 3 grid, colors, offsets ──pillow──▶ PNG of 24 x 24 pixels
"""

from __future__ import annotations

import io

from runner.data.sampling_order import permutation, random_stream

KINDS = ("circle", "square", "triangle")
MOST, GRID, CELL = 4, 3, 8  # shapes; cells on each side; pixels of a cell
NUM_ANSWERS = len(KINDS) * MOST


def answer(number: int) -> str:
    """What the image of this number shows, such as 2 circles."""
    kind, count = KINDS[number % len(KINDS)], number // len(KINDS) % MOST + 1
    return f"{count} {kind}{'s' if count > 1 else ''}"


def draw(number: int) -> bytes:
    """The image of this number, as a PNG."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (GRID * CELL, GRID * CELL), "black")
    pen, drawn = ImageDraw.Draw(image), random_stream(number, "demo", "shapes").random_raw(5 * MOST).tolist()
    cells = permutation(GRID * GRID, number, "demo", "cells").tolist()
    for at in range(number // len(KINDS) % MOST + 1):
        red, green, blue, right, down = drawn[5 * at : 5 * at + 5]
        color = tuple(128 + value % 128 for value in (red, green, blue))
        left, top = cells[at] % GRID * CELL + right % 2, cells[at] // GRID * CELL + down % 2
        box = (left, top, left + CELL - 2, top + CELL - 2)
        if KINDS[number % len(KINDS)] == "circle":
            pen.ellipse(box, outline=color)
        elif KINDS[number % len(KINDS)] == "square":
            pen.rectangle(box, fill=color)
        else:
            pen.polygon([(box[0], box[3]), (box[2], box[3]), ((box[0] + box[2]) // 2, box[1])], fill=color)
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()
