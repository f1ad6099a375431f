"""`Trace`: requests in order of arrival; `HashTokens` and `PackedTokens` make their tokens.

Times are seconds since the first request. The tokens of a request are made on demand.
"""

from __future__ import annotations

import re
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from radixserve.advice.fingerprints import Fingerprints
from radixserve.arrays import IntArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class TokenSource(Protocol):
    """Makes the tokens of requests: `HashTokens` or `PackedTokens`."""

    def tokens(self, index: int) -> tuple[IntArray, IntArray]:
        """The prompt and the output of a request."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request with its recorded output."""

    index: int  # in the trace, in order of arrival
    time: float  # seconds since the first request
    session: str | None  # shared by the requests of one conversation, task or user
    namespace: str
    prompt: IntArray  # [n] int32, n >= 1
    output: IntArray  # [m] int32, m >= 0

    @property
    def kept(self) -> IntArray:
        """The tokens whose K/V exists when the request ends: prompt and output without the last
        token."""
        if len(self.output) < 2:
            return self.prompt
        return np.concatenate((self.prompt, self.output[:-1]))


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of a trace, as columns in order of arrival. Prompts are made on demand by
    `source`."""

    name: str
    source: TokenSource
    times: Floats  # [requests] seconds since the first request
    sessions: Sequence[str | None]
    namespaces: Sequence[str]
    num_prompt: Ints  # [requests] tokens
    num_output: Ints  # [requests] tokens
    has_times: bool = True  # False: the file does not have times, all requests arrive at once
    sessions_inferred: bool = False  # whether sessions are inferred from continued prompts
    words: Mapping[int, str] = field(default_factory=dict)  # of token ids, if the file has texts

    def __len__(self) -> int:
        return len(self.times)

    def __iter__(self) -> Iterator[TraceRequest]:
        return (self.request(index) for index in range(len(self)))

    def request(self, index: int) -> TraceRequest:
        """A request with its tokens. O(its tokens)."""
        time, session = float(self.times[index]), self.sessions[index]
        tokens = self.source.tokens(index)
        return TraceRequest(index, time, session, self.namespaces[index], *tokens)

    @property
    def num_kept(self) -> Ints:
        """[requests] the number of tokens in `TraceRequest.kept`."""
        return self.num_prompt + np.maximum(self.num_output - 1, 0)

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of all prompts."""
        return int(self.num_prompt.sum())

    @property
    def longest(self) -> int:
        """The tokens that the longest request keeps; a smaller cache cannot serve it."""
        return int(self.num_kept.max())

    @property
    def num_sessions(self) -> int:
        return len(self.session_sizes())

    def session_sizes(self) -> Counter[str]:
        """The number of requests of each session. O(requests)."""
        return Counter(session for session in self.sessions if session is not None)


VOCAB = 32_000
# First ids of blocks that belong to one request, by their use.
PRIVATE_TAIL, PRIVATE_FOLLOW, PRIVATE_OUTPUT = 1 << 40, 1 << 41, 1 << 42
_FIRST_TOKEN = 256  # lower ids are those of special tokens
_ID_STEP = 0xD1342543DE82EF95
_STEP = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_CHUNK = 1 << 18  # tokens made at a time: their 64-bit states stay in the processor's cache
_PACKED_BYTES = 4 * 64  # of a packed block
_PIECE = re.compile(r" ?[A-Za-z]{1,7}| ?\d{1,3}| ?[^\sA-Za-z\d]{1,3}|\s+", re.S)
_TEXT_VOCAB = 131_072


