"""Streams while nothing comes from the engine: the head goes out at once, then pings."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, cast

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

import httpx

from radixserve import Runtime
from radixserve.server.gate.state import AppState
from radixserve.server.turn.event_stream import HEAD_AFTER_S, EventStream
from radixserve.server.turn.http_generation import HttpGeneration
from radixserve.server.wire.errors import ApiError
from tests.fleet.local_links import Link, cluster
from tests.pacing import held, wait_until
from tests.server.local_server import LocalServer

ASK = [{"role": "user", "content": "How do I sort a list?"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Sort", "max_tokens": 4, "temperature": 0},
    "/v1/chat/completions": {"messages": ASK, "max_tokens": 4, "temperature": 0, "n": 2},
    "/v1/responses": {"input": "Sort", "max_output_tokens": 4, "temperature": 0},
    "/v1/messages": {"model": "demo", "messages": ASK, "max_tokens": 4, "temperature": 0},
    "/generate": {"text": "Sort", "sampling_params": {"max_new_tokens": 4, "temperature": 0}},
    "/generate short": {"prompt": "Sort", "max_tokens": 4, "temperature": 0},
    "/v1/completions beams": {
        "prompt": "Sort", "max_tokens": 4, "temperature": 0, "use_beam_search": True, "n": 2,
    },
    "/v1/branches/{}/generate": {"max_tokens": 4, "temperature": 0},
}  # fmt: skip
ROUTES = pytest.mark.parametrize("route", BODIES)
PING = 'event: ping\ndata: {"type":"ping"}'


@pytest.fixture(scope="module")
def pinging(runtime: Runtime) -> Iterator[LocalServer]:
    with LocalServer(runtime, ping_interval=0.02) as served:
        yield served


@pytest.fixture
def mortal() -> Iterator[LocalServer]:
    """Its engine may be ended."""
    with Runtime("demo", num_pages=512) as runtime, LocalServer(runtime, ping_interval=0.02) as one:
        yield one


def events_of(answer: httpx.Response) -> Iterator[str]:
    """The events and comments of a stream, as they come."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines: list[str] = []
    for line in answer.iter_lines():
        if line:
            lines.append(line)
        elif lines:
            yield "\n".join(lines)
            lines = []
    assert not lines


def is_ping(event: str) -> bool:
    return event == ": ping" or event == PING or '"type":"response.in_progress"' in event


def ask(served: LocalServer, route: str) -> tuple[str, dict[str, Any]]:
    """The path, and the body without `stream`."""
    path = route.split()[0]
    if "{}" in path:
        path = path.format(served.post("/v1/branches", {"prompt": "Sort"})["id"])
    return path, BODIES[route]


@ROUTES
def test_the_head_comes_first_then_pings_then_the_answer(pinging: LocalServer, route: str) -> None:
    path, body = ask(pinging, route)
    expected = answer_in(whole_stream(pinging, path, body))
    assert len(expected[1][0]) > 2
    path, body = ask(pinging, route)
    with held(pinging.server.runtime, 0):
        answer = begin(pinging, path, body)
        assert answer.status_code == 200
        assert answer.headers["x-request-id" if "messages" not in path else "request-id"]
        found = events_of(answer)
        first = list(itertools.islice(found, 6))
        assert sum(map(is_ping, first)) >= 4, first
    assert answer_in([*first, *found]) == expected
    answer.close()


def begin(served: LocalServer, path: str, body: dict[str, Any]) -> httpx.Response:
    """Returns when the head has come."""
    request = served.client.build_request("POST", path, json={**body, "stream": True})
    return served.client.send(request, stream=True)


def whole_stream(served: LocalServer, path: str, body: dict[str, Any]) -> list[str]:
    with served.client.stream("POST", path, json={**body, "stream": True}) as answer:
        return list(events_of(answer))


