"""`BeamScorer`: a beam search's joint choice of beams, its answers so far and its end.

The rules are those of transformers' beam search, one prompt at a time. It knows numbers and tokens;
`beams/searches.py` keeps the requests that compute the beams.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixserve.output import Beam
from radixserve.request import Request
from radixserve.schedule import Candidates, SampleOutput

FloatArray = NDArray[np.float32]


class Continuation(NamedTuple):
    """One more token after one of the beams."""

    parent: int  # index of that beam
    rank: int  # of the token among the parent's candidates
    token_id: int
    total: float  # the parent's total and the token's score, added in float32


class _Token(NamedTuple):
    """A generated token with its log-probabilities, linked to the one before it."""

    before: _Token | None
    token_id: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]


class _Answer(NamedTuple):
    """A finished beam."""

    score: float
    reason: str
    last: _Token


class BeamScorer:
    """One beam search: the running beams with their total scores, and the best finished answers."""

    def __init__(self, request: Request) -> None:
        assert request.beams is not None
        params = request.params
        self._beams = request.beams
        self._width = request.beams.width
        self._end_ids = request.end_ids
        self._prompt = request.token_ids
        self._is_stopped = request.is_stopped
        self._max_output = min(params.max_tokens, request.max_len - len(self._prompt))
        self._num_candidates = request.num_candidates
        self.num_output = 0  # tokens of each running beam
        self._totals: FloatArray = np.zeros(1, np.float32)  # [m] of the running beams
        self._last: list[_Token | None] = [None]  # [m]
        self._answers: list[_Answer] = []  # best first, at most `width`

    def advance(self, samples: Sequence[SampleOutput]) -> list[Continuation]:
        """Choose the next beams. Returns them best first, none when the search has ended.
        O(width * candidates).

        samples: one per beam, in the order that the last call returned.
        """
        width = self._width
        self.num_output += 1
        candidates = [sample.candidates for sample in samples if sample.candidates is not None]
        best = best_continuations(self._totals, candidates, self._num_candidates)
        going_on: list[Continuation] = []
        for place, continuation in enumerate(best):
            reason = self._end_reason(continuation)
            if reason is None:
                going_on.append(continuation)
                if len(going_on) == width and place >= width - 1:
                    break
            elif place < width:
                self._finish(continuation, reason, samples)
        del going_on[width:]
        if not going_on or self._is_settled(going_on[0].total):
            self._totals, self._last = self._totals[:0], []
            return []
        self._last = [self._token(continuation, samples) for continuation in going_on]
        self._totals = np.array([continuation.total for continuation in going_on], np.float32)
        return going_on

    def answers(self) -> tuple[Beam, ...]:
        """Returns the best answers, best first. Running beams are included while the search has not
        ended."""
        answers = list(self._answers)
        for total, last in zip(self._totals.tolist(), self._last, strict=True):
            if last is not None:
                answers.append(_Answer(self._score(total, self.num_output), "abort", last))
        answers.sort(key=lambda answer: -answer.score)  # stable
        return tuple(_as_beam(answer) for answer in answers[: self._width])

    def _end_reason(self, continuation: Continuation) -> str | None:
        if continuation.token_id in self._end_ids:
            return "stop"
        if self._is_stopped is not None:
            before = [token.token_id for token in _path(self._last[continuation.parent])]
            tokens = np.concatenate([self._prompt, np.array(before, np.int32)])
            if self._is_stopped(tokens, continuation.token_id):
                return "stop"
        return "length" if self.num_output >= self._max_output else None

    def _finish(
        self, continuation: Continuation, reason: str, samples: Sequence[SampleOutput]
    ) -> None:
        score, answers = self._score(continuation.total, self.num_output), self._answers
        if len(answers) == self._width:
            if score <= answers[-1].score:
                return
            answers.pop()
        answers.append(_Answer(score, reason, self._token(continuation, samples)))
        answers.sort(key=lambda answer: -answer.score)  # stable: the earlier one of a tie stays

    def _is_settled(self, best_total: float) -> bool:
        """Whether no running beam is expected to become better than the answers so far."""
        if len(self._answers) < self._width:
            return False
        early = self._beams.early_stopping
        if early is True:
            return True
        favours_long = early == "never" and self._beams.length_penalty > 0
        length = self._max_output if favours_long else self.num_output
        return self._score(best_total, length) <= self._answers[-1].score

    def _score(self, total: float, num_output: int) -> float:
        return total / float(num_output**self._beams.length_penalty)

    def _token(self, continuation: Continuation, samples: Sequence[SampleOutput]) -> _Token:
        sample = samples[continuation.parent]
        assert sample.candidates is not None
        logprob = float(sample.candidates.logprobs[continuation.rank])
        return _Token(
            self._last[continuation.parent], continuation.token_id, logprob, sample.top_logprobs
        )


def best_continuations(
    totals: FloatArray, candidates: Sequence[Candidates], count: int
) -> list[Continuation]:
    """Returns the `count` best candidates of all beams, best first; fewer if there are fewer.

    totals      [m] of the beams
    candidates  of each beam, best first, equally many of each: at least `count`, or the vocabulary

    Candidates with a score of -inf do not count. Of a tie the earlier beam wins, then the earlier
    rank.
    """
    width = len(candidates[0].scores)
    sums = (
        np.concatenate([beam_candidates.scores for beam_candidates in candidates]).reshape(
            -1, width
        )
        + totals[:, None]
    ).ravel()
    order: NDArray[np.intp]
    if count < len(sums):  # those no worse than number `count`, of which a stable sort settles ties
        least = np.partition(sums, len(sums) - count)[len(sums) - count]
        kept = np.flatnonzero(sums >= least)
        order = kept[np.argsort(-sums[kept], kind="stable")[:count]]
    else:
        order = np.argsort(-sums, kind="stable")
    token_ids = np.concatenate([beam_candidates.token_ids for beam_candidates in candidates])[order]
    chosen = zip(order.tolist(), token_ids.tolist(), sums[order].tolist(), strict=True)
    return [
        Continuation(index // width, index % width, token_id, total)
        for index, token_id, total in chosen
        if total > -math.inf
    ]


def _path(last: _Token | None) -> list[_Token]:
    """Returns the tokens of a beam up to `last`, in order."""
    path = []
    while last is not None:
        path.append(last)
        last = last.before
    return path[::-1]


def _as_beam(answer: _Answer) -> Beam:
    path = _path(answer.last)
    return Beam(
        [token.token_id for token in path],
        answer.reason,
        answer.score,
        tuple(token.logprob for token in path),
        tuple(dict(token.top_logprobs) for token in path),
    )
