"""`Trace`: requests in order of arrival, and where their tokens come from.

Tokens are made when they are asked for: from block ids, packed token ids, or text.
"""

from __future__ import annotations

import re
import zlib
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from radixserve.arrays import IntArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class TokenSource(Protocol):
    """Makes a request's tokens. `HashTokens` and `PackedTokens` are the two."""

    def tokens(self, index: int) -> tuple[IntArray, IntArray]:
        """Prompt and output of a request of the trace."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request with its recorded output."""

    index: int  # in the trace, by arrival
    time: float  # seconds since the first request
    session: str | None  # shared by the requests of one conversation, task or user
    namespace: str
    prompt: IntArray  # [n] int32, n >= 1
    output: IntArray  # [m] int32, m >= 0

    @property
    def kept(self) -> IntArray:
        """The tokens whose K/V exists at its end: prompt and output without the last token."""
        if len(self.output) < 2:
            return self.prompt
        return np.concatenate((self.prompt, self.output[:-1]))


@dataclass(frozen=True, slots=True)
class Trace:
    """Columns by request in order of arrival. Holds no expanded prompts: see `TokenSource`."""

    name: str
    source: TokenSource
    times: Floats  # [requests] seconds since the first one
    sessions: Sequence[str | None]
    namespaces: Sequence[str]
    num_prompt: Ints  # [requests] tokens
    num_output: Ints  # [requests] tokens
    has_times: bool = True  # False: the file has no times, all arrive at once
    sessions_inferred: bool = False  # from which request continues which, not from the file

    def __len__(self) -> int:
        return len(self.times)

    def __iter__(self) -> Iterator[TraceRequest]:
        return (self.request(index) for index in range(len(self)))

    def request(self, index: int) -> TraceRequest:
        """O(its tokens)."""
        time, session = float(self.times[index]), self.sessions[index]
        tokens = self.source.tokens(index)
        return TraceRequest(index, time, session, self.namespaces[index], *tokens)

    @property
    def num_kept(self) -> Ints:
        """[requests] tokens whose K/V is computed by its end: see `TraceRequest.kept`."""
        return self.num_prompt + np.maximum(self.num_output - 1, 0)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return int(self.num_prompt.sum())

    @property
    def longest(self) -> int:
        """Tokens that the longest request keeps; a smaller cache cannot serve it."""
        return int(self.num_kept.max())

    @property
    def num_sessions(self) -> int:
        return len(self.session_sizes())

    def session_sizes(self) -> Counter[str]:
        """Requests of each session. O(requests)."""
        return Counter(session for session in self.sessions if session is not None)


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
    for first in range(0, len(ids), step):
        states = _mix(starts[first : first + step, None] + offsets)
        rows[first : first + step] = _FIRST_TOKEN + states % np.uint64(VOCAB - _FIRST_TOKEN)
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
        self._sequences: list[tuple[array[int], bytes, int]] = []  # blocks, rest, prompt's length

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, prompt: IntArray, output: IntArray) -> tuple[int, int]:
        """Returns both lengths. O(tokens)."""
        data = np.concatenate((prompt, output)).tobytes()
        whole = len(data) - len(data) % _PACKED_BYTES
        rows = array("i")
        for start in range(0, whole, _PACKED_BYTES):
            block = data[start : start + _PACKED_BYTES]
            row = self._index.setdefault(block, len(self._blocks))
            if row == len(self._blocks):
                self._blocks.append(block)
            rows.append(row)
        self._sequences.append((rows, data[whole:], len(prompt)))
        return len(prompt), len(output)

    def reordered(self, order: Ints) -> PackedTokens:
        """The sequences in another order; shares the blocks."""
        other = PackedTokens()
        other._blocks, other._index = self._blocks, self._index
        other._sequences = [self._sequences[index] for index in order]
        return other

    def coarser(self, unit: int) -> PackedTokens:
        """The same sequences where `unit` tokens are one: their checksum. What two sequences have
        in common they still have, up to the last whole unit."""
        other = PackedTokens()
        for index in range(len(self)):
            prompt, output = self.tokens(index)
            ids = np.concatenate((prompt, output))
            if len(ids) % unit:
                ids = np.concatenate((ids, np.full(-len(ids) % unit, index, np.int32)))
            weights = np.uint64(_ID_STEP) ** np.arange(1, unit + 1, dtype=np.uint64)
            sums = _mix((ids.reshape(-1, unit).astype(np.uint64) * weights).sum(axis=1))
            units = (_FIRST_TOKEN + sums % np.uint64(2**31 - _FIRST_TOKEN)).astype(np.int32)
            num_prompt = max(1, len(prompt) // unit)
            num_output = max(1, len(output) // unit)
            other.add(units[:num_prompt], units[num_prompt : num_prompt + num_output])
        return other

    def tokens(self, index: int) -> tuple[IntArray, IntArray]:
        """Prompt and output. O(tokens), a copy at memory speed."""
        rows, tail, num_prompt = self._sequences[index]
        parts = [self._blocks[row] for row in rows]
        ids = np.frombuffer(b"".join([*parts, tail]), np.int32)
        return ids[:num_prompt], ids[num_prompt:]


class HashTokens:
    """Pseudo-random tokens (SplitMix64) for a trace that names blocks by hashes.

        blocks   [ id 7 ][ id 8 ][ id 31 ]         full blocks, equal ids for equal whole prefixes
        prompt   [----------------------- tail)    a tail shorter than a block may have no id
        output                                [--)

    With `stitch` the tail and the output are those of the request that continues this one, as a
    client that resends its conversation would send them; else they belong to this request alone.

    The distinct blocks are one matrix; a prompt is a selection of its rows. Memory: 4 bytes a token
    of a distinct block and a block of a request. Making a prompt costs a copy at memory speed.
    """

    def __init__(
        self,
        block_size: int,
        ids: list[Ints],  # by request: [blocks]
        num_prompt: Ints,  # [requests] tokens
        num_output: Ints,  # [requests] tokens
        *,
        stitch: bool,
    ) -> None:
        self._size = block_size
        self._num_prompt, self._num_output = num_prompt, num_output
        distinct = np.unique(np.concatenate([*ids, np.empty(0, np.int64)]))
        self._matrix = block_matrix(distinct, block_size)
        self._rows: list[IntArray] = [
            np.searchsorted(distinct, blocks).astype(np.int32) for blocks in ids
        ]
        # By request: the later one that continues it, and the first block after its own full ones.
        self._continued: dict[int, tuple[int, int]] = self._find_continued() if stitch else {}

    def tokens(self, index: int) -> tuple[IntArray, IntArray]:
        """Prompt and output. O(their tokens)."""
        rows, num_whole = self._rows[index], self._num_whole(index)
        num_output = int(self._num_output[index])
        tail_len = int(self._num_prompt[index]) - num_whole * self._size
        body = self._matrix[rows[:num_whole]].reshape(-1)
        if index in self._continued:
            after = self._tokens_after(*self._continued[index], index, tail_len + num_output)
            return np.concatenate((body, after[:tail_len])), after[tail_len:]
        output = block_tokens(PRIVATE_OUTPUT + index, num_output)
        if num_whole < len(rows):
            tail = self._matrix[rows[num_whole]][:tail_len]
        else:
            tail = block_tokens(PRIVATE_TAIL + index, tail_len)
        return np.concatenate((body, tail)), output

    def coarser(self, unit: int) -> HashTokens:
        """The same blocks where `unit` tokens are one."""
        distinct = np.arange(len(self._matrix), dtype=np.int64)
        ids = [distinct[rows] for rows in self._rows]
        num_prompt = np.maximum(1, self._num_prompt // unit)
        num_output = np.maximum(1, self._num_output // unit)
        stitch = bool(self._continued)
        return HashTokens(max(1, self._size // unit), ids, num_prompt, num_output, stitch=stitch)

    def inferred_sessions(self) -> list[str | None]:
        """Requests that continue each other are a session, named after the first one."""
        sessions: list[str | None] = [f"#{index}" for index in range(len(self._rows))]
        for index in range(len(sessions)):
            if index in self._continued:
                sessions[self._continued[index][0]] = sessions[index]
        return sessions

    def _num_whole(self, index: int) -> int:
        """Full blocks in a request's prompt."""
        return min(int(self._num_prompt[index]) // self._size, len(self._rows[index]))

    def _tokens_after(self, later: int, first: int, index: int, count: int) -> IntArray:
        """[count] the tokens of request `later` from its block `first` on; private ones follow."""
        last = min(self._num_whole(later), first - (-count // self._size))
        known = self._matrix[self._rows[later][first:last]].reshape(-1)[:count]
        private = block_tokens(PRIVATE_FOLLOW + index, count - len(known))
        return np.concatenate((known, private))

    def _find_continued(self) -> dict[int, tuple[int, int]]:
        """A request continues an earlier one if it contains and extends that one's last full block,
        and that block was new in the earlier one. O(blocks of all requests)."""
        first_user = np.full(len(self._matrix), -1, np.int64)
        open_end = np.full(len(self._matrix), -1, np.int64)  # by last block: request not continued
        continued: dict[int, tuple[int, int]] = {}
        for index, rows in enumerate(self._rows):
            num_whole = self._num_whole(index)
            for block in np.flatnonzero(open_end[rows[:-1]] >= 0).tolist():
                continued[int(open_end[rows[block]])] = (index, block + 1)
                open_end[rows[block]] = -1
            first_user[rows[first_user[rows] < 0]] = index
            if num_whole and first_user[rows[num_whole - 1]] == index:
                open_end[rows[num_whole - 1]] = index
        return continued
