"""Parses JSON bodies within bounds on their depth, size, number of values and memory.

Large bodies are parsed in a child process that runs this file as its program (`serve`), so the file
imports the standard library and pydantic_core only.
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

MAX_IDS = 1_200_000  # numbers in long lists of integers; max_queued_tokens is less by default
MAX_VALUES = 131_072  # other values of a body
MAX_CONTAINERS = 65_536  # objects and lists of a body
MAX_MEMBERS = 4_096  # members of an object
MAX_ITEMS = 16_384  # items of a list that does not contain token ids
MAX_TEXT_BYTES = 4 << 20  # of a string with its escapes
MAX_PICTURE_BYTES = 28 << 20  # of a picture in base64: 20 MiB of a file, and its URL's beginning
# Levels of objects and lists: twice checks.MAX_NESTING, which bounds the values in a body. A large
# body has at most 200, which is pydantic's own bound.
MAX_DEPTH = 256
# Maps from token ids to numbers: they may have more members; their readers check them.
_MAPS = frozenset({"logit_bias"})
# Places of lists of token ids, which may be longer than other lists and then become arrays.
TOKEN_IDS = frozenset(
    ".prompt .prompt[] .text .text[] .input_ids .input_ids[] .candidates .candidates[] "
    ".hints[].prompt .hints[].prompt[] .tokens .allowed_token_ids .opened .path".split()
)
# Places of pictures in base64, which may be longer than other texts.
PICTURES = frozenset(
    ".messages[].content[].image_url.url .messages[].content[].source.data "
    ".messages[].content[].source.url .messages[].content[].content[].source.data "
    ".input[].content[].image_url .input[].output[].image_url".split()
)
_SMALL = 16 * 1024  # bytes; a smaller text can exceed only the bound of depth
_MARKS = re.compile(rb'[",\[{]')  # begins a string, list or object, or separates values
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_BASE64 = re.compile(rb'"(?:data:image/[\w.+-]{1,64};base64,)?[\w+/=-]*+"')
_PICTURE_NAME = re.compile(rb'"(?:data|url|image_url)"\s*:\s*$')
_INTEGERS = re.compile(rb"\[[-\d \t\n\r,]{256,}+\]")
_LEADING_ZERO = re.compile(rb"(?<!\d)0\d")
_MAX_PATH = 64  # characters of a path, after which it is cut
_PIECE = 64 * 1024  # bytes of a long list that are parsed at a time


class BodyError(Exception):
    """The body is not JSON or exceeds a bound. The argument is the message for the client."""


def parse(body: bytes) -> Any:
    """The value of a small JSON text, as `json.loads` returns it. Raises BodyError."""
    if len(body) > _SMALL:
        _scan(body, finds_ids=False)
    try:
        value = json.loads(body.decode())
    except UnicodeDecodeError as error:
        raise BodyError(f"the body is not valid JSON: byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise BodyError("the body is nested too deeply") from None
    except ValueError as error:  # a JSONDecodeError, or a number of more than 4,300 digits
        reason = getattr(error, "msg", "a number has too many digits")
        raise BodyError(f"the body is not valid JSON: {reason}") from None
    _check_shape(value)
    return value


def parse_large(body: bytearray) -> Any:
    """The value of a large JSON text; long lists of token ids become array("q"). Clears `body`.
    Raises BodyError.

    Takes at most three times the body's size and 32 MB: the text is not decoded as a whole, token
    ids take 8 bytes each, and other values are counted before they are made.
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
    """The message for the client of one of pydantic's errors."""
    if message.startswith("recursion limit"):
        return "the body is nested too deeply"
    if message.startswith("number out of range"):
        return "the body is not valid JSON: a number has too many digits"
    if message.startswith("invalid unicode"):
        message = f"not UTF-8: {message}"
    return f"the body is not valid JSON: {message}"


def _is_picture(body: bytes | bytearray, start: int, end: int) -> bool:
    """Whether a string looks like a picture: in base64, and behind the name of such a member."""
    if end - start > MAX_PICTURE_BYTES or not _PICTURE_NAME.search(body, max(0, start - 32), start):
        return False
    return _BASE64.fullmatch(body, start, end) is not None


