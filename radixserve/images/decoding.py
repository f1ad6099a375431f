"""Decodes picture files with Pillow, within bounds. The one file that imports it."""

from __future__ import annotations

import hashlib
import io
from typing import Any, NamedTuple

from radixserve.checks import shown
from radixserve.errors import InvalidRequest

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")


class ImageLimits(NamedTuple):
    """What a picture, and a prompt's pictures, may have at most."""

    max_bytes: int = 20 << 20  # of a file
    max_pixels: int = 50_000_000
    max_pictures: int = 100  # of a prompt


def file_key(given: Any) -> bytes | None:
    """The SHA-256 of a file's bytes; None for an image in memory."""
    return hashlib.sha256(given).digest() if isinstance(given, bytes) else None


def decode_image(given: Any, limits: ImageLimits) -> Any:
    """Returns a PIL image in RGB, turned as its EXIF data say. given: a file's bytes, or a PIL
    image. Of several frames the first. The size is checked before any pixel is decoded. Raises
    InvalidRequest."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise InvalidRequest('pictures need Pillow: pip install "radixserve[images]"') from None
    if isinstance(given, Image.Image):
        return _converted(given, limits, ImageOps)
    if not isinstance(given, bytes):
        raise InvalidRequest(f"a picture is a PIL image, bytes or a path, got {shown(given)}")
    try:
        with Image.open(io.BytesIO(given), formats=FORMATS) as image:
            return _converted(image, limits, ImageOps)
    except InvalidRequest:
        raise
    except Exception as error:  # decoders raise many kinds
        reason = str(error).partition(" <")[0]  # without addresses of objects
        raise InvalidRequest(
            f"a picture cannot be decoded ({', '.join(FORMATS)} can): {shown(reason)}"
        ) from None


def _converted(image: Any, limits: ImageLimits, ops: Any) -> Any:
    width, height = image.size
    if width * height > limits.max_pixels:
        raise InvalidRequest(
            f"a picture has {width} x {height} pixels; at most {limits.max_pixels} are allowed"
        )
    return ops.exif_transpose(image).convert("RGB")