def block_matrix(ids: Ints, size: int) -> IntArray:
    """[n, size] int32: row k has the tokens of the block `ids[k]`, in [256, VOCAB).

    The tokens are those of SplitMix64 with the seed mix64((id + 1) * 0xD1342543DE82EF95), so equal
    ids give equal tokens and different ids different ones. About 15 ns and 4 bytes per token.
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


def tokenize(text: str, words: dict[int, str] | None = None) -> IntArray:
    """[n] int32: the tokens of a text, without a tokenizer: the CRC-32 of each piece of about four
    characters, modulo 131,072.

    It does not need model files and is the same everywhere. The number of tokens differs from that
    of a real tokenizer. About 0.5 us per token. `words`: gets the piece of each token.
    """
    pieces = _PIECE.findall(text)
    ids = [zlib.crc32(piece.encode("utf-8", "surrogatepass")) % _TEXT_VOCAB for piece in pieces]
    if words is not None:
        words.update(zip(ids, pieces, strict=True))
    return np.asarray(ids, np.int32)


class PackedTokens:
    """Stored prompts and outputs, by index in the order in which they were added.

    Equal blocks of 64 tokens are stored once. The turns of a chat share all blocks except the last
    ones, so memory is about 5.5 bytes per distinct token.
    """

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._index: dict[bytes, int] = {}
        self._sequences: list[tuple[array[int], bytes, int]] = []  # blocks, rest, prompt's length

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, prompt: IntArray, output: IntArray) -> tuple[int, int]:
        """Add a request. Returns the lengths of its prompt and output. O(tokens)."""
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
        """The same requests in another order. Shares the blocks."""
        other = PackedTokens()
        other._blocks, other._index = self._blocks, self._index
        other._sequences = [self._sequences[index] for index in order]
        return other

    def stitched(self, unknown: Iterable[int]) -> PackedTokens:
        """The same requests. Of those in `unknown` only the length of the output is known: its
        tokens are taken from the request that continues this one. About 0.2 us per token."""
        prints, wanted = Fingerprints(), set(unknown)
        found: dict[int, IntArray] = {}
        waiting: dict[int, int] = {}  # by the sum over a whole prompt: the last request with it
        for index in range(len(self)):
            prompt, output = self.tokens(index)
            sums = prints.sums(prompt)
            for key in waiting.keys() & set(sums[:-1].tolist()):
                before = waiting.pop(key)
                start = len(self.tokens(before)[0])
                known = prompt[start : start + len(found[before])]
                found[before] = np.concatenate((known, found[before][len(known) :]))
            if index in wanted:
                waiting[int(sums[-1])], found[index] = index, output
        other = PackedTokens()
        for index in range(len(self)):
            prompt, output = self.tokens(index)
            other.add(prompt, found.get(index, output))
        return other

    def coarser(self, unit: int) -> PackedTokens:
        """The same requests with `unit` tokens joined to one, their checksum. Prefixes that two
        sequences have in common stay common, up to the last whole unit."""
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
        """The prompt and the output of a request. O(tokens), a copy at memory speed."""
        rows, tail, num_prompt = self._sequences[index]
        parts = [self._blocks[row] for row in rows]
        ids = np.frombuffer(b"".join([*parts, tail]), np.int32)
        return ids[:num_prompt], ids[num_prompt:]


class HashTokens:
    """Makes pseudo-random tokens (SplitMix64) for a trace in which hashes identify blocks.

        blocks   [ id 7 ][ id 8 ][ id 31 ]         full blocks, equal ids for equal whole prefixes
        prompt   [----------------------- tail)    a tail shorter than a block may have no id
        output                                [--)

    With `stitch`, the tail and the output are taken from the request that continues this one, as if
    a client had sent its conversation again. Without, they belong to this request alone.

    The distinct blocks are one matrix; a prompt is a selection of its rows. Memory: 4 bytes per
    token of a distinct block, and 4 bytes per block of a request. Making a prompt is a copy at
    memory speed.
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
        # By request: the later request that continues it, and the first block there that is new.
        self._continued: dict[int, tuple[int, int]] = self._find_continued() if stitch else {}

    def tokens(self, index: int) -> tuple[IntArray, IntArray]:
        """The prompt and the output of a request. O(their tokens)."""
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
        """The same requests with `unit` tokens joined to one."""
        distinct = np.arange(len(self._matrix), dtype=np.int64)
        ids = [distinct[rows] for rows in self._rows]
        num_prompt = np.maximum(1, self._num_prompt // unit)
        num_output = np.maximum(1, self._num_output // unit)
        stitch = bool(self._continued)
        return HashTokens(max(1, self._size // unit), ids, num_prompt, num_output, stitch=stitch)

    def inferred_sessions(self) -> list[str | None]:
        """The session of each request: requests that continue each other, named after the first."""
        sessions: list[str | None] = [f"#{index}" for index in range(len(self._rows))]
        for index in range(len(sessions)):
            if index in self._continued:
                sessions[self._continued[index][0]] = sessions[index]
        return sessions

    def _num_whole(self, index: int) -> int:
        """The number of full blocks in a request's prompt."""
        return min(int(self._num_prompt[index]) // self._size, len(self._rows[index]))

    def _tokens_after(self, later: int, first: int, index: int, count: int) -> IntArray:
        """[count] the tokens of request `later` from its block `first`, then private tokens of
        request `index`."""
        last = min(self._num_whole(later), first - (-count // self._size))
        known = self._matrix[self._rows[later][first:last]].reshape(-1)[:count]
        private = block_tokens(PRIVATE_FOLLOW + index, count - len(known))
        return np.concatenate((known, private))

    def _find_continued(self) -> dict[int, tuple[int, int]]:
        """Find the requests that continue earlier ones: those that contain the last full block of
        the earlier one, and more, if that block was new there. O(blocks of all requests)."""
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
