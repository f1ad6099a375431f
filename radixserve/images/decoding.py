"""Decodes picture files with Pillow, within bounds. The one file that imports it."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from radixserve.checks import shown
from radixserve.errors import InvalidRequest

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
# Pillow's loops over parts of a file are bounded by these alone: 20 MiB hold millions of parts. A
# PNG of that size in chunks of 4 KiB takes 20,000 reads; a photo has about ten scans.
_MAX_READS = 50_000
_MAX_SCANS = 100
_MAX_ASPECT = 200  # processors resize a line to more rows than its file has bytes
_START_OF_SCAN = b"\xff\xda"


class ImageLimits(NamedTuple):
    """What a picture, and a prompt's pictures, may have at most."""

    max_bytes: int = 20 << 20  # of a file
    max_pixels: int = 50_000_000
    # Of a prompt:
    max_pictures: int = 100
    max_total_bytes: int = 100 << 20
    max_total_pixels: int = 500_000_000


class _CountedFile(io.BytesIO):
    """A file's bytes, of which no more than _MAX_READS parts are read."""

    num_reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self.num_reads += 1
        if self.num_reads > _MAX_READS:
            raise InvalidRequest(f"a picture has more than {_MAX_READS} parts")
        return super().read(size)


def file_key(given: Any) -> bytes | None:
    """The SHA-256 of a file's bytes; None for an image in memory."""
    return hashlib.sha256(given).digest() if isinstance(given, bytes) else None


def open_image(given: Any, limits: ImageLimits) -> Any:
    """Returns a PIL image whose size is checked, before any pixel is decoded. given: a file's
    bytes, or a PIL image. Raises InvalidRequest."""
    try:
        from PIL import Image
    except ImportError:
        raise InvalidRequest('pictures need Pillow: pip install "radixserve[images]"') from None
    if not isinstance(given, bytes | Image.Image):
        raise InvalidRequest(f"a picture is a PIL image, bytes or a path, got {shown(given)}")
    with _refusing():
        image = given
        if isinstance(given, bytes):
            image = Image.open(_CountedFile(given), formats=FORMATS)
            _check_scans(image, given)
        _check_size(image, limits)
        return image


def decode_image(image: Any) -> Any:
    """Returns an opened image in RGB, turned as its EXIF data say; of several frames the first.
    Raises InvalidRequest."""
    from PIL import ImageOps

    with _refusing():
        return ImageOps.exif_transpose(image).convert("RGB")


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except InvalidRequest:
        raise
    except Exception as error:  # decoders raise many kinds
        reason = str(error).partition(" <")[0]  # without addresses of objects
        raise InvalidRequest(
            f"a picture cannot be decoded ({', '.join(FORMATS)} can): {shown(reason)}"
        ) from None


def _check_size(image: Any, limits: ImageLimits) -> None:
    width, height = image.size
    if image.format == "TIFF":  # its tiles may be larger than itself
        width = max(width, image.tag_v2.get(322, 0))
        height = max(height, image.tag_v2.get(323, 0))
    if width * height > limits.max_pixels:
        raise InvalidRequest(
            f"a picture has {width} x {height} pixels; at most {limits.max_pixels} are allowed"
        )
    if max(width, height) > _MAX_ASPECT * min(width, height):
        raise InvalidRequest(
            f"a picture has {width} x {height} pixels; one side may be at most {_MAX_ASPECT} times "
            "the other"
        )


def _check_scans(image: Any, file: bytes) -> None:
    """Each scan of a progressive JPEG goes over all pixels again."""
    num_strips = 0  # of a TIFF: each strip or tile may be a JPEG of its own
    if image.format == "TIFF":
        if image.info.get("compression") not in ("jpeg", "tiff_jpeg"):
            return
        num_strips = max(len(image.tag_v2.get(tag, ())) for tag in (273, 324))
    elif image.format not in ("JPEG", "MPO"):
        return
    if file.count(_START_OF_SCAN) > _MAX_SCANS + 2 * num_strips:
        raise InvalidRequest(f"a picture has more than {_MAX_SCANS} scans")
