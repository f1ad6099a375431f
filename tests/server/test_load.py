"""Clients that leave, read slowly or come in crowds; an engine that dies."""

from __future__ import annotations

import json
import os
import random
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

from radixserve import Runtime
from radixserve.server.turn import event_stream
from radixserve.server.wire.errors import ApiError
from tests.checkpoints import make_checkpoint
from tests.pacing import held, wait_until
from tests.server.local_server import LocalServer

PATH = "/v1/completions"
LONG = {"prompt": [5, 6, 7], "max_tokens": 2000, "ignore_eos": True}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_aborted(
    served: LocalServer, runtime: Runtime, stream: bool
) -> None:
    aborted = runtime.cache_stats()["aborted"]
    gone = served.server.counters.clients_gone
    with held(runtime, steps=400):
        sock = served.connect(PATH, {**LONG, "stream": stream, "n": 2})
        wait_until(lambda: runtime.cache_stats()["running"] == 2)
        sock.close()
        wait_until(lambda: runtime.cache_stats()["aborted"] == aborted + 2)
    wait_until(lambda: runtime.status().is_idle)
    wait_until(lambda: served.server.counters.clients_gone == gone + 1)
    wait_until(lambda: not served.server.in_flight)


def test_a_client_that_leaves_early_is_counted(
    served: LocalServer, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its body is read, and while its stream has no head."""
    monkeypatch.setattr(event_stream, "HEAD_AFTER_S", 60)
    counters = served.server.counters
    before, gone = Counter(counters.statuses), counters.clients_gone
    with held(runtime, steps=0):
        with served.connect(PATH, {**LONG, "stream": True}):
            wait_until(lambda: bool(served.server.in_flight))
        with socket.socket() as sock:
            sock.connect(served.address)
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 9\r\n\r\n{")
        wait_until(lambda: counters.statuses - before == {"499": 2})
    assert counters.clients_gone == gone + 2


def test_a_full_queue_is_answered_429(runtime: Runtime) -> None:
    """16 requests run; the limits count what waits behind them."""
    with LocalServer(runtime, max_queued_requests=3, max_queued_tokens=200) as served:
        with held(runtime, steps=400):  # its choices may come one by one
            sock = served.connect(PATH, {**LONG, "n": 16})
            wait_until(lambda: runtime.status().running == 16)
            waiting = [served.connect(PATH, {"prompt": [at], "max_tokens": 1}) for at in range(3)]
            wait_until(lambda: runtime.status().waiting == 3)
            refused = served.client.post(PATH, json={"prompt": [9], "max_tokens": 1})
            assert refused.status_code == 429
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert "max_queued_requests=3" in refused.json()["error"]["message"]
            waiting.pop().close()
            wait_until(lambda: runtime.status().waiting == 2)
            refused = served.client.post(PATH, json={"prompt": [1] * 200, "max_tokens": 1})
            assert refused.status_code == 429
            assert "max_queued_tokens=200" in refused.json()["error"]["message"]
            refused = served.client.post(PATH, json={"prompt": [1], "max_tokens": 1, "n": 2})
            assert refused.status_code == 429, "n does not count n times"
            assert served.client.get("/health/ready").status_code == 200
            sock.close()
        for one in waiting:
            assert b"200 OK" in one.recv(4096)
            one.close()
        wait_until(lambda: runtime.status().is_idle)
        served.post(PATH, {"prompt": [1] * 300, "max_tokens": 1})  # an empty queue takes it
        assert 'rejections_total{reason="queue_full"} 3.0' in served.client.get("/metrics").text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 1_700}]}),
        ("/v1/responses", {"input": "a", "background": True}),
        ("/rerank", {"query": "a", "documents": ["b", "c", "d"]}),
    ],
)
def test_a_crowd_that_comes_at_once_keeps_the_bound_of_the_queue(
    runtime: Runtime, path: str, body: dict[str, object]
) -> None:
    with LocalServer(runtime, max_queued_requests=4) as served:
        counters = served.server.counters
        with held(runtime, steps=0):
            socks = [served.connect(path, body) for _ in range(24)]
            wait_until(lambda: counters.statuses["429"] >= 20)
            assert runtime.status().waiting == 4
            for sock in socks:
                sock.close()
            served.call(end_background(served))
        wait_until(lambda: not served.server.in_flight)


async def end_background(served: LocalServer) -> None:
    served.server.background.end_all(ApiError(503, "enough"))


def test_a_reranking_that_is_aborted_says_so(served: LocalServer, runtime: Runtime) -> None:
    with held(runtime, steps=0), ThreadPoolExecutor(1) as pool:
        body = {"query": "a", "documents": ["b", "c"]}
        answer = pool.submit(served.client.post, "/rerank", json=body)
        wait_until(lambda: runtime.status().waiting == 4)
        runtime.abort()
        assert answer.result().json()["error"]["message"] == "the decisions were aborted"


def test_a_slow_reader_disturbs_nobody_and_gets_everything(runtime: Runtime) -> None:
    with LocalServer(runtime, send_buffer=8192) as served:
        body = {"prompt": [5, 6, 7], "max_tokens": 300, "ignore_eos": True, "n": 8, "seed": 1}
        expected = served.post(PATH, body)
        begun = runtime.cache_stats()["prompted_tokens"]
        slow = served.connect(PATH, {**body, "stream": True}, buffer=4096)
        wait_until(lambda: runtime.cache_stats()["prompted_tokens"] > begun)
        served.post(PATH, {"prompt": "quick", "max_tokens": 2})  # while nobody reads the other
        wait_until(lambda: runtime.status().is_idle)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)  # it hurries from now on
        received = b""
        while part := slow.recv(65536):
            received += part
        slow.close()
    texts = dict.fromkeys(range(8), "")
    events = [line for line in received.split(b"\n") if b"data: {" in line]
    for line in events:
        (choice,) = json.loads(line[line.index(b"{") :])["choices"]
        texts[choice["index"]] += choice["text"]
    assert list(texts.values()) == [choice["text"] for choice in expected["choices"]]
    assert len(events) < 8 * 200, "nothing was merged while the reader lagged"


def test_many_connections_that_leave_give_everything_back(
    served: LocalServer, runtime: Runtime
) -> None:
    rng = random.Random(3)
    wait_until(lambda: not served.server.in_flight)
    before = len(os.listdir("/proc/self/fd"))
    socks = []
    for number in range(80):
        body = {"prompt": [number, 5], "max_tokens": 20, "stream": number % 2 == 0}
        socks.append(served.connect(PATH, body))
        if rng.random() < 0.5:
            socks.pop(rng.randrange(len(socks))).close()
    for sock in socks:
        received = b""
        while part := sock.recv(65536):
            received += part
        assert b"finish_reason" in received
        sock.close()
    wait_until(lambda: not served.server.in_flight and runtime.status().is_idle)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before + 2)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Runtime]:
    with Runtime(make_checkpoint(tmp_path, "llama"), num_pages=2048) as runtime:
        yield runtime


def test_a_dead_engine_answers_every_request(small: Runtime) -> None:
    """Those in flight and those that come; nothing hangs, and health says so."""
    with LocalServer(small) as served:
        body = {"prompt": [1], "max_tokens": 400, "ignore_eos": True, "n": 64}
        with ThreadPoolExecutor(1) as pool, held(small):
            asked = pool.submit(served.client.post, PATH, json=body)
            wait_until(lambda: small.status().running > 0)
            small.close()
            answer = asked.result()
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_dead"
        assert served.client.post(PATH, json={"prompt": [1]}).status_code == 503
        for path in ("/health", "/health/ready"):
            answer = served.client.get(path)
            assert answer.status_code == 503
            assert "dead" in answer.json()["status"]
        assert served.client.get("/health/live").status_code == 200
        assert served.client.get("/metrics").status_code == 200
