"""What a frontend counts on at a replica stands until the replica's events show it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from radixserve import SamplingParams
from radixserve.arrays import IntArray
from radixserve.cache import EventBatch, EventSnapshot
from radixserve.cache.events import Event, Stored
from radixserve.engine.messages import EngineMessage, GetStats, TakeEvents
from radixserve.fleet.replica import EngineReplica, ReplicaReport
from radixserve.fleet.replica_router import ReplicaRouter
from radixserve.fleet.token_index import TokenIndex
from radixserve.reports import EngineStatus
from radixserve.request import Request

STATUS = EngineStatus(True, True, 0.0, 0, 0, 0, {})


def make_request(name: str, first: int, num_tokens: int = 200) -> Request:
    ids: IntArray = np.arange(first, first + num_tokens, dtype=np.int32)
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    return Request(name, ids, params, 0, frozenset(), num_tokens + 4)


def report(*events: Event, first: int = 0, settled: tuple[str, ...] = ()) -> ReplicaReport:
    return ReplicaReport([], [], STATUS, [EventBatch(1, first, list(events))], settled)


def test_a_reservation_stands_until_its_replica_says_that_the_events_are_there() -> None:
    router = ReplicaRouter()
    for name in ("a", "b"):
        router.add(name)
        router.update(name, ReplicaReport([], [], STATUS, [EventSnapshot(1, 0, [])]))
    assert router.choose(make_request("one", 0)) == "a"
    request = make_request("two", 1000)
    assert router.choose(request) == "b"
    ids = request.token_ids
    router.update("b", report(Stored(1, 0, "", b"\1\0\0\0")))  # of the time before it ended
    assert router.best(ids, "") == "b"
    router.update("b", report(Stored(2, 0, "", ids.tobytes()), first=1))
    router.update("b", report(first=2, settled=("two", "unknown")))
    assert router.best(ids, "") == "b"
    router.update("a", report(settled=("one",)))  # it left nothing in the cache
    router.remove("b")
    assert router.choose(make_request("three", 1000)) == "a"


class LateEvents(EngineReplica):
    """A request comes and ends while the events of before are on their way."""

    def prepare(self, requests: list[Request]) -> None:
        self.left, self.has_ended = list(requests), asyncio.Event()

    async def call(self, message: EngineMessage[Any]) -> Any:
        answer = await super().call(message)
        if isinstance(message, TakeEvents) and self.left:
            await self.submit("frontend", 1, [self.left.pop()])
            await self.has_ended.wait()
            self.has_ended.clear()
        return answer


async def follow(replica: LateEvents) -> None:
    index, requests = TokenIndex(), [make_request(f"{at}", 20 * at, 100) for at in range(3)]
    index.add("r")
    replica.prepare(requests)
    settled: set[str] = set()
    async with contextlib.aclosing(replica.reports("frontend", 1)) as reports:
        async for one in reports:
            for events in one.events:
                if isinstance(events, EventSnapshot):
                    index.restart("r", events)
                else:
                    index.take("r", events)
            held = index.cached_paths("r", "")
            for request in requests:
                tokens = tuple(request.token_ids.tolist())
                if request.request_id in one.settled:
                    assert any(path[:100] == tokens for path in held), "settled before its events"
            assert settled.isdisjoint(one.settled), "told twice"
            settled.update(one.settled)
            if len(settled) == len(requests):
                return
            if any(output.finish is not None for output in one.outputs):
                replica.has_ended.set()


def test_a_replica_settles_what_ended_before_it_asked_for_the_events() -> None:
    replica = LateEvents("demo", {"num_pages": 1000})
    try:
        asyncio.run(follow(replica))
    finally:
        replica.close()


async def end_while_submitting(replica: EngineReplica) -> int:
    """The number of aborted requests after the stream ended while its request was submitted."""
    loop, may_go = asyncio.get_running_loop(), threading.Event()
    loop.set_default_executor(ThreadPoolExecutor(1))
    reports = replica.reports("frontend", 1)
    await anext(reports)
    blocked = asyncio.create_task(asyncio.to_thread(may_go.wait))
    await asyncio.sleep(0)
    params = SamplingParams(max_tokens=5000, ignore_eos=True)
    request = replace(make_request("one", 0), params=params, max_len=6000)
    submitting = asyncio.create_task(replica.submit("frontend", 1, [request]))
    await asyncio.sleep(0)
    await reports.aclose()
    may_go.set()
    await blocked
    assert not await submitting
    while replica.num_requests:
        await asyncio.sleep(0.01)
    return (await replica.call(GetStats()))["aborted"]


def test_a_request_ends_with_a_stream_that_ends_while_it_is_submitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("radixserve.fleet.replica.REPORT_EVERY_S", 0.02)
    replica = EngineReplica("demo", {"num_pages": 8000})
    try:
        assert asyncio.run(end_while_submitting(replica)) == 1
    finally:
        replica.close()
