"""What every prefix cache promises when it is changed: reuse, commit, forks, eviction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from radixserve.errors import InvalidRequest
from tests.cache.kinds import Kind, put
from tests.cache.world import picture


class TestReuse:
    @pytest.mark.parametrize("shared", [0, 1, 2, 15, 16, 17, 32, 63, 64, 99])
    def test_the_longest_cached_prefix_is_found(self, kind: Kind, shared: int) -> None:
        cache = kind.for_tokens(1000)
        first = list(range(1000, 1100))
        put(cache, first).release()
        second = first[:shared] + list(range(2000, 2030))
        expected = kind.cached_len(shared)
        watch = cache.watch(np.asarray(second, np.int32))
        assert cache.lookup(second).cached_len == watch.cached_len == expected
        watch.close()
        seq = cache.acquire(second)
        assert seq.cached_len == seq.length == seq.committed_len == expected
        assert seq.tokens.tolist() == second[:expected]
        assert len(seq.pages) == -(-expected // cache.page_size)
        assert not seq.is_released
        assert not seq.is_stale
        cache.check()

    def test_at_least_the_last_token_is_left_unless_all_may_be_reused(self, kind: Kind) -> None:
        cache = kind.for_tokens(1000)
        tokens = list(range(48))
        put(cache, tokens).release()
        assert cache.lookup(tokens).cached_len == kind.cached_len(47)
        assert cache.acquire(tokens).cached_len == kind.cached_len(47)
        assert cache.lookup(tokens, allow_full=True).cached_len == 48
        assert cache.acquire(tokens, allow_full=True).cached_len == 48

    def test_looking_changes_nothing(self, kind: Kind) -> None:
        cache = kind.for_tokens(200)
        put(cache, list(range(60))).release()
        put(cache, list(range(100, 140)), "b").release()
        before = picture(cache)
        for tokens in ([], [5], list(range(60)), [*range(40), 7], list(range(100, 140))):
            cache.lookup(tokens)
            cache.lookup(tokens, "c", allow_full=True)
            cache.watch(np.asarray(tokens, np.int32), "d").close()
        cache.changed_watches()
        assert picture(cache) == before

    def test_whole_shared_pages_are_the_same_pages(self, kind: Kind) -> None:
        cache = kind.for_tokens(400)
        first = put(cache, list(range(70)))
        seq = cache.acquire([*range(67), 999, 998])
        whole = kind.cached_len(67) // cache.page_size
        assert seq.pages[:whole].tolist() == first.pages[:whole].tolist()
        own = seq.pages[whole:].tolist()
        assert not set(own) & set(first.pages.tolist())
        assert [copy[1] for copy in seq.cow_copies] == own
        cache.check()

    def test_a_conversation_reuses_what_was_said(self, kind: Kind) -> None:
        cache = kind.for_tokens(2000)
        history: list[int] = []
        for turn in range(12):
            prompt = history + [turn * 100 + i for i in range(13)]
            seq = cache.acquire(prompt)
            assert seq.cached_len == kind.cached_len(len(history))
            answer = [turn * 100 + 50 + i for i in range(7)]
            seq.extend(prompt[seq.cached_len :] + answer)
            seq.commit(seq.length)
            seq.release()
            cache.check()
            history = prompt + answer
        assert cache.stats()["pages_private"] == 0

    def test_any_sequence_of_ints_is_a_prompt(self, kind: Kind) -> None:
        cache = kind.for_tokens(100)
        tokens = list(range(33))
        put(cache, tokens).release()
        assert cache.lookup(tuple(tokens)).cached_len == kind.cached_len(32)
        assert cache.lookup(np.asarray(tokens, np.int64)).cached_len == kind.cached_len(32)
        twice = np.repeat(np.asarray(tokens, np.int32), 2)[::2]  # not contiguous
        assert cache.lookup(twice).cached_len == kind.cached_len(32)
        blob = b"." + np.asarray([*tokens[:20], 99], np.int32).tobytes()
        unaligned = np.frombuffer(blob, np.int32, offset=1)
        assert cache.lookup(unaligned).cached_len == kind.cached_len(20)
        cache.acquire(unaligned).release()

    def test_extreme_token_ids(self, kind: Kind) -> None:
        cache = kind.for_tokens(200)
        tokens = [2**31 - 1, 0, 2**24, 127] * 20
        put(cache, tokens).release()
        assert cache.lookup(tokens).cached_len == kind.cached_len(79)

    def test_what_is_wrong_is_refused_and_changes_nothing(self, kind: Kind) -> None:
        cache = kind.for_tokens(200)
        put(cache, list(range(40))).release()
        before = picture(cache)
        bad_tokens: list[Any] = [[1.5, 2.0], [[1], [2]], ["a"], [2**31], [1, None], [1, 2.5], [-1]]
        bad_tokens += [[3] * 2_000 + [-(2**31)], np.array([5, -1]), (-7,)]
        calls: list[Callable[[], object]] = [
            *(lambda bad=bad: cache.acquire(bad) for bad in bad_tokens),
            *(lambda bad=bad: cache.lookup(bad) for bad in bad_tokens),
            lambda: cache.acquire([1], 5),  # type: ignore[arg-type]
            lambda: cache.acquire([1], priority="high"),  # type: ignore[arg-type]
            lambda: cache.acquire([1], session="me"),  # type: ignore[arg-type]
            lambda: cache.evict(-1),
            lambda: cache.evict(1.5),  # type: ignore[arg-type]
            lambda: cache.reset(3),  # type: ignore[arg-type]
            lambda: cache.dump(-1),
        ]
        for call in calls:
            with pytest.raises(InvalidRequest):
                call()
        assert picture(cache) == before
        cache.check()

    def test_a_sequence_refuses_negative_ids(self, kind: Kind) -> None:
        cache = kind.for_tokens(200)
        with cache.acquire([1, 2, 3]) as seq:
            for bad in ([4, -5], np.array([-1], np.int32), [7] * 2_000 + [-1]):
                with pytest.raises(InvalidRequest, match=r"must be >= 0.*, got -"):
                    seq.extend(bad)
            seq.append_placeholders(1)
            with pytest.raises(InvalidRequest, match=r"must be >= 0.*, got -1"):
                seq.fill([-1])
            assert (seq.length, seq.num_placeholders) == (1, 1)
        cache.check()

    def test_views_are_read_only(self, kind: Kind) -> None:
        cache = kind.for_tokens(200)
        with put(cache, list(range(40))) as seq:
            for view in (seq.pages, seq.tokens):
                with pytest.raises(ValueError, match="read-only"):
                    view[0] = 3
        cache.check()

    def test_blocks_of_with_release(self, kind: Kind) -> None:
        cache = kind.for_tokens(200)
        tokens = list(range(40))

        def fail_inside() -> None:
            with cache.open_session("s") as session, cache.acquire(tokens, session=session) as seq:
                held.extend((session, seq))
                seq.extend(tokens)
                seq.commit(40)
                raise KeyError

        held: list[Any] = []
        with pytest.raises(KeyError):
            fail_inside()
        session, seq = held
        assert seq.is_released
        assert not session.is_open
        stats = cache.stats()
        assert (stats["sequences"], stats["sessions"], stats["pages_locked"]) == (0, 0, 0)
        assert cache.lookup(list(range(41))).cached_len == kind.cached_len(40)
        cache.check()

    def test_stats_by_state_and_of_the_last_minute(self, kind: Kind) -> None:
        now = [1_000.0]
        cache = kind.for_tokens(400, clock=lambda: now[0])
        size, tokens = cache.page_size, list(range(kind.cached_len(192)))
        stats = cache.stats()
        assert stats["hit_rate"] == stats["collisions"] == stats["last_minute"]["hit_rate"] == 0
        with put(cache, tokens), cache.acquire([*tokens, 1]) as two:
            two.extend([1, 2])
            stats = cache.stats()
            assert stats["pages_shared"] == len(tokens) // size
            assert stats["pages_referenced"] == stats["pages_shared"] + two.num_private
            assert stats["pages_cached"] == 0
        stats = cache.stats()
        assert stats["pages_shared"] == stats["pages_referenced"] == 0
        assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]
        recent = stats["last_minute"]
        assert stats["hit_rate"] == recent["hit_rate"] == len(tokens) / (2 * len(tokens) + 1)
        assert recent["committed_tokens"] == len(tokens)
        now[0] += 40.0
        cache.evict(64)
        recent = cache.stats()["last_minute"]
        assert (recent["seconds"], recent["evicted_tokens"]) == (40.0, 64)
        assert recent["evicted_tokens_per_s"] == 64 / 40.0
        now[0] += 25.0  # all but the eviction is older than a minute
        recent = cache.stats()["last_minute"]
        assert (recent["seconds"], recent["evicted_tokens"]) == (60.0, 64)
        assert recent["committed_tokens"] == recent["hit_rate"] == recent["num_acquired"] == 0
        now[0] += 100.0
        assert cache.stats()["last_minute"]["evicted_tokens"] == 0
        assert cache.stats()["committed_tokens"] == len(tokens)

    def test_empty_and_one_token_prompts(self, kind: Kind) -> None:
        cache = kind.for_tokens(100)
        for tokens in ([], [5]):
            assert cache.lookup(tokens).cached_len == 0
            seq = cache.acquire(tokens)
            assert seq.length == 0
            assert seq.pages.tolist() == seq.tokens.tolist() == []
            seq.commit(0)
            seq.fork().release()
            seq.truncate(0)
            seq.release()
        cache.check()
        assert cache.stats()["pages_free"] == cache.num_pages


class TestCommit:
    def test_the_second_to_publish_gives_its_pages_back(self, kind: Kind) -> None:
        cache = kind.for_tokens(400)
        tokens = list(range(128))
        first, second = cache.acquire(tokens), cache.acquire(tokens)
        first.extend(tokens)
        second.extend(tokens)
        first.commit(128)
        second.commit(128)
        assert second.pages.tolist() == first.pages.tolist()
        stats = cache.stats()
        assert stats["pages_tree"] == 128 // cache.page_size
        assert stats["pages_private"] == 0
        assert stats["duplicate_tokens"] == 128
        cache.check()

    def test_two_sequences_token_by_token(self, kind: Kind) -> None:
        cache = kind.for_tokens(400)
        tokens = list(range(100))
        first, second = cache.acquire(tokens), cache.acquire(tokens)
        for position, token in enumerate(tokens):
            for seq in (first, second):
                seq.extend([token])
                seq.commit(position + 1)
                cache.check()
        first.release()
        second.release()
        cache.check()
        assert cache.lookup([*tokens, 0]).cached_len == kind.cached_len(100)
        assert cache.stats()["pages_tree"] == -(-kind.cached_len(100) // cache.page_size)

    def test_only_what_is_committed_is_found(self, kind: Kind) -> None:
        cache = kind.for_tokens(400)
        tokens = list(range(50))
        seq = cache.acquire(tokens)
        seq.extend(tokens)
        for length in (0, 1, 20, 20, 33, 50):
            seq.commit(length)
            assert seq.committed_len == length
            assert cache.lookup([*tokens, 0]).cached_len == kind.cached_len(length)
        cache.check()

    def test_the_length_must_have_room_and_not_go_back(self, kind: Kind) -> None:
        cache = kind.for_tokens(100)
        seq = put(cache, list(range(20)))
        before = picture(cache)
        for length in (19, 21):
            with pytest.raises(InvalidRequest, match="between 20"):
                seq.commit(length)
        for bad in (-1, 2.5, "a", None, True):
            with pytest.raises(InvalidRequest, match="length must be"):
                seq.commit(bad)  # type: ignore[arg-type]
        assert picture(cache) == before

    def test_views_keep_the_state_in_which_they_were_taken(self, kind: Kind) -> None:
        cache = kind.for_tokens(200)
        seq = put(cache, list(range(20)))
        tokens, pages = seq.tokens, seq.pages
        seq.extend(list(range(20, 60)))
        seq.commit(60)
        assert tokens.tolist() == list(range(20))
        assert len(pages) == -(-20 // cache.page_size)
        assert seq.tokens.tolist() == list(range(60))

    def test_extend_takes_as_many_pages_as_it_must(self, kind: Kind) -> None:
        cache = kind.for_tokens(200)
        seq = put(cache, list(range(20)))
        for count in (0, 1, 12, 13, 50):
            seq.extend([7] * count)
            assert len(seq.pages) == -(-seq.length // cache.page_size)


class TestForkAndTruncate:
    @pytest.mark.parametrize("length", [0, 1, 32, 75])
    def test_a_fork_shares_all_but_a_head(self, kind: Kind, length: int) -> None:
        cache = kind.for_tokens(400)
        seq = put(cache, list(range(length)))
        seq.extend([1, 2, 3])  # not committed: not the fork's
        forked = seq.fork()
        cache.check()
        whole, extra = divmod(length, cache.page_size)
        assert forked.length == forked.committed_len == forked.cached_len == length
        assert forked.tokens.tolist() == list(range(length))
        assert forked.pages[:whole].tolist() == seq.pages[:whole].tolist()
        assert [(dst, n) for _, dst, n in forked.cow_copies] == (
            [(int(forked.pages[whole]), extra)] if extra else []
        )
        assert forked.num_private == (1 if extra else 0)
        seq.truncate(length)
        for grown, token in ((seq, 500), (forked, 600)):
            tokens = [token + i for i in range(20)]
            grown.extend(tokens)
            grown.commit(length + 20)
            cache.check()
        for token in (500, 600):
            tokens = [*range(length), *[token + i for i in range(20)], 0]
            assert cache.lookup(tokens).cached_len == kind.cached_len(length + 20)

    def test_forks_of_forks_that_all_go_the_same_way(self, kind: Kind) -> None:
        cache = kind.for_tokens(900)
        all_of_them = [put(cache, list(range(37)))]
        for _ in range(6):
            all_of_them.append(all_of_them[-1].fork())
            cache.check()
        for seq in all_of_them:
            seq.extend(list(range(37, 80)))
            seq.commit(80)
            cache.check()
        whole = kind.cached_len(80) // cache.page_size
        assert len({tuple(seq.pages[:whole].tolist()) for seq in all_of_them}) == 1
        for seq in all_of_them:
            seq.release()
            cache.check()
        assert cache.stats()["pages_private"] == 0

    def test_a_fork_outlives_what_it_was_forked_from(self, kind: Kind) -> None:
        """Its copy is still to be made: the source must stay, whoever lets go of it."""
        cache = kind.for_tokens(64)
        seq = put(cache, list(range(21)))
        forked = seq.fork()
        sources = [source for source, _, _ in forked.cow_copies]
        seq.release()
        other = cache.acquire([9] * 64)
        other.extend([9] * (cache.num_available * cache.page_size))
        cache.check()
        assert not set(other.pages.tolist()) & set(sources)
        assert forked.tokens.tolist() == list(range(21))
        other.release()
        forked.commit(21)
        forked.release()
        cache.check()
        assert cache.stats()["pages_locked"] == 0

    @pytest.mark.parametrize("length", [0, 1, 16, 30, 64, 74, 75])
    def test_truncate_rolls_back_and_the_rest_stays_cached(self, kind: Kind, length: int) -> None:
        cache = kind.for_tokens(600)
        tokens = list(range(75))
        seq = put(cache, tokens)
        seq.extend([1, 2, 3])
        seq.truncate(length)
        assert seq.length == seq.committed_len == length
        assert len(seq.pages) == -(-length // cache.page_size)
        assert seq.cached_len <= length
        cache.check()
        tail = [500 + i for i in range(20)]
        seq.extend(tail)
        seq.commit(length + 20)
        cache.check()
        assert cache.lookup([*tokens, 0]).cached_len == kind.cached_len(75)
        assert cache.lookup([*tokens[:length], *tail, 0]).cached_len == kind.cached_len(length + 20)

    def test_a_cut_shortens_or_drops_a_pending_copy(self, kind: Kind) -> None:
        cache = kind.for_tokens(400)
        seq = put(cache, list(range(42)))
        for length in (42, 41, 37, 33, 32):
            forked = seq.fork()
            forked.extend([7] * 10)
            forked.truncate(length)
            extra = length % cache.page_size
            assert [n for _, _, n in forked.cow_copies] == ([extra] if extra else [])
            cache.check()
            forked.release()

    def test_a_cut_behind_a_pending_copy_leaves_it_whole(self, kind: Kind) -> None:
        cache = kind.for_tokens(400)
        seq = put(cache, list(range(41)))
        forked = seq.fork()
        copies = list(forked.cow_copies)
        forked.extend([7] * 40)
        forked.truncate(65)  # in a page behind the one that the copy fills
        assert forked.cow_copies == copies
        cache.check()

    def test_bad_lengths_are_refused(self, kind: Kind) -> None:
        cache = kind.for_tokens(100)
        seq = put(cache, list(range(20)))
        before = picture(cache)
        for length in (21, -1, 1.5, None):
            with pytest.raises(InvalidRequest):
                seq.truncate(length)  # type: ignore[arg-type]
        assert picture(cache) == before

    def test_a_released_sequence_says_so(self, kind: Kind) -> None:
        cache = kind.for_tokens(100)
        seq = put(cache, list(range(20)))
        seq.release()
        after = picture(cache)
        seq.release()
        assert seq.is_released
        uses: list[Callable[[], object]] = [
            lambda: seq.extend([1]),
            lambda: seq.commit(20),
            lambda: seq.truncate(3),
            seq.fork,
        ]
        for use in uses:
            with pytest.raises(InvalidRequest, match="released"):
                use()
        assert picture(cache) == after
        cache.check()
