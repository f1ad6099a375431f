"""Where a trace's tokens come from: block ids, packed token ids, or text.

A trace of hashes names blocks, whose tokens are pseudo-random (SplitMix64):

    blocks   [ id 7 ][ id 8 ][ id 31 ]         full blocks, equal ids for equal whole prefixes
    prompt   [----------------------- tail)    a tail shorter than a block may have no id
    output                                [--)

With `stitch` the tail and the output are taken from the request that continues this one, if there
is one, as a client that resends its conversation would; else they are private to the request.
"""

from __future__ import annotations

import re
import zlib
from array import array

import numpy as np
from numpy.typing import NDArray

from radixserve.arrays import IntArray
from radixserve.replay.trace import Ints

VOCAB = 32_000
PRIVATE_TAIL, PRIVATE_FOLLOW, PRIVATE_OUTPUT = 1 << 40, 1 << 41, 1 << 42  # first private block ids
_FIRST_TOKEN = 256  # ids below are left to special tokens
_ID_STEP = 0xD1342543DE82EF95
_STEP = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_CHUNK = 1 << 18  # tokens made at a time: their 64-bit states stay in the processor's cache
_PACKED_BYTES = 4 * 64  # of a packed block
_PIECE = re.compile(r" ?[A-Za-z]{1,7}| ?\d{1,3}| ?[^\sA-Za-z\d]{1,3}|\s+", re.S)
_TEXT_VOCAB = 131_072


def block_matrix(ids: Ints, size: int) -> IntArray:
    """[n, size] int32: row k holds the tokens of the block `ids[k]`, in [256, VOCAB).

    SplitMix64, started at mix64((id + 1) * 0xD1342543DE82EF95). Equal ids give equal tokens,
    different ids different ones. About 15 ns a token; needs 4 bytes a token and little more.
    """
    rows = np.empty((len(ids), size), np.int32)
    step = max(1, _CHUNK // max(1, size))
    offsets = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(_STEP)
    starts = _mix((ids.astype(np.uint64) + np.uint64(1)) * np.uint64(_ID_STEP))
    for at in range(0, len(ids), step):
        states = _mix(starts[at : at + step, None] + offsets)
        rows[at : at + step] = _FIRST_TOKEN + states % np.uint64(VOCAB - _FIRST_TOKEN)
    return rows


def block_tokens(block_id: int, size: int) -> IntArray:
    """[size] int32: the tokens of one block."""
    return block_matrix(np.asarray([block_id]), size)[0]


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX_2)
    return z ^ (z >> np.uint64(31))


def tokenize(text: str) -> IntArray:
    """[n] int32: a stand-in for a tokenizer, about four characters a token, 0.5 us a token.

    Needs no model files and gives the same ids everywhere: the CRC-32 of each piece of text,
    modulo 131,072. Counts differ from a real tokenizer's.
    """
    pieces = _PIECE.findall(text)
    ids = [zlib.crc32(piece.encode("utf-8", "surrogatepass")) % _TEXT_VOCAB for piece in pieces]
    return np.asarray(ids, np.int32)


class PackedTokens:
    """Prompts and outputs by index, in the order in which they were added.

    Equal blocks of 64 tokens are stored once. The turns of a chat share all blocks but the last
    ones, so memory goes with the distinct tokens: about 5.5 bytes each.
    """

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._index: dict[bytes, int] = {}
        self._rows: list[array[int]] = []
        self._tails: list[bytes] = []
        self._num_prompt = array("q")

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, prompt: IntArray, output: IntArray) -> None:
        """O(tokens)."""
        data = np.concatenate((prompt, output)).tobytes()
        whole = len(data) - len(data) % _PACKED_BYTES
        rows = array("i")
        for at in range(0, whole, _PACKED_BYTES):
            block = data[at : at + _PACKED_BYTES]
            row = self._index.get(block)
            if row is None:
                row = self._index[block] = len(self._blocks)
                self._blocks.append(block)
            rows.append(row)
        self._rows.append(rows)
        self._tails.append(data[whole:])
        self._num_prompt.append(len(prompt))

    def tokens(self, index: int) -> tuple[IntArray, IntArray]:
        """Prompt and output. O(tokens), a copy at memory speed."""
        parts = [self._blocks[row] for row in self._rows[index]]
        ids = np.frombuffer(b"".join([*parts, self._tails[index]]), np.int32)
        count = self._num_prompt[index]
        return ids[:count], ids[count:]


