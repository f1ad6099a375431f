"""Replicas in this process that are added and taken away while streams run."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable

import numpy as np
import pytest

from radixserve import Completion, Runtime, SamplingParams
from radixserve.engine.output_collector import Event, OutputCollector
from radixserve.fleet.cluster_client import OpenRequest
from radixserve.fleet.cluster_runtime import ClusterRuntime
from radixserve.fleet.replica import ReplicaReport
from radixserve.fleet.tree_router import MAX_LOST
from radixserve.output import Finish, Metrics, RequestOutput, Usage
from radixserve.request import Request
from tests.fleet.local_links import (
    PARAMS,
    PROMPTS,
    SETTINGS,
    Link,
    links,
    scaled_cluster,
    wait_for_links,
)
from tests.pacing import wait_until

__all__ = ["links"]
Answers = list[tuple[str, list[int]]]
PROMPT = "A prompt that is long enough to be worth a walk to where it is cached. " * 4
ONE = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def expected() -> Answers:
    with Runtime("demo", **SETTINGS) as single:
        return [(one.text, one.token_ids) for one in single.generate(PROMPTS, PARAMS)]


def hang_after(link: Link, count: int) -> None:
    """It says nothing more after so many outputs."""

    def spoil(report: ReplicaReport) -> ReplicaReport:
        link.hangs |= count <= link.num_outputs
        return report

    link.spoil = spoil


async def read_all(runtime: ClusterRuntime, meanwhile: Callable[[], None]) -> Answers:
    """The streams of all prompts; `meanwhile` runs in a thread."""

    async def read(at: int) -> tuple[str, list[int]]:
        text, ids = "", []
        async for chunk in runtime.astream(PROMPTS[at], PARAMS[at]):
            text += chunk.text
            ids += chunk.token_ids
        return text, ids

    tasks = [asyncio.create_task(read(at)) for at in range(len(PROMPTS))]
    await asyncio.to_thread(meanwhile)
    return await asyncio.gather(*tasks)


def test_a_replica_that_is_added_gets_work(links: list[Link], expected: Answers) -> None:
    with scaled_cluster(links[:1]) as (client, runtime):
        assert runtime.generate(PROMPTS[:4], PARAMS[:4])[0].text == expected[0][0]
        client.set_replicas(links)
        wait_for_links(runtime, 2)
        found = runtime.generate(PROMPTS, PARAMS)
        assert [(one.text, one.token_ids) for one in found] == expected
        assert links[1].num_requests > 0
        assert links[0].num_requests + links[1].num_requests == 4 + len(PROMPTS)


def test_requests_end_where_their_replica_is_taken_away(
    links: list[Link], expected: Answers
) -> None:
    first, second = links
    with scaled_cluster(links) as (client, runtime):
        hang_after(second, 20)

        def take_away() -> None:
            wait_until(lambda: second.hangs)
            before = second.num_requests
            client.set_replicas([first])
            for _ in range(3):  # new requests go to those that stay
                assert len(runtime.generate(PROMPT, ONE).token_ids) == 4
            assert second.num_requests == before
            second.spoil = lambda report: report
            second.hangs = False

        assert asyncio.run(read_all(runtime, take_away)) == expected
        assert first.num_requests + second.num_requests == len(PROMPTS) + 3
        wait_for_links(runtime, 1)


def test_what_a_replica_that_is_taken_away_had_cached_is_not_found(links: list[Link]) -> None:
    first, second = links
    with scaled_cluster(links) as (client, runtime):
        runtime.generate(PROMPT, ONE)
        used = second if second.num_requests else first
        other = first if used is second else second
        assert runtime.lookup(PROMPT).cached_len > 0
        used.hangs = True
        with runtime.submit([PROMPT], ONE, streams=True) as handle:  # it keeps the replica there
            wait_until(lambda: used.num_requests == 2)
            client.set_replicas([other])
            assert runtime.lookup(PROMPT).cached_len == 0
            assert runtime.generate(PROMPT, ONE).usage.cached_tokens == 0
            assert runtime.status().stats["pages_total"] == 2 * SETTINGS["num_pages"]
            used.hangs = False
            last = [chunk.completion for chunk in handle][-1]
        assert last is not None
        assert last.usage.cached_tokens > 0
        assert other.num_requests == 1


@pytest.mark.parametrize("how", ["its time is over", "it is lost", "it comes back"])
def test_what_does_not_end_there_goes_on_elsewhere(
    links: list[Link], expected: Answers, how: str
) -> None:
    first, second = links
    drain_s = 0.2 if how == "its time is over" else 1e6
    with scaled_cluster(links, drain_s=drain_s) as (client, runtime):
        hang_after(second, 20)

        def take_away() -> None:
            wait_until(lambda: second.hangs)
            client.set_replicas([first])
            second.spoil = lambda report: report
            if how == "it is lost":
                second.is_cut, second.hangs = True, False
            elif how == "it comes back":
                client.set_replicas(links)
                second.hangs = False

        assert asyncio.run(read_all(runtime, take_away)) == expected
        assert first.num_requests + second.num_requests > len(PROMPTS)
        wait_for_links(runtime, 2 if how == "it comes back" else 1)


def test_replicas_that_are_taken_away_do_not_count_as_lost(links: list[Link]) -> None:
    """A request may be moved any number of times."""
    params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    with scaled_cluster(links[:1], drain_s=0.0) as (client, runtime):
        whole = runtime.generate(PROMPT, params)
        with runtime.submit([PROMPT], params, streams=True) as handle:
            for link in [*links, *links, *links]:
                link.hangs, before = False, link.num_outputs
                hang_after(link, before + 1)  # the request does not end before it is moved
                client.set_replicas([link])
                wait_until(functools.partial(has_sent, link, before))
            link.spoil, link.hangs = (lambda report: report), False
            chunks = list(handle)
        assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert links[0].num_requests + links[1].num_requests >= 2 + MAX_LOST


def test_a_request_that_moves_does_not_open_its_closed_session_again(
    links: list[Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixserve.fleet.replica.REPORT_EVERY_S", 0.02)
    first, second = links
    with scaled_cluster([first], drain_s=0.0) as (client, runtime):
        first.hangs = True
        with runtime.submit([PROMPT], ONE, session="closed", streams=True) as handle:
            wait_until(lambda: first.num_requests == 1)
            runtime.close_session("closed")
            client.set_replicas([second])
            assert sum(len(chunk.token_ids) for chunk in handle) == ONE.max_tokens
        wait_for_links(runtime, 1)
        assert runtime.cache_stats()["sessions"] == 0
        first.hangs = False


def test_times_of_a_request_that_moves_count_from_its_arrival(
    links: list[Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixserve.fleet.replica.REPORT_EVERY_S", 0.02)
    first, second = links
    with scaled_cluster([first], drain_s=0.0) as (client, runtime):
        first.hangs = True
        with runtime.submit([PROMPT], ONE, streams=True) as handle:
            time.sleep(0.2)
            client.set_replicas([second])
            completion = list(handle)[-1].completion
        first.hangs = False
    assert completion is not None
    times = completion.metrics
    assert times.queue_s is not None
    assert times.ttft_s is not None
    assert 0.2 <= times.queue_s <= times.ttft_s <= times.total_s


def test_the_first_token_counts_on_the_replica_that_generated_it() -> None:
    ids = np.arange(10, dtype=np.int32)
    events: list[Event] = []
    request = Request("one", ids, SamplingParams(max_tokens=2), 0, frozenset(), 100)
    moving = OpenRequest(OutputCollector(request, None, events.append, streams=False))
    moving.rest()
    moving.push(RequestOutput("one", (5,), (-1.0,), (), None))
    moving.note_lost()
    assert moving.rest().num_resumed_tokens == 1
    finish = Finish("length", Usage(10, 0, 10, 1), Metrics(40.0, 50.0, 60.0), None)
    moving.push(RequestOutput("one", (6,), (-1.0,), (), finish))
    (completion,) = events
    assert isinstance(completion, Completion)
    assert (completion.token_ids, completion.usage.completion_tokens) == ([5, 6], 2)
    times = completion.metrics
    assert times.queue_s is None
    assert times.ttft_s is not None
    assert 0.0 <= times.ttft_s <= times.total_s < 40.0


def has_sent(link: Link, before: int) -> bool:
    return link.num_outputs > before


def test_requests_leave_a_replica_whose_engine_has_ended(
    links: list[Link], expected: Answers
) -> None:
    first, second = links
    with scaled_cluster(links) as (_, runtime):

        def spoil(report: ReplicaReport) -> ReplicaReport:
            if second.num_outputs < 20:
                return report
            return report._replace(status=report.status._replace(is_alive=False))

        second.spoil = spoil
        assert asyncio.run(read_all(runtime, lambda: None)) == expected
        assert first.num_requests + second.num_requests > len(PROMPTS)
