"""Acquired sequences that read their tokens and pages late: what others do to the tree meanwhile
does not change them."""

from __future__ import annotations

import random

import pytest

from radixserve.cache import OutOfPages, RadixCache, RadixSequence
from radixserve.errors import InvalidRequest

PAGE_SIZES = [1, 4]


def put(cache: RadixCache, tokens: list[int]) -> None:
    with cache.acquire(tokens) as seq:
        seq.extend(tokens[seq.cached_len :])
        seq.commit(len(tokens))


def disturb(cache: RadixCache, rng: random.Random) -> None:
    """One call of another user of the cache."""
    kind = rng.randrange(12)
    if kind == 0:
        cache.evict(rng.randrange(1, 40))
    elif kind == 1 and rng.random() < 0.2:
        cache.reset()
    elif kind == 2:  # more pages than are evictable: locks shrink
        with cache.acquire([]) as seq, pytest.raises(OutOfPages):
            seq.extend([9] * (cache.num_pages + 1) * cache.page_size)
    else:
        try:
            put(cache, random_tokens(rng))
        except OutOfPages:
            return


def random_tokens(rng: random.Random) -> list[int]:
    """Of two blocks, so that many prompts begin alike; not always of whole ones."""
    tokens: list[int] = []
    for _ in range(14):
        tokens += rng.choice(([0, 1, 1, 0], [1, 1, 0, 1]))
    return tokens[: rng.choice((rng.randrange(1, 57), 4 * rng.randrange(1, 15)))]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("seed", range(4))
def test_late_readers_find_what_early_ones_found(page_size: int, seed: int) -> None:
    rng, cache = random.Random(seed), RadixCache(160 // page_size, page_size)
    twins: list[tuple[RadixSequence, RadixSequence, list[int]]] = []
    num_found = 0
    for _ in range(400):
        disturb(cache, rng)
        if len(twins) < 3:
            tokens = random_tokens(rng)
            late, early = cache.acquire(tokens), cache.acquire(tokens)
            pages = early.pages[: early.length // page_size].tolist()
            assert early.tokens.tolist() == tokens[: early.length]
            twins.append((late, early, pages))
            continue
        late, early, pages = twins.pop(rng.randrange(3))
        if rng.random() < 0.3:
            with late:
                late = late.fork()
        if rng.random() < 0.3:
            late.commit(late.length)
        if rng.random() < 0.5 and late.length:
            late.truncate(rng.randrange(late.length + 1))
        length = late.length
        assert late.num_pages == -(-length // page_size)
        if rng.random() < 0.5:
            try:
                late.extend([5, 6, 7])
            except OutOfPages:
                assert late.length == length
        assert late.tokens[:length].tolist() == early.tokens[:length].tolist()
        whole = length // page_size
        assert late.pages[:whole].tolist() == pages[:whole]
        num_found += whole * page_size
        late.release()
        early.release()
        cache.check()
    assert num_found > 300


def test_a_path_of_many_nodes_is_read_whole() -> None:
    cache, tokens = RadixCache(2_000), list(range(1_000))
    put(cache, tokens)
    for cut in range(100, 1_000, 100):
        put(cache, [*tokens[:cut], 5_000])
    late = cache.acquire([*tokens, 7])
    late.extend([7])
    assert late.cached_len == 1_000
    assert late.tokens.tolist() == [*tokens, 7]
    assert late.pages[:1_000].tolist() == cache.cached_pages(tokens)[1].tolist()
    cache.check()


def test_released_unread_it_has_neither_tokens_nor_pages() -> None:
    cache = RadixCache(40)
    put(cache, list(range(20)))
    seq = cache.acquire(list(range(20)))
    seq.release()
    for name in ("tokens", "pages"):
        with pytest.raises(InvalidRequest, match="released"):
            getattr(seq, name)


def test_told_pages_stay_as_they_were_told() -> None:
    cache = RadixCache(100, 2)
    seq = cache.acquire([1, 2, 3, 4])
    seq.extend([1, 2, 3, 4])
    first = seq.take_page_table_delta()[0]
    before = first.tolist()
    seq.truncate(2)
    seq.extend([5] * 40)
    assert first.tolist() == before
    pages, changed = seq.take_page_table_delta()
    assert (len(pages), changed) == (21, 1)
