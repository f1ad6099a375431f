"""Tokens of requests that a trace describes by ids of blocks.

    blocks   [ id 7 ][ id 8 ][ id 31 ]         full blocks, equal ids for equal whole prefixes
    prompt   [----------------------- tail)    a tail shorter than a block may have no id
    output                                [--)

With `stitch` the tail and the output are taken from the request that continues this one, where
there is one, as a client that resends its conversation would; else they are private to the request.
"""

from __future__ import annotations

import numpy as np

from radixserve.arrays import IntArray
from radixserve.replay.splitmix import block_matrix, block_tokens
from radixserve.replay.trace import Ints

_TAIL, _FOLLOW, _OUTPUT = 1 << 40, 1 << 41, 1 << 42  # first ids of private blocks


class HashTokens:
    """The distinct blocks as one matrix; a prompt is a selection of its rows.

    Memory: 4 bytes a token of a distinct block and 16 bytes a run of consecutive ids. Making a
    prompt costs a copy at memory speed.
    """

    def __init__(
        self,
        block_size: int,
        runs: list[Ints],  # by request: [k, 2] first id and count
        num_prompt: Ints,
        num_output: Ints,
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
        self._next: dict[int, tuple[int, int]] = self._continuations() if stitch else {}

    def tokens(self, index: int) -> tuple[IntArray, IntArray]:
        """Prompt and output. O(their tokens)."""
        rows = _expanded(self._runs[index])
        count, wanted = int(self._num_prompt[index]), int(self._num_output[index])
        whole = min(count // self._size, len(rows))
        body, rest = self._matrix[rows[:whole]].reshape(-1), count - whole * self._size
        if index in self._next:
            behind = self._follow(index, rest + wanted)
            return np.concatenate((body, behind[:rest])), behind[rest:]
        output = block_tokens(_OUTPUT + index, wanted)
        if not rest:
            return body, output
        if whole < len(rows):
            tail = self._matrix[rows[whole]][:rest]
        else:
            tail = block_tokens(_TAIL + index, rest)
        return np.concatenate((body, tail)), output

    def continued_by(self) -> dict[int, int]:
        """{request: the later one that goes on from it}, as far as stitching found out."""
        return {index: later for index, (later, _) in self._next.items()}

    def _follow(self, index: int, count: int) -> IntArray:
        """`count` tokens behind the full blocks of a request, from the one that continues it."""
        later, first = self._next[index]
        rows = _expanded(self._runs[later])
        whole = min(int(self._num_prompt[later]) // self._size, len(rows))
        last = min(whole, first - (-count // self._size))
        known = self._matrix[rows[first:last]].reshape(-1)[:count]
        missing = count - len(known)
        if not missing:
            return known
        return np.concatenate((known, block_tokens(_FOLLOW + index, missing)))

    def _continuations(self) -> dict[int, tuple[int, int]]:
        """{request: (the later one, its first block behind this one's)}.

        A request continues an earlier one whose last full block, which was new then, it contains
        and goes on behind. O(blocks of all requests).
        """
        first_user = np.full(self._num_rows, -1, np.int64)
        waits = np.full(self._num_rows, -1, np.int64)  # by last block: who has not been continued
        found: dict[int, tuple[int, int]] = {}
        for index, runs in enumerate(self._runs):
            rows = _expanded(runs)
            for at in np.flatnonzero(waits[rows[:-1]] >= 0).tolist():
                found[int(waits[rows[at]])] = (index, at + 1)
                waits[rows[at]] = -1
            fresh = rows[first_user[rows] < 0]
            first_user[fresh] = index
            whole = int(self._num_prompt[index]) // self._size
            if 0 < whole <= len(rows) and first_user[rows[whole - 1]] == index:
                waits[rows[whole - 1]] = index
        return found


def runs_of(ids: Ints) -> Ints:
    """[k, 2]: a list of ids as runs of consecutive ones."""
    if not len(ids):
        return np.empty((0, 2), np.int64)
    starts = np.flatnonzero(np.diff(ids, prepend=ids[0] - 2) != 1)
    counts = np.diff(starts, append=len(ids))
    return np.stack((ids[starts], counts), 1)


def _merged(runs: list[Ints]) -> tuple[Ints, Ints]:
    """The union of all runs as disjoint ones: first ids, ascending, and counts."""
    every = np.unique(np.concatenate([*runs, np.empty((0, 2), np.int64)]), axis=0)
    if not len(every):
        return every[:, 0], every[:, 1]
    ends = np.maximum.accumulate(every[:, 0] + every[:, 1])
    starts_new = np.empty(len(every), bool)
    starts_new[0] = True
    starts_new[1:] = every[1:, 0] > ends[:-1]
    first_of = np.flatnonzero(starts_new)
    lasts = np.append(first_of[1:], len(every)) - 1
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
