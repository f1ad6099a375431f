"""Epochs of a `RadixCache`: K/V by weights, its events, and sequences between two of them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from radixserve.cache import EventCursor, Namespace, RadixCache
from radixserve.cache.events import Reset, Stored


def fill(cache: RadixCache, tokens: list[int], namespace: str = "") -> int:
    """Cache a sequence; returns how much of it was there."""
    with cache.acquire(tokens, namespace, allow_full=True) as seq:
        seq.extend(tokens[seq.cached_len :])
        seq.commit(len(tokens))
        return seq.cached_len


@pytest.mark.parametrize("page_size", [1, 4])
def test_look_ups_find_the_present_epoch(page_size: int) -> None:
    cache = RadixCache(100, page_size)
    tokens = list(range(30))
    assert fill(cache, tokens, "a") == 0
    cache.begin_epoch(1)
    assert cache.lookup(tokens, "a").cached_len == 0
    assert fill(cache, tokens[:20], "a") == 0
    cache.begin_epoch(2)
    cache.begin_epoch(0)
    assert cache.lookup(tokens, "a", allow_full=True).cached_len == 30
    cache.begin_epoch(1)
    assert cache.lookup(tokens, "a", allow_full=True).cached_len == 20
    cache.check()
    assert cache.lookup(tokens, "a")[:3] == (20, "epoch", 20)
    assert cache.lookup([7, 8], "a").reason == "never_seen"
    assert fill(cache, tokens, "\0sql@1\0a/salt") == 0
    assert cache.namespaces() == [Namespace("a"), Namespace("a", "sql@1", "salt")]
    cache.reset("a")
    cache.begin_epoch(0)
    assert cache.namespaces() == []
    assert cache.lookup(tokens, "a")[:2] == (0, "never_seen")
    cache.check()
    cache.evict(10_000)
    assert cache.stats()["pages_free"] == cache.num_pages


def test_watches_follow() -> None:
    cache = RadixCache(100)
    fill(cache, list(range(30)))
    watch = cache.watch(np.arange(30, dtype=np.int32))
    assert watch.cached_len == 29
    cache.begin_epoch(1)
    assert cache.changed_watches() == [watch]
    assert watch.cached_len == 0
    cache.begin_epoch(0)
    assert cache.changed_watches() == [watch]
    assert watch.cached_len == 29
    watch.close()
    cache.check()


def test_events_are_those_of_the_present_epoch() -> None:
    cache = RadixCache(100)
    log, cursor = cache.open_events(), EventCursor()
    cursor.restart(log.snapshot())
    fill(cache, list(range(30)), "a")
    log.take()
    cache.begin_epoch(1)
    assert log.take().events == [Reset("a")]
    cache.evict(10)  # of the old epoch: nobody follows it
    assert log.take().events == []
    assert log.snapshot().nodes == []
    cache.begin_epoch(0)
    (stored,) = log.take().events
    assert isinstance(stored, Stored)
    assert len(stored.tokens) == 20 * 4


def test_a_detached_sequence_publishes_nothing() -> None:
    for page_size in (1, 4):
        cache = RadixCache(50, page_size)
        seq = cache.acquire(list(range(10)))
        seq.extend(list(range(10)))
        seq.commit(10)
        cache.begin_epoch(1)
        assert seq.detach()
        for token in range(10, 40):
            seq.extend([token])
            seq.commit(token + 1)
            cache.check()
        assert seq.is_stale
        assert seq.tokens.tolist() == list(range(40))
        seq.release()
        cache.check()
        assert cache.lookup(list(range(40))).cached_len == 0
        cache.begin_epoch(0)
        assert cache.lookup(list(range(40))).cached_len == 10


@pytest.mark.parametrize("page_size", [1, 5])
def test_eviction_goes_by_recency_over_all_epochs(page_size: int) -> None:
    """A look-up of another epoch's tokens changes no order, and no more is freed than asked for."""
    cache = RadixCache(100, page_size)
    first, second = list(range(20)), list(range(50, 70))
    fill(cache, first)
    cache.begin_epoch(1)
    fill(cache, second)
    fill(cache, first)
    cache.begin_epoch(2)
    before, free = cache.dump(), cache.stats()["pages_free"]
    assert cache.lookup(first)[:3] == (0, "epoch", 0)
    assert cache.dump() == before
    assert cache.evict(15) == 15  # of the oldest, which is epoch 0's
    assert cache.stats()["pages_free"] - free == 15 // page_size
    left = []
    for epoch in (0, 1):
        cache.begin_epoch(epoch)
        left += [cache.lookup(tokens, allow_full=True).cached_len for tokens in (first, second)]
    assert left == [5, 0, 20, 20]
    cache.check()


@pytest.mark.parametrize("page_size", [1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_storms(page_size: int, seed: int) -> None:
    """No page is lost, and each epoch has what was committed in it."""
    rng = random.Random(seed)
    cache = RadixCache(60, page_size)
    open_sequences = []
    for _ in range(300):
        kind = rng.random()
        if kind < 0.1:
            cache.begin_epoch(rng.randrange(4))
            for seq in open_sequences:
                if rng.random() < 0.5:
                    seq.detach()
            gone = [seq for seq in open_sequences if not seq.is_stale]
            for seq in gone:
                seq.release()
                open_sequences.remove(seq)
        elif kind < 0.5 and len(open_sequences) < 4:
            tokens = [rng.randrange(3) for _ in range(rng.randint(1, 12))]
            seq = cache.acquire(tokens, rng.choice(["", "a"]))
            seq.extend(tokens[seq.cached_len :])
            seq.commit(len(tokens))
            open_sequences.append(seq)
        elif kind < 0.8 and open_sequences:
            seq = rng.choice(open_sequences)
            if cache.num_available > 4:
                seq.extend([rng.randrange(3)])
                seq.commit(seq.length)
        elif kind < 0.82:
            cache.reset(rng.choice([None, "a"]))
        elif open_sequences:
            open_sequences.pop(rng.randrange(len(open_sequences))).release()
        cache.check()
    for seq in open_sequences:
        seq.release()
    cache.check()
    cache.reset()
    assert cache.stats()["pages_free"] == cache.num_pages
