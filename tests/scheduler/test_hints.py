"""Hints from the engine down: each verb's effect on what is evicted, its bounds and its answers."""

from __future__ import annotations

import random

import pytest

from radixserve.cache import SnapshotView
from radixserve.config import EVICTION_POLICIES
from radixserve.request import BeamParams
from radixserve.schedule import WindowLayers
from tests.scheduler.hint_driver import HintDriver


def block(name: int, size: int = 20) -> list[int]:
    """Blocks of different names below 48 begin with different tokens."""
    rng = random.Random(name)
    return [2 + name % 48, *(rng.randrange(2, 50) for _ in range(size - 1))]


def served(*names: int, pages: int = 100, **settings: object) -> HintDriver:
    """A driver that has served prompts of 20 tokens."""
    driver = HintDriver(pages, **settings)  # type: ignore[arg-type]
    for name in names:
        driver.serve(f"first {name}", block(name))
    return driver


def kept(driver: HintDriver, *names: int) -> list[int]:
    return [name for name in names if driver.cached(block(name)) == 20]


class TestRetain:
    @pytest.mark.parametrize("eviction", EVICTION_POLICIES)
    def test_is_evicted_after_everything_else(self, eviction: str) -> None:
        driver = served(1, 2, 3, eviction=eviction)
        driver.serve("chat", block(4), session="chat")  # leased
        answer = driver.hint("retain", block(1), seconds=10.0)
        assert answer == ("retain", "accepted", 20, 20, 10.0, "")
        assert driver.cache.stats()["pages_retained"] == 20
        driver.cache.evict(60)
        assert kept(driver, 1, 2, 3, 4) == [1]
        (entry,) = driver.cache.eviction_preview()
        assert entry["reason"].startswith("retained until 10 s from now")
        driver.cache.evict(20)
        assert kept(driver, 1) == []
        assert driver.cache.stats()["retained_evicted_pages"] == 20
        driver.engine.check()

    def test_ends_with_its_time(self) -> None:
        driver = served(1, 2)
        driver.hint("retain", block(1), seconds=10.0)
        driver.now += 10.0
        assert driver.scheduler.stats()["hints"] == driver.cache.stats()["pages_retained"] == 0
        driver.cache.evict(20)
        assert kept(driver, 1, 2) == [1]  # its time counted as a use
        driver.cache.evict(20)
        driver.engine.check()
        assert driver.cache.stats()["retained_evicted_pages"] == 0

    def test_zero_seconds_end_it(self) -> None:
        driver = served(1)
        driver.hint("retain", block(1))
        assert driver.hint("retain", block(1), seconds=0.0).answer == "accepted"
        assert driver.cache.stats()["pages_retained"] == 0
        assert driver.hint("retain", block(1), seconds=0.0).answer == "missing"

    def test_a_longer_one_takes_the_place_of_a_shorter_one(self) -> None:
        driver = served(1)
        driver.hint("retain", block(1)[:10], seconds=5.0)
        driver.hint("retain", block(1), seconds=5.0)
        assert driver.scheduler.stats()["hints"] == 1
        driver.hint("retain", block(1)[:10], seconds=50.0)  # stays beside it
        assert driver.scheduler.stats()["hints"] == 2
        driver.now += 6.0
        assert driver.scheduler.stats()["hints"] == 1
        assert driver.cache.stats()["pages_retained"] == 10
        driver.engine.check()

    def test_what_a_session_keeps(self) -> None:
        driver = served()
        for name in (1, 2):
            driver.serve(f"r{name}", block(name), session="agent")
        answer = driver.hint("retain", session="agent", seconds=1e6)
        assert (answer.answer, answer.tokens_covered) == ("clipped", 40)
        assert answer.seconds == 3600.0
        driver.scheduler.sessions.close("agent")
        driver.serve("other", block(3))
        driver.cache.evict(20)
        assert kept(driver, 1, 2, 3) == [1, 2]
        assert driver.hint("retain", session="agent").answer == "missing"


