"""What each policy drops first, that victims are leaves, and that the cost does not grow."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from radixserve.cache import RadixCache, ReturnEstimate
from radixserve.cache.radix.eviction import POLICIES, EvictionOrder, policy_class
from radixserve.cache.radix.eviction_policies import ARC
from radixserve.cache.radix.node import Node
from radixserve.config import EVICTION_POLICIES
from radixserve.errors import InvalidRequest, OutOfPages


def serve(cache: RadixCache, tokens: Sequence[int], **options: int) -> int:
    """One request from beginning to end; the tokens that it found."""
    seq = cache.acquire(tokens, priority=options.get("priority", 0))
    seq.extend(tokens[seq.cached_len :])
    seq.commit(len(tokens))
    cached_len = seq.cached_len
    seq.release()
    return cached_len


def block(name: int, size: int = 10) -> list[int]:
    return [name * 1000 + i for i in range(size)]


def is_cached(cache: RadixCache, tokens: list[int]) -> bool:
    return cache.lookup(tokens, allow_full=True).cached_len == len(tokens)


def survivors(cache: RadixCache, names: Sequence[int], size: int = 10) -> list[int]:
    return [name for name in names if is_cached(cache, block(name, size))]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[EvictionOrder]:
    """The orders of eviction of the caches that the test makes."""
    orders: list[EvictionOrder] = []

    def recorded(make: Callable[[int], EvictionOrder]) -> Callable[[int], EvictionOrder]:
        return lambda num_pages: orders.append(make(num_pages)) or orders[-1]

    for name in POLICIES:
        monkeypatch.setitem(POLICIES, name, recorded(policy_class(name)))
    return orders


def test_there_is_a_policy_for_each_name() -> None:
    assert tuple(POLICIES) == EVICTION_POLICIES


class TestWhoGoes:
    def test_lru_drops_what_was_used_longest_ago(self) -> None:
        cache = RadixCache(60, eviction="lru")
        for name in (1, 2, 3, 4, 1):
            serve(cache, block(name))
        cache.evict(20)
        assert survivors(cache, (1, 2, 3, 4)) == [1, 4]

    def test_fifo_drops_what_came_first_however_often_it_was_used(self) -> None:
        cache = RadixCache(60, eviction="fifo")
        for name in (1, 2, 3, 4, 1, 1):
            serve(cache, block(name))
        cache.evict(20)
        assert survivors(cache, (1, 2, 3, 4)) == [3, 4]

    def test_fifo_keeps_a_head_for_as_long_as_its_youngest_tail(self) -> None:
        cache = RadixCache(60, eviction="fifo")
        serve(cache, block(1) + block(2))
        serve(cache, block(3))
        serve(cache, block(1) + block(4))
        cache.evict(20)
        assert is_cached(cache, block(1) + block(4))
        assert survivors(cache, (1, 3)) == [1]

    def test_lfu_drops_what_was_reused_least(self) -> None:
        cache = RadixCache(60, eviction="lfu")
        for name in (1, 1, 1, 2, 2, 3, 4):
            serve(cache, block(name))
        cache.evict(20)
        assert survivors(cache, (1, 2, 3, 4)) == [1, 2]

    def test_a_shared_head_is_used_more_than_the_tail_below_it(self) -> None:
        cache = RadixCache(100, eviction="lfu")
        serve(cache, block(1) + block(2))
        serve(cache, block(1) + block(3))
        serve(cache, block(4))
        cache.evict(30)
        assert survivors(cache, (1, 4)) == [1]

    @pytest.mark.parametrize("eviction", ["slru", "arc"])
    def test_a_scan_does_not_wash_out_what_was_seen_twice(self, eviction: str) -> None:
        cache = RadixCache(100, eviction=eviction)
        for name in (1, 2, 1, 2):
            serve(cache, block(name))
        for name in range(10, 60):  # fifty strangers, five times the pool
            serve(cache, block(name))
        assert survivors(cache, (1, 2)) == [1, 2]

    def test_slru_lets_the_protected_ones_go_back(self) -> None:
        cache = RadixCache(110, eviction="slru")
        for name in range(10):
            serve(cache, block(name))
            serve(cache, block(name))  # all of them seen twice, more than 80 % of the pool
        cache.evict(30)
        assert survivors(cache, range(10)) == [3, 4, 5, 6, 7, 8, 9]

    def test_priority_drops_the_unimportant_first(self) -> None:
        cache = RadixCache(60, eviction="priority")
        for name, priority in ((1, 5), (2, -1), (3, 0), (4, 2)):
            serve(cache, block(name), priority=priority)
        cache.evict(20)
        assert survivors(cache, (1, 2, 3, 4)) == [1, 4]

    def test_the_most_important_reader_of_a_head_counts(self) -> None:
        cache = RadixCache(100, eviction="priority")
        serve(cache, block(1) + block(2), priority=3)
        serve(cache, block(1) + block(3), priority=-3)
        serve(cache, block(4), priority=1)
        cache.evict(20)
        assert is_cached(cache, block(1) + block(2))
        assert survivors(cache, (1, 4)) == [1]

    def test_unknown_policies_are_refused_by_name(self) -> None:
        with pytest.raises(InvalidRequest, match=r"eviction must be.*lru"):
            RadixCache(10, eviction="random")
        with pytest.raises(InvalidRequest, match="priority must be"):
            RadixCache(10).acquire([1], priority=2**40)


class TestARC:
    def test_coming_back_for_recent_things_gives_recency_more_room(
        self, made: list[EvictionOrder]
    ) -> None:
        cache = RadixCache(100, eviction="arc")
        [order] = made
        for name in range(5):
            serve(cache, block(name))
            serve(cache, block(name))  # seen twice
        for name in range(10, 22):
            serve(cache, block(name))  # seen once; the first ones are gone again
        assert isinstance(order, ARC)
        assert order.once_share == 0
        for name in range(10, 14):
            serve(cache, block(name))
        assert order.once_share > 0

    def test_it_adapts_where_lru_fails_and_where_lfu_fails(self) -> None:
        def hits(eviction: str, names: list[int]) -> int:
            cache = RadixCache(300, eviction=eviction)
            return sum(serve(cache, block(name)) for name in names)

        rng = random.Random(1)
        loop = [n for _ in range(40) for n in (*range(20), *(rng.randrange(100, 900),) * 1)]
        scans = [n for i in range(60) for n in (*range(10), *range(100 + 40 * i, 140 + 40 * i))]
        assert hits("arc", scans) > hits("lru", scans)
        drift = [n for i in range(100) for n in range(i, i + 10)]
        assert hits("arc", drift) > 0.9 * hits("lru", drift)
        assert hits("arc", drift) > hits("lfu", drift)
        assert hits("arc", loop) >= 0.9 * hits("lru", loop)

    def test_what_it_remembers_is_bounded(self) -> None:
        cache = RadixCache(50, eviction="arc")
        for name in range(500):
            serve(cache, block(name))
            if name % 3 == 0:
                serve(cache, block(name))
            cache.check()  # the bounds are among its laws


@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_evictions_take_leaves_and_never_more_than_asked(eviction: str, page_size: int) -> None:
    rng = random.Random(page_size)
    cache = RadixCache(400 // page_size, page_size, eviction)
    known: list[list[int]] = [[]]
    for _ in range(300):
        head = rng.choice(known)
        tokens = head[: rng.randint(0, len(head))] + [rng.randrange(50) for _ in range(30)]
        known = [*known[-20:], tokens[:150]]
        serve(cache, known[-1], priority=rng.randint(-2, 2))
        cache.check()
        if rng.random() < 0.2:
            asked = rng.randrange(40)
            rounded = -(-asked // page_size) * page_size
            could = cache.num_available - cache.stats()["pages_free"]
            assert cache.evict(asked) == min(rounded, could * page_size)
            cache.check()


@pytest.mark.pairs
@pytest.mark.parametrize("sessions", [False, True])
@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
@pytest.mark.parametrize("page_size", [1, 4])
def test_evictions_go_as_previewed(page_size: int, eviction: str, sessions: bool) -> None:
    rng = random.Random(eviction)
    now = [0.0]
    cache = RadixCache(2_000 // page_size, page_size, eviction, clock=lambda: now[0])
    open_sessions = [cache.open_session(str(n), lease_s=50.0) for n in range(6)] if sessions else []
    known: list[list[int]] = [[]]
    held = []
    for _ in range(60):
        now[0] += rng.random()
        head = rng.choice(known)
        tokens = head[: rng.randint(0, len(head))] + [rng.randrange(50) for _ in range(20)]
        known.append(tokens[:100])
        session = rng.choice([None, *open_sessions])
        seq = cache.acquire(known[-1], priority=rng.randint(-2, 2), session=session)
        seq.extend(known[-1][seq.cached_len :])
        seq.commit(seq.length)
        held.append(seq)
        if len(held) > 3:
            held.pop(rng.randrange(3)).release()
    for session in open_sessions[:3]:
        session.close()
    before = cache.dump()
    wanted = cache.eviction_preview(10_000)
    assert cache.dump() == before
    assert sum(victim["num_pages"] for victim in wanted) == cache.stats()["pages_cached"]
    assert cache.eviction_preview(3) == wanted[:3]
    num_checked = 0
    while wanted and not wanted[0]["reason"].startswith("leased"):  # to evict one ends its lease
        first = wanted.pop(0)
        cache.evict(first["num_pages"] * page_size)
        cache.check()
        assert cache.eviction_preview(10_000) == wanted
        num_checked += 1
    assert num_checked > 10


@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
def test_an_eviction_looks_at_as_few_nodes_in_a_large_tree_as_in_a_small_one(
    eviction: str, made: list[EvictionOrder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in nodes asked for, discarded or added, not in seconds."""
    calls: dict[int, int] = {}
    for leaves in (100, 5_000):
        cache = RadixCache(leaves * 4, eviction=eviction)
        for row in np.arange(leaves * 4, dtype=np.int32).reshape(leaves, 4):
            serve(cache, row.tolist())
        order = made[-1]
        count = [0]

        def counted(name: str, order: EvictionOrder = order, count: list[int] = count) -> None:
            plain = getattr(order, name)

            def call(*args: Node) -> object:
                count[0] += 1
                return plain(*args)

            monkeypatch.setattr(order, name, call)

        for name in ("add", "discard", "victim"):
            counted(name)
        cache.evict(40)
        calls[leaves] = count[0]
    assert calls[100] == calls[5_000]


