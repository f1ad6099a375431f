"""`PagePool`: every page is free or taken, and a sequence that grows page by page gets a row."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixserve.cache import page_pool
from radixserve.cache.page_pool import RUN_PAGES, PagePool
from radixserve.cache.radix.radix_cache import RadixCache
from radixserve.errors import OutOfPages


def grow(pool: PagePool, count: int, last: int = -1) -> list[int]:
    """Pages taken one by one, each after the last."""
    taken = []
    for _ in range(count):
        [last] = pool.allocate_after(last)
        taken.append(last)
    return taken


def test_sequences_that_take_turns_get_pages_in_a_row() -> None:
    pool = PagePool(100)
    ours, theirs = [], []
    for _ in range(RUN_PAGES):
        for mine in (ours, theirs):
            mine += pool.allocate_after(mine[-1] if mine else -1)
    assert ours == list(range(RUN_PAGES))
    assert theirs == list(range(RUN_PAGES, 2 * RUN_PAGES))
    assert pool.num_free == len(pool.free_ids()) == 100 - 2 * RUN_PAGES


def test_kept_pages_are_free() -> None:
    """Reserved pages may be taken by any allocation; their sequence then continues elsewhere."""
    pool = PagePool(40)
    ours, theirs = grow(pool, 3), grow(pool, 1)
    assert pool.num_free == 36
    assert len(pool.allocate(35)) == 35
    [last] = grow(pool, 1, ours[-1])
    assert pool.num_free == 0
    for take in (lambda: pool.allocate_after(theirs[-1]), lambda: pool.allocate(1)):
        with pytest.raises(OutOfPages, match="1 pages wanted, 0 free of 40"):
            take()
    pool.free(array("i", [*ours, last]))
    assert sorted(pool.free_ids()) == sorted([*ours, last])


def test_too_many_are_refused_and_nothing_changes() -> None:
    pool = PagePool(40)
    ours = grow(pool, 2)
    before = pool.free_ids()
    with pytest.raises(OutOfPages, match="39 pages wanted, 38 free of 40"):
        pool.allocate(39)
    assert pool.free_ids() == before
    assert grow(pool, 1, ours[-1]) == [2]


def test_several_at_once_are_those_one_by_one() -> None:
    singly, together = PagePool(100), PagePool(100)
    assert together.allocate_after(-1, 20).tolist() == grow(singly, 20)
    assert together.allocate_after(19, 3).tolist() == grow(singly, 3, 19)
    before = together.free_ids()
    with pytest.raises(OutOfPages, match="78 pages wanted, 77 free of 100"):
        together.allocate_after(22, 78)
    assert together.free_ids() == before == singly.free_ids()


@pytest.mark.parametrize("turned", [False, True])
def test_runs_of_pages_that_came_back(turned: bool) -> None:
    pool = PagePool(3 * RUN_PAGES)
    pages = pool.allocate(3 * RUN_PAGES)
    pool.free(pages[::-1] if turned else pages)
    taken = grow(pool, RUN_PAGES)
    assert taken == list(range(taken[0], taken[0] + RUN_PAGES))


def test_pages_out_of_order_are_taken_as_they_come() -> None:
    pool = PagePool(2 * RUN_PAGES)
    pages = pool.allocate(2 * RUN_PAGES)
    pool.free(pages[::2] + pages[1::2])
    assert sorted(grow(pool, 2 * RUN_PAGES)) == list(pages)


def test_runs_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences that ended without a release leave the rest of their runs behind."""
    monkeypatch.setattr(page_pool, "MAX_RUNS", 3)
    pool = PagePool(1000)
    for _ in range(20):
        pool.allocate_after(-1)
        assert pool.num_runs <= 3
    assert pool.num_free == len(set(pool.free_ids())) == 980


def test_a_released_run_is_taken_next() -> None:
    pool = PagePool(100)
    ours = grow(pool, 5)
    pool.release_run(ours[-1])
    pool.release_run(ours[-1])
    assert pool.num_free == len(set(pool.free_ids())) == 95
    assert grow(pool, RUN_PAGES) == list(range(5, 5 + RUN_PAGES))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=80))
def test_every_page_is_free_or_taken(steps: list[tuple[int, int]]) -> None:
    pool, held = PagePool(90), [[] for _ in range(10)]
    for kind, number in steps:
        mine = held[number]
        if kind == 0:
            pool.release_run(mine[-1] if mine else number)
            pool.free(array("i", mine[number:]))
            del mine[number:]
        elif kind == 1 and pool.num_free >= 3 * number:
            mine += pool.allocate(3 * number)
        elif kind == 2 and pool.num_free:
            mine += pool.allocate_after(mine[-1] if mine else -1)
        elif kind == 3 and number % 2 and pool.num_free >= number:
            mine += pool.allocate_after(mine[-1] if mine else -1, number)
        elif kind == 3:
            mine += grow(pool, min(5, pool.num_free), mine[-1] if mine else -1)
        free = pool.free_ids()
        assert len(free) == pool.num_free
        assert sorted([*free, *(page for pages in held for page in pages)]) == list(range(90))


@pytest.mark.parametrize("page_size", [1, 4])
def test_sequences_that_decode_side_by_side(page_size: int) -> None:
    """Each has its tokens in consecutive pages, and what is free is what is left."""
    cache = RadixCache(400, page_size)
    sequences = []
    for first in range(3):
        sequence = cache.acquire([first])
        sequence.extend([first])
        sequences.append(sequence)
    for token in range(page_size * RUN_PAGES):
        for sequence in sequences:
            sequence.extend([token])
            cache.check()
    for sequence in sequences:
        new = sequence.pages[-RUN_PAGES:].tolist()
        assert new == list(range(new[0], new[0] + RUN_PAGES))
        sequence.extend([0] * page_size)
        sequence.release()
    cache.check()
    assert cache.num_available == 400
    assert cache._allocator.pool.num_runs == 0
