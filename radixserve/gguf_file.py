"""`GgufFile`: reads the metadata and tensors of a GGUF file, which is memory-mapped.

Format: ggml's docs/gguf.md, versions 2 and 3, little endian. The gguf package makes a numpy array
per string, which takes 4 s for a vocabulary of 49,152 tokens; this reader takes 0.1 s. The package
is used for further tensor types and for dequantisation.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from radixserve.errors import InvalidRequest, ModelNotSupported

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_TYPES = {  # types known without the gguf package: (name, numbers per block, bytes per block)
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
}
_FLOATS: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2")}
_CORRUPT = (ArithmeticError, LookupError, RecursionError, TypeError, ValueError, struct.error)
_MAX_DIMENSIONS = 4
_MAX_NUMBERS_OF_BYTE = 8
_MAX_LENGTH = 1 << 31  # entries of an array, bytes of a string


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies in the file and how its numbers are stored."""

    name: str
    shape: tuple[int, ...]  # as in PyTorch: the fastest dimension last
    type_id: int  # gguf.GGMLQuantizationType
    offset: int  # bytes from the start of the file


class GgufFile:
    """An open GGUF file. Raises InvalidRequest if it is truncated or not a GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fields: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._read_header()
        except (*_CORRUPT, OSError) as error:
            raise InvalidRequest(f"{path} is not a complete GGUF file: {error}") from error

    @property
    def architecture(self) -> str:
        return str(self.fields.get("general.architecture", ""))

    def field(self, name: str, default: Any = None) -> Any:
        """Returns a field of the model's architecture: "context_length" is
        llama.context_length."""
        return self.fields.get(f"{self.architecture}.{name}", default)

    def largest(self, name: str, default: Any = None) -> Any:
        """Returns a field; if it has a number per layer, the largest one."""
        value = self.field(name, default)
        return max(value, default=default) if isinstance(value, list) else value

    @property
    def num_layers(self) -> int:
        """Number of layers, without the last ones that only draft tokens."""
        return int(self.field("block_count", 0)) - int(self.field("nextn_predict_layers", 0))

    def kind(self, name: str) -> str:
        """Returns the storage type of a tensor's numbers, as gguf.GGMLQuantizationType names it.

        Raises ModelNotSupported for a type that the gguf package does not know.
        """
        return self._type(name)[0]

    def raw(self, name: str, index: int | None = None) -> NDArray[np.uint8]:
        """Returns [..., bytes of a row]: a tensor, or `index` of its first axis, as stored, without
        a copy. Raises the errors of `kind`, and InvalidRequest if the file ends before the tensor.
        """
        tensor, (_, block, block_bytes) = self.tensors[name], self._type(name)
        end = tensor.offset + math.prod(tensor.shape) // block * block_bytes
        if not tensor.shape or tensor.shape[-1] % block or end > len(self._data):
            raise InvalidRequest(f"{self.path} is truncated or corrupt at tensor {name}")
        raw = np.frombuffer(self._data, np.uint8, end - tensor.offset, tensor.offset)
        rows = raw.reshape(*tensor.shape[:-1], -1)
        return rows if index is None else rows[index]

    def read(self, name: str, index: int | None = None) -> NDArray[np.float32]:
        """Returns the numbers of a tensor, or of `index` of its first axis, widened to float32.

        Raises the errors of `raw`, and ModelNotSupported for a type that cannot be widened.
        """
        shape = self.tensors[name].shape if index is None else self.tensors[name].shape[1:]
        rows, kind = self.raw(name, index), self.kind(name)
        if kind in _FLOATS:
            return rows.view(_FLOATS[kind]).reshape(shape).astype(np.float32, copy=False)
        gguf = _gguf_package()
        try:
            numbers = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
        except NotImplementedError:
            raise ModelNotSupported(
                f"{self.path}: tensor {name} is of type {kind}, which cannot be widened"
            ) from None
        widened: NDArray[np.float32] = numbers.reshape(shape).astype(np.float32, copy=False)
        return widened

    def _type(self, name: str) -> tuple[str, int, int]:
        """Returns (name, numbers per block, bytes per block) of a tensor's type. Raises
        ModelNotSupported."""
        type_id = self.tensors[name].type_id
        if type_id in _TYPES:
            return _TYPES[type_id]
        gguf = _gguf_package()
        try:
            kind = gguf.GGMLQuantizationType(type_id)
            return str(kind.name), *gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise ModelNotSupported(
                f"{self.path}: tensor {name} has the unknown type {type_id}"
            ) from None

    def drop_pages(self) -> None:
        """Let the system reclaim the memory of the file's pages that were read."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._data.madvise(mmap.MADV_DONTNEED)

    def _read_header(self) -> None:
        if self._data[:4] != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        position = 4
        version, num_tensors, num_fields = struct.unpack_from("<IQQ", self._data, position)
        if version not in _VERSIONS:
            raise ValueError(f"version {version} is not one of {_VERSIONS}")
        position += 20
        for _ in range(num_fields):
            name, position = self._string(position)
            (kind,) = struct.unpack_from("<I", self._data, position)
            self.fields[name], position = self._value(kind, position + 4)
        tensors = []
        for _ in range(num_tensors):
            name, position = self._string(position)
            (num_dimensions,) = struct.unpack_from("<I", self._data, position)
            if num_dimensions > _MAX_DIMENSIONS:
                raise ValueError(f"tensor {name} has {num_dimensions} dimensions")
            shape = struct.unpack_from(f"<{num_dimensions}Q", self._data, position + 4)
            position += 4 + 8 * num_dimensions
            type_id, offset = struct.unpack_from("<IQ", self._data, position)
            position += 12
            tensors.append((name, shape[::-1], type_id, offset))
        alignment = int(self.fields.get("general.alignment", 32))
        if alignment < 1:
            raise ValueError(f"its alignment is {alignment}")
        start = -(-position // alignment) * alignment
        for name, shape, type_id, offset in tensors:
            if math.prod(shape) > _MAX_NUMBERS_OF_BYTE * len(self._data):
                raise ValueError(f"tensor {name} of {list(shape)} ends after the file")
            self.tensors[name] = GgufTensor(name, shape, type_id, start + offset)

    def _string(self, offset: int) -> tuple[str, int]:
        (length,) = struct.unpack_from("<Q", self._data, offset)
        offset += 8
        if length > len(self._data) - offset:
            raise ValueError(f"a string of {length} bytes ends after the file")
        return self._data[offset : offset + length].decode(), offset + length

    def _value(self, kind: int, offset: int) -> tuple[Any, int]:
        if kind == _STRING:
            return self._string(offset)
        if kind in _NUMBERS:
            layout = "<" + _NUMBERS[kind]
            return struct.unpack_from(layout, self._data, offset)[0], offset + struct.calcsize(
                layout
            )
        if kind != _ARRAY:
            raise ValueError(f"a field has the unknown type {kind}")
        inner, length = struct.unpack_from("<IQ", self._data, offset)
        offset += 12
        if length > min(_MAX_LENGTH, len(self._data)):
            raise ValueError(f"an array of {length} entries ends after the file")
        if inner in _NUMBERS:
            values = np.frombuffer(self._data, np.dtype("<" + _NUMBERS[inner]), length, offset)
            return values.tolist(), offset + values.nbytes
        if inner == _STRING:
            return self._strings(length, offset)
        items = []
        for _ in range(length):
            value, offset = self._value(inner, offset)
            items.append(value)
        return items, offset

    def _strings(self, length: int, offset: int) -> tuple[list[str], int]:
        """Returns an array of strings and the offset after it. Its loop makes few calls, since
        vocabularies have 100,000 strings."""
        data, size_at, end = self._data, struct.Struct("<Q").unpack_from, len(self._data)
        strings = []
        for _ in range(length):
            begin = offset + 8
            offset = begin + size_at(data, offset)[0]
            if offset > end:
                raise ValueError("a string ends after the file")
            strings.append(data[begin:offset].decode())
        return strings, offset


_open_files: WeakValueDictionary[tuple[str, int, int, int], GgufFile] = WeakValueDictionary()


def find_gguf(model_path: str) -> GgufFile | None:
    """Returns the GGUF file that a path names: the path itself, or the only GGUF file of a folder
    without config.json; None for other paths. Raises InvalidRequest for a missing file, and for a
    folder of several files.
    """
    path = Path(model_path).expanduser()
    if path.suffix == SUFFIX:
        if not path.is_file():
            raise InvalidRequest(f"there is no file {path}")
        return open_gguf(path)
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    paths = sorted(path.glob(f"*{SUFFIX}"))
    if len(paths) > 1:
        names = ", ".join(file.name for file in paths)
        raise InvalidRequest(f"{path} holds several GGUF files ({names}): name one of them")
    return open_gguf(paths[0]) if paths else None


def open_gguf(path: Path) -> GgufFile:
    """Opens a GGUF file, or returns the object of a file that is open and has not changed since:
    reading a header with a vocabulary takes tens of milliseconds."""
    try:
        status = path.stat()
    except OSError as error:
        raise InvalidRequest(f"{path} is not a complete GGUF file: {error}") from error
    key = str(path.absolute()), status.st_ino, status.st_size, status.st_mtime_ns
    file = _open_files.get(key)
    if file is None:
        file = _open_files[key] = GgufFile(path)
    return file


def _gguf_package() -> Any:
    try:
        import gguf
    except ImportError:
        raise InvalidRequest(
            'GGUF files need the gguf package: pip install "radixserve[gguf]"'
        ) from None
    return gguf
