"""JSON bodies as Python values, within bounds on depth, size, number of values and memory.

Large bodies are parsed in a process that runs this file as its program: it imports the standard
library and pydantic_core only.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import secrets
import sys
from array import array
from collections.abc import Sequence
from typing import Any, BinaryIO, NamedTuple

MAX_IDS = 1_200_000  # numbers in long lists of integers, more than max_queued_tokens by default
MAX_VALUES = 131_072  # other values of a body
MAX_CONTAINERS = 65_536  # objects and lists of a body
MAX_MEMBERS = 4_096  # members of an object
MAX_ITEMS = 16_384  # items of a list that is not of token ids
MAX_TEXT_BYTES = 4 << 20  # of a string, as it is written
# Of a body: twice checks.MAX_NESTING, which bounds the values in it; of large ones 200, which is
# pydantic's own bound.
MAX_DEPTH = 256
# Maps from token ids to numbers have a member a token; they are checked where they are read.
_MAPS = frozenset({"logit_bias"})
# Where texts are given as token ids, or many of a vocabulary: these lists may be longer than
# others, and are arrays then.
TOKEN_IDS = frozenset({
    ".prompt", ".prompt[]", ".text", ".text[]", ".input_ids", ".input_ids[]", ".candidates",
    ".candidates[]", ".hints[].prompt", ".hints[].prompt[]", ".tokens", ".allowed_token_ids",
    ".opened", ".path",
})  # fmt: skip
_SMALL = 16 * 1024  # bytes; less cannot be beyond a bound but that of depth
_MARKS = re.compile(rb'[",\[{]')  # a string, or what begins or separates values
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_INTEGERS = re.compile(rb"\[[-\d \t\n\r,]{256,}+\]")
_LEADING_ZERO = re.compile(rb"(?<!\d)0\d")
_LONGEST_PATH = 64  # characters that are kept of one
_PIECE = 64 * 1024  # bytes of a long list that are read at once


class BodyError(Exception):
    """The body is not JSON, or is beyond a bound. Its argument is the message."""


def parse(body: bytes) -> Any:
    """The value of a small JSON text, made of Python's own types. Raises BodyError."""
    if len(body) > _SMALL:
        _scan(body, finds_ids=False)
    try:
        value = json.loads(body.decode())
    except UnicodeDecodeError as error:
        raise BodyError(f"the body is not valid JSON: byte {error.start} is no UTF-8") from None
    except RecursionError:
        raise BodyError("the body is nested too deeply") from None
    except ValueError as error:  # a JSONDecodeError, or a number of more than 4,300 digits
        reason = getattr(error, "msg", "a number has too many digits")
        raise BodyError(f"the body is not valid JSON: {reason}") from None
    _check_shape(value)
    return value


def parse_large(body: bytearray) -> Any:
    """The same, where lists of token ids are of the type array("q"). Clears `body`.

    Never takes more than three times the body's size and 32 MB: the text is not decoded as a whole,
    ids take 8 bytes each, and all else is counted before it is made.
    """
    from pydantic_core import from_json

    ids = _scan(body, finds_ids=True)
    prefix = f"{secrets.token_hex(16)} "  # no client knows it
    if ids:
        body = _without_ids(body, ids, prefix)
    arrays = [numbers for _, _, numbers in ids]
    try:
        value = from_json(body, cache_strings="keys")
    except ValueError as error:
        raise BodyError(_reason(str(error))) from None
    finally:
        body.clear()
    return _check_shape(value, prefix, arrays)


def _reason(message: str) -> str:
    if message.startswith("recursion limit"):
        return "the body is nested too deeply"
    if message.startswith("number out of range"):
        return "the body is not valid JSON: a number has too many digits"
    if message.startswith("invalid unicode"):
        message = f"no UTF-8: {message}"
    return f"the body is not valid JSON: {message}"


class _Ids(NamedTuple):
    """A long list of integers: where it begins and ends in a body, and what it holds."""

    start: int
    end: int
    numbers: array[int]


def _scan(body: bytes | bytearray, *, finds_ids: bool) -> list[_Ids]:
    """The long lists of integers. Raises BodyError where the text has too many values or too long
    ones, before any of them is made. O(len(body)): slow per value, not per byte."""
    ids: list[_Ids] = []
    num_values = num_ids = num_containers = num_strings = position = 0
    while mark := _MARKS.search(body, position):
        start, position = mark.start(), mark.end()
        if mark[0] == b'"':
            string = _STRING.match(body, start)
            if string is None:
                break  # no JSON: what reads it says so
            position = string.end()
            num_strings += 1
            if position - start > MAX_TEXT_BYTES:
                raise BodyError(f"the body has a text of more than {MAX_TEXT_BYTES} bytes")
        elif mark[0] == b",":
            num_values += 1
        else:
            num_containers += 1
            integers = _INTEGERS.match(body, start) if finds_ids and mark[0] == b"[" else None
            most = MAX_IDS - num_ids
            numbers = _read_integers(body, start, integers.end(), most) if integers else None
            if integers is not None and numbers is not None:
                position = integers.end()
                num_ids += len(numbers)
                ids.append(_Ids(start, position, numbers))
        if num_values > MAX_VALUES or num_strings > 2 * MAX_VALUES:  # twice: members have names
            raise BodyError(f"the body has more than {MAX_VALUES} values")
        if num_containers > MAX_CONTAINERS:
            raise BodyError(f"the body has more than {MAX_CONTAINERS} objects and lists")
    return ids