def answer_in(events: Iterable[str]) -> tuple[list[str], dict[int, str]]:
    """The kinds of the events in order, each once, and the texts by the index of their choice: how
    many tokens come in an event differs."""
    kinds: list[str] = []
    texts: dict[int, str] = {}
    for event in events:
        if is_ping(event):
            continue
        value = {} if event == "data: [DONE]" else json.loads(event.partition("data: ")[2])
        kinds.append(value.get("type", "end" if not value else "chunk"))
        for choice in value.get("choices", [value]):
            piece = choice.get("text", choice.get("delta", ""))
            if isinstance(piece, dict):
                piece = piece.get("text", piece.get("content")) or ""
            if isinstance(piece, str):
                index = choice.get("index", 0)
                texts[index] = piece if "output_ids" in value else texts.get(index, "") + piece
    return [kind for kind, _ in itertools.groupby(kinds)], texts


def test_the_numbers_of_a_response_leave_no_gap(pinging: LocalServer) -> None:
    with held(pinging.server.runtime, 0):
        answer = begin(pinging, "/v1/responses", BODIES["/v1/responses"])
        found = events_of(answer)
        first = list(itertools.islice(found, 5))
    events = [json.loads(event.partition("data: ")[2]) for event in (*first, *found)]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert {event["type"] for event in events[1:5]} == {"response.in_progress"}
    assert events[-1]["type"] in ("response.completed", "response.incomplete")
    answer.close()


def test_pings_can_be_turned_off(runtime: Runtime) -> None:
    with LocalServer(runtime, ping_interval=0) as served:
        with held(runtime, 0):
            answer = begin(served, "/v1/completions", BODIES["/v1/completions"])
            time.sleep(0.2)
        assert not any(map(is_ping, events_of(answer)))
        answer.close()


def test_replicas_are_waited_for_in_the_same_way() -> None:
    link = Link("a")
    with cluster([link]) as runtime, LocalServer(runtime, ping_interval=0.02) as served:
        path, body = "/v1/chat/completions", BODIES["/v1/chat/completions"]
        expected = answer_in(whole_stream(served, path, body))
        with held(runtime, 0):
            answer = begin(served, path, body)
            found = events_of(answer)
            first = list(itertools.islice(found, 4))
            assert all(map(is_ping, first))
        assert answer_in(found) == expected
        answer.close()
    link.replica.close()


# -- what fails before and after the head ---------------------------------------------------------


@ROUTES
def test_an_engine_that_dies_after_the_head_ends_the_stream(
    mortal: LocalServer, route: str
) -> None:
    """By an error event of the protocol. The next request has a status of its own."""
    path, body = ask(mortal, route)
    with held(mortal.server.runtime, 0):
        answer = begin(mortal, path, body)
        found = events_of(answer)
        assert not is_error(next(found))
        mortal.server.runtime.close()
        *_, last = (event for event in found if not is_ping(event) and event != "data: [DONE]")
    assert is_error(last), last
    assert "engine" in last or "Runtime" in last
    answer.close()
    assert mortal.server.counters.rejected["engine_dead"] == 1
    if "{}" not in route:
        refused = mortal.client.post(path, json={**body, "stream": True})
        assert refused.status_code == (500 if "messages" in path else 503)
        assert refused.headers["content-type"] == "application/json"


def is_error(event: str) -> bool:
    if event == ": ping":
        return False
    value = json.loads(event.partition("data: ")[2])
    if event.startswith("event: "):
        assert event.startswith(f"event: {value['type']}\n")
    if value.get("type") == "response.failed":
        return value["response"]["status"] == "failed" and bool(value["response"]["error"])
    if value.get("type") == "error":
        return {"type", "message"} <= set(value["error"])
    return {"message", "type", "code"} <= set(value.get("error", ()))


@ROUTES
def test_a_server_that_is_shut_down_ends_a_stream_without_data(
    pinging: LocalServer, route: str
) -> None:
    path, body = ask(pinging, route)

    async def shut_down() -> None:
        (one,) = pinging.server.in_flight
        one.end(ApiError(503, "the server was shut down", code="shutdown"))

    with held(pinging.server.runtime, 0):
        answer = begin(pinging, path, body)
        found = events_of(answer)
        next(found)
        pinging.call(shut_down())
        *_, last = (event for event in found if not is_ping(event) and event != "data: [DONE]")
    assert is_error(last)
    assert "shut down" in last
    answer.close()


