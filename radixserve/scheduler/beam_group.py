"""`BeamGroup`: what a beam search has found so far, and when it is over.

The rules are those of transformers' beam search, one prompt at a time. It knows numbers and tokens;
which request computes which beam is the concern of `beams.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from radixserve.int_buffer import IntBuffer
from radixserve.output import Beam
from radixserve.request import Request
from radixserve.schedule import SampleOutput
from radixserve.scheduler.beam_step import Continuation, FloatArray, best_continuations


class Drawn(NamedTuple):
    """A token's log-probabilities, and those of the ones before it."""

    before: Drawn | None
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]


class Child(NamedTuple):
    """A beam of the next step: one more token behind one of this step's beams."""

    parent: int
    token_id: int
    total: float


class _Answer(NamedTuple):
    """A finished beam."""

    score: float
    token_ids: list[int]
    reason: str
    drawn: Drawn


class BeamGroup:
    """The totals of the running beams, best first, and the best finished ones."""

    def __init__(self, request: Request) -> None:
        assert request.beams is not None
        params = request.params
        self._beams = request.beams
        self._end_ids = request.end_ids
        self._num_prompt = len(request.token_ids)
        self._max_output = min(params.max_tokens, request.max_len - self._num_prompt)
        # Enough for `width` beams to go on even where every beam's best tokens end it.
        self.num_candidates = max(2, 1 + len(request.end_ids)) * self._beams.width
        self._totals: FloatArray = np.zeros(1, np.float32)  # [m]
        self._drawn: list[Drawn | None] = [None]  # [m]
        self._answers: list[_Answer] = []  # best first, at most `width`

    @property
    def width(self) -> int:
        return self._beams.width

    def advance(self, tokens: Sequence[IntBuffer], draws: Sequence[SampleOutput]) -> list[Child]:
        """The next beams, best first; none when the search is over.

        tokens: prompt and output of each beam; draws: what was drawn behind it. Both in the order
        of the beams that the last call returned.
        """
        width, num_output = self.width, len(tokens[0]) - self._num_prompt + 1
        candidates = [draw.candidates for draw in draws if draw.candidates is not None]
        best = best_continuations(self._totals, candidates, self.num_candidates)
        going_on: list[Continuation] = []
        for place, one in enumerate(best):
            reason = self._end_reason(tokens[one.parent], one.token_id, num_output)
            if reason is None:
                going_on.append(one)
                if len(going_on) == width and place >= width - 1:
                    break
            elif place < width:
                self._finish(tokens[one.parent], one, reason, draws, num_output)
        del going_on[width:]
        if not going_on or self._is_settled(going_on[0].total, num_output):
            self._totals, self._drawn = self._totals[:0], []
            return []
        self._totals = np.array([one.total for one in going_on], np.float32)
        self._drawn = [self._note(one, draws) for one in going_on]
        return [Child(one.parent, one.token_id, one.total) for one in going_on]

    def answers(self, running: Sequence[IntBuffer] = ()) -> tuple[Beam, ...]:
        """The best ones, best first. Those that are `running` count unless the search is over."""
        found = list(self._answers)
        totals = self._totals.tolist()
        for tokens, total, drawn in zip(running, totals, self._drawn, strict=False):
            if drawn is not None:
                score = self._score(total, len(tokens) - self._num_prompt)
                ids = tokens.view(self._num_prompt).tolist()
                found.append(_Answer(score, ids, "abort", drawn))
        found.sort(key=lambda one: -one.score)  # stable
        return tuple(_as_beam(one) for one in found[: self.width])

    def _end_reason(self, before: IntBuffer, token_id: int, num_output: int) -> str | None:
        if token_id in self._end_ids:
            return "stop"
        is_stopped = self._beams.is_stopped
        if is_stopped is not None and is_stopped(before.view(), token_id):
            return "stop"
        return "length" if num_output >= self._max_output else None

    def _finish(
        self,
        before: IntBuffer,
        one: Continuation,
        reason: str,
        draws: Sequence[SampleOutput],
        num_output: int,
    ) -> None:
        score, answers = self._score(one.total, num_output), self._answers
        if len(answers) == self.width:
            if score <= answers[-1].score:
                return
            answers.pop()
        ids = [*before.view(self._num_prompt).tolist(), one.token_id]
        answers.append(_Answer(score, ids, reason, self._note(one, draws)))
        answers.sort(key=lambda answer: -answer.score)  # stable: the earlier one of a tie stays

    def _is_settled(self, best_total: float, num_output: int) -> bool:
        """Whether no beam is expected to become better than the answers that there are."""
        if len(self._answers) < self.width:
            return False
        early = self._beams.early_stopping
        if early is True:
            return True
        favours_long = early == "never" and self._beams.length_penalty > 0
        length = self._max_output if favours_long else num_output
        return self._score(best_total, length) <= self._answers[-1].score

    def _score(self, total: float, num_output: int) -> float:
        return total / float(num_output**self._beams.length_penalty)

    def _note(self, one: Continuation, draws: Sequence[SampleOutput]) -> Drawn:
        draw = draws[one.parent]
        assert draw.candidates is not None
        logprob = float(draw.candidates.logprobs[one.rank])
        return Drawn(self._drawn[one.parent], logprob, draw.top_logprobs)


def _as_beam(answer: _Answer) -> Beam:
    logprobs: list[float] = []
    top: list[dict[int, float]] = []
    at: Drawn | None = answer.drawn
    while at is not None:
        logprobs.append(at.logprob)
        top.append(dict(at.top_logprobs))
        at = at.before
    return Beam(
        answer.token_ids, answer.reason, answer.score, tuple(logprobs[::-1]), tuple(top[::-1])
    )
