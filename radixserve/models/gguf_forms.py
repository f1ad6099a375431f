"""Quantised tensors of GGUF files as 8- and 4-bit weights.

Q8_0, Q5_0, Q4_0, Q4_1, Q4_K, MXFP4, IQ4_NL, TQ1_0 and TQ2_0 keep every number exactly. The others
are rounded to 8 bits a number with a scale for 32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from radixserve_kernels.quantized import QuantizedTensor, quantize_int8

Bytes = NDArray[np.uint8]


def exact_form(name: str, rows: Bytes) -> QuantizedTensor:
    """A tensor [N, K] of a type in EXACT; rows [N, bytes of a row], as stored."""
    return _READERS[name](rows)


def nearest_int8(numbers: NDArray[np.float32]) -> QuantizedTensor:
    """A tensor [N, K] of any other type, from its widened numbers. Raises ValueError, see
    `quantize_int8`."""
    return quantize_int8(torch.from_numpy(numbers))


def _q8_0(rows: Bytes) -> QuantizedTensor:
    scales, numbers = _halves(rows, 34, 1)
    return _made(numbers.view(np.int8), scales[0])


def _q5_0(rows: Bytes) -> QuantizedTensor:
    scales, rest = _halves(rows, 22, 1)
    fifth = np.unpackbits(rest[..., :4], axis=-1, bitorder="little")
    numbers = _nibbles(rest[..., 4:]) | fifth << 4
    return _made(numbers.astype(np.int8) - 16, scales[0])


def _q4_0(rows: Bytes) -> QuantizedTensor:
    scales, numbers = _halves(rows, 18, 1)
    return _made(_nibbles(numbers), scales[0], scales[0] * np.float16(-8))


def _q4_1(rows: Bytes) -> QuantizedTensor:
    scales, numbers = _halves(rows, 20, 2)
    return _made(_nibbles(numbers), *scales)


def _q4_k(rows: Bytes) -> QuantizedTensor:
    """Eight blocks of 32 share a scale for their scales and one for their minimums."""
    (scale, minimum), rest = _halves(rows, 144, 2)
    packed, numbers = rest[..., :12], rest[..., 12:]
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate((first & 63, (third & 15) | (first >> 6) << 4), -1)
    minimums = np.concatenate((second & 63, (third >> 4) | (second >> 6) << 4), -1)
    pairs = numbers.reshape(*numbers.shape[:-1], 4, 32)
    blocks = np.stack((pairs & 15, pairs >> 4), -2)  # [N, n, 4, 2, 32]
    return _made(
        blocks,
        scale.astype(np.float32)[..., None] * scales,
        -(minimum.astype(np.float32)[..., None] * minimums),
    )


def _mxfp4(rows: Bytes) -> QuantizedTensor:
    """Twice the number is whole; scales are powers of two, of which float16 holds -24 to 15."""
    blocks = rows.reshape(len(rows), -1, 17)
    numbers = _MXFP4_DOUBLED[_nibbles(blocks[..., 1:])]
    with np.errstate(over="ignore", under="ignore"):
        scales = np.ldexp(np.float32(1), blocks[..., 0].astype(np.int32) - 128).astype(np.float16)
    return _made(numbers, scales)


def _iq4_nl(rows: Bytes) -> QuantizedTensor:
    """Half a byte is an index of a table."""
    scales, numbers = _halves(rows, 18, 1)
    return _made(_IQ4_NL[_nibbles(numbers)], scales[0])


def _tq1_0(rows: Bytes) -> QuantizedTensor:
    """-1, 0 or 1: of 256 numbers 240 are five to a byte, 16 four to a byte. A byte is a fraction of
    256 whose digits in base 3 are the numbers."""
    blocks = rows.reshape(len(rows), -1, 54)
    digits = [
        _digits(blocks[..., :32], 5),
        _digits(blocks[..., 32:48], 5),
        _digits(blocks[..., 48:52], 4),
    ]
    return _ternary(np.concatenate(digits, -1), blocks[..., 52:])


def _digits(packed: Bytes, count: int) -> Bytes:
    """The first digits of each byte: those of all bytes, then the second ones of all, and so on."""
    powers = np.array([3**digit for digit in range(count)], np.uint8)
    rest = packed[..., None, :] * powers[:, None]  # modulo 256
    return (rest.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(*packed.shape[:-1], -1)


def _tq2_0(rows: Bytes) -> QuantizedTensor:
    """-1, 0 or 1, four to a byte, those of successive bytes 32 times."""
    blocks = rows.reshape(len(rows), -1, 66)
    packed = blocks[..., :64].reshape(*blocks.shape[:-1], 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    return _ternary((packed >> shifts & 3).astype(np.uint8), blocks[..., 64:])


def _ternary(numbers: Bytes, scales: Bytes) -> QuantizedTensor:
    """0, 1 or 2 less 1, with a float16 scale for 256."""
    own = np.ascontiguousarray(scales).view(np.float16)
    return _made(numbers.astype(np.int8) - np.int8(1), np.repeat(own, 8, -1))


_IQ4_NL = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)
_MXFP4_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
_READERS: dict[str, Callable[[Bytes], QuantizedTensor]] = {
    "Q8_0": _q8_0,
    "Q5_0": _q5_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "MXFP4": _mxfp4,
    "IQ4_NL": _iq4_nl,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
}
EXACT = tuple(_READERS)


def _halves(rows: Bytes, size: int, count: int) -> tuple[list[NDArray[np.float16]], Bytes]:
    """Blocks of `size` bytes: the first `count` float16 [N, n] each, and the other bytes."""
    blocks = rows.reshape(len(rows), -1, size)
    first = np.ascontiguousarray(blocks[..., : 2 * count]).view(np.float16)
    return [first[..., i] for i in range(count)], blocks[..., 2 * count :]


def _nibbles(packed: Bytes) -> Bytes:
    """[..., n] to [..., 2 n]: the low halves, then the high ones."""
    return np.concatenate((packed & 15, packed >> 4), -1)


def _made(
    numbers: NDArray[Any], scales: NDArray[Any], minimums: NDArray[Any] | None = None
) -> QuantizedTensor:
    """From arrays that begin with N, in blocks of any arrangement."""
    size = len(numbers)

    def tensor(values: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.array(values, order="C").reshape(size, -1))

    return QuantizedTensor(
        tensor(numbers), tensor(scales), None if minimums is None else tensor(minimums)
    )