class TestPin:
    def test_is_locked_until_its_time_is_over(self) -> None:
        driver = served(1, 2)
        answer = driver.hint("pin", block(1), seconds=10.0)
        assert answer == ("pin", "accepted", 20, 20, 10.0, "")
        assert driver.cache.stats()["pages_pinned"] == 20
        assert driver.cache.evict(100) == 20
        assert kept(driver, 1, 2) == [1]
        root = driver.cache.dump()["namespaces"][""]
        assert [child["state"] for child in root["children"]] == ["pinned"]
        (node,) = driver.cache.snapshot(SnapshotView())["nodes"]
        assert (node["state"], node["sequences"]) == ("pinned", 0)
        driver.now += 10.0
        driver.scheduler.stats()
        driver.drain()

    def test_ends_in_an_engine_that_is_idle(self) -> None:
        """Nothing is scheduled; the engine's statistics agree with each other all the same."""
        driver = served(1)
        driver.hint("pin", block(1), seconds=2.0)
        driver.now += 25.0
        stats = driver.engine.stats()
        assert (stats["pages_pinned"], stats["pages_referenced"]) == (0, 0)
        assert stats["hints"] == 0
        driver.drain()

    def test_is_released_by_zero_seconds(self) -> None:
        driver = served(1)
        driver.hint("pin", block(1))
        driver.hint("pin", block(1), seconds=0.0)
        driver.drain()

    def test_requests_live_with_what_is_left(self) -> None:
        """Pins make the pool smaller: requests that fit beside them do not break them."""
        driver = served(1, pages=60)
        driver.hint("pin", block(1))
        for i in range(6):
            driver.add(f"r{i}", block(10 + i), max_tokens=15)
        driver.run()
        assert len(driver.finished) == 7
        assert driver.scheduler.stats()["broken_pins"] == 0
        assert kept(driver, 1) == [1]

    def test_makes_way_for_a_request_that_fits_in_no_other_way(self) -> None:
        driver = served(1, 2, pages=60)
        driver.hint("pin", block(1)[:10])
        driver.hint("pin", block(2)[:10])
        driver.add("big", block(3), max_tokens=30, ignore_eos=True)
        driver.run()
        assert driver.finished["big"].reason == "length"
        assert driver.scheduler.stats()["broken_pins"] == 1, "the oldest alone"
        assert driver.cached(block(2)) == 10
        assert driver.scheduler.stats()["hints"] == 2, "it is retained still"

    def test_a_reset_ends_it(self) -> None:
        driver = served(1)
        driver.hint("pin", block(1))
        driver.engine.reset_cache("")
        driver.engine.check()
        driver.drain()


class TestBounds:
    def test_the_budget_cuts(self) -> None:
        driver = served(1, 2)
        budget = {"owner": "ann", "budget_tokens": 30}
        assert driver.hint("retain", block(1), **budget).answer == "accepted"
        answer = driver.hint("pin", block(2), **budget)
        assert (answer.answer, answer.tokens_found, answer.tokens_covered) == ("clipped", 20, 10)
        assert "budget of 30 tokens" in answer.reason
        assert driver.hint("pin", block(2), owner="bob", budget_tokens=0).answer == "rejected"
        assert driver.hint("pin", block(2), owner="bob", budget_tokens=20).answer == "accepted"
        assert driver.cache.stats()["pages_pinned"] == 20

    def test_what_two_hints_share_counts_once(self) -> None:
        driver = HintDriver(200)
        shared = block(0, 30)
        for name in (1, 2, 3):
            driver.serve(str(name), shared + block(name))
            answer = driver.hint("pin", shared + block(name), owner="ann", budget_tokens=90)
            assert answer.answer == "accepted"
        assert driver.cache.stats()["pages_pinned"] == 90

    def test_the_share_of_the_pool_bounds_all_owners(self) -> None:
        driver = served(1, 2, 3, pages=100, max_hint_share=0.3)
        assert driver.hint("pin", block(1), owner="ann").answer == "accepted"
        assert driver.hint("pin", block(2), owner="bob").tokens_covered == 10
        answer = driver.hint("retain", block(3), owner="cy")
        assert answer.answer == "rejected"
        assert "share of the pool" in answer.reason

    def test_seconds_and_tokens_are_cut(self) -> None:
        driver = served(1)
        answer = driver.hint("retain", block(1), seconds=1e5, max_tokens=7)
        assert (answer.answer, answer.tokens_covered, answer.seconds) == ("clipped", 7, 3600.0)
        assert driver.hint("retain", block(1), max_tokens=7).answer == "accepted"

    def test_whole_pages_count(self) -> None:
        driver = served(1, pages=20, page_size=8)
        answer = driver.hint("retain", block(1))
        assert (answer.answer, answer.tokens_found, answer.tokens_covered) == ("accepted", 20, 16)
        assert driver.hint("retain", block(1)[:7]).answer == "missing"

    def test_only_what_is_cached(self) -> None:
        driver = served(1)
        answer = driver.hint("retain", [*block(1), 3, 4, 5])
        assert (answer.answer, answer.reason) == ("clipped", "only 20 of 23 tokens are cached")
        assert driver.hint("retain", block(9)).answer == "missing"
        assert driver.hint("retain", block(1), namespace="b").answer == "missing"


