"""A `Driver` that gives hints and knows the prompts of prefetches."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from radixserve.cache import HashBlockCache, PrefixCache, RadixCache
from radixserve.config import EngineConfig
from radixserve.engine.engine_thread import answer_message
from radixserve.hints.hint import VERBS, Hint, HintAnswer
from radixserve.hints.messages import ApplyHints
from radixserve.schedule import SchedulerOutput
from tests.scheduler.fake import Driver
from tests.scheduler.overlap_fake import OverlapDriver


@dataclass
class HintDriver(Driver):
    max_hint_share: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        config = EngineConfig(
            page_size=self.page_size,
            schedule_policy=self.policy,
            chunked_prefill_size=self.chunked_prefill_size,
            max_running_requests=self.max_running_requests,
            max_overtake=self.max_overtake,
            max_hint_share=self.max_hint_share,
        )
        self.clock = lambda: 0.0  # measured times would differ each time
        self.engine = self.make_engine(config)
        self.scheduler = self.engine.scheduler
        self.runner.before_launch = self._note_prefetches

    def make_cache(self) -> PrefixCache:
        if self.kind == "hash":
            return HashBlockCache(self.num_pages, self.page_size, clock=lambda: self.now)
        return RadixCache(
            self.num_pages,
            self.page_size,
            self.eviction,
            reuse=self.reuse,
            layers=self.make_layers(),
            clock=lambda: self.now,
        )

    def _note_prefetches(self, schedule: SchedulerOutput) -> None:
        for row in schedule.rows:
            name = row.request_id
            if name.startswith("#prefetch"):
                request = self.states[name].request
                self.runner.tokens[name] = request.token_ids.tolist()
                self.runner.namespaces[name] = request.params.namespace
        self._note_launch(schedule)

    def hint(self, verb: str, tokens: list[int] | None = None, **fields: Any) -> HintAnswer:
        ids = None if tokens is None else np.asarray(tokens, np.int32)
        (answer,) = answer_message(self.engine, ApplyHints((Hint(verb, ids, **fields),)))
        self.engine.check()
        return answer

    def serve(self, name: str, tokens: list[int], **fields: Any) -> int:
        """Runs one request; the tokens that it found cached."""
        self.add(name, tokens, **{"max_tokens": 1, **fields})
        self.run()
        return self.finished[name].usage.cached_tokens

    def cached(self, tokens: list[int], namespace: str = "") -> int:
        return self.cache.lookup(tokens, namespace, allow_full=True).cached_len


@dataclass
class AheadHintDriver(HintDriver, OverlapDriver):
    """The same for an engine that launches one step ahead."""

    def _note_prefetches(self, schedule: SchedulerOutput) -> None:
        for row in schedule.rows:
            if row.request_id.startswith("#prefetch") and row.request_id not in self.serials:
                self.runner.serials[row.request_id] = len(self.serials)
                self.serials.append(row.request_id)
        super()._note_prefetches(schedule)


def random_hint(
    driver: HintDriver, rng: random.Random, sessions: list[str], seen: Counter[str]
) -> None:
    known = list(driver.runner.tokens.values())
    verb = rng.choice(VERBS)
    fields: dict[str, Any] = {"owner": rng.choice(["ann", "bob"])}
    fields["namespace"] = rng.choice(["", "b"])
    tokens: list[int] | None = None
    if known and rng.random() < 0.85:
        whole = rng.choice(known[-30:])
        tokens = whole[: rng.randint(1, len(whole))]
        if verb != "demote" and rng.random() < 0.2:
            fields["max_tokens"] = rng.randint(1, 40)
    else:
        fields["session"] = rng.choice(sessions)
    if verb in ("pin", "retain", "share"):
        fields["seconds"] = rng.choice([None, 0.0, 0.5, 5.0, 100.0, 1e6])
        fields["budget_tokens"] = rng.choice([None, 0, 20, 200])
        fields["may_share"] = rng.random() < 0.8
    answer = driver.hint(verb, tokens, **fields)
    seen[f"{verb} {answer.answer}"] += 1
    assert answer.tokens_found >= 0
    assert answer.tokens_covered >= 0
    assert bool(answer.reason) or answer.answer == "accepted"
    if answer.answer in ("rejected", "missing"):
        assert not answer.tokens_covered
