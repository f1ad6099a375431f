"""The file of a run: its tokens and their K/V, with a checksum at the end.

"RSKV"    4 bytes
header    4 bytes of length (little-endian), then JSON, then spaces up to the alignment of the K/V
tokens    [num_tokens] int32
K/V       at a multiple of 64 bytes: [layers, 2, num_tokens, kv_heads, head_dim] in the layout's
          dtype; of int8 each head's scale is behind its numbers. Where layers differ in their
          heads: [2, num_tokens, layers, kv_heads, head_dim], without padding
checksum  8 bytes (little-endian), of everything before it, by the algorithm that the header names
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from radixserve.arrays import IntArray

MAGIC = b"RSKV"
VERSION = 2
_LENGTH = struct.Struct("<I")
_CHECKSUM = struct.Struct("<Q")
_MAX_HEADER = 1 << 20
WRITE_BYTES = 1 << 20  # at a time, at multiples of it: the system then keeps files in large pages
_ALIGNMENT = 64  # bytes, of the K/V in a file
XXH3, CRC32 = "xxh3_64", "crc32"
ByteArray = NDArray[np.uint8]
Buffer = bytes | bytearray | memoryview


class BadRun(ValueError):
    """The file is damaged, cut short, of another model or of an unknown version."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What the K/V of a token is: [layers, 2, kv_heads, head_dim] numbers.

    Where layers differ in their heads, the keys of all layers are one row, and so are the values.
    num_kv_heads and head_dim are then the largest.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # "float32"
    itemsize: int  # bytes of a number
    scale_bytes: int = 0  # of a head's keys, or of its values, behind its numbers
    shapes: tuple[tuple[int, int], ...] = ()  # (kv_heads, head_dim) of each layer, if they differ

    @property
    def num_rows(self) -> int:
        """Rows of a token's keys, or of its values."""
        return 1 if self.shapes else self.num_layers

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: of a token's keys, or of its values, in one layer or in all."""
        shapes = self.shapes or ((self.num_kv_heads, self.head_dim),)
        return sum(count * (dim * self.itemsize + self.scale_bytes) for count, dim in shapes)

    @property
    def token_bytes(self) -> int:
        return 2 * self.num_rows * self.row_bytes

    def as_list(self) -> list[Any]:
        """Begins with `num_rows`. JSON values."""
        if self.shapes:
            return [1, 2, [list(shape) for shape in self.shapes], self.dtype]
        return [self.num_layers, 2, self.num_kv_heads, self.head_dim, self.dtype]


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
    """Raises BadRun for an algorithm that is unknown here."""
    return _Crc32() if algorithm == CRC32 else _xxhash(algorithm).xxh3_64()


def checksum_of(data: Buffer, algorithm: str) -> int:
    """As of a hasher, and faster. O(bytes). Raises BadRun, see `make_hasher`."""
    if algorithm == CRC32:
        return zlib.crc32(data)
    checksum: int = _xxhash(algorithm).xxh3_64_intdigest(data)
    return checksum


def _xxhash(algorithm: str) -> ModuleType:
    """The package xxhash, if it makes the checksum. Raises BadRun."""
    if algorithm != XXH3:
        raise BadRun(f"its checksum is {algorithm!r}, which this version does not know")
    try:
        import xxhash
    except ImportError as error:
        raise BadRun("its checksum needs the package xxhash (pip install xxhash)") from error
    return xxhash


def encode_run(run: KVRun, layout: KVLayout, checksum: str | None = None) -> Iterator[Buffer]:
    """The parts of a file, in order. K/V is not copied. No part extends over a multiple of
    WRITE_BYTES. The checksum is made part by part: whoever writes each soon finds it in the
    processor's cache.

    checksum  algorithm, see `default_checksum`
    """
    algorithm = default_checksum() if checksum is None else checksum
    tokens = np.ascontiguousarray(run.tokens, "<i4")
    header = {
        "version": VERSION,
        "checksum": algorithm,
        "namespace": run.namespace,
        "start": run.start,
        "parent": run.parent,
        "num_tokens": len(tokens),
        "layout": layout.as_list(),
    }
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text) + tokens.nbytes) % _ALIGNMENT)
    head, hasher = MAGIC + _LENGTH.pack(len(text)) + text + tokens.tobytes(), make_hasher(algorithm)
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


def _contiguous_blocks(kv: ByteArray) -> list[ByteArray]:
    """K/V [layers, 2, tokens, bytes] as contiguous arrays, in order: of some of a larger array's
    tokens, the keys or values of a layer each."""
    if kv.flags.c_contiguous:
        return [kv]
    return [np.ascontiguousarray(rows) for layer in kv for rows in layer]


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
    checksum = checksum_of(view[:end], head.checksum)
    if checksum != _CHECKSUM.unpack(view[end:])[0]:
        raise BadRun("its checksum is wrong: it is damaged or cut short")
    if layout is not None and head.layout != layout.as_list():
        raise BadRun(f"its K/V is {head.layout}, not {layout.as_list()}")
    try:
        shape = (int(head.layout[0]), 2, len(head.tokens), -1)
        kv = np.frombuffer(view[head.num_bytes : end], np.uint8).reshape(shape)
    except (IndexError, TypeError, ValueError) as error:
        raise BadRun(f"its K/V has another size than its header says: {error}") from error
    return KVRun(head.namespace, head.start, head.parent, head.tokens, kv)


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


def decode_head(data: Buffer) -> RunHead:
    """The head of a run, from a file's first bytes; the checksum is not checked. Raises BadRun, or
    ShortHead, which says how many bytes are needed."""
    view = memoryview(data)
    header, begin = _read_header(view)
    try:
        end = begin + 4 * int(header["num_tokens"])
        namespace, parent = str(header["namespace"]), str(header["parent"])
        start, layout = int(header["start"]), list(header["layout"])
        checksum = str(header["checksum"])
    except (KeyError, TypeError, ValueError) as error:
        raise BadRun(f"its header lacks a field: {error}") from error
    if len(view) < end:
        raise ShortHead(end)
    head = bytes(view[:end])
    tokens = np.frombuffer(head, "<i4", offset=begin).astype(np.int32, copy=False)
    return RunHead(namespace, start, parent, tokens, layout, checksum, head)


class ShortHead(Exception):
    """More of the file's first bytes are needed."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(f"{num_bytes} bytes are needed")
        self.num_bytes = num_bytes


def _read_header(view: memoryview) -> tuple[dict[str, Any], int]:
    """The header, and the index after it."""
    if len(view) < 8 or view[:4] != MAGIC:
        raise BadRun("it is not a file of this store")
    (size,) = _LENGTH.unpack(view[4:8])
    if size > _MAX_HEADER:
        raise BadRun("its header is too long")
    if len(view) < 8 + size:
        raise ShortHead(8 + size)
    try:
        header = json.loads(bytes(view[8 : 8 + size]))
    except (ValueError, RecursionError) as error:
        raise BadRun(f"its header is not JSON: {error}") from error
    if not isinstance(header, dict) or header.get("version") != VERSION:
        raise BadRun(f"its version is not {VERSION}")
    return header, 8 + size
