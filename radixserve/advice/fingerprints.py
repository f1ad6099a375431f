"""Hashes of a sequence: of its prefixes at block ends, and of its pieces wherever they stand."""

from __future__ import annotations

import zlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixserve.arrays import IntArray

UInts = NDArray[np.uint64]
_RATIO = 0x9E3779B97F4A7C15  # odd: powers of it do not vanish modulo 2**64
_WINDOW = 4  # tokens that decide whether a chunk ends


def _mixed(values: UInts) -> UInts:
    """Values spread over 64 bits (the end of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: UInts = values ^ (values >> np.uint64(31))
    return mixed


class _Powers:
    """Powers of a number modulo 2**64, made as they are needed."""

    def __init__(self, base: int) -> None:
        self._base = np.uint64(base)
        self._powers: UInts = np.ones(1, np.uint64)

    def first(self, count: int) -> UInts:
        if len(self._powers) < count:
            factors = np.full(1 << (count - 1).bit_length(), self._base)
            factors[0] = 1
            self._powers = np.cumprod(factors, dtype=np.uint64)
        return self._powers[:count]


class Chunks(NamedTuple):
    """A sequence cut where its content says so: equal texts are cut equally, wherever they stand.
    The tokens after the last end belong to no chunk."""

    ends: NDArray[np.intp]  # [n] position after each chunk
    ids: UInts  # [n]


class Fingerprints:
    """Hashes sequences. About 20 ns per token. `chunk_tokens`: mean length of a chunk, a power of
    two."""

    def __init__(self, chunk_tokens: int = 16) -> None:
        self._ends_mask = np.uint64(chunk_tokens - 1)
        self._powers = _Powers(_RATIO)
        self._inverse = _Powers(pow(_RATIO, -1, 1 << 64))

    def prefixes(self, tokens: IntArray, block_size: int, salt: int = 0) -> UInts:
        """[n] the hash of each prefix that ends with a full block. `salt`: of the namespace."""
        sums = self.sums(tokens)
        return prefix_ids(sums[block_size - 1 :: block_size], salt)

    def sums(self, tokens: IntArray, start: int = 0, before: int = 0) -> UInts:
        """[n] for each token a sum over the sequence up to it. `start`: tokens before these, whose
        sum is `before`."""
        mixed = _mixed(tokens.astype(np.uint64) + np.uint64(1))
        powers = self._powers.first(start + len(tokens))[start:]
        sums: UInts = np.cumsum(mixed * powers, dtype=np.uint64)
        return sums + np.uint64(before) if before else sums

    def chunks(self, tokens: IntArray, salt: int = 0) -> Chunks:
        """The chunks of a sequence. A chunk ends behind a token where a hash of the last tokens
        says so."""
        if len(tokens) <= _WINDOW:
            return Chunks(np.empty(0, np.intp), np.empty(0, np.uint64))
        mixed = _mixed(tokens.astype(np.uint64) + np.uint64(1))
        seen = mixed[_WINDOW - 1 :].copy()
        for back in range(1, _WINDOW):
            seen += mixed[_WINDOW - 1 - back : len(mixed) - back] << np.uint64(back)
        ends = np.flatnonzero(_mixed(seen) & self._ends_mask == 0) + _WINDOW
        starts = np.concatenate((np.zeros(1, np.intp), ends))[: len(ends)]
        # The sum over a chunk, divided by the power at its begin, does not depend on its place.
        sums = np.cumsum(mixed * self._powers.first(len(tokens)), dtype=np.uint64)[ends - 1]
        inner = np.diff(sums, prepend=np.uint64(0))
        inverse = self._inverse.first(len(tokens))[starts]
        return Chunks(ends, _mixed(inner * inverse) ^ np.uint64(salt))


def prefix_ids(sums: UInts, salt: int) -> UInts:
    """[n] the hashes of prefixes with these sums."""
    ids: UInts = _mixed(sums) ^ np.uint64(salt)
    return ids


def namespace_salt(namespace: str) -> int:
    """A number of 64 bits that is XORed into the hashes of a namespace; 0 for the default one."""
    if not namespace:
        return 0
    data = namespace.encode("utf-8", "surrogatepass")
    return zlib.crc32(data) << 32 | zlib.adler32(data)
