"""Where requests go, by what replicas have and have to do."""

from __future__ import annotations

from collections import Counter

from radixserve.cache import EventBatch, EventSnapshot, RadixCache
from radixserve.cache.events import Event, Removed, Stored
from radixserve.fleet.tree_router import StepCosts, TreeRouter
from tests.cache.mirror import ids


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_router(num_replicas: int, clock: Clock | None = None) -> TreeRouter:
    router = TreeRouter(clock or Clock())
    for number in range(num_replicas):
        add(router, f"r{number}")
    return router


def add(router: TreeRouter, name: str, costs: StepCosts | None = None) -> None:
    router.add(name, costs)
    assert router.restart(name, EventSnapshot(1, 0, []))


def feed(router: TreeRouter, name: str, *events: Event) -> None:
    router.take(name, EventBatch(1, router.index.next_event(name), events))


def tokens(first: int, count: int) -> bytes:
    return ids(range(first, first + count))


def test_a_request_goes_where_its_tokens_are() -> None:
    router = make_router(4)
    assert make_router(0).choose("a", tokens(0, 8)) is None
    feed(router, "r2", Stored(1, 0, "", tokens(0, 4000)))
    feed(router, "r3", Stored(1, 0, "b", tokens(0, 4000)))
    assert router.choose("a", tokens(0, 4100)) == "r2"
    assert router.choose("b", tokens(0, 4100), "b") == "r3"
    assert router.best(tokens(0, 10), "b") == "r3"


def test_siblings_that_arrive_together_stay_together_until_that_costs_more() -> None:
    router = make_router(4)
    head = tokens(0, 8000)
    first = [router.choose(str(n), head + tokens(10_000 + n, 8)) for n in range(3)]
    assert len(set(first)) == 1
    places = first + [router.choose(str(n), head + tokens(10_000 + n, 8)) for n in range(3, 400)]
    counts = Counter(places)
    assert len(counts) == 4, "the prefix is computed on others, too"
    assert max(counts.values()) < 150
    for number in range(400):
        router.end(str(number), 10)
        router.end(str(number), 10)
    router.index.check()
    assert router.index.num_edges == 0


def test_prompts_that_nobody_has_are_spread() -> None:
    router = make_router(8)
    counts = Counter(router.choose(str(n), tokens(5000 * n, 3000 + n)) for n in range(80))
    assert min(counts.values()) >= 8


def test_a_slow_replica_gets_less() -> None:
    router = make_router(1)
    add(router, "slow", StepCosts(prefill_token_s=270e-6, decode_row_s=200e-6))
    counts = Counter(router.choose(str(n), tokens(5000 * n, 3000)) for n in range(110))
    assert 5 <= counts["slow"] <= 20


def test_new_prompts_push_out_what_was_used_longest_ago() -> None:
    clock = Clock()
    clock.now = 1e7
    router = make_router(3, clock)
    router.remove("r2")  # counts no more
    for name, first in (("r1", 0), ("r0", 10_000)):
        feed(router, name, Stored(1, 0, "", tokens(first, 100)), Stored(2, 1, "", tokens(7, 9)))
        clock.now += 50
    feed(router, "r0", Removed(2, 9))
    clock.now += 50
    feed(router, "r1", Removed(2, 9))  # used 100 seconds before; r0's 50 seconds
    assert router.choose("a", tokens(20_000, 500)) == "r1"
    router.end("a")


def test_a_session_stays_unless_all_of_it_is_cheaper_elsewhere() -> None:
    router = make_router(2)
    home = router.choose("a", tokens(0, 4000), session="s")
    assert home is not None
    other = "r1" if home == "r0" else "r0"
    feed(router, home, Stored(1, 0, "", tokens(0, 4000)))
    router.end("a", 10)
    feed(router, other, Stored(1, 0, "", tokens(0, 4000)))
    assert router.choose("b", tokens(0, 4100), session="s") == home
    assert router.of_session("s") == home
    places = [router.choose(str(n), tokens(0, 4100 + n), session="s") for n in range(400)]
    assert places[0] == home
    assert other in places, "its replica has too much to do"
    router.close_session("s")
    assert router.of_session("s") is None


def test_a_removed_replica_and_what_it_was_to_do_are_gone_at_once() -> None:
    router = make_router(2)
    name = router.choose("a", tokens(0, 4000), session="s")
    assert name is not None
    router.remove(name)
    assert router.of_session("s") is None
    other = router.choose("a", tokens(0, 4000))
    assert other not in (name, None)
    router.start("a")
    router.end("a", 5)
    assert other is not None
    router.remove(other)
    assert router.choose("b", tokens(0, 4000)) is None
    router.index.check()
    assert router.index.num_edges == 0


def test_more_replicas_than_there_was_room_for() -> None:
    router = make_router(100)
    feed(router, "r97", Stored(1, 0, "", tokens(0, 4000)))
    assert router.choose("a", tokens(0, 4000)) == "r97"
    assert sorted(router.replicas) == sorted(f"r{n}" for n in range(100))


def test_what_a_real_cache_evicted_is_known() -> None:
    clock = Clock()
    router = make_router(1, clock)
    cache = RadixCache(100)
    log = cache.open_events()
    router.restart("r0", log.snapshot())
    for first in (0, 1000, 2000):
        clock.now += 10
        router.choose(str(first), tokens(first, 40))
        with cache.acquire(range(first, first + 40)) as sequence:
            sequence.extend(range(first, first + 40))
            sequence.commit(40)
        router.take("r0", log.take())
        router.end(str(first), 0)
    assert router.index.evicted_at("r0") == 110.0
    assert router.best(tokens(1000, 40)) == "r0"
    router.index.check()
