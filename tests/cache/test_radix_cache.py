"""The rules of the cache, one by one, at every page size."""

from __future__ import annotations

import numpy as np
import pytest

from radixserve.cache import OutOfPages, RadixCache, RadixSequence
from radixserve.errors import InvalidRequest
from tests.cache.world import picture

PAGE_SIZES = [1, 2, 16, 64]


def put(cache: RadixCache, tokens: list[int], namespace: str = "") -> RadixSequence:
    """A sequence with all of `tokens` committed, still held."""
    seq = cache.acquire(tokens, namespace)
    seq.extend(tokens[seq.cached_len :])
    seq.commit(len(tokens))
    cache.check()
    return seq


@pytest.fixture(params=PAGE_SIZES)
def cache(request: pytest.FixtureRequest) -> RadixCache:
    return RadixCache(num_pages=2048 // request.param, page_size=request.param)


class TestReuse:
    @pytest.mark.parametrize("shared", [0, 1, 2, 3, 15, 16, 17, 63, 64, 65, 99])
    def test_reuse_is_exact_to_the_token(self, cache: RadixCache, shared: int) -> None:
        first = list(range(1000, 1100))
        put(cache, first).release()
        second = first[:shared] + list(range(2000, 2030))
        assert cache.lookup(second).cached_len == shared
        seq = cache.acquire(second)
        assert seq.cached_len == seq.length == shared
        assert seq.tokens.tolist() == second[:shared]
        assert len(seq.pages) == -(-shared // cache.page_size)
        cache.check()

    def test_last_token_is_left_to_compute(self, cache: RadixCache) -> None:
        tokens = list(range(40))
        put(cache, tokens).release()
        assert cache.acquire(tokens).cached_len == 39
        assert cache.acquire(tokens, allow_full=True).cached_len == 40

    def test_a_partial_page_is_copied_and_whole_pages_are_shared(self, cache: RadixCache) -> None:
        size = cache.page_size
        first = put(cache, list(range(70)))
        seq = cache.acquire([*range(67), 999, 998])
        whole, extra = divmod(67, size)
        assert seq.pages[:whole].tolist() == first.pages[:whole].tolist()
        if extra:
            assert seq.cow_copies == [(int(first.pages[whole]), int(seq.pages[whole]), extra)]
            assert seq.pages[whole] not in first.pages
        else:
            assert seq.cow_copies == []
        cache.check()

    def test_identical_prompts_share_their_partial_last_page(self, cache: RadixCache) -> None:
        tokens = list(range(37))
        writer = put(cache, tokens)  # still there, about to write behind its last token
        seq = cache.acquire([*tokens, 5])
        assert seq.cached_len == 37
        writer.extend([7])
        writer.commit(38)
        cache.check()
        assert seq.tokens.tolist() == tokens

    def test_growing_turn_by_turn_reuses_all_that_was_said(self, cache: RadixCache) -> None:
        history: list[int] = []
        for turn in range(12):
            prompt = history + [turn * 100 + i for i in range(13)]
            seq = cache.acquire(prompt)
            assert seq.cached_len == len(history)
            answer = [turn * 100 + 50 + i for i in range(7)]
            seq.extend(prompt[seq.cached_len :] + answer)
            seq.commit(seq.length)
            seq.release()
            cache.check()
            history = prompt + answer
        pages = cache.stats()["pages_tree"]
        assert pages == -(-len(history) // cache.page_size), "a page holds what another one does"

    def test_any_int_sequence_is_accepted(self) -> None:
        cache = RadixCache(64)
        put(cache, [1, 2, 3, 4]).release()
        for tokens in ((1, 2, 3, 9), np.array([1, 2, 3, 9], np.int64), [np.int32(1), 2, 3, 9]):
            assert cache.lookup(tokens).cached_len == 3  # type: ignore[arg-type]

    def test_bad_tokens_are_refused_and_change_nothing(self) -> None:
        cache = RadixCache(64)
        before = picture(cache)
        for bad in ([1.5, 2.0], [[1], [2]], ["a"], [2**31], [1, None]):
            with pytest.raises(InvalidRequest):
                cache.acquire(bad)  # type: ignore[arg-type]
        assert picture(cache) == before

    def test_extreme_token_ids(self, cache: RadixCache) -> None:
        tokens = [2**31 - 1, 0, 2**24, 127] * 20
        put(cache, tokens).release()
        assert cache.lookup(tokens).cached_len == 79

    def test_empty_and_one_token_prompts(self, cache: RadixCache) -> None:
        for tokens in ([], [5]):
            assert cache.lookup(tokens).cached_len == 0
            seq = cache.acquire(tokens)
            assert seq.length == 0
            seq.release()
        cache.check()


class TestCommit:
    def test_length_must_be_within_what_has_room(self, cache: RadixCache) -> None:
        seq = put(cache, [1, 2, 3])
        for length in (2, 4):
            with pytest.raises(InvalidRequest, match="between 3"):
                seq.commit(length)
        for bad in (-1, 2.5, "a", None, True):
            with pytest.raises(InvalidRequest, match="length must be"):
                seq.commit(bad)  # type: ignore[arg-type]

    def test_uncommitted_tokens_are_not_found(self, cache: RadixCache) -> None:
        seq = cache.acquire(list(range(50)))
        seq.extend(list(range(50)))
        assert cache.lookup(list(range(50))).cached_len == 0
        seq.commit(20)
        assert cache.lookup(list(range(50))).cached_len == 20


class TestForkAndTruncate:
    def test_fork_shares_all_but_one_page_head(self, cache: RadixCache) -> None:
        seq = put(cache, list(range(75)))
        private = cache.stats()["pages_private"]
        forked = seq.fork()
        assert forked.tokens.tolist() == seq.tokens.tolist()
        extra = 75 % cache.page_size
        assert cache.stats()["pages_private"] - private == (1 if extra else 0)
        assert [n for _, _, n in forked.cow_copies] == ([extra] if extra else [])
        seq.extend([1])
        forked.extend([2])
        seq.commit(76)
        forked.commit(76)
        cache.check()
        assert cache.lookup([*range(75), 2, 0]).cached_len == 76

    def test_fork_leaves_out_what_is_not_committed(self, cache: RadixCache) -> None:
        seq = put(cache, list(range(20)))
        seq.extend([1, 2, 3])
        assert seq.fork().length == 20

    @pytest.mark.parametrize("length", [0, 1, 16, 30, 64, 74, 75])
    def test_truncate_rolls_back_and_keeps_the_tail_cached(
        self, cache: RadixCache, length: int
    ) -> None:
        tokens = list(range(75))
        seq = put(cache, tokens)
        seq.truncate(length)
        assert seq.length == seq.committed_len == length
        cache.check()
        seq.extend([500, 501])
        seq.commit(length + 2)
        cache.check()
        assert cache.lookup([*tokens, 0]).cached_len == 75
        assert cache.lookup([*tokens[:length], 500, 501, 0]).cached_len == length + 2

    def test_a_cut_shortens_a_copy_that_is_still_to_be_made(self) -> None:
        """Else the copy, made later, would overwrite what was computed behind the cut."""
        cache = RadixCache(20, page_size=16)
        put(cache, list(range(30))).release()
        seq = cache.acquire([*range(10), 99, 99])
        (copy,) = seq.cow_copies
        assert copy[2] == 10
        seq.truncate(4)
        assert seq.cow_copies == [(copy[0], copy[1], 4)]
        seq.truncate(0)
        assert seq.cow_copies == []
        cache.check()

    def test_truncate_beyond_the_end_is_refused(self, cache: RadixCache) -> None:
        seq = put(cache, [1, 2, 3])
        for length in (4, -1):
            with pytest.raises(InvalidRequest):
                seq.truncate(length)

    def test_released_sequences_say_so(self, cache: RadixCache) -> None:
        seq = put(cache, [1, 2, 3])
        seq.release()
        seq.release()
        assert seq.is_released
        for use in (lambda: seq.extend([1]), lambda: seq.commit(3), seq.fork):
            with pytest.raises(InvalidRequest, match="released"):
                use()
        cache.check()


class TestEviction:
    def test_never_more_than_asked_rounded_up_to_a_page(self, cache: RadixCache) -> None:
        put(cache, list(range(1000))).release()
        for asked in (1, 5, 64, 100):
            before = cache.stats()["pages_free"]
            pages = -(-asked // cache.page_size)
            assert cache.evict(asked) == pages * cache.page_size
            assert cache.stats()["pages_free"] == before + pages
            cache.check()

    def test_a_leaf_is_trimmed_from_its_tail(self, cache: RadixCache) -> None:
        put(cache, list(range(640))).release()
        cache.evict(128)
        assert cache.lookup(list(range(641))).cached_len == 512

    def test_least_recently_used_goes_first(self) -> None:
        cache = RadixCache(100)
        for first in (1, 2, 3):
            put(cache, [first] * 10).release()
        cache.acquire([1] * 10).release()  # used again
        cache.evict(10)
        lengths = [cache.lookup([first] * 10).cached_len for first in (1, 2, 3)]
        assert lengths == [9, 0, 9]

    def test_lookup_does_not_count_as_use(self) -> None:
        cache = RadixCache(100)
        put(cache, [1] * 10).release()
        put(cache, [2] * 10).release()
        cache.lookup([1] * 10)
        cache.watch(np.array([1] * 10, np.int32)).close()
        cache.evict(10)
        assert cache.lookup([1] * 10).cached_len == 0

    def test_what_is_held_stays(self, cache: RadixCache) -> None:
        seq = put(cache, list(range(64)))
        put(cache, list(range(128))).release()
        cache.evict(10**6)
        assert cache.lookup([*range(64), 0]).cached_len == 64
        assert seq.length == 64
        cache.check()

    def test_parents_outlive_their_children(self) -> None:
        cache = RadixCache(1000)
        for branch in range(5):
            put(cache, [*range(50), 100 + branch, 7]).release()
        for _ in range(10):
            cache.evict(1)
            cache.check()
        assert cache.lookup([*range(50), 0]).cached_len == 50

    def test_out_of_pages_changes_nothing(self, cache: RadixCache) -> None:
        capacity = cache.num_pages * cache.page_size
        seq = put(cache, list(range(capacity // 2)))
        put(cache, list(range(10_000, 10_000 + capacity // 4))).release()
        before = picture(cache)
        with pytest.raises(OutOfPages, match="evictable"):
            seq.extend(list(range(capacity)))
        assert picture(cache) == before
        seq.extend([1] * (capacity // 2))  # evicts the other one
        assert cache.stats()["pages_free"] == 0
        cache.check()

    def test_a_head_is_still_found_when_the_page_it_was_copied_from_is_evicted(self) -> None:
        cache = RadixCache(4, page_size=16)
        put(cache, list(range(40))).release()
        seq = cache.acquire(list(range(21)))
        seq.extend([20])
        seq.commit(21)
        seq.extend([99] * 43)  # takes all that can be had
        cache.check()
        assert cache.stats()["pages_free"] == cache.num_available == 0
        assert cache.lookup([*range(21), 0, 0]).position == 21
        seq.release()
        assert cache.lookup([*range(21), 0, 0]).cached_len == 21

    def test_a_sequence_can_have_the_whole_pool_although_its_prefix_node_is_longer(self) -> None:
        for size in PAGE_SIZES:
            cache = RadixCache(8, size)
            put(cache, list(range(8 * size))).release()
            prompt = [*range(3 * size + size // 2), *[999] * (8 * size)][: 8 * size]
            seq = cache.acquire(prompt)
            for token in prompt[seq.cached_len :]:
                seq.extend([token])
                seq.commit(seq.length)
                cache.check()
            assert seq.length == 8 * size

    def test_what_a_reset_freed_is_not_counted_again(self, cache: RadixCache) -> None:
        put(cache, list(range(160))).release()
        put(cache, list(range(160)), "other").release()
        cache.reset("")
        free = cache.stats()["pages_free"]
        assert cache.evict(64) == 64
        assert cache.stats()["pages_free"] - free == 64 // cache.page_size
        cache.check()


class TestReset:
    def test_reset_forgets_and_frees(self, cache: RadixCache) -> None:
        put(cache, list(range(100))).release()
        cache.reset()
        cache.check()
        assert cache.lookup(list(range(100))).cached_len == 0
        assert cache.stats()["pages_free"] == cache.num_pages
        assert cache.stats()["pages_tree"] == 0
        capacity = cache.num_pages * cache.page_size
        put(cache, list(range(capacity))).release()  # all of it can be used again
        cache.check()

    def test_pages_in_use_are_freed_when_released(self, cache: RadixCache) -> None:
        seq = put(cache, list(range(100)))
        cache.reset()
        assert cache.stats()["pages_tree"] == -(-100 // cache.page_size)
        seq.extend([5, 6])
        seq.commit(102)
        cache.check()
        assert cache.lookup([*range(100), 5, 6]).cached_len == 0
        seq.release()
        cache.check()
        assert cache.stats()["pages_free"] == cache.num_pages

    def test_only_the_named_namespace(self, cache: RadixCache) -> None:
        put(cache, list(range(50)), "a").release()
        put(cache, list(range(50)), "b").release()
        cache.reset("a")
        assert cache.lookup(list(range(50)), "a").cached_len == 0
        assert cache.lookup(list(range(50)), "b").cached_len == 49
        cache.check()

    def test_costs_the_same_however_much_is_cached(self) -> None:
        cache = RadixCache(200_000)
        for branch in range(2_000):
            put_fast(cache, [branch, *range(20)])
        nodes_before = cache.stats()["nodes"]
        cache.reset()
        assert cache.stats()["nodes"] == nodes_before, "taken apart at once instead of when needed"
        assert cache.stats()["pages_free"] == 200_000


def put_fast(cache: RadixCache, tokens: list[int]) -> None:
    seq = cache.acquire(tokens)
    seq.extend(tokens[seq.cached_len :])
    seq.commit(len(tokens))
    seq.release()


class TestReasons:
    def test_never_seen(self, cache: RadixCache) -> None:
        assert cache.lookup([1, 2, 3]).reason == "never_seen"
        put(cache, [1, 2, 3, 4]).release()
        answer = cache.lookup([1, 2, 3, 4, 5, 6])
        assert (answer.cached_len, answer.reason, answer.position) == (4, "never_seen", 4)

    def test_full(self, cache: RadixCache) -> None:
        put(cache, [1, 2, 3, 4]).release()
        assert cache.lookup([1, 2, 3, 4])[:5] == (3, "full", 3, None, None)
        assert cache.lookup([1, 2, 3, 4], allow_full=True).cached_len == 4

    def test_diverged_names_both_tokens(self, cache: RadixCache) -> None:
        put(cache, list(range(100))).release()
        answer = cache.lookup([*range(70), 5, 6])
        assert answer[:5] == (70, "diverged", 70, 70, 5)

    def test_evicted(self, cache: RadixCache) -> None:
        tokens = list(range(256))
        put(cache, tokens).release()
        cache.evict(64)
        answer = cache.lookup(tokens)
        assert (answer.cached_len, answer.reason) == (192, "evicted")
        cache.evict(10**6)
        assert cache.lookup(tokens).reason == "evicted"
        assert cache.lookup([9, *tokens]).reason == "never_seen"

    def test_evicted_is_remembered_when_the_node_has_grown_again(self, cache: RadixCache) -> None:
        old = list(range(1024))
        put(cache, old).release()
        cache.evict(128)
        put(cache, [*range(896), *[7] * 128]).release()
        assert cache.lookup(old).reason == "evicted"

    def test_a_reset_forgets(self, cache: RadixCache) -> None:
        tokens = list(range(100))
        put(cache, tokens).release()
        cache.reset()
        assert cache.lookup(tokens).reason == "never_seen"
        put(cache, [5] * 1500).release()  # takes apart what was reset
        assert cache.lookup(tokens).reason == "never_seen"

    def test_position_is_the_true_one_when_no_page_is_left_for_a_head(self) -> None:
        cache = RadixCache(2, page_size=16)
        held = put(cache, list(range(32)))
        answer = cache.lookup([*range(20), 99, 98])
        assert answer[:5] == (16, "diverged", 20, 20, 99)
        held.release()

    def test_namespace(self, cache: RadixCache) -> None:
        put(cache, list(range(50)), "adapter").release()
        assert cache.lookup(list(range(50))).reason == "namespace"
        assert cache.lookup(list(range(50)), "adapter").reason == "full"

    def test_lookup_predicts_acquire_when_no_page_is_left_for_a_head(self) -> None:
        cache = RadixCache(2, page_size=4)
        seq = put(cache, [1, 2, 3, 4, 5, 6, 7, 8])
        answer = cache.lookup([1, 2, 3, 4, 5, 6, 0])
        assert answer.cached_len == 4
        assert cache.acquire([1, 2, 3, 4, 5, 6, 0]).cached_len == 4
        seq.release()
        assert cache.lookup([1, 2, 3, 4, 5, 6, 0]).cached_len == 4


def test_settings_are_checked() -> None:
    for bad in ({"num_pages": 0}, {"page_size": 0}, {"num_pages": True}, {"eviction": "random"}):
        with pytest.raises(InvalidRequest):
            RadixCache(**{"num_pages": 10, **bad})  # type: ignore[arg-type]


def test_without_reuse_nothing_is_shared_or_kept() -> None:
    cache = RadixCache(100, reuse=False)
    first = put(cache, [1, 2, 3, 4])
    second = put(cache, [1, 2, 3, 4])
    assert second.cached_len == 0
    assert not set(first.pages.tolist()) & set(second.pages.tolist())
    forked = first.fork()
    assert forked.pages.tolist() == first.pages.tolist()
    for seq in (first, second, forked):
        seq.release()
        cache.check()
    assert cache.stats()["pages_free"] == 100
