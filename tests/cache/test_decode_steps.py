"""Calls for all rows of a decode step: the same as those of one sequence, one after the other."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from radixserve.cache import HashBlockCache, OutOfPages, RadixCache
from radixserve.errors import InvalidRequest
from tests.cache.mirror import Mirror, contents

CACHES = [RadixCache, HashBlockCache]
COUNTS = ("pages_total", "pages_free", "pages_tree", "pages_private", "pages_locked")


def one_by_one(seqs: list[Any], token_ids: list[int]) -> None:
    for seq, token_id in zip(seqs, token_ids, strict=True):
        if seq.num_placeholders and seq.length - seq.num_placeholders == seq.committed_len:
            seq.fill([token_id])
        seq.commit(seq.committed_len + 1)


class Side:
    """A cache, its open sequences, and what they decode."""

    def __init__(self, make: Any, size: int, *, is_batched: bool, with_events: bool) -> None:
        self.cache, self.is_batched = make(6_000 // size, size), is_batched
        self.seqs: list[Any] = []
        self.session = self.cache.open_session("chat", lease_s=60)
        self.mirror, self.log = Mirror(), None
        if with_events:
            self.log = self.cache.open_events(epoch=1)
            self.mirror.restart(self.log.snapshot())

    def begin(self, prompt: list[int], namespace: str, *, in_session: bool) -> None:
        seq = self.cache.acquire(prompt, namespace, session=self.session if in_session else None)
        seq.extend(prompt[seq.cached_len :])
        seq.commit(len(prompt))
        self.seqs.append(seq)

    def launch(self, token_ids: list[int], *, is_known: bool) -> None:
        """A row each: of the next token if nothing is in flight, else of a placeholder."""
        known = [seq for seq in self.seqs if is_known and not seq.num_placeholders]
        for seq, token_id in zip(self.seqs, token_ids, strict=True):
            if seq in known:
                seq.extend([token_id])
        sampled = [seq for seq in self.seqs if seq not in known]
        if self.is_batched:
            self.cache.append_next(sampled)
            return
        for seq in sampled:
            seq.append_placeholders(1)

    def land(self, token_ids: list[int]) -> None:
        if self.is_batched:
            self.cache.commit_next(self.seqs, token_ids)
        else:
            one_by_one(self.seqs, token_ids)

    def state(self) -> dict[str, Any]:
        self.cache.check()
        if self.log is not None:
            self.mirror.take(self.log.take())
            assert self.mirror.contents() == contents(self.cache)
        stats = self.cache.stats()
        return {
            "counts": [stats[name] for name in COUNTS],
            "committed": stats["committed_tokens"],
            "sequences": [
                (seq.tokens.tolist(), seq.committed_len, seq.num_placeholders, len(seq.pages))
                for seq in self.seqs
            ],
        }


@pytest.mark.parametrize("make", CACHES)
@pytest.mark.parametrize("size", [1, 2, 16])
@pytest.mark.parametrize("seed", range(4))
def test_a_step_is_what_its_rows_are(make: Any, size: int, seed: int) -> None:
    """Prompts that share prefixes and whole answers, sessions, namespaces, forks, cuts, resets, and
    requests that watch: both ways leave the same."""
    rng = random.Random(seed)
    sides = [Side(make, size, is_batched=way, with_events=seed % 2 == 1) for way in (False, True)]
    prompts = [[rng.randrange(2) for _ in range(rng.randrange(1, 40))] for _ in range(4)]
    watches = [
        [side.cache.watch(np.array(prompt, np.int32)) for prompt in prompts] for side in sides
    ]
    for step in range(40):
        if step % 8 == 0 and len(sides[0].seqs) < 12:
            for _ in range(3):
                prompt = prompts[rng.randrange(4)] + [rng.randrange(2) for _ in range(step // 8)]
                namespace, in_session = rng.choice(["", "", "b"]), rng.random() < 0.4
                for side in sides:
                    side.begin(prompt, namespace, in_session=in_session)
        count = len(sides[0].seqs)
        if step % 5 == 4:
            index, action = rng.randrange(count), rng.choice(["fork", "release", "cut", "reset"])
            for side in sides:
                change(side, index, action)
            count = len(sides[0].seqs)
        tokens = [rng.randrange(2) for _ in range(count)]
        is_known, is_ahead = rng.random() < 0.5, rng.random() < 0.5
        more = [rng.randrange(2) for _ in range(count)]
        for side in sides:
            side.launch(tokens, is_known=is_known)
            if is_ahead:
                side.launch(more, is_known=False)
            side.land(tokens)
            if is_ahead:
                side.land(more)
        assert sides[0].state() == sides[1].state()
        for side, mine in zip(sides, watches, strict=True):
            side.cache.changed_watches()
            for watch, prompt in zip(mine, prompts, strict=True):
                assert watch.cached_len == side.cache.lookup(prompt).cached_len
    for side in sides:
        for seq in side.seqs:
            seq.release()
        side.cache.check()


def change(side: Side, index: int, action: str) -> None:
    seq = side.seqs[index]
    if action == "fork":
        side.seqs.append(seq.fork())
    elif action == "release" and len(side.seqs) > 1:
        side.seqs.pop(index).release()
    elif action == "cut":
        seq.truncate(max(1, seq.length - 3))
    elif action == "reset":
        side.cache.reset("b")


@pytest.mark.parametrize("make", CACHES)
def test_what_cannot_be_committed_is_refused(make: Any) -> None:
    cache = make(20, 1)
    seqs = [cache.acquire([index]) for index in range(3)]
    for index, seq in enumerate(seqs):
        seq.extend([index])
    seqs[1].append_placeholders(1)
    cache.commit_next(seqs, [0, 1, 2])
    with pytest.raises(InvalidRequest, match=r"between 1 .* and 1, got 2"):
        cache.commit_next([seqs[0]], [7])  # it has no row
    with pytest.raises(InvalidRequest, match="token ids must be >= 0"):
        cache.commit_next([seqs[1]], [-1])
    assert seqs[1].num_placeholders == 1
    seqs[1].release()
    with pytest.raises(InvalidRequest, match="released"):
        cache.commit_next([seqs[1]], [7])
    with pytest.raises(InvalidRequest, match="released"):
        cache.append_next([seqs[1]])
    cache.check()


@pytest.mark.parametrize("make", CACHES)
@pytest.mark.parametrize("count", [2, 3])
def test_wrong_ids_of_a_step_are_refused(make: Any, count: int) -> None:
    cache = make(40, 1)
    seqs = [cache.acquire([index]) for index in range(count)]
    for index, seq in enumerate(seqs):
        seq.extend([index])
        seq.commit(1)
    good = [7] * count
    for wrong in (good[1:], [*good, 7], [-1, *good[1:]], [2**31, *good[1:]]):
        with pytest.raises(InvalidRequest):
            cache.append_next(seqs, wrong)
        assert [seq.tokens.tolist() for seq in seqs] == [[index] for index in range(count)]
    cache.append_next(seqs, good)
    with pytest.raises(InvalidRequest, match="the next token is 7, not 8"):
        cache.commit_next(seqs, [7, 8, 7][:count])
    for wrong in (good[1:], [*good, 7]):
        with pytest.raises(ValueError):
            cache.commit_next(seqs, wrong)
    cache.check()
    assert cache.lookup([1, 8, 9]).cached_len == 1


@pytest.mark.parametrize("make", CACHES)
def test_a_view_of_tokens_and_pages_outlives_a_step(make: Any) -> None:
    cache = make(60, 1)
    seq = cache.acquire([1, 2])
    seq.extend([1, 2])
    seq.commit(2)
    for token_id in range(20):
        tokens, pages = seq.tokens, seq.pages
        before = tokens.tolist(), pages.tolist()
        cache.append_next([seq])
        assert (tokens.tolist(), pages.tolist()) == before
        cache.commit_next([seq], [token_id])
    assert seq.tokens.tolist() == [1, 2, *range(20)]
    cache.check()


@pytest.mark.parametrize("make", CACHES)
def test_placeholders_evict_what_is_not_used_and_end_with_the_pool(make: Any) -> None:
    cache = make(8, 1)
    with cache.acquire([9, 9, 9, 9]) as old:
        old.extend([9, 9, 9, 9])
        old.commit(4)
    seqs = [cache.acquire([index]) for index in range(2)]
    for index, seq in enumerate(seqs):
        seq.extend([index])
        seq.commit(1)
    for _ in range(3):
        cache.append_next(seqs)
    with pytest.raises(OutOfPages):
        cache.append_next(seqs)
    assert [seq.length for seq in seqs] == [4, 4]
    cache.check()
