"""Sessions: what closed ones leave goes first, what leases keep goes last, and nothing waits."""

from __future__ import annotations

import pytest

from radixserve.cache import RadixCache, SnapshotView
from radixserve.config import EVICTION_POLICIES
from radixserve.errors import InvalidRequest
from radixserve.retention.sessions import RadixSession, SessionRetention


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make(clock: Clock, num_pages: int = 100, eviction: str = "lru", **options: float) -> RadixCache:
    return RadixCache(num_pages, eviction=eviction, clock=clock, **options)  # type: ignore[arg-type]


def serve(cache: RadixCache, tokens: list[int], session: RadixSession | None = None) -> int:
    seq = cache.acquire(tokens, session=session)
    seq.extend(tokens[seq.cached_len :])
    seq.commit(len(tokens))
    cached_len = seq.cached_len
    seq.release()
    cache.check()
    return cached_len


def block(name: int, size: int = 10) -> list[int]:
    return [name * 1000 + i for i in range(size)]


def survivors(cache: RadixCache, names: tuple[int, ...]) -> list[int]:
    kept = []
    for name in names:
        if cache.lookup(block(name), allow_full=True).cached_len == 10:
            kept.append(name)
    return kept


class TestClosed:
    @pytest.mark.parametrize("eviction", EVICTION_POLICIES)
    def test_what_only_closed_sessions_reach_goes_first(self, clock: Clock, eviction: str) -> None:
        cache = make(clock, eviction=eviction)
        old, over = cache.open_session("old"), cache.open_session("over")
        serve(cache, block(1))
        serve(cache, block(2), old)
        serve(cache, block(3), over)  # the youngest
        over.close()
        cache.check()
        assert cache.stats()["pages_closed"] == 10
        cache.evict(10)
        assert survivors(cache, (1, 2, 3)) == [1, 2]
        cache.evict(10)
        assert survivors(cache, (1, 2, 3)) == [2], "an open session's lease keeps its pages"
        cache.evict(10)
        assert survivors(cache, (1, 2, 3)) == []

    def test_what_others_reach_too_is_not_closed(self, clock: Clock) -> None:
        cache = make(clock)
        a, b = cache.open_session("a"), cache.open_session("b")
        serve(cache, block(1) + block(2), a)
        serve(cache, block(1) + block(3), b)
        serve(cache, block(4) + block(5), a)
        serve(cache, block(4))  # without a session
        a.close()
        cache.check()
        assert cache.stats()["pages_closed"] == 20  # blocks 2 and 5
        b.close()
        assert cache.stats()["pages_closed"] == 40  # 1 and 3, too; 4 is everybody's
        cache.evict(40)
        assert survivors(cache, (1, 4)) == [4]

    def test_a_sequence_that_outlives_its_session(self, clock: Clock) -> None:
        cache = make(clock)
        chat = cache.open_session("chat")
        seq = cache.acquire(block(1), session=chat)
        seq.extend(block(1))
        chat.close()
        chat.close()
        seq.commit(10)
        assert cache.stats()["pages_closed"] == 0  # it is still held
        seq.release()
        cache.check()
        assert cache.stats()["pages_closed"] == 10

    def test_a_dead_branch_of_an_open_chat_is_closed(self, clock: Clock) -> None:
        """Thinking that was rolled back will not be continued."""
        cache = make(clock)
        chat = cache.open_session("chat")
        seq = cache.acquire(block(1), session=chat)
        seq.extend(block(1) + block(2))
        seq.commit(20)
        seq.truncate(10)
        seq.extend(block(3))
        seq.commit(20)
        seq.release()
        cache.check()
        assert cache.stats()["pages_closed"] == 10
        cache.evict(10)
        assert cache.lookup(block(1) + block(3), allow_full=True).cached_len == 20

    def test_coming_back_opens_what_was_closed(self, clock: Clock) -> None:
        cache = make(clock)
        first = cache.open_session("first")
        serve(cache, block(1), first)
        first.close()
        again = cache.open_session("again")
        assert serve(cache, block(1) + block(2), again) == 10
        assert cache.stats()["pages_closed"] == 0

    def test_so_is_thinking_that_each_turn_rolls_back(self, clock: Clock) -> None:
        for page_size in (1, 2, 5):
            cache = RadixCache(1000 // page_size, page_size, clock=clock)
            chat, said = cache.open_session("chat"), block(0)
            for turn in range(1, 5):
                seq = cache.acquire(said, session=chat, allow_full=True)
                seq.extend(said[seq.cached_len :])
                seq.commit(len(said))
                seq.extend(block(100 + turn, 50))
                seq.commit(seq.length)
                seq.truncate(len(said))
                seq.extend(block(turn))
                seq.commit(seq.length)
                said = seq.tokens.tolist()
                seq.release()
                cache.check()
            stats = cache.stats()
            assert stats["pages_closed"] == 200 // page_size
            assert stats["pages_leased"] == 50 // page_size
            assert [lease["tokens"] for lease in stats["leases"]] == [50]

    @pytest.mark.parametrize("page_size", [1, 2, 5])
    def test_continuing_from_the_end_of_another_session(self, clock: Clock, page_size: int) -> None:
        cache = RadixCache(100 // page_size, page_size, clock=clock)
        parent, child = cache.open_session("parent"), cache.open_session("child")
        serve(cache, block(0))
        serve(cache, block(1), parent)
        serve(cache, block(1) + block(2), child)
        serve(cache, block(0) + block(3), child)
        child.close()
        cache.check()
        assert cache.stats()["pages_closed"] == 20 // page_size
        assert cache.stats()["pages_leased"] == 10 // page_size
        assert [lease["tokens"] for lease in cache.stats()["leases"]] == [10]

    def test_a_child_that_returns_keeps_its_demoted_parent(self, clock: Clock) -> None:
        cache = make(clock, eviction="slru")
        chat = cache.open_session("chat", lease_s=0)
        for tail in (1, 2):
            serve(cache, [*block(1), tail])
        for tail in (3, 4):
            serve(cache, block(1) + block(2, 3) + [tail], chat)
        chat.close()  # what it used leaves the policy as seen twice
        for name in range(10, 18):
            serve(cache, block(name, 9))
            serve(cache, [*block(name, 9), 0])  # the head of block 1 is protected no more
        serve(cache, block(1) + block(2, 3) + [9])
        cache.evict(60)
        cache.check()


class TestLeases:
    def test_a_lease_ends(self, clock: Clock) -> None:
        cache = make(clock)
        chat = cache.open_session("chat", lease_s=60)
        serve(cache, block(1), chat)
        serve(cache, block(2))
        serve(cache, block(3))
        cache.evict(10)
        assert survivors(cache, (1, 2, 3)) == [1, 3], "leased: the next oldest goes"
        clock.now += 61
        cache.evict(10)
        assert survivors(cache, (1, 2, 3)) == [3], "ended: it was the oldest"
        assert cache.stats()["leases"] == []

    def test_a_turn_renews_it_and_moves_it_to_the_new_end(self, clock: Clock) -> None:
        cache = make(clock)
        chat = cache.open_session("chat", lease_s=60)
        said = block(1)
        for turn in range(2, 5):
            serve(cache, said, chat)
            clock.now += 50
            said = said + block(turn)
        (lease,) = cache.stats()["leases"]
        assert lease == {"session": "chat", "tokens": 30, "seconds_left": 10.0}
        assert cache.stats()["pages_leased"] == 30

    def test_the_oldest_leases_end_beyond_the_share(self, clock: Clock) -> None:
        cache = make(clock, max_lease_share=0.35)
        for name in range(1, 6):
            serve(cache, block(name), cache.open_session(f"h{name}", lease_s=1e9))
        assert [lease["session"] for lease in cache.stats()["leases"]] == ["h3", "h4", "h5"]
        assert cache.stats()["pages_leased"] == 30
        serve(cache, block(6, 60), cache.open_session("too large", lease_s=1e9))
        assert [lease["session"] for lease in cache.stats()["leases"]] == ["h3", "h4", "h5"]
        quick, slow = (
            cache.open_session("quick", lease_s=5),
            cache.open_session("slow", lease_s=1e9),
        )
        serve(cache, block(7), quick)
        serve(cache, block(8), slow)
        assert [lease["session"] for lease in cache.stats()["leases"]] == ["quick", "h5", "slow"]

    @pytest.mark.parametrize("eviction", EVICTION_POLICIES)
    def test_a_lease_never_keeps_anybody_waiting(self, clock: Clock, eviction: str) -> None:
        cache = make(clock, eviction=eviction, max_lease_share=1.0)
        for name in range(10):
            serve(cache, block(name), cache.open_session(f"h{name}", lease_s=1e9))
        assert cache.num_available == 100
        assert serve(cache, block(50, 100)) == 0  # the whole pool

    def test_no_lease_when_none_is_wanted(self, clock: Clock) -> None:
        cache = make(clock)
        serve(cache, block(1), cache.open_session("quiet", lease_s=0))
        assert cache.stats()["leases"] == []
        assert cache.stats()["sessions"] == 1

    def test_each_branch_of_a_session_has_its_own(self, clock: Clock) -> None:
        cache = make(clock)
        tree = cache.open_session("tree search", lease_s=60)
        later = cache.acquire(block(1) + block(3), session=tree)  # at work together
        later.extend(block(1) + block(3))
        serve(cache, block(1) + block(2), tree)
        clock.now += 40
        later.commit(20)
        later.release()
        assert len(cache.stats()["leases"]) == 2
        clock.now += 30
        assert [lease["seconds_left"] for lease in cache.stats()["leases"]] == [30.0]
        assert cache.stats()["pages_leased"] == 20

    def test_a_lease_follows_what_is_left_of_its_path(self, clock: Clock) -> None:
        cache = make(clock)
        a, b = cache.open_session("a", lease_s=1e9), cache.open_session("b", lease_s=1e9)
        serve(cache, block(1) + block(2), a)
        serve(cache, block(1) + block(3), b)
        cache.evict(10)  # block 2, as a last resort
        cache.check()
        assert [lease["tokens"] for lease in cache.stats()["leases"]] == [10, 20]
        a.close()
        cache.check()
        assert cache.stats()["pages_closed"] == 0
        b.close()
        cache.check()
        assert cache.stats()["pages_closed"] == 20


class TestBorders:
    def test_a_session_belongs_to_one_cache(self, clock: Clock) -> None:
        other = make(clock).open_session("x")
        for session in (other, "x"):
            with pytest.raises(InvalidRequest, match="open_session"):
                make(clock).acquire([1, 2], session=session)  # type: ignore[arg-type]

    def test_arguments_are_checked(self, clock: Clock) -> None:
        cache = make(clock)
        with pytest.raises(InvalidRequest, match="name must be a string"):
            cache.open_session(3)  # type: ignore[arg-type]
        for bad in (-1, float("nan"), "long"):
            with pytest.raises(InvalidRequest, match="lease_s must be"):
                cache.open_session("x", lease_s=bad)  # type: ignore[arg-type]
        for bad in (-0.1, 1.5):
            with pytest.raises(InvalidRequest, match="max_lease_share must be"):
                make(clock, max_lease_share=bad)

    def test_a_reset_ends_leases_and_forgets_where_sessions_ended(self, clock: Clock) -> None:
        cache = make(clock)
        chat = cache.open_session("chat", lease_s=1e9)
        notes = cache.open_session("notes", retain_until=1e9)
        closed = cache.open_session("closed")
        for number, session in enumerate((chat, notes, closed)):
            serve(cache, block(number), session)
        with cache.acquire(block(4), "other", session=chat) as seq:
            seq.extend(block(4))
            seq.commit(10)
        closed.close()
        assert cache.stats()["pages_leased"] == 20
        cache.reset("")
        cache.check()
        stats = cache.stats()
        assert (stats["pages_leased"], stats["pages_retained"], stats["pages_closed"]) == (10, 0, 0)
        assert [lease["tokens"] for lease in stats["leases"]] == [10]
        assert cache.held_tokens([chat, notes]) == 10
        cache.reset()
        cache.check()
        assert cache.stats()["leases"] == []
        assert serve(cache, block(2, 100)) == 0  # takes every page
        chat.close()
        cache.check()

    def test_the_audit_finds_leases_that_a_reset_left(
        self, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cache = make(clock)
        serve(cache, block(1), cache.open_session("chat", lease_s=1e9))
        monkeypatch.setattr(SessionRetention, "on_reset", lambda *_: None)
        cache.reset()
        with pytest.raises(AssertionError, match="still reached or leased"):
            cache.check()

    def test_everything_that_shows_leases_ends_expired_ones_first(self, clock: Clock) -> None:
        cache = make(clock)
        serve(cache, block(1), cache.open_session("chat", lease_s=5.0))
        clock.now += 5.0
        (node,) = cache.dump()["namespaces"][""]["children"]
        assert node["state"] == "cached"
        cache, clock.now = make(clock), 0.0
        serve(cache, block(1), cache.open_session("chat", lease_s=5.0))
        clock.now += 5.0
        (node,) = cache.snapshot(SnapshotView())["nodes"]
        assert node["state"] == "cached"

    def test_a_session_may_come_late(self, clock: Clock) -> None:
        """What was cached before the first session keeps its order."""
        cache = make(clock)
        serve(cache, block(1))
        serve(cache, block(2))
        chat = cache.open_session("chat", lease_s=0)
        serve(cache, block(3), chat)
        cache.evict(10)
        assert survivors(cache, (1, 2, 3)) == [2, 3]
