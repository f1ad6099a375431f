"""`TokenScores`: the scores of consecutive tokens, as a node keeps them and as requests read them.

A score is the log-probability of a token after the tokens before it. 4 bytes a token; where a
request asked for ranks or for the best tokens, 4 for the rank and 8 for each of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from radixserve.arrays import IntArray
from radixserve.cache.radix.node import Node, path
from radixserve.cache.tokens import TOKEN_BYTES
from radixserve.scheduler.request_state import TopLogprobs

Number = TypeVar("Number", np.float32, np.int32)
MAX_TOPS = 20  # best tokens of a position that are kept; of more, none are


class TokenScores:
    """Of n tokens; the values of a node are in `Node.token_values`."""

    __slots__ = ("logprobs", "ranks", "top_ids", "top_logprobs")

    def __init__(
        self,
        logprobs: NDArray[np.float32],
        ranks: IntArray,
        top_ids: IntArray,
        top_logprobs: NDArray[np.float32],
    ) -> None:
        self.logprobs = logprobs  # [n], NaN where unknown
        self.ranks = ranks  # [n], 0 where unknown; [0] where no request asked for them
        self.top_ids = top_ids  # [n, K], -1 where unknown; [0, 0] where no request asked for them
        self.top_logprobs = top_logprobs  # [n, K]

    @classmethod
    def of(
        cls, logprobs: list[float], ranks: list[int], tops: list[TopLogprobs], num_tops: int
    ) -> TokenScores:
        """Of lists; the last two may be empty. Tops are kept where there are `num_tops` of each."""
        has_tops = bool(num_tops and tops) and {len(top) for top in tops} == {num_tops}
        pairs = [pair for top in tops for pair in top] if has_tops and num_tops <= MAX_TOPS else []
        shape = (len(tops), num_tops) if pairs else (0, 0)
        return cls(
            np.array(logprobs, np.float32),
            np.array(ranks, np.int32),
            np.array([token_id for token_id, _ in pairs], np.int32).reshape(shape),
            np.array([logprob for _, logprob in pairs], np.float32).reshape(shape),
        )

    def __len__(self) -> int:
        return len(self.logprobs)

    def part(self, start: int, end: int) -> TokenScores:
        """Returns a copy of the scores of tokens [start, end), as far as there are some."""
        return TokenScores(
            self.logprobs[start:end].copy(),
            self.ranks[start:end].copy(),
            self.top_ids[start:end].copy(),
            self.top_logprobs[start:end].copy(),
        )

    def split(self, num_tokens: int) -> TokenScores:
        """See `TokenValues.split`."""
        upper, rest = self.part(0, num_tokens), self.part(num_tokens, len(self))
        self._set(rest)
        return upper

    def cut(self, num_tokens: int) -> None:
        """See `TokenValues.cut`."""
        self._set(self.part(0, num_tokens))

    def write(self, start: int, scores: TokenScores) -> None:
        """Add the scores of tokens from `start` on. What was known stays known, except that best
        tokens are replaced by others of another number."""
        end = max(len(self), start + len(scores))
        self.logprobs = _grown(self.logprobs, end, np.nan)
        known = ~np.isnan(scores.logprobs)
        self.logprobs[start : start + len(scores)][known] = scores.logprobs[known]
        if len(scores.ranks):
            self.ranks = _grown(self.ranks, end, 0)
            _put(self.ranks, start, scores.ranks)
        num_tops = scores.top_ids.shape[1]
        if num_tops:
            if self.top_ids.shape[1] != num_tops:
                self.top_ids = np.empty((0, num_tops), np.int32)
                self.top_logprobs = np.empty((0, num_tops), np.float32)
            self.top_ids = _grown(self.top_ids, end, -1)
            self.top_logprobs = _grown(self.top_logprobs, end, np.nan)
            _put(self.top_ids, start, scores.top_ids)
            _put(self.top_logprobs, start, scores.top_logprobs)

    def num_known(self, start: int, *, with_ranks: bool, num_tops: int) -> int:
        """Returns how many tokens in a row, from `start` on, have scores with all that is asked."""
        known = ~np.isnan(self.logprobs[start:])
        if with_ranks:
            known = _both(known, self.ranks[start:] > 0)
        if num_tops:
            is_kept = self.top_ids.shape[1] == num_tops
            known = _both(known, self.top_ids[start:, 0] >= 0) if is_kept else known[:0]
        return len(known) if known.all() else int(known.argmin())

    def _set(self, other: TokenScores) -> None:
        self.logprobs, self.ranks = other.logprobs, other.ranks
        self.top_ids, self.top_logprobs = other.top_ids, other.top_logprobs


def _grown(column: NDArray[Number], length: int, unknown: float) -> NDArray[Number]:
    """Returns the column with that many rows."""
    missing = length - len(column)
    if missing <= 0:
        return column
    more = np.full((missing, *column.shape[1:]), unknown, column.dtype)
    return np.concatenate([column, more])


def _put(column: NDArray[Number], start: int, values: NDArray[Number]) -> None:
    column[start : start + len(values)] = values


def _both(one: NDArray[np.bool_], other: NDArray[np.bool_]) -> NDArray[np.bool_]:
    size = min(len(one), len(other))
    return one[:size] & other[:size]


# -- on a path of the tree ------------------------------------------------------------------------


def read_scores(
    last: Node, start: int, end: int, *, with_ranks: bool, num_tops: int
) -> Iterator[TokenScores]:
    """Yields the scores of the tokens at positions [start, end) on the path to the node `last`, up
    to the first one that is not known with all that is asked. O(those tokens)."""
    for node in _nodes_from(last, start):
        scores, offset = node.token_values, max(start, node.start) - node.start
        if node.start >= end or not isinstance(scores, TokenScores):
            return
        wanted = min(end, node.end) - node.start - offset
        known = scores.num_known(offset, with_ranks=with_ranks, num_tops=num_tops)
        yield scores.part(offset, offset + min(wanted, known))
        if known < wanted:
            return


def write_scores(last: Node, start: int, scores: TokenScores, tokens: IntArray) -> None:
    """Keep the scores of `tokens`, which begin at position `start`, in the nodes on the path to
    `last` that have these tokens. O(tokens)."""
    end, data = start + len(scores), tokens.tobytes()
    for node in _nodes_from(last, start):
        first, stop = max(start, node.start), min(end, node.end)
        mine = data[(first - start) * TOKEN_BYTES : (stop - start) * TOKEN_BYTES]
        offset = first - node.start
        if first >= stop or not node.tokens.startswith(mine, offset * TOKEN_BYTES):
            return
        if not isinstance(node.token_values, TokenScores):
            node.token_values = TokenScores.of([], [], [], 0)
        node.token_values.write(offset, scores.part(first - start, stop - start))


def _nodes_from(last: Node, start: int) -> Iterator[Node]:
    """Yields the nodes with positions from `start` on, on the path to `last`, from above."""
    below = [node for node in path(last) if node.end > start]
    return islice(reversed(below), len(below))
