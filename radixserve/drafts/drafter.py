"""`Drafts`: the `Drafter` that asks the sources, within the budget of the step."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from radixserve.cache import PrefixCache
from radixserve.drafts.budget import MOST_ROWS, DraftBudget, FirstOdds, Odds
from radixserve.drafts.source import DraftContext, DraftSource
from radixserve.request import MAX_TOKEN_IDS
from radixserve.scheduler.drafter import Drafter
from radixserve.scheduler.request_state import RequestState
from radixserve.scheduler.stats import SchedulerStats
from radixserve.token_marks import num_unmarked

_log = logging.getLogger("radixserve")
_NEVER = 1 << 62  # tokens
MOST_FORCED = 32  # tokens of a row in a step, at least
_PLAIN_STEPS = 32  # measured together, at most

Guess = tuple[DraftSource, Odds, Sequence[int]]


class Drafts(Drafter):
    """Asks its sources in their order; the first that has a guess drafts for a request."""

    def __init__(self, sources: Iterable[DraftSource], max_tokens: int) -> None:
        """`max_tokens`: most drafts of a row."""
        self.sources = list(sources)
        self._max_tokens = max_tokens
        self._budget = DraftBudget(max_tokens)
        self._first_odds: dict[DraftSource, FirstOdds] = {}
        self._drafted: Counter[str] = Counter()  # tokens by source
        self._accepted: Counter[str] = Counter()
        # The last call of `propose`: its time, its rows, and the counters then.
        self._at = 0.0
        self._num_rows = self._step = self._num_prefilled = 0
        self._is_crowded = False  # whether even a right draft would not pay for so many rows
        self._num_plain, self._plain_since = 0, 0.0  # steps without drafts before it, not yet noted
        self._num_verified = 0  # drafts since then

    def attach(
        self, cache: PrefixCache, clock: Callable[[], float], counts: SchedulerStats
    ) -> None:
        self._cache, self._clock, self._counts = cache, clock, counts

    def propose(self, decodes: Sequence[RequestState]) -> Mapping[RequestState, Sequence[int]]:
        num_rows = len(decodes)
        self._measure(num_rows)
        is_crowded = self._is_crowded
        drafts: dict[RequestState, Sequence[int]] = {}
        num_drafts, num_expected = 0, 0.0
        for state in decodes:
            record: RequestDrafts | None = state.drafts
            if record is None:
                if state.tokens.size == state.num_prompt:
                    continue
                most = _most_drafts(state, self._max_tokens)
                sources = self._sources_of_request() if most else []
                record = state.drafts = RequestDrafts(state, sources, most)
            if record.rests_until > state.tokens.size or (is_crowded and not record.has_sure):
                continue
            guess = self._guess(state, record, is_crowded=is_crowded)
            if guess is None:
                continue
            source, odds, token_ids = guess
            if not source.is_sure:
                self._note_plain_steps()
                most = self._budget.length(odds.value, num_rows, num_drafts, num_expected)
                if not most:
                    if self._budget.length(1.0, num_rows, num_drafts, num_expected):
                        record.rest(odds, state.tokens.size)
                    continue
                token_ids = token_ids[:most]
            drafts[state] = token_ids
            record.proposed = source, odds
            num_drafts += len(token_ids)
            num_expected += sum(odds.value**n for n in range(1, len(token_ids) + 1))
        if num_drafts and not self._has_room(num_rows + num_drafts):
            return {}
        return drafts

    def needs_output(self, num_running: int) -> bool:
        return self._max_tokens > 0 and num_running <= MOST_ROWS

    def note_verified(self, state: RequestState, num_drafts: int, num_accepted: int) -> None:
        source, odds = state.drafts.proposed
        odds.note(num_drafts, num_accepted)
        self._first_odds[source].note(num_drafts, num_accepted)
        self._num_verified += num_drafts
        self._drafted[source.name] += num_drafts
        self._accepted[source.name] += num_accepted

    def note_ended(self, state: RequestState) -> None:
        if state.sequence is None or state.group is not None or state.token_mark:
            return
        context = context_of(state)
        for source in tuple(self.sources):
            try:
                source.end(context)
            except Exception:
                self._end_source(source)

    def stats(self) -> dict[str, Any]:
        """Returns {source: {"drafted_tokens", "accepted_tokens", and its own gauges}}."""
        return {
            source.name: {
                "drafted_tokens": self._drafted[source.name],
                "accepted_tokens": self._accepted[source.name],
                **source.stats(),
            }
            for source in self.sources
        }

    def _sources_of_request(self) -> list[tuple[DraftSource, Odds]]:
        for source in self.sources:
            self._first_odds.setdefault(source, FirstOdds(source.first_odds))
        return [(source, Odds(self._first_odds[source].of_request())) for source in self.sources]

    def _guess(
        self, state: RequestState, record: RequestDrafts, *, is_crowded: bool
    ) -> Guess | None:
        """Returns the first guess of a source that does not rest. None of its tokens ends the
        request."""
        size = state.tokens.size
        most = min(state.length_limit - size - 1, record.most)
        if most < 1:
            return None
        context = record.context
        context.tokens, context.matcher = state.tokens.view(), state.matcher
        assert state.sequence is not None
        context.sequence = state.sequence  # another one after a preemption
        for source, odds in record.sources:
            if odds.rests_until > size or (is_crowded and not source.is_sure):
                continue
            try:
                token_ids = source.draft(context, most)
            except Exception:
                self._end_source(source)
                token_ids = None
            if token_ids is None:
                record.drop(source)
            elif token_ids and (token_ids := _before_end(token_ids[:most], state)):
                return source, odds, token_ids
        return None

    def _measure(self, num_rows: int) -> None:
        """Note what the step since the last call cost if it had the same rows and nothing else."""
        now, counts = self._clock(), self._counts
        is_measured = (
            num_rows == self._num_rows
            and counts.steps == self._step + 1
            and counts.prefilled_tokens == self._num_prefilled
        )
        if is_measured and not self._num_verified:
            self._num_plain += 1
        else:
            self._note_plain_steps()
            if is_measured:
                self._budget.note_step(num_rows, self._num_verified, now - self._at)
            self._plain_since = now
        self._at, self._num_rows, self._num_verified = now, num_rows, 0
        self._step, self._num_prefilled = counts.steps, counts.prefilled_tokens
        if not 0 < self._num_plain < _PLAIN_STEPS:
            self._note_plain_steps()
            self._is_crowded = not self._budget.may_pay(num_rows)

    def _note_plain_steps(self) -> None:
        if self._num_plain:
            seconds = (self._at - self._plain_since) / self._num_plain
            self._budget.note_step(self._num_rows, 0, seconds, self._num_plain)
            self._num_plain, self._plain_since = 0, self._at

    def _end_source(self, source: DraftSource) -> None:
        """A source has raised an exception: it is not asked again."""
        if source in self.sources:
            _log.exception("the drafts of %s have failed and are ended", source.name)
            self.sources.remove(source)

    def _has_room(self, num_tokens: int) -> bool:
        """Whether there are pages for so many tokens, so that no request is preempted for
        drafts."""
        return self._cache.num_obtainable(num_tokens) == num_tokens


class RequestDrafts:
    """What is known of a request: its sources, and how often they were right."""

    __slots__ = ("context", "has_sure", "most", "proposed", "rests_until", "sources")

    def __init__(
        self, state: RequestState, sources: list[tuple[DraftSource, Odds]], most: int
    ) -> None:
        self.context, self.most = context_of(state), most
        self.sources = sources  # in turn
        self.proposed: tuple[DraftSource, Odds]  # whose drafts were proposed last
        self._settle()

    def drop(self, source: DraftSource) -> None:
        """The source will have no guess for the request."""
        self.sources = [pair for pair in self.sources if pair[0] is not source]
        self._settle()

    def rest(self, odds: Odds, num_tokens: int) -> None:
        """The drafts of the source with these odds do not pay at `num_tokens` tokens."""
        odds.rest(num_tokens)
        self._settle()

    def _settle(self) -> None:
        self.has_sure = any(source.is_sure for source, _ in self.sources)
        # Until it has so many tokens no source is asked.
        self.rests_until = min((odds.rests_until for _, odds in self.sources), default=_NEVER)


def context_of(state: RequestState) -> DraftContext:
    assert state.sequence is not None
    return DraftContext(
        state.request, state.tokens.view(), state.num_prompt, state.sequence, state.matcher
    )


def _most_drafts(state: RequestState, max_tokens: int) -> int:
    """Of a step of the request: none where they cannot be verified, and some at least where tokens
    are forced."""
    if state.group is not None or state.token_mark:
        return 0
    return max(max_tokens, MOST_FORCED) if state.request.params.jumps_forward else max_tokens


def _before_end(token_ids: Sequence[int], state: RequestState) -> Sequence[int]:
    """Returns the tokens before the first one that would end the request, or that the cache has of
    an activated adapter."""
    if token_ids and max(token_ids) >= MAX_TOKEN_IDS:
        token_ids = token_ids[: num_unmarked(np.array(token_ids, np.int32))]
    end_ids = state.request.end_ids
    if end_ids.isdisjoint(token_ids):
        return token_ids
    first = next(index for index, token_id in enumerate(token_ids) if token_id in end_ids)
    return token_ids[:first]