class TestDemote:
    @pytest.mark.parametrize("eviction", EVICTION_POLICIES)
    def test_goes_first_until_it_is_used_again(self, eviction: str) -> None:
        driver = served(1, 2, 3, eviction=eviction)
        answer = driver.hint("demote", block(3))
        assert (answer.answer, answer.tokens_found) == ("accepted", 20)
        assert answer.tokens_covered == 20
        driver.cache.evict(20)
        assert kept(driver, 1, 2, 3) == [1, 2]
        driver.hint("demote", block(2))
        driver.serve("again", block(2))
        driver.engine.check()
        assert driver.cache.stats()["pages_closed"] == 0

    def test_what_others_need_stays(self) -> None:
        driver = HintDriver(200)
        for name in (1, 2):
            driver.serve(str(name), block(0) + block(name))
        assert driver.hint("demote", block(0) + block(1)).tokens_covered == 20
        driver.cache.evict(20)
        assert driver.cached(block(0) + block(1)) == 20
        assert driver.cached(block(0) + block(2)) == 40
        assert driver.hint("demote", block(0) + block(2)).tokens_covered == 40  # nothing else left

    def test_an_open_session_keeps_it_and_pins_end(self) -> None:
        driver = served()
        driver.serve("a", block(1), session="chat")
        assert driver.hint("demote", block(1)).answer == "rejected"
        driver.serve("b", block(2))
        driver.hint("pin", block(2))
        assert driver.hint("demote", block(2)).answer == "accepted"
        assert driver.cache.stats()["pages_pinned"] == 0
        driver.hint("pin", session="chat")
        assert driver.hint("demote", session="chat").tokens_covered == 20
        assert driver.scheduler.stats()["hints"] == 0
        driver.serve("c", block(2) + block(3), session="agent")
        answer = driver.hint("demote", session="agent")
        assert (answer.tokens_found, answer.tokens_covered) == (40, 40)
        driver.serve("d", block(4))
        driver.serve("e", block(4) + block(3), session="agent")
        assert driver.hint("demote", session="agent").tokens_covered == 20, "others reach the rest"
        assert driver.hint("demote", block(9)).answer == "missing"


