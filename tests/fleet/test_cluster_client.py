"""Requests over replicas in this process, which are lost, hang and come back."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from radixserve import Runtime, SamplingParams
from radixserve.cache import EventBatch
from radixserve.engine.output_collector import Event, OutputCollector
from radixserve.errors import EngineDead, InvalidRequest, RequestFailed
from radixserve.fleet.cluster_client import ClusterClient, add_stats, without_gauges
from radixserve.fleet.cluster_runtime import ClusterRuntime
from radixserve.fleet.replica import ReplicaReport
from radixserve.fleet.replica_router import ReplicaRouter
from radixserve.request import Request
from tests.fleet.local_links import (
    PARAMS,
    PROMPTS,
    SETTINGS,
    Link,
    SilentLink,
    cluster,
    wait_for_links,
)
from tests.pacing import PATIENCE_S, wait_until


@pytest.fixture(scope="module")
def single() -> Iterator[Runtime]:
    with Runtime("demo", **SETTINGS) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def all_links() -> Iterator[list[Link]]:
    links = [Link("a"), Link("b")]
    yield links
    for link in links:
        link.replica.close()


@pytest.fixture
def links(all_links: list[Link]) -> list[Link]:
    for link in all_links:
        link.is_cut = link.hangs = False
        link.cut_after, link.num_outputs, link.num_resyncs = None, 0, 0
        link.spoil = lambda report: report
    return all_links


@pytest.fixture
def runtime(links: list[Link]) -> Iterator[ClusterRuntime]:
    with cluster(links) as runtime:
        yield runtime


def test_answers_are_those_of_one_engine(runtime: ClusterRuntime, single: Runtime) -> None:
    ours = runtime.generate(PROMPTS, PARAMS)
    theirs = single.generate(PROMPTS, PARAMS)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.token_ids, one.text) == (other.token_ids, other.text)
        assert one.usage.cached_tokens + one.usage.computed_tokens == one.usage.prompt_tokens
    stats = runtime.cache_stats()
    assert stats["finished"] >= len(PROMPTS)
    assert stats["hit_rate"] > 0
    assert runtime.lookup(PROMPTS[0]).cached_len >= 0
    text = [chunk.text for chunk in runtime.stream(PROMPTS[0], PARAMS[0])]
    assert "".join(text) == theirs[0].text
    assert len(runtime.beam_search(PROMPTS[0], beam_width=2, max_tokens=8)) == 2
    stop = SamplingParams(max_tokens=40, temperature=0.0, stop=[theirs[0].text[20:26]])
    assert runtime.generate(PROMPTS[0], stop).text == single.generate(PROMPTS[0], stop).text
    assert runtime.cache_tree()
    runtime.flush_cache()


def test_a_prompt_goes_where_it_is_cached(runtime: ClusterRuntime) -> None:
    runtime.flush_cache()
    one, other = ("The first of two long questions. " * 8, "Another one, also long enough. " * 8)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    for prompt in (one, other):
        runtime.generate(prompt, params)
    for _ in range(3):
        for prompt in (one, other):
            usage = runtime.generate(prompt, params).usage
            assert usage.cached_tokens >= usage.prompt_tokens - 1
    assert runtime.lookup(one).cached_len > 0


@pytest.mark.parametrize("how", ["lost", "doubled", "late"])
def test_wrong_events_give_no_wrong_answer(
    runtime: ClusterRuntime, links: list[Link], single: Runtime, how: str
) -> None:
    kept: list[Any] = []

    def spoil(report: ReplicaReport) -> ReplicaReport:
        if how == "lost":
            lost = [one for one in report.events if isinstance(one, EventBatch) and one.events]
            if kept or not lost:
                return report
            kept.append(lost)
            return report._replace(events=[one for one in report.events if one is not lost[0]])
        if how == "doubled":
            return report._replace(events=[*report.events, *report.events])
        kept.append(report.events)
        return report._replace(events=kept.pop(0) if len(kept) > 3 else ())

    expected = single.generate(PROMPTS, PARAMS)
    links[0].spoil = spoil
    for _ in range(2):
        found = runtime.generate(PROMPTS, PARAMS)
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
        runtime.flush_cache()
    while how == "lost" and not links[0].num_resyncs:
        runtime.generate(PROMPTS, PARAMS)


@pytest.mark.parametrize("how", ["cut", "hangs"])
def test_requests_outlive_their_replica(links: list[Link], single: Runtime, how: str) -> None:
    """The first one that has sent a few outputs."""
    lost: list[Link] = []

    def lose(report: ReplicaReport, link: Link) -> ReplicaReport:
        if not lost and link.num_outputs >= 30:
            lost.append(link)
            link.is_cut, link.hangs = how == "cut", how == "hangs"
        return report

    expected = single.generate(PROMPTS, PARAMS)
    for link in links:
        link.spoil = functools.partial(lose, link=link)
    with cluster(links, PATIENCE_S if how == "cut" else 3.0) as runtime:
        found = runtime.generate(PROMPTS, PARAMS)
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
        assert [one.text for one in found] == [one.text for one in expected]
        for one in found:
            assert one.usage.completion_tokens == 40
            assert one.usage.cached_tokens + one.usage.computed_tokens == one.usage.prompt_tokens
        (gone,) = lost
        gone.is_cut = gone.hangs = False
        wait_for_links(runtime, 2)
        assert runtime.generate(PROMPTS, PARAMS)[0].token_ids == expected[0].token_ids


def test_streams_are_whole_when_all_replicas_go_and_one_returns(
    runtime: ClusterRuntime, links: list[Link], single: Runtime
) -> None:
    expected = single.generate(PROMPTS, PARAMS)
    for link in links:
        link.cut_after = 40

    async def read(at: int) -> tuple[str, list[int]]:
        text, ids = "", []
        async for chunk in runtime.astream(PROMPTS[at], PARAMS[at]):
            text += chunk.text
            ids += chunk.token_ids
        return text, ids

    async def read_all() -> list[tuple[str, list[int]]]:
        tasks = [asyncio.create_task(read(at)) for at in range(len(PROMPTS))]
        while not all(link.is_cut for link in links):
            await asyncio.sleep(0.01)
        links[1].is_cut = False
        return await asyncio.gather(*tasks)

    found = asyncio.run(read_all())
    assert found == [(one.text, one.token_ids) for one in expected]


def test_a_request_that_ends_replicas_ends(runtime: ClusterRuntime, links: list[Link]) -> None:
    def cut(_: Any, logits: Any) -> Any:
        for link in links:
            link.cut_after = 1
        return logits

    async def revive() -> None:
        while True:
            await asyncio.sleep(0.05)
            for link in links:
                link.is_cut = False

    async def ask() -> None:
        reviving = asyncio.create_task(revive())
        params = SamplingParams(max_tokens=400, logits_processors=[cut], ignore_eos=True)
        with pytest.raises(RequestFailed, match="3 replicas were lost"):
            await runtime.agenerate(PROMPTS[0], params)
        reviving.cancel()

    asyncio.run(ask())


def test_calls_during_a_loss_raise_engine_dead_or_ask_the_others(
    links: list[Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the client knows that a replica is gone."""

    async def fail(_: Any) -> None:
        raise ConnectionError("the replica is gone")

    with cluster(links) as runtime:
        monkeypatch.setattr(links[0], "call", fail)
        stats = runtime.cache_stats()
        assert stats["pages_total"] == 2 * SETTINGS["num_pages"]
        assert runtime.held_by_hints()["pins"] == 0
        with pytest.raises(EngineDead, match="replica a does not answer"):
            runtime.flush_cache()