def test_refusals_keep_their_status(runtime: Runtime) -> None:
    with LocalServer(runtime, max_queued_requests=1) as served, held(runtime):
        body = {"prompt": [5, 6, 7], "max_tokens": 50, "ignore_eos": True, "n": 16}
        socks = [served.connect("/v1/completions", body)]
        wait_until(lambda: runtime.status().running == 16)
        socks.append(served.connect("/v1/completions", {"prompt": [1], "max_tokens": 1}))
        wait_until(lambda: runtime.status().waiting == 1)
        for path, asked in BODIES.items():
            if " " in path or "{}" in path:
                continue
            refused = served.client.post(path, json={**asked, "stream": True})
            assert refused.status_code == 429
            assert refused.headers["retry-after"]
        for sock in socks:
            sock.close()
    wait_until(lambda: runtime.status().is_idle)


# -- clients --------------------------------------------------------------------------------------


def test_a_client_that_leaves_during_its_prompt_gives_back_its_pages() -> None:
    with (
        Runtime("demo", num_pages=512, chunked_prefill_size=16) as runtime,
        LocalServer(runtime, ping_interval=0.02) as served,
    ):
        body = {"prompt": [at % 50 for at in range(200)], "max_tokens": 2, "stream": True}
        with held(runtime, 2):  # of 13 chunks
            sock = served.connect("/v1/completions", body)
            head = sock.recv(4096)
            assert head.startswith(b"HTTP/1.1 200 ")
            wait_until(lambda: runtime.cache_stats()["prefilled_tokens"] == 32)
            sock.close()
            wait_until(lambda: runtime.cache_stats()["aborted"] == 1)
            assert runtime.cache_stats()["pages_private"] == 0
            assert runtime.cache_stats()["prefilled_tokens"] == 32
        runtime.check()
        assert served.server.counters.clients_gone == 1


def test_a_slow_reader_gets_no_pile_of_pings(pinging: LocalServer) -> None:
    """None while an event waits to be sent, however often one would be due."""
    sent: list[str] = []
    may_send = asyncio.Event()

    async def events() -> AsyncIterator[str]:
        yield "one "
        yield "two "

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await may_send.wait()
            sent.append(message["body"].decode())

    stream = EventStream(
        cast(HttpGeneration, Running(pinging.server)), events(),
        opening="opening ", ping=lambda: "ping ", failed=str, done="done",
    )  # fmt: skip

    async def respond() -> None:
        sending = asyncio.create_task(stream({"type": "http"}, cast(Any, None), send))
        await asyncio.sleep(HEAD_AFTER_S + 10 * pinging.server.config.ping_interval)
        assert not sent
        may_send.set()
        await sending

    asyncio.run(respond())
    assert sent == ["opening one ", "two ", "done"]


class Running(contextlib.nullcontext[None]):
    """A generation."""

    def __init__(self, server: AppState) -> None:
        super().__init__()
        self.server = server


def test_http_1_0_has_no_chunks(pinging: LocalServer) -> None:
    """The stream ends with its connection."""
    expected = answer_in(whole_stream(pinging, "/v1/completions", BODIES["/v1/completions"]))
    content = json.dumps({**BODIES["/v1/completions"], "stream": True}).encode()
    received = b""
    with held(pinging.server.runtime, 0):
        host, port = pinging.url.removeprefix("http://").split(":")
        sock = socket.create_connection((host, int(port)), timeout=60)
        sock.sendall(
            b"POST /v1/completions HTTP/1.0\r\nhost: localhost\r\nconnection: keep-alive\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(content)
        )
        sock.sendall(content)
        while received.count(b": ping\n\n") < 3:
            received += sock.recv(4096)
    while part := sock.recv(4096):
        received += part
    sock.close()
    head, _, text = received.partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert b"connection: close" in head
    assert answer_in(text.decode().split("\n\n")[:-1]) == expected