def _read_integers(body: bytes | bytearray, start: int, end: int, most: int) -> array[int] | None:
    """The integers of a list in `body[start:end]`; None where it is no JSON or has one of more than
    64 bits. BodyError where there are more than `most`."""
    if _LEADING_ZERO.search(body, start, end):
        return None
    numbers = array("q")
    position, end = start + 1, end - 1
    while position <= end:
        comma = body.find(b",", min(position + _PIECE, end), end)
        stop = end if comma < 0 else comma
        try:
            numbers.extend(map(int, body[position:stop].split(b",")))
        except (ValueError, OverflowError):
            return None
        if len(numbers) > most:
            raise BodyError(f"the body has more than {MAX_IDS} token ids")
        position = stop + 1
    return numbers


def _without_ids(body: bytearray, ids: list[_Ids], prefix: str) -> bytearray:
    """The text with strings in place of its long lists. Clears `body`."""
    rest, position = bytearray(), 0
    for index, (start, end, _) in enumerate(ids):
        rest += body[position:start]
        rest += f'"{prefix}{index}"'.encode()
        position = end
    rest += body[position:]
    body.clear()
    return rest


def _check_shape(value: Any, prefix: str = "", arrays: Sequence[array[int]] = ()) -> Any:
    """The value with its arrays in their places: as they are where token ids stand, elsewhere as
    lists. Raises BodyError where a list or an object is too long, or lies too deep.

    A string that begins with `prefix` stands for one of the arrays; "": there are none.
    """
    root = [value]
    places = [_Place(root, 0, "", "the body")]
    num_listed = 0  # integers of arrays that become lists
    while places:
        place = places.pop()
        container = place.container
        _check_size(place)
        for key, member in list(
            enumerate(container) if type(container) is list else container.items()
        ):
            if type(member) is dict or type(member) is list:
                places.append(place.below(key, member))
            elif prefix and type(member) is str and member.startswith(prefix):
                numbers = arrays[int(member[len(prefix) :])]
                below = place.below(key, numbers)
                if below.path not in TOKEN_IDS:
                    num_listed += len(numbers)
                    if len(numbers) > MAX_ITEMS or num_listed > MAX_VALUES:
                        raise BodyError(f"{below.name} has more than {MAX_ITEMS} items")
                container[key] = numbers if below.path in TOKEN_IDS else numbers.tolist()
    return root[0]


class _Place(NamedTuple):
    """A list or an object of a body, and where it is."""

    container: Any
    depth: int
    path: str  # ".hints[].prompt"
    name: str  # of the member that it is or belongs to, for errors

    def below(self, key: Any, member: Any) -> _Place:
        if not self.depth:
            return _Place(member, 1, "", self.name)
        is_item = type(self.container) is list
        path = "..." if len(self.path) > _LONGEST_PATH else self.path
        path += "[]" if is_item else f".{key[:64]}"
        return _Place(member, self.depth + 1, path, self.name if is_item else key[:64])


def _check_size(place: _Place) -> None:
    container = place.container
    if place.depth > MAX_DEPTH:
        raise BodyError("the body is nested too deeply")
    if type(container) is dict:
        if len(container) > MAX_MEMBERS and place.name not in _MAPS:
            raise BodyError(f"{place.name} has more than {MAX_MEMBERS} members")
    elif len(container) > MAX_ITEMS:
        is_ids = place.path in TOKEN_IDS and set(map(type, container)) == {int}
        if not is_ids:
            raise BodyError(f"{place.name} has more than {MAX_ITEMS} items")


class _Frames:
    """A file for `pickle.dump`: frames of a length in 8 bytes, little-endian, and so many bytes."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self._stream.write(view.nbytes.to_bytes(8, "little"))
        self._stream.write(view)
        return view.nbytes


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Parse bodies until `requests` ends.

    A request is a length of 8 bytes, little-endian, and so many bytes; an answer is the pickle of
    (error or None, value) in such frames, then an empty one.
    """
    while length := requests.read(8):
        body = bytearray(int.from_bytes(length, "little"))
        view, position = memoryview(body), 0
        while position < len(view):
            num_read = requests.readinto(view[position:])  # type: ignore[attr-defined]
            if not num_read:
                return
            position += num_read
        view.release()
        try:
            answer: tuple[str | None, Any] = (None, parse_large(body))
        except BodyError as error:
            answer = (str(error), None)
        body.clear()
        pickle.dump(answer, _Frames(answers), pickle.HIGHEST_PROTOCOL)
        del answer
        answers.write(bytes(8))
        answers.flush()


if __name__ == "__main__":
    os.nice(1)  # streams of tokens come first
    serve(sys.stdin.buffer, sys.stdout.buffer)
