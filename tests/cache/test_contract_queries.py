"""What every prefix cache tells a caller: namespaces, reasons, sessions, watches, counters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from radixserve.cache import RadixCache
from radixserve.errors import InvalidRequest
from tests.cache.kinds import Kind, put
from tests.cache.world import picture


class TestReset:
    @pytest.mark.parametrize("namespace", [None, ""])
    def test_reset_forgets_and_frees(self, kind: Kind, namespace: str | None) -> None:
        cache = kind.for_tokens(512)
        put(cache, list(range(100))).release()
        cache.reset(namespace)
        cache.check()
        assert cache.lookup(list(range(100)))[:5] == (0, "never_seen", 0, None, None)
        assert cache.stats()["pages_free"] == cache.num_pages
        assert cache.evict(10) == 0
        put(cache, list(range(512))).release()  # all of it can be used again
        cache.check()

    def test_what_is_in_use_goes_on_undisturbed(self, kind: Kind) -> None:
        cache = kind.for_tokens(512)
        tokens = list(range(100))
        seq, other = put(cache, tokens), put(cache, tokens)
        cache.reset()
        assert seq.is_stale
        cache.check()
        new = put(cache, tokens)
        assert new.cached_len == 0
        assert not new.is_stale
        assert not set(new.pages.tolist()) & set(seq.pages.tolist())
        forked = seq.fork()
        assert forked.is_stale
        for sequence in (seq, forked):
            sequence.extend(list(range(100, 140)))
            sequence.commit(140)
            cache.check()
        other.truncate(37)
        cache.check()
        assert cache.lookup(list(range(141))).cached_len == kind.cached_len(100)  # by the new one
        for sequence in (seq, other, forked):
            sequence.release()
            cache.check()
        stats = cache.stats()
        held = kind.cached_len(100) if kind.grain > 1 else 100
        assert stats["pages_tree"] == -(-held // cache.page_size)
        new.release()
        cache.reset()
        cache.check()
        assert cache.stats()["pages_free"] == cache.num_pages

    def test_only_the_named_namespace(self, kind: Kind) -> None:
        cache = kind.for_tokens(256)
        held = put(cache, list(range(48)), "a")
        put(cache, list(range(48)), "b").release()
        cache.reset("a")
        cache.reset("unknown")
        assert held.is_stale
        assert cache.lookup(list(range(49)), "a").cached_len == 0
        assert cache.lookup(list(range(49)), "b").cached_len == 48
        cache.check()


class TestNamespaces:
    def test_equal_tokens_in_two_namespaces_share_nothing(self, kind: Kind) -> None:
        cache = kind.for_tokens(512)
        tokens = list(range(48))
        sequences = [put(cache, tokens, name) for name in ("", "a", "b", "\ud800")]
        pages = [page for seq in sequences for page in seq.pages.tolist()]
        assert len(set(pages)) == len(pages)
        assert cache.stats()["namespaces"] == 4
        for seq in sequences:
            seq.release()
        cache.evict(10**6)
        cache.check()
        assert cache.stats()["namespaces"] == 0


class TestReasons:
    def test_each_one(self, kind: Kind) -> None:
        cache = kind.for_tokens(512)
        assert cache.lookup(list(range(49))).reason == "never_seen"
        put(cache, list(range(64))).release()
        assert cache.lookup(list(range(65)))[:5] == (64, "full", 64, None, None)
        assert cache.lookup([*range(64), *[7] * 20]).reason == "never_seen"
        assert cache.lookup(list(range(49)), "other").reason == "namespace"
        assert cache.lookup([9] * 40).reason == "never_seen"
        cache.evict(32)
        answer = cache.lookup(list(range(65)))
        assert (answer.cached_len, answer.reason) == (32, "evicted")
        cache.evict(10**6)
        assert cache.lookup(list(range(65))).reason == "evicted"
        put(cache, list(range(64))).release()
        assert cache.lookup(list(range(65))).reason == "full"


class TestSessions:
    def test_open_use_and_close(self, kind: Kind) -> None:
        cache = kind.for_tokens(256)
        session = cache.open_session("chat 1", lease_s=2.5)
        other = cache.open_session("chat 2")
        assert (session.name, session.is_open) == ("chat 1", True)
        assert cache.stats()["sessions"] == 2
        for priority in (0, 5, -1):
            seq = cache.acquire(list(range(40)), session=session, priority=priority)
            seq.extend(list(range(seq.cached_len, 40)))
            seq.commit(40)
            seq.release()
            cache.check()
        for _ in range(2):
            session.close()
            assert not session.is_open
            assert cache.stats()["sessions"] == 1
        cache.acquire(list(range(40)), session=session).release()  # closed: like none
        other.close()
        cache.check()
        cache.evict(10**6)
        assert cache.stats()["pages_free"] == cache.num_pages

    def test_what_is_wrong_is_refused(self, kind: Kind) -> None:
        cache = kind.for_tokens(256)
        for name, lease in ((5, None), ("a", -1.0), ("a", float("nan")), ("a", "long")):
            with pytest.raises(InvalidRequest):
                cache.open_session(name, lease_s=lease)  # type: ignore[arg-type]
        foreign = kind.for_tokens(256).open_session("a")
        with pytest.raises(InvalidRequest, match="open_session"):
            cache.acquire([1, 2, 3], session=foreign)
        assert cache.stats()["sequences"] == cache.stats()["sessions"] == 0


class TestWatches:
    def test_only_those_concerned_are_refreshed(self, kind: Kind) -> None:
        cache = kind.for_tokens(2048)
        put(cache, list(range(64))).release()
        heads = {"deep": list(range(64)), "cold": [900 + i for i in range(64)]}
        watches = {
            name: cache.watch(np.asarray([*head, *[5] * 32, 0], np.int32))
            for name, head in heads.items()
        }
        assert [watch.cached_len for watch in watches.values()] == [64, 0]
        cache.changed_watches()
        put(cache, [700 + i for i in range(64)]).release()  # elsewhere
        assert cache.changed_watches() == []
        put(cache, [*heads["cold"], *[6] * 32]).release()
        assert cache.changed_watches() == [watches["cold"]]
        assert watches["cold"].cached_len == 64
        seq = put(cache, [*heads["deep"], *[5] * 32])
        assert cache.changed_watches() == [watches["deep"]]
        assert (watches["deep"].cached_len, watches["deep"].locked_len) == (96, 96)
        seq.release()
        assert (watches["deep"].cached_len, watches["deep"].locked_len) == (96, 0)
        cache.reset()
        assert set(cache.changed_watches()) == set(watches.values())
        assert [watch.cached_len for watch in watches.values()] == [0, 0]
        for watch in watches.values():
            watch.close()
        put(cache, heads["deep"]).release()
        assert cache.changed_watches() == []

    def test_a_path_names_what_is_shared(self, kind: Kind) -> None:
        cache = kind.for_tokens(512)
        for tail in (1, 2):
            put(cache, [*range(32), *[tail] * 32]).release()
        ends = [[*range(32), *[1] * 33], [*range(32), *[2] * 33], [*range(32), 3], [4, 4]]
        watches = [cache.watch(np.asarray(tokens, np.int32)) for tokens in ends]
        first, second, head, none = (watch.path() for watch in watches)
        assert none == ()
        assert first[: len(head)] == second[: len(head)] == head
        assert first != second
        for watch in watches:
            watch.close()


class TestKnowing:
    def test_the_counters_and_the_law_of_pages(self, kind: Kind) -> None:
        cache = kind.for_tokens(512)
        assert (cache.num_pages, cache.page_size) == (-(-512 // kind.page_size), kind.page_size)
        assert cache.sharing_enabled
        put(cache, list(range(100))).release()
        seq = put(cache, [*range(50), *[7] * 30])
        seq.extend([8] * 5)
        stats = cache.stats()
        parts = stats["pages_free"] + stats["pages_tree"] + stats["pages_private"]
        assert parts == stats["pages_total"] == cache.num_pages
        assert stats["pages_free"] + stats["pages_tree"] - stats["pages_locked"] == (
            cache.num_available
        )
        assert (stats["sequences"], stats["namespaces"]) == (1, 1)
        assert stats["num_acquired"] == 2
        assert stats["acquired_tokens"] == 180
        assert stats["matched_tokens"] == kind.cached_len(50)
        assert stats["committed_tokens"] == 180 - kind.cached_len(50)
        cache.reset("nobody")
        assert cache.stats()["num_resets"] == 1

    def test_all_report_the_same_keys(self, kind: Kind) -> None:
        reference = RadixCache(40)
        cache = kind.make(40)
        assert set(cache.stats()) == set(reference.stats())
        for each in (cache, reference):
            put(each, list(range(20))).release()
        shapes = [set(each.dump()["namespaces"][""]) for each in (cache, reference)]
        assert shapes[0] == shapes[1]

    def test_the_picture_is_cut_at_max_nodes(self, kind: Kind) -> None:
        cache = kind.for_tokens(512)
        for first in range(10):
            put(cache, [first] * 16).release()
        assert not cache.dump()["truncated"]
        assert cache.dump()["page_size"] == kind.page_size
        for count in (0, 4):
            cut = cache.dump(max_nodes=count)
            assert cut["truncated"]
            assert count_nodes(cut) == count
        (top, *_) = cache.dump()["namespaces"][""]["children"]
        assert top["tokens"] == [0] * top["num_tokens"]
        assert (top["start"], top["lock_ref"], top["sequences"]) == (0, 0, 0)

    def test_the_preview_names_what_goes_next(self, kind: Kind) -> None:
        now = [100.0]
        cache = kind.for_tokens(512, clock=lambda: now[0])
        size = 32
        for first in range(3):
            put(cache, [*range(64), *[900 + first] * size], "a").release()
            now[0] += 10.0
        with pytest.raises(InvalidRequest):
            cache.eviction_preview(-1)
        assert cache.eviction_preview(0) == []
        before = picture(cache)
        seen: list[int] = []
        idle: list[float] = []
        for entry in cache.eviction_preview(1_000):
            assert entry["namespace"] == "a"
            assert entry["num_tokens"] == len(entry["tokens"])
            assert entry["num_tokens"] == entry["num_pages"] * kind.page_size
            if entry["start"] >= 64:
                seen.append(entry["tokens"][0] - 900)
            idle.append(entry["idle_s"])
        assert idle == sorted(idle, reverse=True)
        assert idle[-1] == 10.0  # the last one used what they share
        assert picture(cache) == before
        assert seen == sorted(seen)
        assert set(seen) == {0, 1, 2}
        cache.evict(size)
        assert cache.eviction_preview(1)[0]["tokens"][0] == 901

    def test_the_dump_has_states_page_tables_and_unused_slots(self, kind: Kind) -> None:
        cache = kind.for_tokens(512, clock=lambda: 7.0)
        size = cache.page_size
        put(cache, [5] * 40).release()
        shared = [1] * 32
        with put(cache, shared) as first, cache.acquire([*shared, 2, 3]) as second:
            second.extend([2, 3])
            dump = cache.dump()
            tops = {node["tokens"][0]: node for node in dump["namespaces"][""]["children"]}
            assert (tops[1]["state"], tops[1]["last_use"]) == ("shared", None)
            assert (tops[5]["state"], tops[5]["last_use"]) == ("cached", 7.0)
            tables = sorted(dump["sequences"], key=lambda table: table["length"])
            assert [table["pages"] for table in tables] == [
                first.pages.tolist(),
                second.pages.tolist(),
            ]
            assert [table["length"] for table in tables] == [32, 34]
            assert [table["cached_len"] for table in tables] == [0, 32]
            room = dump["fragmentation"]
            stats = cache.stats()
            assert room["pages"] == stats["pages_tree"] + stats["pages_private"]
            kept = kind.cached_len(40) + 32 + 2  # tokens that have a slot
            assert room["unused_slots"] == room["pages"] * size - kept
        assert cache.dump()["sequences"] == []

    def test_settings_are_checked(self, kind: Kind) -> None:
        for bad in (0, -1, 2.5, True, None, 2**31):
            with pytest.raises(InvalidRequest, match="num_pages"):
                kind.make(bad)  # type: ignore[arg-type]


def count_nodes(dump: dict[str, Any]) -> int:
    count, stack = 0, list(dump["namespaces"].values())
    while stack:
        children = stack.pop()["children"]
        count += len(children)
        stack.extend(children)
    return count
