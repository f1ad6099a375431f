"""Hashes of a sequence: of its prefixes at block ends, and of its pieces wherever they stand."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixserve.arrays import IntArray

UInts = NDArray[np.uint64]
_RATIO = 0x9E3779B97F4A7C15  # odd: powers of it do not vanish modulo 2**64
_LEAST_BITS, _MOST_BITS = 16, 18  # of token ids whose mixed values are looked up


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


class Piece(NamedTuple):
    """Tokens to be hashed, at least one, and how the sequence before them ended."""

    tokens: IntArray
    salt: int = 0  # of the namespace
    start: int = 0  # tokens before
    sum: int = 0  # over these
    last: int = 0  # the mixed value of the last of these
    chunk_start: int = 0  # the end of the last chunk
    chunk_sum: int = 0  # the sum up to there


class Hashes(NamedTuple):
    """The hashes of a piece."""

    blocks: list[int]  # of the prefixes at the wanted ends
    chunk_ends: list[int]
    chunks: list[int]
    end: Piece  # without tokens: a piece that follows begins so


class Fingerprints:
    """Hashes sequences. About 10 ns per token. `chunk_tokens`: mean length of a chunk."""

    def __init__(self, chunk_tokens: int = 16) -> None:
        self._ends_below = np.uint64((1 << 64) // chunk_tokens)
        self._powers = _Powers(_RATIO)
        self._inverse = _Powers(pow(_RATIO, -1, 1 << 64))

    def prefixes(self, tokens: IntArray, block_size: int, salt: int = 0) -> UInts:
        """[n] the hash of each prefix that ends with a full block. `salt`: of the namespace."""
        return prefix_ids(self.sums(tokens)[block_size - 1 :: block_size], salt)

    def sums(self, tokens: IntArray) -> UInts:
        """[n] for each token a sum over the sequence up to it."""
        sums: UInts = np.cumsum(mixed_tokens(tokens) * self._powers.first(len(tokens)))
        return sums

    def chunks(self, tokens: IntArray, salt: int = 0) -> Chunks:
        """The chunks of a sequence. A chunk ends behind a token where a hash of the last two tokens
        says so."""
        if not len(tokens):
            return Chunks(np.empty(0, np.intp), np.empty(0, np.uint64))
        (hashes,) = self.hash_all([Piece(tokens)], np.empty(0, np.intp), [slice(0, 0)])
        ids = np.asarray(hashes.chunks, np.uint64) ^ np.uint64(salt)
        return Chunks(np.asarray(hashes.chunk_ends, np.intp), ids)

    def hash_all(
        self, pieces: Sequence[Piece], ends: NDArray[np.intp], blocks: Sequence[slice]
    ) -> list[Hashes]:
        """Hash many pieces at once, which is several times faster than one by one.

        ends    positions, for all sequences
        blocks  which of these lie in each piece; its prefixes up to there are hashed
        """
        sizes = np.asarray([len(piece.tokens) for piece in pieces])
        salts, starts, sums_before, last, chunk_starts, chunk_sums = (
            np.asarray([piece[field] for piece in pieces], np.uint64) for field in range(1, 7)
        )
        stops = np.cumsum(sizes)
        firsts = stops - sizes
        powers = self._powers.first(int((starts.astype(np.int64) + sizes).max()))
        inverse = self._inverse.first(len(powers))
        mixed = mixed_tokens(np.concatenate([piece.tokens for piece in pieces]))
        weights = [powers[piece.start : piece.start + len(piece.tokens)] for piece in pieces]
        sums = np.cumsum(mixed * np.concatenate(weights), dtype=np.uint64)
        bases = sums_before - np.where(firsts > 0, sums[firsts - 1], np.uint64(0))

        counts = np.asarray([part.stop - part.start for part in blocks])
        shifts = np.repeat(firsts - starts.astype(np.int64) - 1, counts)
        places = np.concatenate([ends[part] for part in blocks]) + shifts
        ids = _mixed(sums[places] + np.repeat(bases, counts)) ^ np.repeat(salts, counts)

        before = np.empty_like(mixed)
        before[1:] = mixed[:-1]
        before[firsts] = last
        at = np.flatnonzero(mixed + (before << np.uint64(1)) < self._ends_below)
        cuts = np.concatenate((np.zeros(1, np.intp), np.searchsorted(at, stops)))
        num_chunks = np.diff(cuts)
        base = np.repeat(bases, num_chunks)
        shift = np.repeat(starts.astype(np.int64) - firsts + 1, num_chunks)
        chunk_ends, end_sums = at + shift, sums[at] + base
        begins = np.concatenate((np.zeros(1, np.intp), chunk_ends))[: len(at)]
        begin_sums = np.concatenate((np.zeros(1, np.uint64), end_sums))[: len(at)]
        has_chunks = num_chunks > 0
        begins[cuts[:-1][has_chunks]] = chunk_starts[has_chunks].astype(np.intp)
        begin_sums[cuts[:-1][has_chunks]] = chunk_sums[has_chunks]
        # The sum over a chunk, divided by the power at its begin, does not depend on its place.
        chunk_ids = _mixed((end_sums - begin_sums) * inverse[begins])

        block_list, end_list, chunk_list = ids.tolist(), chunk_ends.tolist(), chunk_ids.tolist()
        last_sums, last_mixed = (sums[stops - 1] + bases).tolist(), mixed[stops - 1].tolist()
        sum_list, cut_list = end_sums.tolist(), cuts.tolist()
        hashes, block = [], 0
        for number, (piece, count) in enumerate(zip(pieces, counts.tolist(), strict=True)):
            low, high = cut_list[number], cut_list[number + 1]
            end = Piece(
                piece.tokens[:0],
                piece.salt,
                piece.start + len(piece.tokens),
                last_sums[number],
                last_mixed[number],
                end_list[high - 1] if high > low else piece.chunk_start,
                sum_list[high - 1] if high > low else piece.chunk_sum,
            )
            found = block_list[block : block + count]
            hashes.append(Hashes(found, end_list[low:high], chunk_list[low:high], end))
            block += count
        return hashes


@cache
def _token_table(bits: int) -> UInts:
    """[token] the mixed value of each id of so many bits."""
    return _mixed(np.arange(1, (1 << bits) + 1, dtype=np.uint64))


def mixed_tokens(tokens: IntArray) -> UInts:
    """[n] the token ids, spread over 64 bits."""
    if len(tokens) and int(tokens.min()) >= 0:
        bits = int(tokens.max()).bit_length()
        if bits <= _MOST_BITS:
            return _token_table(max(bits, _LEAST_BITS))[tokens]
    return _mixed(tokens.astype(np.uint64) + np.uint64(1))


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