def _too_long() -> BodyError:
    return BodyError(f"the body has a text of more than {MAX_TEXT_BYTES} bytes")


class _Ids(NamedTuple):
    """A long list of integers, which stands at `body[start:end]`."""

    start: int
    end: int
    numbers: array[int]


def _scan(body: bytes | bytearray, *, finds_ids: bool) -> list[_Ids]:
    """The long lists of integers in a JSON text; [] unless `finds_ids`.

    Raises BodyError if the text has too many values or too long ones, before any of them is made.
    O(len(body)); the cost is per value rather than per byte.
    """
    ids: list[_Ids] = []
    num_values = num_ids = num_containers = num_strings = position = 0
    while mark := _MARKS.search(body, position):
        start, position = mark.start(), mark.end()
        if mark[0] == b'"':
            string = _STRING.match(body, start)
            if string is None:
                break  # not JSON: the parser will report it
            position = string.end()
            num_strings += 1
            if position - start > MAX_TEXT_BYTES and not _is_picture(body, start, position):
                raise _too_long()
        elif mark[0] == b",":
            num_values += 1
        else:
            num_containers += 1
            integers = _INTEGERS.match(body, start) if finds_ids and mark[0] == b"[" else None
            max_ids = MAX_IDS - num_ids
            numbers = _read_integers(body, start, integers.end(), max_ids) if integers else None
            if integers is not None and numbers is not None:
                position = integers.end()
                num_ids += len(numbers)
                ids.append(_Ids(start, position, numbers))
        if num_values > MAX_VALUES or num_strings > 2 * MAX_VALUES:  # twice: members have names
            raise BodyError(f"the body has more than {MAX_VALUES} values")
        if num_containers > MAX_CONTAINERS:
            raise BodyError(f"the body has more than {MAX_CONTAINERS} objects and lists")
    return ids


def _read_integers(
    body: bytes | bytearray, start: int, end: int, max_ids: int
) -> array[int] | None:
    """The integers of the list in `body[start:end]`; None if it is not JSON or one of them has more
    than 64 bits. Raises BodyError for more than `max_ids`."""
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
        if len(numbers) > max_ids:
            raise BodyError(f"the body has more than {MAX_IDS} token ids")
        position = stop + 1
    return numbers


def _without_ids(body: bytearray, ids: list[_Ids], prefix: str) -> bytearray:
    """The JSON text with a string, `prefix` and its index, in place of each of the lists. Clears
    `body`."""
    rest, position = bytearray(), 0
    for index, (start, end, _) in enumerate(ids):
        rest += body[position:start]
        rest += f'"{prefix}{index}"'.encode()
        position = end
    rest += body[position:]
    body.clear()
    return rest


def _check_shape(value: Any, prefix: str = "", arrays: Sequence[array[int]] = ()) -> Any:
    """Check the sizes and depths of all lists and objects in `value`. Returns it with `arrays` in
    place of the strings that `_without_ids` put there; "" as `prefix`: there are none.

    In the places of TOKEN_IDS the arrays stay arrays, elsewhere they become lists. Raises
    BodyError.
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
            elif type(member) is str and len(member) > MAX_TEXT_BYTES:
                if place.below(key, member).path not in PICTURES:
                    raise _too_long()
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
    """A list or an object of a body, and its place there."""

    container: Any
    depth: int
    path: str  # ".hints[].prompt"
    name: str  # of the member that it is, or is an item of; for error messages

    def below(self, key: Any, member: Any) -> _Place:
        """The place of `member`, which `container` has at `key`."""
        if not self.depth:
            return _Place(member, 1, "", self.name)
        is_item = type(self.container) is list
        path = "..." if len(self.path) > _MAX_PATH else self.path
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
    """A file object for `pickle.dump` that writes frames: a length of 8 bytes, little-endian, and
    that many bytes."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self._stream.write(view.nbytes.to_bytes(8, "little"))
        self._stream.write(view)
        return view.nbytes


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """The child process's loop: parse bodies until `requests` ends.

    A request is a frame: a length of 8 bytes, little-endian, and that many bytes of JSON. An answer
    is the pickle of (error message or None, value) in such frames, then an empty frame.
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
    os.nice(1)  # the server's process, which streams tokens, goes first
    serve(sys.stdin.buffer, sys.stdout.buffer)
