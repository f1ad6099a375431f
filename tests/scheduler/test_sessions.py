"""Sessions: who a request's cached tokens belong to, from the engine down to the cache."""

from __future__ import annotations

from typing import Any

import pytest

from radixserve.api.engine_factory import make_engine
from radixserve.cache import CacheSession, RadixCache
from radixserve.config import EVICTION_POLICIES, EngineConfig
from radixserve.errors import InvalidRequest
from tests.scheduler.fake import Driver, FakeRunner
from tests.scheduler.test_scheduler import finished_as_expected, prompt


class RecordingCache(RadixCache):
    """Remembers for whom it was asked."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.asked: list[tuple[CacheSession | None, int]] = []

    def acquire_watched(self, *args: Any, **settings: Any) -> Any:
        self.asked.append((settings["session"], settings["priority"]))
        return super().acquire_watched(*args, **settings)


class RecordingDriver(Driver):
    def make_cache(self) -> RecordingCache:
        return RecordingCache(self.num_pages, self.page_size)

    @property
    def asked(self) -> list[tuple[str | None, int]]:
        assert isinstance(self.cache, RecordingCache)
        return [(None if who is None else who.name, level) for who, level in self.cache.asked]


def test_session_and_priority_reach_the_cache() -> None:
    driver = RecordingDriver(200)
    driver.scheduler.sessions.open("chat", 5.0)
    driver.add("a", prompt(0, 10), max_tokens=1, session="chat")
    driver.run()
    driver.add("b", prompt(1, 10), max_tokens=1, session="new", priority=3)
    driver.run()
    driver.add("c", prompt(2, 10), max_tokens=1)
    driver.run()
    assert driver.asked == [("chat", 0), ("new", 3), (None, 0)]
    assert driver.cache.stats()["sessions"] == 2


def test_a_name_is_one_session_until_it_is_closed() -> None:
    driver = RecordingDriver(200)
    for _ in range(2):
        driver.scheduler.sessions.open("chat")
    for i in range(3):
        driver.add(f"r{i}", prompt(i, 10), max_tokens=1, session="chat")
    driver.run()
    assert driver.cache.stats()["sessions"] == 1
    driver.scheduler.sessions.close("chat")
    driver.scheduler.sessions.close("chat")
    driver.scheduler.sessions.close("unknown")
    assert driver.cache.stats()["sessions"] == 0


def test_closed_names_are_forgotten() -> None:
    driver = Driver(200)
    for i in range(100):
        driver.add(f"r{i}", prompt(i, 5), max_tokens=1, session=f"chat {i}")
        driver.run()
        driver.scheduler.sessions.close(f"chat {i}")
    driver.scheduler.check()
    assert driver.cache.stats()["sessions"] == 0


def test_a_request_whose_session_was_closed_before_it_started_has_none() -> None:
    driver = RecordingDriver(200, max_running_requests=1)
    driver.add("first", prompt(0, 10), max_tokens=3, session="chat", ignore_eos=True)
    driver.step()
    driver.add("late", prompt(1, 10), max_tokens=1, session="chat")
    driver.scheduler.sessions.close("chat")
    driver.scheduler.sessions.open("chat")  # somebody else by the same name
    driver.add("new", prompt(2, 10), max_tokens=1, session="chat")
    driver.run()
    assert [name for name, _ in driver.asked] == ["chat", None, "chat"]
    finished_as_expected(driver)


def test_a_preempted_request_comes_back_with_its_session() -> None:
    driver = RecordingDriver(100, chunked_prefill_size=64)
    driver.add("old", prompt(0, 40), max_tokens=30, ignore_eos=True, session="a", priority=1)
    driver.add("young", prompt(1, 40), max_tokens=12, ignore_eos=True, session="b")
    driver.run()
    assert driver.scheduler.stats()["preemptions"] >= 1
    assert driver.asked.count(("b", 0)) >= 2
    finished_as_expected(driver)


def test_what_only_closed_sessions_reach_goes_first() -> None:
    driver = Driver(200)
    for name in ("stays", "leaves"):  # the one that leaves was used last
        driver.add(name, prompt(len(name), 40), max_tokens=1, session=name)
        driver.run()
    driver.scheduler.sessions.close("leaves")
    driver.cache.evict(20)
    found = {name: driver.cache.lookup(prompt(len(name), 40)) for name in ("stays", "leaves")}
    assert found["stays"].cached_len == 39
    assert found["leaves"].cached_len < 39


@pytest.mark.parametrize("kind", ["radix", "hash"])
def test_what_is_wrong_is_refused_and_changes_nothing(kind: str) -> None:
    driver = Driver(200, kind=kind)
    for name, lease in (("", None), (5, None), ("a", -1.0), ("a", float("inf"))):
        with pytest.raises(InvalidRequest):
            driver.scheduler.sessions.open(name, lease)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest):
        driver.add("big", prompt(0, 300), session="a")
    driver.scheduler.check()
    assert driver.cache.stats()["sessions"] == 0
    driver.add("a", prompt(0, 30), max_tokens=2, session="me")
    driver.run()
    finished_as_expected(driver)
    assert driver.cache.stats()["sessions"] == 1
    driver.drain()


@pytest.mark.parametrize("cache", ["radix", "hash", "off"])
def test_the_engine_passes_them_on(cache: str) -> None:
    class Runner(FakeRunner):
        num_pages = 64

    engine = make_engine(Runner(64, 4), EngineConfig(cache=cache, page_size=4))
    engine.open_session("chat", lease_s=1.0)
    assert engine.stats()["sessions"] == 1
    engine.close_session("chat")
    assert engine.stats()["sessions"] == 0
    engine.check()


@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
def test_the_engine_has_every_eviction_that_the_cache_has(eviction: str) -> None:
    class Runner(FakeRunner):
        num_pages = 64

    make_engine(Runner(64, 1), EngineConfig(eviction=eviction)).check()
    with pytest.raises(InvalidRequest, match="lru"):
        EngineConfig(eviction="mru")
