"""Layers with windows: which K and V are dropped, and what of a prefix can be used afterwards."""

from __future__ import annotations

from typing import Any

import pytest

from radixserve.cache import OutOfPages, RadixCache, WindowLayers
from radixserve.errors import InvalidRequest

PROMPT = list(range(100, 160))


def make(num_window_pages: int, window_size: int = 8, page_size: int = 1, **options: Any) -> Any:
    windows = WindowLayers(num_window_pages, window_size)
    return RadixCache(600 // page_size, page_size, windows=windows, **options)


def serve(cache: RadixCache, tokens: list[int], chunk: int = 10) -> int:
    """Compute a prompt chunk by chunk; what was reused."""
    with cache.acquire(tokens) as seq:
        reused = seq.cached_len
        while seq.length < len(tokens):
            seq.extend(tokens[seq.length : seq.length + chunk])
            cache.take_window_updates()
            seq.commit(seq.length)
            cache.check()
    cache.check()
    return reused


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_long_sequence_needs_a_window_and_a_chunk(page_size: int) -> None:
    cache = make(num_window_pages=20 // page_size, page_size=page_size)
    assert serve(cache, list(range(500))) == 0
    stats = cache.stats()
    assert stats["pages_free"] == (600 - 500) // page_size
    assert stats["dropped_window_pages"] >= (500 - 20) // page_size
    assert cache.lookup([*range(500), 7])[:2] == (500, "full")


def test_nothing_is_dropped_while_window_pages_are_free() -> None:
    cache = make(num_window_pages=60)
    serve(cache, PROMPT)
    assert cache.stats()["dropped_window_pages"] == 0
    assert [cache.lookup([*PROMPT[:n], 7]).cached_len for n in range(60)] == list(range(60))


def test_what_ends_outside_of_the_windows_left_is_computed_again() -> None:
    cache = make(num_window_pages=25)
    serve(cache, PROMPT)
    found = cache.lookup([*PROMPT[:20], 7, 7])
    assert found[:3] == (0, "window_evicted", 20)
    assert cache.lookup([*PROMPT, 7]).cached_len == 60
    assert serve(cache, [*PROMPT[:20], 7, 7]) == 0
    assert cache.lookup([*PROMPT[:20], 8]).cached_len == 20  # the tree's pages have theirs again
    assert cache.stats()["duplicate_tokens"] == 20


def test_where_sequences_end_and_begin_is_kept_longer() -> None:
    cache = make(num_window_pages=40)
    serve(cache, PROMPT[:20])
    for turn in range(4):
        serve(cache, [*PROMPT[:20], turn, *range(18)])
        assert cache.lookup([*PROMPT[:20], 9]).cached_len == 20
    assert cache.stats()["dropped_window_pages"] > 0


def test_windows_of_live_sequences_stay() -> None:
    cache = make(num_window_pages=24)
    held = cache.acquire(PROMPT)
    held.extend(PROMPT[:20])
    held.commit(20)
    other = cache.acquire([7])
    other.extend(range(17))
    with pytest.raises(OutOfPages, match="1 window pages wanted: 0 of 24 free"):
        other.extend([5])
    free = cache.stats()["pages_free"]
    cache.check()
    held.release()
    other.extend([5])
    assert cache.stats()["pages_free"] == free - 1
    assert cache.num_obtainable(600) == 6  # of `held`; `other` has committed nothing


def test_truncate_goes_back_to_where_windows_are() -> None:
    cache = make(num_window_pages=25)
    seq = cache.acquire(PROMPT)
    for first in range(0, 60, 10):
        seq.extend(PROMPT[first : first + 10])
        seq.commit(seq.length)
    seq.truncate(56)
    assert seq.length == 56
    seq.truncate(20)
    assert seq.length == seq.committed_len == 0
    cache.check()


def test_a_fork_copies_both_parts_of_a_page() -> None:
    cache = make(num_window_pages=20, page_size=4)
    seq = cache.acquire(PROMPT)
    seq.extend(PROMPT[:10])
    cache.take_window_updates()
    seq.commit(10)
    fork = seq.fork()
    updates = cache.take_window_updates()
    table = dict(updates.pages.tolist())
    assert updates.copies == [(2, table[int(fork.pages[2])], 2)]


def test_a_runner_learns_of_every_change() -> None:
    cache = make(num_window_pages=25)
    seq = cache.acquire(PROMPT)
    seq.extend(PROMPT[:3])
    pages = seq.pages.tolist()
    assert cache.take_window_updates().pages.tolist() == [[page, page] for page in pages]
    assert len(cache.take_window_updates().pages) == 0
    seq.release()  # nothing was committed
    assert cache.take_window_updates().pages.tolist() == [[page, -1] for page in pages]


def test_a_cache_without_windows_tells_nothing() -> None:
    cache = RadixCache(10)
    assert cache.window_size == 0
    assert cache.take_window_updates() is None
    assert cache.num_obtainable(20) == 10


def test_wrong_windows_are_refused() -> None:
    for windows in (WindowLayers(0, 4), WindowLayers(4, 0)):
        with pytest.raises(InvalidRequest, match="windows"):
            RadixCache(10, windows=windows)
    with pytest.raises(InvalidRequest, match="not both"):
        RadixCache(10, windows=WindowLayers(4, 4), num_states=3)
