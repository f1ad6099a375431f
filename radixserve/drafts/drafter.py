"""`Drafts`: the `Drafter` that asks the sources, within the budget of the step."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from radixserve.cache import PrefixCache
from radixserve.drafts.budget import MOST_ROWS, DraftBudget, Odds
from radixserve.drafts.source import DraftContext, DraftSource
from radixserve.request import MAX_TOKEN_IDS, num_unmarked
from radixserve.schedule import SchedulerOutput
from radixserve.scheduler.drafter import Drafter
from radixserve.scheduler.request_state import RequestState

_log = logging.getLogger("radixserve")
Answer = TypeVar("Answer")


class Drafts(Drafter):
    """Asks its sources in their order; the first that has a guess drafts for a request."""

    def __init__(self, sources: Iterable[DraftSource], max_tokens: int) -> None:
        """`max_tokens`: most drafts of a row."""
        self.sources = list(sources)
        self._max_tokens = max_tokens
        self._budget = DraftBudget(max_tokens)
        self._odds: dict[RequestState, dict[str, Odds]] = {}  # by source
        self._proposed: dict[RequestState, tuple[DraftSource, int]] = {}  # of the last step
        self._begun_at = 0.0  # of a step with decode rows; 0.0: none in flight
        self._drafted: Counter[str] = Counter()  # tokens by source
        self._accepted: Counter[str] = Counter()

    def attach(self, cache: PrefixCache, clock: Callable[[], float]) -> None:
        self._cache, self._clock = cache, clock

    def propose(self, decodes: Sequence[RequestState]) -> Mapping[RequestState, Sequence[int]]:
        self._begun_at = self._clock()
        self._proposed = {}
        drafts: dict[RequestState, Sequence[int]] = {}
        num_rows, num_drafts, num_expected = len(decodes), 0, 0.0
        for state in decodes:
            room = min(state.length_limit - state.tokens.size - 1, self._max_tokens)
            if room < 1 or not _may_draft(state):
                continue
            context, size = context_of(state), state.tokens.size
            for source in tuple(self.sources):
                odds, most = self._odds_of(state, source), room
                if not source.is_sure:
                    if odds.rests_until > size:
                        continue
                    paid = self._budget.length(odds.value, num_rows, num_drafts, num_expected)
                    if not paid:
                        if self._budget.length(1.0, num_rows, num_drafts, num_expected):
                            odds.rest(size)
                        continue
                    most = min(room, paid)
                token_ids = _before_end(self._ask(source, context, most), state)
                if token_ids:
                    drafts[state] = token_ids
                    self._proposed[state] = source, len(token_ids)
                    num_drafts += len(token_ids)
                    num_expected += sum(odds.value**n for n in range(1, len(token_ids) + 1))
                    break
        if num_drafts and not self._has_room(num_rows + num_drafts):
            self._proposed = {}
            return {}
        return drafts

    def needs_output(self, num_running: int) -> bool:
        return num_running <= MOST_ROWS

    def note_step(self, schedule: SchedulerOutput) -> None:
        begun_at, self._begun_at = self._begun_at, 0.0
        if begun_at and not schedule.num_prefill_tokens:
            rows = schedule.rows
            num_drafts = sum(rows.drafts.values()) if rows.drafts else 0
            self._budget.note_step(len(rows), num_drafts, self._clock() - begun_at)

    def note_verified(self, state: RequestState, num_drafts: int, num_accepted: int) -> None:
        source, _ = self._proposed[state]
        self._odds_of(state, source).note(num_drafts, num_accepted)
        self._drafted[source.name] += num_drafts
        self._accepted[source.name] += num_accepted

    def note_ended(self, state: RequestState) -> None:
        self._odds.pop(state, None)
        self._proposed.pop(state, None)
        if state.sequence is not None and state.group is None and not state.token_mark:
            context = context_of(state)
            for source in tuple(self.sources):
                self._call(source, partial(source.end, context), None)

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

    def _ask(self, source: DraftSource, context: DraftContext, most: int) -> Sequence[int]:
        nothing: Sequence[int] = ()
        return self._call(source, partial(source.draft, context, most), nothing)[:most]

    def _call(self, source: DraftSource, call: Callable[[], Answer], otherwise: Answer) -> Answer:
        """Returns what a source returns. One that fails is not asked again."""
        try:
            return call()
        except Exception:
            _log.exception("the drafts of %s have failed and are ended", source.name)
            self.sources.remove(source)
            return otherwise

    def _odds_of(self, state: RequestState, source: DraftSource) -> Odds:
        by_source = self._odds.get(state)
        if by_source is None:
            by_source = self._odds[state] = {}
        odds = by_source.get(source.name)
        if odds is None:
            odds = by_source[source.name] = Odds(source.first_odds)
        return odds

    def _has_room(self, num_tokens: int) -> bool:
        """Whether there are pages for so many tokens, so that no request is preempted for
        drafts."""
        return self._cache.num_obtainable(num_tokens) == num_tokens


def context_of(state: RequestState) -> DraftContext:
    assert state.sequence is not None
    return DraftContext(
        state.request, state.tokens.view(), state.num_prompt, state.sequence, state.matcher
    )


def _may_draft(state: RequestState) -> bool:
    """Whether drafts of a decoding request can be verified."""
    structured = state.request.params.structured_outputs
    jumps = structured is not None and structured.jump_forward
    is_single = state.group is None and not state.token_mark
    return state.num_output > 0 and is_single and not jumps


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
