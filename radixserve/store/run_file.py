"""The file of a run: its tokens and their K/V, with two checksums.

fixed     28 bytes, little-endian: "RSKV", version (uint32), algorithm of the checksums (4 bytes),
          bytes of the header (uint32), number of tokens (uint32), checksum of the head (uint64)
header    JSON, then spaces up to the alignment of the K/V
tokens    [num_tokens] int32
K/V       at a multiple of 64 bytes: [layers, 2, num_tokens, kv_heads, head_dim] in the layout's
          dtype; of int8 each head's scale is behind its numbers. Where layers differ in their
          heads: [2, num_tokens, layers, kv_heads, head_dim], without padding
checksum  8 bytes (little-endian), of everything before it

The head is all up to the K/V. Its checksum, of the head without these 8 bytes, is verified before
the header is parsed; then the type and the range of every field are checked.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np

from radixserve.arrays import IntArray
from radixserve.runner.kv_layout import ByteArray, KVLayout

MAGIC = b"RSKV"
VERSION = 3
_FIXED = struct.Struct("<4sI4sII")
_CHECKSUM = struct.Struct("<Q")
_HEADER_AT = _FIXED.size + _CHECKSUM.size
_MAX_HEADER = 1 << 16
_MAX_TOKENS = 1 << 16
_MAX_START = 1 << 31
_MAX_TEXT = 1 << 12  # characters of a namespace or a name
WRITE_BYTES = 1 << 20  # at a time, at multiples of it: the system then keeps files in large pages
_ALIGNMENT = 64  # bytes, of the K/V in a file
XXH3, CRC32 = "xxh3_64", "crc32"
_ALGORITHMS = {b"xxh3": XXH3, b"crc3": CRC32}
_MARKS = {algorithm: mark for mark, algorithm in _ALGORITHMS.items()}
Buffer = bytes | bytearray | memoryview


class BadRun(ValueError):
    """The file is damaged, cut short, or not what it claims to be."""


class OtherRun(BadRun):
    """The file may be whole, but not for this engine: of another version, K/V layout or
    checksum."""


class ShortHead(Exception):
    """More of the file's first bytes are needed."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(f"{num_bytes} bytes are needed")
        self.num_bytes = num_bytes


@dataclass(frozen=True, slots=True, eq=False)
class KVRun:
    """Tokens [start, start + len(tokens)) of a sequence, and their K/V.

    parent  name of the run that holds the token before `start`; "" at the start of a sequence
    kv      [num_rows, 2, num_tokens, row_bytes] uint8, see `KVLayout`
    """

    namespace: str
    start: int
    parent: str
    tokens: IntArray
    kv: ByteArray


class RunHead(NamedTuple):
    """What a file says before its K/V; see `KVRun`."""

    namespace: str
    start: int
    parent: str
    tokens: IntArray
    layout: list[Any]
    checksum: str  # algorithm
    data: bytes  # all of this in the file

    @property
    def num_bytes(self) -> int:
        return len(self.data)


def default_checksum() -> str:
    """The algorithm of new files: XXH3 where the package xxhash is installed, several times as fast
    as CRC32."""
    return CRC32 if find_spec("xxhash") is None else XXH3


class Hasher(Protocol):
    """A checksum of bytes that come in parts."""

    def update(self, part: Buffer, /) -> object:
        """Add the bytes that follow."""

    def intdigest(self) -> int:
        """The checksum so far."""


class _Crc32:
    def __init__(self) -> None:
        self._checksum = 0

    def update(self, part: Buffer) -> None:
        self._checksum = zlib.crc32(part, self._checksum)

    def intdigest(self) -> int:
        return self._checksum


def make_hasher(algorithm: str) -> Hasher:
    """Raises OtherRun for an algorithm that cannot be computed here."""
    return _Crc32() if algorithm == CRC32 else _xxhash().xxh3_64()


def checksum_of(data: Buffer, algorithm: str) -> int:
    """As of a hasher, and faster. O(bytes). Raises OtherRun, see `make_hasher`."""
    if algorithm == CRC32:
        return zlib.crc32(data)
    checksum: int = _xxhash().xxh3_64_intdigest(data)
    return checksum


def _xxhash() -> ModuleType:
    try:
        import xxhash
    except ImportError as error:
        raise OtherRun("its checksum needs the package xxhash (pip install xxhash)") from error
    return xxhash


# -- writing -----------------------------------------------------------------------------------


def encode_run(run: KVRun, layout: KVLayout, checksum: str | None = None) -> Iterator[Buffer]:
    """The parts of a file, in order: the head first. K/V is not copied. No part extends over a
    multiple of WRITE_BYTES. The checksum is made part by part: whoever writes each soon finds it in
    the processor's cache.

    checksum  algorithm, see `default_checksum`
    """
    algorithm = default_checksum() if checksum is None else checksum
    header = {
        "namespace": run.namespace,
        "start": run.start,
        "parent": run.parent,
        "layout": layout.as_list(),
    }
    head = encode_head(json.dumps(header).encode(), run.tokens, algorithm)
    hasher = make_hasher(algorithm)
    hasher.update(head)
    yield head
    offset = len(head)
    for block in _contiguous_blocks(run.kv):
        view = block.reshape(-1).data
        while len(view):
            part = view[: WRITE_BYTES - offset % WRITE_BYTES]
            hasher.update(part)
            yield part
            offset += len(part)
            view = view[len(part) :]
    yield _CHECKSUM.pack(hasher.intdigest())


