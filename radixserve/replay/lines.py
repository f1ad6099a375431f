"""`Line`: a line of a trace file with its number; `json_lines` and `raw_lines` read them."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import zlib
from collections.abc import Iterator
from itertools import chain
from typing import IO, Any, NamedTuple, cast

import numpy as np

from radixserve.checks import shown
from radixserve.engine.trace_recorder import LOG_KIND
from radixserve.errors import InvalidRequest
from radixserve.replay.trace import Ints

_log = logging.getLogger("radixserve")


class Line(NamedTuple):
    """A line of a file, a JSON object."""

    path: str
    number: int  # from 1
    fields: dict[str, Any]

    def error(self, what: str) -> InvalidRequest:
        """An error about the line, which names the file and the line."""
        return InvalidRequest(f"{self.path}:{self.number}: {what}")

    def wrong(self, name: str, what: str) -> InvalidRequest:
        """An error about the value of a field; `what`: what it must be."""
        return self.error(f'"{name}" must be {what}, got {shown(self.fields.get(name))}')

    def number_at(self, name: str) -> float | None:
        """A number field in [0, 1e15); None if it is missing. Raises InvalidRequest."""
        value = self.fields.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise self.wrong(name, "a number")
        if value is not None and not 0 <= value < 1e15:
            raise self.wrong(name, ">= 0")
        return value

    def length_at(self, name: str) -> int | None:
        """A field with a number of tokens; None if it is missing. Raises InvalidRequest."""
        value = self.number_at(name)
        if value is not None and (not isinstance(value, int) or value >= 2**31):
            raise self.wrong(name, "a number of tokens")
        return value

    def text_at(self, name: str) -> str | None:
        """A string field, or an integer as text; None if it is missing or null. Raises
        InvalidRequest."""
        value = self.fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int | str | None):
            raise self.wrong(name, "text")
        return None if value is None else str(value)

    def integers_at(self, name: str, *, width: int) -> Ints | None:
        """[n], or [n, width] if `width` is above 1: a list of integers >= 0; None if the field is
        not such a list."""
        given, row = self.fields.get(name), () if width == 1 else (width,)
        if given == []:
            return np.empty((0, *row), np.int64)
        try:
            numbers = np.asarray(given)
        except (ValueError, OverflowError, TypeError):
            return None
        is_good = isinstance(given, list) and numbers.dtype == np.int64
        return numbers if is_good and numbers.shape[1:] == row and numbers.min() >= 0 else None


def json_lines(path: str) -> tuple[dict[str, Any], Iterator[Line]]:
    """The header ({} without one), and an iterator of the other lines. Empty lines are left out.

    Raises OSError for a file that cannot be read, InvalidRequest for a line that is not a JSON
    object. An incomplete last line of a log, whose writer was killed, is left out with a warning.
    """
    lines = _objects(path)
    first = next(lines, None)
    if first is None:
        raise InvalidRequest(f"{path}: the trace is empty")
    fields = first.fields
    if "trace" in fields and "id" not in fields and "input_length" not in fields:
        return fields, _requests(fields, lines)
    return {}, chain([first], lines)


def raw_lines(path: str) -> Iterator[bytes]:
    """The lines of a plain or gzip file, with their ends. Raises OSError, and InvalidRequest for a
    broken gzip file."""
    with contextlib.closing(open_plain(path)) as file:
        try:
            yield from file
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise broken_gzip(path, error) from None


def beginning(path: str, size: int = 4096) -> bytes:
    """The first bytes of a plain or gzip file. Raises what `raw_lines` raises."""
    with contextlib.closing(open_plain(path)) as file:
        try:
            return file.read(size)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise broken_gzip(path, error) from None


def open_plain(path: str) -> IO[bytes]:
    """A file to read, decompressed if it is a gzip file."""
    with open(path, "rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    return cast(IO[bytes], gzip.open(path)) if is_gzip else open(path, "rb")


def broken_gzip(path: str, error: Exception) -> InvalidRequest:
    return InvalidRequest(f"{path}: the gzip file is broken: {error}")


def warn_cut_off(path: str, number: int) -> None:
    _log.warning("%s:%d: the last line is cut off and left out", path, number)


def _requests(header: dict[str, Any], lines: Iterator[Line]) -> Iterator[Line]:
    """The lines without headers, which later runs write when they record into the same file."""
    for line in lines:
        if line.fields.get("kind") != LOG_KIND:
            yield line
        elif line.fields.get("block_size") != header.get("block_size"):
            raise line.error("from here on the requests are recorded in another format")


def _objects(path: str) -> Iterator[Line]:
    is_log = False
    for number, data in enumerate(raw_lines(path), 1):
        if not data.strip():
            continue
        try:
            fields = json.loads(data.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            if is_log and not data.endswith(b"\n"):
                warn_cut_off(path, number)
                return
            raise InvalidRequest(f"{path}:{number}: not a line of JSON: {error}") from None
        line = Line(path, number, fields)
        if not isinstance(fields, dict):
            raise line.error(f"a line must be a JSON object, got {shown(fields)}")
        is_log = is_log or fields.get("kind") == LOG_KIND
        yield line
