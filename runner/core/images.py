"""Encoded images to pixels, in one way for training, sampling and serving.

bytes ──pillow──▶ limits ──▶ EXIF orientation applied ──▶ 16 bits to 8, transparency on white ──▶ RGB
"""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING

from runner.core.errors import DataError
from runner.core.fsync_io import format_bytes

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_IMAGE_BYTES = 64 * 2**20
MAX_IMAGE_PIXELS = 50_000_000
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")


def decode_image(content: bytes) -> Image:
    """The RGB image in an encoded file. Raises DataError if it is damaged, too large or animated."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    if len(content) > MAX_IMAGE_BYTES:
        raise DataError(f"the image has {format_bytes(len(content))}; at most {format_bytes(MAX_IMAGE_BYTES)}")
    if not content:
        raise DataError("the image is empty (0 bytes)")
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(content), formats=FORMATS) as image:
            width, height = image.size
            if width * height > MAX_IMAGE_PIXELS:
                limit = f"{MAX_IMAGE_PIXELS // 10**6} million"
                raise DataError(f"the image has {width} x {height} pixels; at most {limit}, so make it smaller")
            if (frames := getattr(image, "n_frames", 1)) > 1:
                raise DataError(f"the image has {frames} frames; expected one")
            image.load()
            return _as_rgb(ImageOps.exif_transpose(image))
    except UnidentifiedImageError as error:
        raise DataError(f"not an image; expected one of {', '.join(FORMATS)}") from error
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise DataError(f"the image is damaged: {error}") from error


def _as_rgb(image: Image) -> Image:
    from PIL import Image

    if image.mode.startswith(("I", "F")):  # pillow would cut off what is above 255
        image = image.convert("F").point(lambda value: value / 257).convert("L")
    if image.mode in ("LA", "PA", "RGBA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")
