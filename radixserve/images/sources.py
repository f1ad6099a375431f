"""Reads the parts of messages that are pictures, in each protocol's form, as a file or an image.

{"type": "image_url", "image_url": {"url": ...}}     OpenAI's chat completions
{"type": "input_image", "image_url": ...}            OpenAI's responses
{"type": "image", "source": {"type": "base64", "data": ...}}    Anthropic's messages
{"type": "image", "image": ...}                      transformers; also "url", "path", "base64"
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from radixserve.checks import shown
from radixserve.errors import InvalidRequest

_FORMS = (
    'a picture is {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}, '
    '{"type": "image", "image": an image, bytes or a path}, or a part of another protocol'
)
_WHITE_SPACE = str.maketrans("", "", " \t\r\n")  # base64 in lines has some
_DATA_URL = re.compile(r"data:([\w.+/-]*)((?:;[\w=.+-]+)*?)(;base64)?,", re.IGNORECASE)


class FetchUrl(Protocol):
    """Returns the bytes behind an http or https URL, at most `max_bytes`. spent_s: the seconds that
    other URLs of its prompt have taken. Raises InvalidRequest."""

    def __call__(self, url: str, max_bytes: int, spent_s: float = 0.0) -> bytes: ...


def read_source(
    part: Mapping[str, Any],
    max_bytes: int,
    fetch: FetchUrl | None,
    spent_s: float = 0.0,
    *,
    has_files: bool,
) -> Any:
    """Returns the bytes of a part's picture, or what the caller gave in memory.

    fetch: None: http is refused. spent_s: see `FetchUrl`. has_files: paths of this machine, and
    images in memory, may be given. Raises InvalidRequest.
    """
    given = _given(part)
    if isinstance(given, str):
        if _DATA_URL.match(given[:256]):
            return _from_data_url(given, max_bytes)
        if _is_http(given):
            if fetch is None:
                raise InvalidRequest(
                    "pictures are not fetched from URLs here: send a data URL, or let the operator "
                    "allow hosts (allowed_media_domains)"
                )
            return fetch(given, max_bytes, spent_s)
        if has_files:
            given = Path(given)
    if isinstance(given, Path) and has_files:
        return _from_file(given, max_bytes)
    if isinstance(given, bytes | bytearray | memoryview):
        return _bounded(bytes(given), max_bytes)
    if given is None or isinstance(given, str | Path) or not has_files:
        raise InvalidRequest(f"{_FORMS}; got {shown(part)}")
    return given


def is_fetched(part: Mapping[str, Any]) -> bool:
    """Whether a part's picture is behind an http or https URL."""
    places = (part, part.get("source"), part.get("image_url"))
    urls = (place.get("url") if isinstance(place, Mapping) else place for place in places)
    return any(isinstance(url, str) and _is_http(url) for url in urls)


def _is_http(url: str) -> bool:
    return url[:8].lower().startswith(("http://", "https://"))


def _given(part: Mapping[str, Any]) -> Any:
    """The text, path, bytes or image that a part names; None for none."""
    kind, source = part.get("type"), part.get("source")
    if kind == "image" and isinstance(source, Mapping):
        if source.get("type") == "url":
            return source.get("url")
        return _decoded(source.get("data")) if source.get("type") == "base64" else None
    if kind == "image":
        if part.get("base64") is not None:
            return _decoded(part["base64"])
        names = (name for name in ("image", "path", "url") if part.get(name) is not None)
        return part.get(next(names, "image"))
    url = part.get("image_url")
    return url.get("url") if isinstance(url, Mapping) else url


def _decoded(data: object) -> bytes:
    if not isinstance(data, str | bytes):
        raise InvalidRequest(f"a picture's data must be base64, got {shown(data)}")
    try:
        if isinstance(data, str):
            data = data.translate(_WHITE_SPACE)
        return base64.b64decode(data, validate=True)
    except (ValueError, binascii.Error) as error:
        raise InvalidRequest(f"a picture's data is not valid base64: {error}") from None


def _from_data_url(url: str, max_bytes: int) -> bytes:
    match = _DATA_URL.match(url[:256])
    assert match is not None
    if match[3] is None:
        raise InvalidRequest("a picture's data URL must be in base64")
    if match[1] and not match[1].lower().startswith("image/"):
        raise InvalidRequest(f"a picture's data URL must be of an image, got {shown(match[1])}")
    if (len(url) - match.end()) * 3 // 4 > max_bytes + 2:
        raise _too_large(max_bytes)
    return _bounded(_decoded(url[match.end() :]), max_bytes)


def _from_file(path: Path, max_bytes: int) -> bytes:
    try:
        with path.expanduser().open("rb") as file:
            return _bounded(file.read(max_bytes + 1), max_bytes)
    except OSError as error:
        raise InvalidRequest(f"the picture {shown(str(path))} cannot be read: {error}") from None


def _bounded(data: bytes, max_bytes: int) -> bytes:
    if len(data) > max_bytes:
        raise _too_large(max_bytes)
    return data


def _too_large(max_bytes: int) -> InvalidRequest:
    return InvalidRequest(f"a picture has more than {max_bytes} bytes, which is the most")
