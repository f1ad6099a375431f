"""Pseudo-random tokens of a block id: what a trace of hashes is expanded with.

SplitMix64, started at mix64((id + 1) * 0xD1342543DE82EF95); each output is mapped to a token id in
[256, vocab). Equal ids give equal tokens, and different ids different ones.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from radixserve.arrays import IntArray

VOCAB = 32_000
_LEAST = 256  # ids below are left to special tokens
_ID_STEP = 0xD1342543DE82EF95
_STEP = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_CHUNK = 1 << 18  # tokens made at a time: their 64-bit states stay in the processor's cache


def block_matrix(ids: NDArray[np.int64], size: int, vocab: int = VOCAB) -> IntArray:
    """[n, size] int32: row k holds the tokens of the block `ids[k]`.

    About 15 ns a token; needs 4 bytes a token and little more.
    """
    rows = np.empty((len(ids), size), np.int32)
    step = max(1, _CHUNK // size)
    offsets = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(_STEP)
    starts = _mix((ids.astype(np.uint64) + np.uint64(1)) * np.uint64(_ID_STEP))
    for at in range(0, len(ids), step):
        states = _mix(starts[at : at + step, None] + offsets)
        rows[at : at + step] = _LEAST + states % np.uint64(vocab - _LEAST)
    return rows


def block_tokens(block_id: int, size: int, vocab: int = VOCAB) -> IntArray:
    """[size] int32: the tokens of one block."""
    start = (block_id + 1) * _ID_STEP & _MASK
    offsets = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(_STEP)
    states = _mix(_mix(np.asarray([start], np.uint64)) + offsets)
    return (_LEAST + states % np.uint64(vocab - _LEAST)).astype(np.int32)


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX_2)
    return z ^ (z >> np.uint64(31))
