"""Layers with windows: which K and V are dropped, and what of a prefix can be used afterwards."""

from __future__ import annotations

from typing import Any

import pytest

from radixserve.cache import OutOfPages, RadixCache
from radixserve.cache_layers import WindowedLayers
from radixserve.errors import InvalidRequest
from radixserve.schedule import WindowLayers

PROMPT = list(range(100, 160))


def make(num_window_pages: int, window_size: int = 8, page_size: int = 1, **options: Any) -> Any:
    windows = WindowLayers(num_window_pages, window_size)
    return make_windowed(600 // page_size, page_size, windows, **options)


def make_windowed(num_pages: int, page_size: int, windows: WindowLayers, **options: Any) -> Any:
    layers = WindowedLayers(num_pages, page_size, windows)
    return RadixCache(num_pages, page_size, layers=layers, **options)


def serve(cache: RadixCache, tokens: list[int], chunk: int = 10) -> int:
    """Compute a prompt chunk by chunk; what was reused."""
    with cache.acquire(tokens) as seq:
        reused = seq.cached_len
        while seq.length < len(tokens):
            seq.extend(tokens[seq.length : seq.length + chunk])
            cache.layers.windows.take_updates()
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
    assert stats["evicted_window_pages"] >= (500 - 20) // page_size
    assert cache.lookup([*range(500), 7])[:2] == (500, "full")


def test_nothing_is_dropped_while_window_pages_are_free() -> None:
    cache = make(num_window_pages=60)
    serve(cache, PROMPT)
    assert cache.stats()["evicted_window_pages"] == 0
    assert [cache.lookup([*PROMPT[:n], 7]).cached_len for n in range(60)] == list(range(60))


def test_what_ends_outside_of_the_windows_left_is_computed_again() -> None:
    cache = make(num_window_pages=25)
    serve(cache, PROMPT)
    answer = cache.lookup([*PROMPT[:20], 7, 7])
    assert answer[:3] == (0, "window_evicted", 20)
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
    assert cache.stats()["evicted_window_pages"] > 0


def test_an_end_is_kept_longer_than_what_another_sequence_passes() -> None:
    cache = make(num_window_pages=40)
    serve(cache, PROMPT[:20])
    serve(cache, list(range(200, 320)))
    assert cache.stats()["evicted_window_pages"] >= 100
    assert cache.lookup([*PROMPT[:20], 9]).cached_len == 20


@pytest.mark.parametrize("page_size", [1, 4])
def test_where_prompts_leave_what_is_cached_is_kept_longer(page_size: int) -> None:
    cache = make(num_window_pages=40 // page_size, page_size=page_size)
    serve(cache, [*PROMPT[:20], *range(100)])
    assert serve(cache, [*PROMPT[:20], *range(200, 240)]) == 0  # its windows were dropped
    assert serve(cache, [*PROMPT[:20], *range(300, 340)]) == 20
    assert serve(cache, [*PROMPT[:20], *range(400, 440)]) == 20


def test_a_length_that_others_want_is_kept_longer() -> None:
    cache = make(num_window_pages=40)
    with cache.acquire(PROMPT) as seq:
        seq.note_branch_point(20)
        for first in range(0, 60, 10):
            seq.extend(PROMPT[first : first + 10])
            seq.commit(seq.length)
    serve(cache, list(range(200, 240)))
    assert cache.lookup([*PROMPT[:20], 9]).cached_len == 20
    assert cache.lookup([*PROMPT[:30], 9]).cached_len == 20


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


def test_truncate_keeps_what_it_goes_back_to() -> None:
    """The page of the copy takes a window page from others, though these were used longer ago."""
    cache = make(num_window_pages=5, page_size=4)
    seq = cache.acquire(PROMPT)
    seq.extend(PROMPT[:20])
    seq.commit(20)
    cache.acquire([*PROMPT[:4], 7]).release()
    seq.truncate(14)
    assert seq.length == 14
    cache.check()


def test_a_match_without_a_page_for_its_end_needs_another_window() -> None:
    cache = make_windowed(5, 4, WindowLayers(2, 3))
    seq = cache.acquire(PROMPT)
    for first in range(0, 16, 4):
        seq.extend(PROMPT[first : first + 4])
        seq.commit(seq.length)
    prompt = [*PROMPT[:14], 7, 7]
    assert cache.lookup(prompt).cached_len == 14
    with cache.acquire([7]) as other:
        other.extend([7])  # the last page, and the window page that 12 tokens need
        assert cache.lookup(prompt).cached_len == 0
        with cache.acquire(prompt) as short:
            assert short.length == 0
            cache.check()


def test_no_placeholder_without_a_window_page() -> None:
    cache = make(num_window_pages=8)
    seqs = [cache.acquire(PROMPT[first:]) for first in (0, 10)]
    for seq in seqs:
        seq.extend(PROMPT[:4])
    with pytest.raises(OutOfPages, match="window pages"):
        cache.append_next(seqs)
    assert [seq.length for seq in seqs] == [4, 4]
    cache.check()


def test_a_copy_into_another_namespace_takes_the_window_pages_that_are_seen() -> None:
    cache = make(num_window_pages=20, page_size=4)
    serve(cache, PROMPT)
    serve(cache, list(range(200, 250)))
    source = cache.acquire(PROMPT, allow_full=True)
    assert source.length == 60
    before = cache.stats()["evicted_window_pages"]
    cache.layers.windows.take_updates()
    seq = cache.acquire([*PROMPT, 7], "other")
    assert seq.copy_from(source) == 60
    assert cache.stats()["evicted_window_pages"] <= before + 2
    updates = cache.layers.windows.take_updates()
    table = dict(updates.pages.tolist())
    assert [table[page] for page in seq.pages[13:].tolist()] == [copy[1] for copy in updates.copies]
    assert [count for *_, count in updates.copies] == [4, 4]
    seq.commit(60)
    cache.check()


def test_what_a_copy_lacks_in_windows_is_not_found() -> None:
    cache = make(num_window_pages=20, page_size=4)
    serve(cache, PROMPT[:6])
    cache.acquire(PROMPT[:6], "other").release()
    with cache.acquire(PROMPT, "other") as seq:
        seq.extend(PROMPT[:6])
        seq.commit(6)
    serve(cache, PROMPT)
    serve(cache, list(range(200, 260)))  # drops the early windows of PROMPT, not those of its end
    source = cache.acquire(PROMPT, allow_full=True)
    seq = cache.acquire([*PROMPT, 7], "other")
    assert seq.length == 6
    assert seq.copy_from(source) == 54
    cache.layers.windows.take_updates()
    seq.commit(60)
    seq.release()
    assert cache.lookup([*PROMPT, 8], "other").cached_len == 60
    assert cache.lookup([*PROMPT[:8], 8], "other").cached_len == 4
    cache.check()


def test_a_copy_without_room_takes_nothing() -> None:
    cache = make(num_window_pages=6, page_size=4)
    serve(cache, PROMPT, 4)
    source = cache.acquire(PROMPT, allow_full=True)
    held = cache.acquire([7])
    held.extend(range(12))
    free = cache.stats()["pages_free"]
    seq = cache.acquire([*PROMPT, 7], "other")
    with pytest.raises(OutOfPages):
        seq.copy_from(source)
    assert (seq.length, len(seq.pages)) == (0, 0)
    assert cache.stats()["pages_free"] == free
    cache.check()


@pytest.mark.parametrize("tail", [3, 500])
def test_a_lookup_tells_what_a_sibling_has(tail: int) -> None:
    """Of two pages with the same head one lost its window page; the other's is the last one."""
    cache = make_windowed(40, 4, WindowLayers(2, 3))
    for tokens in (PROMPT[:8], [*PROMPT[:6], 300, 300]):
        serve(cache, tokens, 4)
    other = cache.acquire([7])
    other.extend([7])
    prompt = [*PROMPT[:6], tail, 7, 7]
    answer = cache.lookup(prompt)
    assert answer.reason in ("window_evicted", "diverged")
    with cache.acquire(prompt) as seq:
        assert seq.length == answer.cached_len


def test_a_fork_copies_both_parts_of_a_page() -> None:
    cache = make(num_window_pages=20, page_size=4)
    seq = cache.acquire(PROMPT)
    seq.extend(PROMPT[:10])
    cache.layers.windows.take_updates()
    seq.commit(10)
    fork = seq.fork()
    updates = cache.layers.windows.take_updates()
    table = dict(updates.pages.tolist())
    assert updates.copies == [(2, table[int(fork.pages[2])], 2)]


def test_a_runner_learns_of_every_change() -> None:
    cache = make(num_window_pages=25)
    seq = cache.acquire(PROMPT)
    seq.extend(PROMPT[:3])
    pages = seq.pages.tolist()
    assert cache.layers.windows.take_updates().pages.tolist() == [[page, page] for page in pages]
    assert len(cache.layers.windows.take_updates().pages) == 0
    seq.release()  # nothing was committed
    assert cache.layers.windows.take_updates().pages.tolist() == [[page, -1] for page in pages]


def test_a_cache_without_windows_tells_nothing() -> None:
    cache = RadixCache(10)
    assert cache.layers is None
    assert cache.num_obtainable(20) == 10


def test_wrong_windows_are_refused() -> None:
    for windows in (WindowLayers(0, 4), WindowLayers(4, 0)):
        with pytest.raises(InvalidRequest, match="windows"):
            WindowedLayers(10, 1, windows)
