"""The small steps of a walk down the token index."""

from __future__ import annotations

import numpy as np

from radixserve.arrays import IntArray
from radixserve.cache.tokens import TOKEN_BYTES


def write_lengths(lengths: IntArray, mask: int, length: int) -> None:
    """Set the entries of the bits of `mask`."""
    if mask.bit_count() > 8:
        data = np.frombuffer(mask.to_bytes(-(-len(lengths) // 8), "little"), np.uint8)
        lengths[np.unpackbits(data, count=len(lengths), bitorder="little").view(np.bool_)] = length
        return
    while mask:
        low = mask & -mask
        lengths[low.bit_length() - 1] = length
        mask ^= low


def common_bytes(edge: bytes, tokens: bytes, pos: int) -> int:
    """Bytes of the whole tokens that `edge` and `tokens` from byte `pos` have in common."""
    count = min(len(edge), len(tokens) - pos) // TOKEN_BYTES
    differs = np.frombuffer(edge, np.int32, count) != np.frombuffer(tokens, np.int32, count, pos)
    first = int(differs.argmax()) if count else 0
    return (first if count and differs[first] else count) * TOKEN_BYTES
