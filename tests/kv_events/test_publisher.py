"""The stream as a subscriber sees it: live, after a gap, late, and after a restart."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("zmq")

from radixserve import EngineConfig, InvalidRequest, Runtime, SamplingParams
from radixserve.cache import PrefixCache, RadixCache
from radixserve.kv_events import publisher as publisher_module
from radixserve.kv_events.blocks import BlockView
from radixserve.kv_events.publisher import KVEventPublisher
from tests.kv_events.consumer import Follower
from tests.kv_events.test_blocks import blocks

SIZE = 4


@pytest.fixture
def sockets() -> Iterator[tuple[str, str]]:
    """Addresses to publish and to replay on."""
    with tempfile.TemporaryDirectory() as folder:  # the name of a socket has 107 characters at most
        yield f"ipc://{folder}/pub", f"ipc://{folder}/replay"


class Replica:
    """A cache whose events are published."""

    def __init__(self, sockets: tuple[str, str]) -> None:
        self.cache = RadixCache(10_000)
        self.publisher = KVEventPublisher(
            self.cache.open_events(), *sockets, topic="kv@a@demo", block_size=SIZE
        )
        self.num_put = 0

    def put(self, tokens: list[int], namespace: str = "") -> None:
        with self.cache.acquire(tokens, namespace) as sequence:
            sequence.extend(tokens[sequence.cached_len :])
            sequence.commit(len(tokens))
        self.publisher.publish()

    def put_some(self) -> None:
        """A prompt of two blocks that was not there before."""
        self.num_put += 1
        self.put([1, 2, 3, 4, self.num_put, 6, 7, 8, 9])


@pytest.fixture
def replica(sockets: tuple[str, str]) -> Iterator[Replica]:
    replica = Replica(sockets)
    yield replica
    replica.publisher.close()


@pytest.fixture
def follower(sockets: tuple[str, str], replica: Replica) -> Iterator[Follower]:
    """One that has read all that there is."""
    follower = Follower(*sockets, SIZE, b"kv@a@demo")
    catch_up(follower, replica)
    yield follower
    follower.close()


def catch_up(follower: Follower, replica: Replica) -> None:
    replica.put_some()
    while not follower.has_news(50):  # until its subscription has arrived
        replica.put_some()
    follower.read()  # it may tell of the empty cache
    while follower.index.known() != known(replica.cache):
        follower.read()


def known(cache: PrefixCache) -> set[tuple[str, tuple[int, ...]]]:
    return blocks(cache, SIZE)


def test_stored_removed_and_cleared(replica: Replica, follower: Follower) -> None:
    assert follower.index.known() == known(replica.cache)
    (asked,) = follower.asked
    assert asked[0] == 0, "it came late and got all that there was"
    replica.put([7, 7, 7, 7, 7, 7, 7, 7], "b")
    follower.read()
    assert ("b", (7,) * 8) in follower.index.known()
    replica.cache.evict(6)
    replica.publisher.publish()
    follower.read()
    assert follower.index.known() == known(replica.cache)
    replica.cache.reset()
    replica.publisher.publish()
    follower.read()
    assert follower.index.known() == set()
    assert len(follower.asked) == 1


def test_a_gap_is_replayed(replica: Replica, follower: Follower) -> None:
    lost = []
    for _ in range(3):
        replica.put_some()
        lost.append(follower.read(lose=True))
    replica.put_some()
    follower.read()
    assert follower.asked[-1] == (lost[0], [*lost, lost[-1] + 1])
    assert follower.index.known() == known(replica.cache)
    assert list(follower.replay(follower.number + 1)) == []


def test_what_is_not_kept_any_more_is_told_anew(
    replica: Replica, follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "_MAX_KEPT", 2)
    for _ in range(4):
        replica.put_some()
        last = follower.read(lose=True)
    replica.cache.evict(10)
    replica.put_some()
    follower.read()
    assert follower.asked[-1][1] == [last + 1], "one batch under the last number"
    assert follower.index.known() == known(replica.cache)


def test_a_replica_that_comes_back_is_noticed(
    replica: Replica, follower: Follower, sockets: tuple[str, str]
) -> None:
    replica.publisher.close()
    again = Replica(sockets)
    try:
        again.put([3] * 8)
        catch_up(follower, again)
        assert ("", (3,) * 8) in follower.index.known()
    finally:
        again.publisher.close()


def test_what_the_log_drops_is_made_good(
    replica: Replica, follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixserve.cache.events._MAX_PENDING_BYTES", 1_000)
    for token in range(40):
        with replica.cache.acquire([token] * SIZE) as sequence:
            sequence.extend([token] * (SIZE - sequence.cached_len))
            sequence.commit(SIZE)
    replica.publisher.publish()
    follower.read()
    assert follower.index.known() == known(replica.cache)


def test_a_publisher_that_fails_disturbs_nothing(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no blocks")

    monkeypatch.setattr(BlockView, "apply", fail)
    replica.put_some()
    replica.publisher.close()
    with pytest.raises(RuntimeError, match="no blocks"):  # which ends the extension
        replica.publisher.publish()
    replica.cache.open_events()  # its log is closed


def test_an_engine_whose_events_fail_continues(
    sockets: tuple[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no blocks")

    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    with Runtime("demo", num_pages=400, kv_events=",".join(sockets)) as runtime:
        monkeypatch.setattr(BlockView, "apply", fail)
        deadline = time.monotonic() + 20
        while not runtime.cache_stats()["ended_extensions"]:
            assert runtime.generate([*range(5, 45)], params).finish_reason == "length"
            runtime.flush_cache()
            assert time.monotonic() < deadline
        assert runtime.cache_stats()["ended_extensions"] == ["kv_events"]
        assert runtime.generate([*range(5, 45)], params).finish_reason == "length"
        runtime.check()
    assert caplog.text.count("kv_events has failed and is ended") == 1


def test_a_runtime_publishes(sockets: tuple[str, str]) -> None:
    prompt, params = [*range(5, 45)], SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    with Runtime("demo", num_pages=400, kv_events=",".join(sockets)) as rt:
        follower = Follower(*sockets, 16)
        while not follower.has_news(50):
            rt.flush_cache()
            rt.generate([prompt], params)
        (out,) = rt.generate([prompt], params)
        path = (*prompt, *out.token_ids)
        wanted = {("", path[:end]) for end in (16, 32, 48, 64)}
        while follower.index.known() != wanted:
            follower.read()
        rt.flush_cache()
        while follower.index.known():
            follower.read()
        follower.close()


def test_what_cannot_be(sockets: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for bad in ("5557", "tcp://*:1,tcp://*:2,tcp://*:3", "tcp://*:1,", ""):
        with pytest.raises(InvalidRequest, match="one or two addresses"):
            EngineConfig(kv_events=bad)
    with pytest.raises(InvalidRequest, match="block_size must be"):
        EngineConfig(kv_events_block_size=0)
    with pytest.raises(InvalidRequest, match="cannot be opened"):
        Runtime("demo", num_pages=100, kv_events="tcp://*:no-port")
    monkeypatch.setitem(sys.modules, "zmq", None)
    monkeypatch.delitem(sys.modules, "radixserve.kv_events.publisher")
    with pytest.raises(InvalidRequest, match=r"pip install .radixserve\[kv-events\]"):
        Runtime("demo", num_pages=100, kv_events=sockets[0])