def test_a_call_that_is_open_at_the_end_raises_engine_dead(
    links: list[Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    called = threading.Event()

    async def hang(_: Any) -> None:
        called.set()
        await asyncio.sleep(PATIENCE_S)

    with cluster(links[:1]) as runtime, ThreadPoolExecutor(1) as executor:
        monkeypatch.setattr(links[0], "call", hang)
        lookup = executor.submit(runtime.lookup, PROMPTS[0])
        assert called.wait(PATIENCE_S)
        runtime.close()
        with pytest.raises(EngineDead, match="closed"):
            lookup.result(PATIENCE_S)


@pytest.mark.parametrize("verb", ["pin", "demote"])
def test_hints_end_on_all_replicas(
    links: list[Link], verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixserve.fleet.replica.REPORT_EVERY_S", 0.02)
    prompt = "A prompt that both replicas have cached and pinned. " * 4
    for link in links:
        with cluster([link]) as runtime:
            runtime.generate(prompt, SamplingParams(max_tokens=4))
            assert runtime.hint("pin", prompt, seconds=60.0).answer == "accepted"
    with cluster(links) as runtime:
        assert runtime.held_by_hints()["pins"] == 2
        seconds = 0.0 if verb == "pin" else None
        assert runtime.hint(verb, prompt, seconds=seconds).answer == "accepted"
        assert runtime.held_by_hints()["pins"] == 0
        assert runtime.hint("pin", prompt, seconds=0.0).answer == "missing"


def test_a_request_is_not_sent_to_replicas_that_go_together() -> None:
    links = [SilentLink(name) for name in "abcd"]
    client = ClusterClient(ReplicaRouter(), silence_s=2 * PATIENCE_S, drain_s=0.0)
    try:
        client.set_replicas(links)
        wait_until(lambda: client.status().stats.get("pages_total") == len(links))
        events: list[Event] = []
        ids = np.arange(10, dtype=np.int32)
        request = Request("one", ids, SamplingParams(), 0, frozenset(), 100)
        client.submit([OutputCollector(request, None, events.append, streams=False)])
        wait_until(lambda: any(link.requests for link in links))
        (first,) = [link for link in links if link.requests]
        stays = links[-1] if first is not links[-1] else links[0]
        client.set_replicas([stays])
        wait_until(lambda: bool(stays.requests or events))
        assert not events
        assert sum(len(link.requests) for link in links) == 2
    finally:
        client.close()


def test_ids_aborts_and_the_end(runtime: ClusterRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=2000, ignore_eos=True)
    with runtime.submit([PROMPTS[0]], params, streams=True) as handle:
        next(handle)
        monkeypatch.setattr(time, "time", lambda: 0.0)  # the clock is set back
        assert runtime.abort() == 1
        last = [chunk.completion for chunk in handle][-1]
        assert last is not None
        assert 0 <= last.metrics.total_s < PATIENCE_S
        monkeypatch.undo()
        assert last is not None
        assert last.finish_reason == "abort"
        assert last.token_ids
    stream = runtime.stream(PROMPTS[0], params, request_id="one")
    next(iter(stream))
    with pytest.raises(InvalidRequest, match="'one' is in use"):
        runtime.generate(PROMPTS[1], params, request_id="one")
    runtime.close()
    with pytest.raises(EngineDead):
        list(stream)
    with pytest.raises(EngineDead):
        runtime.generate(PROMPTS[0])


def test_gauges_count_present_replicas_only() -> None:
    each = {
        "page_size": 16,
        "pages_tree": 5,
        "evicted_window_pages": 5,
        "window_pages_used": 5,
        "prompted_tokens": 10,
        "reused_tokens": 5,
        "leases": ["lease"],
        "last_minute": {"seconds": 9.0, "prompted_tokens": 10, "reused_tokens": 5},
        "kv_store": {"loaded_tokens": 7, "load_latency_us": 100, "store_bytes": 3, "is_paused": 1},
    }
    other = {**each, "drafts": {"request": {"drafted_tokens": 2}}}
    assert add_stats([each, without_gauges(other)]) == {
        **other,
        "evicted_window_pages": 10,
        "prompted_tokens": 20,
        "reused_tokens": 10,
        "kv_store": {"loaded_tokens": 14, "load_latency_us": 100, "store_bytes": 3, "is_paused": 1},
    }
    store = add_stats([each, other])["kv_store"]
    assert store == {"loaded_tokens": 14, "load_latency_us": 100, "store_bytes": 6, "is_paused": 1}