class HashTokens:
    """The distinct blocks as one matrix; a prompt is a selection of its rows.

    Memory: 4 bytes a token of a distinct block and 16 bytes a run of consecutive ids. Making a
    prompt costs a copy at memory speed.
    """

    def __init__(
        self,
        block_size: int,
        runs: list[Ints],  # by request: [k, 2] first id and count
        num_prompt: Ints,  # [requests] tokens
        num_output: Ints,  # [requests] tokens
        *,
        stitch: bool,
    ) -> None:
        self._size = block_size
        self._num_prompt, self._num_output = num_prompt, num_output
        firsts, counts = _merged(runs)
        starts = np.cumsum(counts) - counts  # the row of each merged run's first id
        self._num_rows = int(counts.sum())
        self._matrix = block_matrix(_expanded(np.stack((firsts, counts), 1)), block_size)
        self._runs = [_as_rows(one, firsts, starts) for one in runs]
        self._continuations = self._find_continuations() if stitch else {}

    def tokens(self, index: int) -> tuple[IntArray, IntArray]:
        """Prompt and output. O(their tokens)."""
        rows, num_whole = self._rows_of(index)
        num_output = int(self._num_output[index])
        tail_len = int(self._num_prompt[index]) - num_whole * self._size
        body = self._matrix[rows[:num_whole]].reshape(-1)
        if index in self._continuations:
            after = self._continuation_tokens(index, tail_len + num_output)
            return np.concatenate((body, after[:tail_len])), after[tail_len:]
        output = block_tokens(PRIVATE_OUTPUT + index, num_output)
        if not tail_len:
            return body, output
        if num_whole < len(rows):
            tail = self._matrix[rows[num_whole]][:tail_len]
        else:
            tail = block_tokens(PRIVATE_TAIL + index, tail_len)
        return np.concatenate((body, tail)), output

    def continued_by(self) -> dict[int, int]:
        """{request: the later request that continues it}, as far as stitching found out."""
        return {index: later for index, (later, _) in self._continuations.items()}

    def _rows_of(self, index: int) -> tuple[Ints, int]:
        """[blocks] matrix rows of a request's blocks; the number of full blocks in its prompt."""
        rows = _expanded(self._runs[index])
        return rows, min(int(self._num_prompt[index]) // self._size, len(rows))

    def _continuation_tokens(self, index: int, count: int) -> IntArray:
        """[count] the tokens after a request's full blocks, from the request that continues it."""
        later, first = self._continuations[index]
        rows, num_whole = self._rows_of(later)
        last = min(num_whole, first - (-count // self._size))
        known = self._matrix[rows[first:last]].reshape(-1)[:count]
        missing = count - len(known)
        if not missing:
            return known
        return np.concatenate((known, block_tokens(PRIVATE_FOLLOW + index, missing)))

    def _find_continuations(self) -> dict[int, tuple[int, int]]:
        """{request: (the later request, its first block after this one's)}.

        A request continues an earlier one if it contains and extends that one's last full block,
        and that block was new in the earlier one. O(blocks of all requests).
        """
        first_user = np.full(self._num_rows, -1, np.int64)
        open_end = np.full(self._num_rows, -1, np.int64)  # by last block: request not yet continued
        found: dict[int, tuple[int, int]] = {}
        for index in range(len(self._runs)):
            rows, num_whole = self._rows_of(index)
            for at in np.flatnonzero(open_end[rows[:-1]] >= 0).tolist():
                found[int(open_end[rows[at]])] = (index, at + 1)
                open_end[rows[at]] = -1
            first_user[rows[first_user[rows] < 0]] = index
            if num_whole and first_user[rows[num_whole - 1]] == index:
                open_end[rows[num_whole - 1]] = index
        return found


def runs_of(ids: Ints) -> Ints:
    """[k, 2]: a list of ids as first ids and counts of runs of consecutive ids."""
    if not len(ids):
        return np.empty((0, 2), np.int64)
    starts = np.flatnonzero(np.diff(ids, prepend=ids[0] - 2) != 1)
    return np.stack((ids[starts], np.diff(starts, append=len(ids))), 1)


def _merged(runs: list[Ints]) -> tuple[Ints, Ints]:
    """The union of all runs as disjoint ones: first ids, ascending, and counts."""
    every = np.unique(np.concatenate([*runs, np.empty((0, 2), np.int64)]), axis=0)
    ends = np.maximum.accumulate(every[:, 0] + every[:, 1])
    first_of = np.flatnonzero(every[:, 0] > np.append(-1, ends)[:-1])
    lasts = np.append(first_of, len(every))[1:] - 1
    return every[first_of, 0], ends[lasts] - every[first_of, 0]


def _as_rows(runs: Ints, firsts: Ints, starts: Ints) -> Ints:
    """The same runs in rows of the matrix instead of ids."""
    at = np.searchsorted(firsts, runs[:, 0], "right") - 1
    return np.stack((starts[at] + runs[:, 0] - firsts[at], runs[:, 1]), 1)


def _expanded(runs: Ints) -> Ints:
    """[n]: every number in the runs, in order."""
    if len(runs) == 1:
        return np.arange(runs[0, 0], runs[0, 0] + runs[0, 1])
    counts = runs[:, 1]
    shifts = runs[:, 0] - (np.cumsum(counts) - counts)
    return np.repeat(shifts, counts) + np.arange(counts.sum())