def encode_head(header: bytes, tokens: IntArray, algorithm: str) -> bytes:
    """The head of a file with a header, whatever it says, and the right checksum."""
    own = np.ascontiguousarray(tokens, "<i4").tobytes()
    header += b" " * (-(_HEADER_AT + len(header) + len(own)) % _ALIGNMENT)
    fixed = _FIXED.pack(MAGIC, VERSION, _MARKS[algorithm], len(header), len(own) // 4)
    checksum = checksum_of(fixed + header + own, algorithm)
    return fixed + _CHECKSUM.pack(checksum) + header + own


def _contiguous_blocks(kv: ByteArray) -> list[ByteArray]:
    """K/V [layers, 2, tokens, bytes] as contiguous arrays, in order: of some of a larger array's
    tokens, the keys or values of a layer each."""
    if kv.flags.c_contiguous:
        return [kv]
    return [np.ascontiguousarray(rows) for layer in kv for rows in layer]


# -- reading -----------------------------------------------------------------------------------


def decode_run(
    data: Buffer, layout: KVLayout | None = None, expected: RunHead | None = None
) -> KVRun:
    """The run of a whole file, checked. Raises BadRun. Its K/V is a view of `data`.

    layout    what its K/V must be; None: whatever it is
    expected  head that the file probably has: it is then not decoded again
    """
    view = memoryview(data)
    if expected is not None and bytes(view[: expected.num_bytes]) == expected.data:
        head = expected
    else:
        try:
            head = decode_head(data)
        except ShortHead as error:
            raise BadRun("it ends within its header or tokens") from error
    end = len(view) - _CHECKSUM.size
    if end < head.num_bytes:
        raise BadRun("it ends before its checksum")
    if checksum_of(view[:end], head.checksum) != _CHECKSUM.unpack(view[end:])[0]:
        raise BadRun("its checksum is wrong: it is damaged or cut short")
    if layout is not None and head.layout != layout.as_list():
        raise OtherRun(f"its K/V is {head.layout}, not {layout.as_list()}")
    kv = np.frombuffer(view[head.num_bytes : end], np.uint8)
    row_bytes, rest = divmod(len(kv), head.layout[0] * 2 * len(head.tokens))
    if rest or not row_bytes or (layout is not None and row_bytes != layout.row_bytes):
        raise BadRun(f"its K/V of {len(kv)} bytes has another size than its header says")
    kv = kv.reshape(head.layout[0], 2, len(head.tokens), row_bytes)
    return KVRun(head.namespace, head.start, head.parent, head.tokens, kv)


def decode_head(data: Buffer) -> RunHead:
    """The head of a run, from a file's first bytes, with its checksum and every field checked.
    Raises BadRun, or ShortHead, which says how many bytes are needed."""
    view = memoryview(data)
    if len(view) < _HEADER_AT:
        if len(view) < 8:
            raise BadRun("it is not a file of this store")
        raise ShortHead(_HEADER_AT)
    magic, version, mark, header_bytes, num_tokens = _FIXED.unpack(view[: _FIXED.size])
    if magic != MAGIC:
        raise BadRun("it is not a file of this store")
    if version != VERSION:
        raise OtherRun(f"its version is not {VERSION}")
    if (algorithm := _ALGORITHMS.get(mark)) is None:
        raise BadRun(f"its checksum is {mark!r}, which this version does not know")
    if header_bytes > _MAX_HEADER or not 0 < num_tokens <= _MAX_TOKENS:
        raise BadRun(f"a header of {header_bytes} bytes or {num_tokens} tokens is out of range")
    tokens_at = _HEADER_AT + header_bytes
    end = tokens_at + 4 * num_tokens
    if len(view) < end:
        raise ShortHead(end)
    head = bytes(view[:end])
    checksum = _CHECKSUM.unpack_from(head, _FIXED.size)[0]
    if checksum_of(head[: _FIXED.size] + head[_HEADER_AT:], algorithm) != checksum:
        raise BadRun("the checksum of its head is wrong: it is damaged")
    tokens = np.frombuffer(head, "<i4", offset=tokens_at).astype(np.int32, copy=False)
    if tokens.min() < 0:
        raise BadRun("it has a token below 0")
    header = _parse_header(head[_HEADER_AT:tokens_at])
    try:
        namespace, parent = (_text(header[name]) for name in ("namespace", "parent"))
        start, layout = _number(header["start"], 0, _MAX_START), _layout(header["layout"])
    except (KeyError, TypeError, ValueError) as error:
        raise BadRun(f"its header lacks a field, or the field is wrong: {error}") from None
    return RunHead(namespace, start, parent, tokens, layout, algorithm, head)


def _parse_header(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise BadRun(f"its header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise BadRun("its header is not an object")
    return header


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number")


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        raise TypeError("a text is too long or not a string")
    value.encode()  # without lone surrogates
    return value


def _number(value: object, low: int, high: int) -> int:
    if type(value) is not int or not low <= value < high:
        raise ValueError("a number is out of range or not an integer")
    return value


def _layout(value: object) -> list[Any]:
    """A value of `KVLayout.as_list`."""
    if not isinstance(value, list) or len(value) not in (4, 5):
        raise TypeError("the layout is not a list of 4 or 5 values")
    rows, two, *shape, dtype = value
    _number(rows, 1, 1 << 16)
    _number(two, 2, 3)
    _text(dtype)
    sizes = shape
    if len(shape) == 1:
        if not isinstance(shape[0], list) or len(shape[0]) > 1 << 12:
            raise TypeError("the shapes of the layers are not a list")
        if any(not isinstance(pair, list) or len(pair) != 2 for pair in shape[0]):
            raise TypeError("the shape of a layer is not two numbers")
        sizes = [size for pair in shape[0] for size in pair]
    for size in sizes:
        _number(size, 1, 1 << 20)
    return value