class TestPrefetch:
    def test_computes_what_will_be_asked(self) -> None:
        driver = HintDriver(200)
        answer = driver.hint("prefetch", block(1))
        assert answer == ("prefetch", "accepted", 0, 20, None, "")
        driver.run()
        driver.engine.check()
        stats = driver.scheduler.stats()
        assert stats["prefetched_tokens"] == 20
        assert [stats["prompted_tokens"], stats["generated_tokens"], stats["finished"]] == [0] * 3
        assert driver.serve("r", block(1)) == 19
        assert driver.hint("prefetch", block(1)).tokens_found == 19
        driver.run()
        assert driver.scheduler.stats()["prefetched_tokens"] == 20, "it was cached"

    def test_gives_way_and_goes_on_where_it_was(self) -> None:
        driver = HintDriver(300, chunked_prefill_size=4)
        driver.hint("prefetch", block(1, 100))
        for _ in range(5):
            driver.step()
        assert driver.cached(block(1, 100)) == 20
        driver.add("r", block(2), max_tokens=10, ignore_eos=True)
        assert driver.hint("prefetch", block(3)).answer == "deferred"
        while "r" not in driver.finished:
            schedule = driver.step()
            assert schedule is None or [row.request_id for row in schedule.rows] == ["r"]
        assert driver.cached(block(1, 100)) == 20
        driver.run()
        assert driver.scheduler.stats()["prefetched_tokens"] == 120
        assert driver.cached(block(3)) == 20

    def test_its_queue_is_bounded(self) -> None:
        driver = HintDriver(3000)
        answers = [driver.hint("prefetch", block(i), owner="ann").answer for i in range(18)]
        assert answers == ["accepted", *["deferred"] * 15, "rejected", "rejected"]
        assert driver.hint("prefetch", block(0), owner="ann").answer == "deferred", "is queued"
        answers = [
            driver.hint("prefetch", block(i), owner=f"o{i % 9}").answer for i in range(20, 90)
        ]
        assert answers.count("deferred") == 48
        assert driver.hint("prefetch", block(1, 3000)).answer == "rejected"
        driver.run()
        assert not driver.engine.has_work()

    def test_it_breaks_no_pin(self) -> None:
        driver = served(1, pages=60)
        assert driver.hint("prefetch", block(2, 45)).answer == "accepted"
        driver.step()
        assert driver.hint("pin", block(1)).answer == "accepted"  # while it is under way
        assert driver.hint("prefetch", block(3, 45)).answer == "rejected"
        driver.run()
        driver.run()
        assert not driver.engine.has_work()
        assert driver.scheduler.stats()["broken_pins"] == 0
        assert driver.serve("r", block(4, 30)) == 0

    def test_a_failed_one_disturbs_nothing(self) -> None:
        driver = HintDriver(300)
        driver.runner.broken_rows = lambda row: row.request_id.startswith("#")
        driver.hint("prefetch", block(1))
        driver.run()
        driver.runner.broken_rows = lambda _: False
        assert driver.serve("r", block(2)) == 0
        driver.drain()