def expected(
    at: float, *, late_at: float = 1e9, is_regular: bool = True, probability: float = 0.9
) -> ReturnEstimate:
    return ReturnEstimate(at, at, late_at, probability, is_regular)


UNLIKELY = expected(9.0, is_regular=False, probability=0.1)


class TestExpectedReturn:
    @staticmethod
    def filled(returns: dict[int, ReturnEstimate | None], now: list[float]) -> RadixCache:
        """Blocks that were released in this order with these estimates."""
        cache = RadixCache(100, eviction="expected-return", clock=lambda: now[0])
        for name, estimate in returns.items():
            seq = cache.acquire(block(name))
            seq.extend(block(name))
            seq.commit(10)
            seq.expected_return = estimate
            seq.release()
        return cache

    def test_of_regular_ones_the_last_to_return_goes_first(self) -> None:
        cache = self.filled({1: expected(30.0), 2: expected(10.0), 3: expected(20.0)}, [0.0])
        cache.evict(10)
        assert survivors(cache, (1, 2, 3)) == [2, 3]
        cache.evict(10)
        assert survivors(cache, (1, 2, 3)) == [2]

    def test_what_is_late_or_unknown_goes_before_them(self) -> None:
        now = [0.0]
        returns = {1: expected(3.0, late_at=5.0), 2: expected(50.0), 3: None}
        cache = self.filled(returns, now)
        now[0] = 6.0
        cache.evict(10)
        assert survivors(cache, (1, 2, 3)) == [1, 2]
        cache.evict(10)
        assert survivors(cache, (1, 2, 3)) == [2]

    def test_irregular_ones_go_by_recency(self) -> None:
        returns = {number: expected(40.0 - number, is_regular=False) for number in (1, 2, 3)}
        cache = self.filled(returns, [0.0])  # type: ignore[arg-type]
        cache.evict(10)
        assert survivors(cache, (1, 2, 3)) == [2, 3]

    def test_what_probably_does_not_come_back_goes_first(self) -> None:
        irregular = expected(9.0, is_regular=False)
        returns = {1: irregular, 2: None, 3: UNLIKELY, 4: expected(9.0), 5: UNLIKELY}
        cache = self.filled(returns, [0.0])  # type: ignore[arg-type]
        order = []
        while left := survivors(cache, (1, 2, 3, 4, 5)):
            cache.evict(10)
            order += [name for name in left if name not in survivors(cache, (1, 2, 3, 4, 5))]
        assert order == [3, 5, 1, 2, 4]

    def test_a_prefix_that_was_reused_stays_whoever_used_it(self) -> None:
        """Prompts that are sent once share it: each of them goes, but not what they share."""
        cache = self.filled({1: expected(9.0, is_regular=False)}, [0.0])
        for number in range(3):
            tokens = [*block(7), *block(10 + number)]
            with cache.acquire(tokens) as seq:
                seq.extend(tokens[seq.length :])
                seq.commit(20)
                seq.expected_return = UNLIKELY
            if number:
                cache.evict(10)  # its own part
        cache.evict(10)
        assert survivors(cache, (1, 7)) == [1, 7]

    def test_what_a_waiting_request_will_reuse_goes_last(self) -> None:
        cache = self.filled({1: expected(30.0), 2: expected(10.0)}, [0.0])
        watch = cache.watch(np.asarray(block(1), np.int32))
        cache.expect_return(watch, expected(-1.0))
        watch.close()
        cache.evict(10)
        assert survivors(cache, (1, 2)) == [1]

    def test_a_later_estimate_holds_for_what_was_released_before(self) -> None:
        cache = self.filled({1: None, 2: None, 3: None}, [7.0])
        cache.adopt_returns(ReturnEstimate(9.0, 2.0, 20.0, 0.9, is_regular=True))
        assert [estimate for _, estimate in cache.victims()] == [
            ReturnEstimate(9.0, 2.0, 20.0, 0.9, is_regular=True)
        ] * 3

    @pytest.mark.parametrize("seed", range(12))
    def test_any_estimates_leave_victims_that_are_leaves(self, seed: int) -> None:
        """The audit finds a node that would outlive what is below it."""
        rng, now = random.Random(seed), [0.0]
        cache = RadixCache(
            rng.choice([40, 80, 200]),
            rng.choice([1, 1, 4]),
            "expected-return",
            clock=lambda: now[0],
        )
        sessions, live, known = [cache.open_session("a")], [], [[0]]
        for _ in range(300):
            now[0] += rng.random()
            if rng.random() < 0.05:
                sessions.append(cache.open_session("b"))
                sessions.pop(0).close()
            if rng.random() < 0.5:
                head = rng.choice(known)
                tokens = head[: rng.randint(0, len(head))]
                tokens = tokens + [rng.randrange(3) for _ in range(rng.randint(1, 12))]
                if rng.random() < 0.5:
                    watch = cache.watch(np.asarray(tokens, np.int32))
                    cache.expect_return(watch, expected(-1.0, late_at=now[0] + 9.0))
                    watch.close()
                seq = cache.acquire(tokens, session=rng.choice([None, sessions[0]]))
                try:
                    seq.extend(tokens[seq.length :])
                except OutOfPages:
                    seq.release()
                    continue
                seq.commit(seq.length)
                live.append(seq)
                known = [*known[-30:], tokens]
            elif live:
                seq, wait_s = live.pop(rng.randrange(len(live))), rng.choice([0.5, 3.0, 20.0])
                estimate = expected(now[0] + wait_s, late_at=now[0] + 2 * wait_s)
                irregular = estimate._replace(is_regular=False)
                unlikely = irregular._replace(probability=0.2)
                seq.expected_return = rng.choice([None, estimate, irregular, unlikely])
                seq.release()
            if rng.random() < 0.02:
                cache.adopt_returns(expected(now[0] + 2.0, late_at=now[0] + 5.0))
            cache.evict(rng.choice([0, 0, 0, 9]))
            cache.check()
