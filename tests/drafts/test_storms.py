"""Random runs of the real scheduler and cache with drafts: aborts, preemptions, evictions."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from radixserve.drafts.drafter import Drafts
from radixserve.drafts.source import DraftContext
from tests.drafts.sources import KINDS, ForcedSource, Kind
from tests.scheduler.fake import VOCAB, Driver, prefix_hashes
from tests.scheduler.test_storm import storm


def plug_in(driver: Driver, rng: random.Random, kind: Kind) -> None:
    def guess(context: DraftContext, most: int) -> Sequence[int]:
        tokens, seed = context.tokens.tolist(), context.request.seed
        hashes, found = prefix_hashes(tokens), []
        for _ in range(most):
            found.append(driver.runner.next_token(hashes, seed))
            hashes = prefix_hashes([*tokens, *found], hashes)
        return found

    source = ForcedSource(kind, guess, VOCAB, rng.randrange(1 << 30))
    driver.scheduler.set_drafter(Drafts([source], 8))


@pytest.mark.parametrize(
    ("cache", "kind"),
    [
        pytest.param(
            cache, kind, marks=() if cache == "radix" or kind == "half" else pytest.mark.long
        )
        for cache in ("radix", "hash", "states", "windows")
        for kind in KINDS
    ],
)
def test_answers_are_those_without_drafts(kind: Kind, cache: str) -> None:
    """Audited after each step; a cell that a rejected draft has left in a page would be found."""
    seen: Counter[str] = Counter()
    for seed in range(3):
        seen += storm(seed, 100, cache, lambda driver, rng: plug_in(driver, rng, kind))
    assert seen["drafted_tokens"] > 50
    for event in ("aborted", "preemptions", "evicted"):
        assert seen[event] > 0, f"the storm had no {event}"
    accepted = seen["accepted_draft_tokens"] / seen["drafted_tokens"]
    low, high = {"right": (0.99, 1.0), "wrong": (0.0, 0.0), "half": (0.2, 0.8)}[kind]
    assert low <= accepted <= high


@pytest.mark.long
@pytest.mark.parametrize("cache", ["radix", "hash", "states", "windows"])
@pytest.mark.parametrize("kind", KINDS)
def test_many_storms(kind: Kind, cache: str) -> None:
    for seed in range(100, 300):
        storm(seed, 200, cache, lambda driver, rng: plug_in(driver, rng, kind))