class TestShare:
    def test_others_copy_it(self) -> None:
        driver = served(1, pages=200)
        assert driver.serve("before", [*block(1), 5, 6], namespace="b") == 0
        driver.engine.reset_cache("b")
        answer = driver.hint("share", block(1))
        assert answer == ("share", "accepted", 20, 20, None, "")
        assert driver.serve("after", [*block(1), 5, 6], namespace="b") == 20
        assert driver.runner.computed["", driver.runner.hashes["after"][0]] == 1
        assert driver.cached([*block(1), 5, 6], "b") == 22
        assert driver.cached([*block(1), 5, 6]) == 20, "what follows is its own"
        assert driver.scheduler.stats()["shared_tokens"] == 20
        driver.drain()

    @pytest.mark.parametrize("page_size", [1, 8])
    def test_at_any_page_size_and_beside_partial_matches(self, page_size: int) -> None:
        driver = HintDriver(400 // page_size, page_size)
        driver.serve("a", block(1, 60))
        driver.serve("b", [*block(1, 60)[:11], 3], namespace="b")
        driver.hint("share", block(1, 60))
        most = 60 - 60 % page_size
        assert driver.serve("c", [*block(1, 60), 9], namespace="b") == most
        assert driver.serve("d", block(1, 60)[:20], namespace="c") == 19 - 19 % page_size
        assert driver.serve("e", [*block(1, 30), 9], namespace="c") < 31
        driver.engine.check()

    def test_leave_time_and_reset(self) -> None:
        driver = served(1)
        assert driver.hint("share", block(1), may_share=False).answer == "rejected"
        assert driver.hint("share", block(9)).answer == "missing"
        driver.hint("share", block(1), seconds=5.0)
        driver.now += 5.0
        assert driver.serve("b", block(1), namespace="b") == 0
        driver.hint("share", block(1))
        assert driver.hint("share", block(1), seconds=0.0).answer == "accepted"
        assert driver.hint("share", block(1), seconds=0.0).answer == "missing"
        assert driver.serve("c", block(1), namespace="c") == 0
        driver.hint("share", block(1))
        driver.engine.reset_cache(None)
        assert driver.scheduler.stats()["shared_prefixes"] == 0

    @pytest.mark.parametrize("page_size", [1, 8])
    def test_beams_go_on_from_it(self, page_size: int) -> None:
        driver = HintDriver(400 // page_size, page_size, chunked_prefill_size=5)
        driver.serve("a", block(1, 40))
        driver.hint("share", block(1, 40))
        beams = BeamParams(width=3)
        driver.add("b", [*block(1, 40), 7, 8], beams=beams, namespace="b", max_tokens=5)
        driver.add("c", [*block(1, 40), 7, 8], beams=beams, namespace="c", max_tokens=5)
        driver.run()
        assert driver.finished["b"].usage.cached_tokens == 40
        assert driver.beams["b"] == driver.beams["c"]
        driver.drain()

    def test_an_abort_while_it_is_copied(self) -> None:
        driver = served(1, pages=200, chunked_prefill_size=4)
        driver.hint("share", block(1))
        driver.add("b", block(1) + block(2), max_tokens=1, namespace="b")
        driver.step()
        driver.abort("b")
        driver.drain()


@pytest.mark.parametrize("kind", ["hash", "off"])
def test_other_caches_reject(kind: str) -> None:
    is_off = kind == "off"
    driver = HintDriver(200 // 16, 16, kind="radix" if is_off else kind, reuse=not is_off)
    for verb in ("retain", "pin", "demote", "share"):
        answer = driver.hint(verb, block(1))
        assert answer.answer == "rejected"
        assert 'cache="radix"' in answer.reason
    answer = driver.hint("prefetch", block(1, 40))
    assert answer.answer == ("rejected" if is_off else "accepted")
    driver.run()
    assert driver.cached(block(1, 40)) == (0 if is_off else 32)


def test_the_last_use_is_not_the_hint_in_an_order_of_priorities() -> None:
    """A hint's own locks say nothing about how important a prefix is."""
    driver = served(1, eviction="priority")
    driver.serve("high", block(2), priority=5)
    driver.hint("retain", block(1), seconds=1.0)
    driver.now += 2.0
    driver.scheduler.stats()
    driver.cache.evict(20)
    assert kept(driver, 1, 2) == [2]


class TestWindows:
    """Of models whose layers see a window: a prefix may be cached without what they see."""

    def driver(self) -> HintDriver:
        """Serves 40 tokens and others, so that no request can go on from their second page."""
        driver = HintDriver(40, 16, windows=WindowLayers(4, 8))
        driver.serve("first", block(1, 41))
        driver.serve("second", block(2, 36))
        assert driver.cached(block(1, 41)) == 41
        assert driver.cached(block(1, 41)[:32]) == 0
        return driver

    @pytest.mark.parametrize("verb", ["pin", "retain", "share"])
    def test_whole_pages_that_nothing_can_go_on_from(self, verb: str) -> None:
        driver = self.driver()
        answer = driver.hint(verb, block(1, 41), may_share=True)
        assert (answer.answer, answer.tokens_found, answer.tokens_covered) == ("missing", 41, 0)
        assert "can be resumed" in answer.reason
        assert driver.scheduler.stats()["hints"] == 0

    def test_a_share_longer_than_the_window_pages(self) -> None:
        driver = HintDriver(40, 16, windows=WindowLayers(4, 8))
        driver.serve("first", block(1, 161))
        assert driver.hint("share", block(1, 160), may_share=True).tokens_covered == 160
        assert driver.serve("other", [*block(1, 160), 5, 6], namespace="b", max_tokens=9) == 160
        assert driver.output("other") == driver.expected("other", len(driver.output("other")))
        assert driver.scheduler.stats()["shared_tokens"] == 160
