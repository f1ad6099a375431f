"""The lines of a trace file: plain or gzip JSON lines, with an optional header in the first one."""

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
    """A JSON object and its place in a file."""

    path: str
    number: int  # from 1
    fields: dict[str, Any]

    def error(self, what: str) -> InvalidRequest:
        """An error that names file and line."""
        return InvalidRequest(f"{self.path}:{self.number}: {what}")

    def wrong(self, name: str, what: str) -> InvalidRequest:
        """An error for a field that is not what it must be."""
        return self.error(f'"{name}" must be {what}, got {shown(self.fields.get(name))}')

    def number_at(self, name: str) -> float | None:
        """A number field in [0, 1e15); None when missing."""
        value = self.fields.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise self.wrong(name, "a number")
        if value is not None and not 0 <= value < 1e15:
            raise self.wrong(name, ">= 0")
        return value

    def length_at(self, name: str) -> int | None:
        """A token count; None when missing."""
        value = self.number_at(name)
        if value is not None and (not isinstance(value, int) or value >= 2**31):
            raise self.wrong(name, "a number of tokens")
        return value

    def text_at(self, name: str) -> str | None:
        """A string field, numbers as text; None when missing or null."""
        value = self.fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int | str | None):
            raise self.wrong(name, "text")
        return None if value is None else str(value)

    def integers_at(self, name: str, *, width: int) -> Ints | None:
        """[n], or [n, width] for a width above 1: integers >= 0; None if the field is not so."""
        given, row = self.fields.get(name), () if width == 1 else (width,)
        if given == []:
            return np.empty((0, *row), np.int64)
        try:
            numbers = np.asarray(given)
        except (ValueError, OverflowError, TypeError):
            return None
        is_good = isinstance(given, list) and numbers.dtype == np.int64
        return numbers if is_good and numbers.shape[1:] == row and numbers.min() >= 0 else None


def read_lines(path: str) -> tuple[dict[str, Any], Iterator[Line]]:
    """The header ({} without one) and the other lines, read one by one; empty lines are left out.

    Raises OSError for a file that cannot be read, InvalidRequest for a line that is no JSON object.
    The cut-off last line of a log is left out with a warning: its writer was killed.
    """
    lines = _objects(path)
    first = next(lines, None)
    if first is None:
        raise InvalidRequest(f"{path}: the trace is empty")
    fields = first.fields
    if "trace" in fields and "id" not in fields and "input_length" not in fields:
        return fields, _requests(fields, lines)
    return {}, chain([first], lines)


def _requests(header: dict[str, Any], lines: Iterator[Line]) -> Iterator[Line]:
    """The lines without the headers of later runs that recorded into the same file."""
    for line in lines:
        if line.fields.get("kind") != LOG_KIND:
            yield line
        elif line.fields.get("block_size") != header.get("block_size"):
            raise line.error("from here on the requests are recorded in another format")


def _objects(path: str) -> Iterator[Line]:
    is_log = False
    with contextlib.closing(_open(path)) as file:
        for number, data in enumerate(_raw_lines(file, path), 1):
            if not data.strip():
                continue
            try:
                fields = json.loads(data.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                if is_log and not data.endswith(b"\n"):
                    _log.warning("%s:%d: the last line is cut off and left out", path, number)
                    return
                raise InvalidRequest(f"{path}:{number}: not a line of JSON: {error}") from None
            line = Line(path, number, fields)
            if not isinstance(fields, dict):
                raise line.error(f"a line must be a JSON object, got {shown(fields)}")
            is_log = is_log or fields.get("kind") == LOG_KIND
            yield line


def _open(path: str) -> IO[bytes]:
    with open(path, "rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    return cast(IO[bytes], gzip.open(path)) if is_gzip else open(path, "rb")


def _raw_lines(file: IO[bytes], path: str) -> Iterator[bytes]:
    try:
        yield from file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InvalidRequest(f"{path}: the gzip file is broken: {error}") from None
