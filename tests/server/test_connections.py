"""Bounds on connections and on the heads of requests, over raw sockets."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

from uvicorn.protocols.http.flow_control import FlowControl

from radixserve import Runtime
from radixserve.server.config import ServerConfig
from radixserve.server.gate import http_protocol
from radixserve.server.gate.hosts import AllowedHosts
from radixserve.server.gate.http_protocol import (
    LEAST_TAKEN_BYTES,
    BoundedHttpProtocol,
    ConnectionCounts,
    bounded_protocol,
)
from radixserve.server.gate.tenants import Tenants
from radixserve.server.wire.errors import ApiError
from tests.pacing import PATIENCE_S, held, wait_until
from tests.server.local_server import LocalServer

HEAD = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n"


def connect(served: LocalServer, buffer: int | None = None) -> socket.socket:
    """`buffer`: bytes that its system keeps for it."""
    host, port = served.url.removeprefix("http://").split(":")
    sock = socket.socket()
    if buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    sock.settimeout(PATIENCE_S)
    sock.connect((host, int(port)))
    return sock


def all_of(sock: socket.socket) -> bytes:
    """What comes until the connection is closed."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(65536):
            received += data
    return received


def answer_to(served: LocalServer, *parts: bytes) -> bytes:
    """All that the server sends until it closes the connection."""
    with connect(served) as sock:
        try:
            for part in parts:
                sock.sendall(part)
        except OSError:
            pass  # it has closed already
        return all_of(sock)


def test_heads_have_a_bound(served: LocalServer) -> None:
    large = b"x: " + b"a" * 100_000 + b"\r\n"
    for parts in (
        [HEAD + large + b"\r\n"],
        [HEAD, b"x: ", *[b"a" * 10_000] * 100],  # never ends
        [HEAD, *[b"x%d: a\r\n" % number for number in range(20_000)]],
        [b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n"],
    ):
        answer = answer_to(served, *parts)
        assert answer.startswith(b"HTTP/1.1 431 ") or not answer
    whole = HEAD + b"x: " + b"a" * 30_000 + b"\r\nconnection: close\r\n\r\n"
    assert answer_to(served, whole).startswith(b"HTTP/1.1 200 ")


def test_a_pipeline_of_requests_is_served(served: LocalServer) -> None:
    """Many requests in one piece are no large head."""
    last = HEAD + b"connection: close\r\n\r\n"
    answer = answer_to(served, (HEAD + b"\r\n") * 3_000 + last)
    assert answer.count(b"HTTP/1.1 200 ") == 3_001


def test_few_requests_of_a_pipeline_are_known_at_a_time(
    served: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also bodies come whole, in whatever pieces."""
    lengths = []
    complete = BoundedHttpProtocol.on_message_complete

    def note(protocol: BoundedHttpProtocol) -> None:
        lengths.append(len(protocol.pipeline))
        complete(protocol)

    monkeypatch.setattr(BoundedHttpProtocol, "on_message_complete", note)
    prompt = {"prompt": "word " * 5_000}
    body, count = json.dumps(prompt).encode(), served.post("/tokenize", prompt)["count"]
    post = (
        b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(body)
    )
    last = HEAD + b"connection: close\r\n\r\n"
    answer = answer_to(served, (HEAD + b"\r\n") * 2_000 + post + body + post + body + last)
    assert answer.count(b"HTTP/1.1 200 ") == 2_003
    assert answer.count(b'"count":%d,' % count) == 2
    assert 1 <= max(lengths) <= 4096 // len(HEAD + b"\r\n") + 1


def test_a_body_that_is_not_read_holds_no_connection(
    served: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer comes before it, as to a request without a key."""
    has_timer = []
    complete = BoundedHttpProtocol.on_message_complete

    def note(protocol: BoundedHttpProtocol) -> None:
        complete(protocol)
        has_timer.append(protocol.timeout_keep_alive_task is not None)

    monkeypatch.setattr(BoundedHttpProtocol, "on_message_complete", note)
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.5)
    head = b"POST /ping HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n"
    for body in (b"", b"123456789"):
        with connect(served) as sock:
            sock.sendall(head)
            assert sock.recv(4096).startswith(b"HTTP/1.1 200 ")
            sock.sendall(body)
            if body:
                wait_until(lambda: bool(has_timer))
            else:
                sock.settimeout(10)
                all_of(sock)  # it is closed
    assert has_timer == [True]
    with connect(served) as sock:  # the body of a request behind another one may take longer
        post = head.replace(b"ping", b"tokenize").replace(b"9", b"15")
        post = post.replace(b"host:", b"content-type: application/json\r\nhost:")
        sock.sendall(HEAD + b"\r\n" + post)
        assert sock.recv(4096).startswith(b"HTTP/1.1 200 ")
        time.sleep(0.6)
        sock.sendall(b'{"prompt": "a"}')
        wait_until(lambda: b'"count":1' in sock.recv(4096))


def test_what_follows_an_open_request_is_bounded_and_hides_no_disconnect(
    served: LocalServer, runtime: Runtime
) -> None:
    post = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: 15\r\n\r\n"
    )
    asked = post + b'{"prompt": "a"}' + post.replace(b"15", b"32000000")
    gone = served.server.counters.clients_gone
    with held(runtime, steps=0):
        with connect(served) as sock:
            sock.sendall(asked)
            wait_until(lambda: bool(served.server.in_flight))
        wait_until(lambda: served.server.counters.clients_gone == gone + 1)
        with connect(served) as sock:
            sock.sendall(asked)
            sock.settimeout(0.2)
            num_sent = 0
            with contextlib.suppress(TimeoutError):
                while num_sent < 32_000_000:
                    num_sent += sock.send(bytes(1 << 20))
            assert num_sent < 16_000_000  # what the system keeps, and _MAX_UNPARSED


def test_a_request_for_another_protocol_is_answered_in_http_1(
    served: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Java's client asks for HTTP/2, in whatever pieces the head comes."""
    for body, answer in ((b'{"prompt": "a b"}', b'"count":'), (b"up", b"not valid JSON")):
        post = (
            b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\nconnection: Upgrade, close\r\n"
            b"Upgrade: h2c\r\nhttp2-settings: AAEAAEAA\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % len(body)
        )
        for size in (*range(1, 12), 4096):
            monkeypatch.setattr(http_protocol, "_SLICE_BYTES", size)
            assert answer in answer_to(served, post + body)


@pytest.mark.parametrize("start", [b"", HEAD])
def test_a_head_that_does_not_come_ends_its_connection(
    served: LocalServer, monkeypatch: pytest.MonkeyPatch, start: bytes
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.05)
    assert answer_to(served, start).startswith(b"HTTP/1.1 408 ")


@pytest.fixture
def guarded(runtime: Runtime, tmp_path: Path) -> Iterator[LocalServer]:
    """With keys."""
    keys = tmp_path / "keys"
    keys.write_text("ann 0123456789abcdef\n")
    keys.chmod(0o600)
    with LocalServer(runtime, Tenants.load(str(keys))) as served:
        yield served


@pytest.fixture(scope="module")
def narrow(runtime: Runtime) -> Iterator[LocalServer]:
    with LocalServer(runtime, max_connections=3) as narrow:
        yield narrow


def test_connections_have_a_bound(narrow: LocalServer) -> None:
    narrow.client.close()  # it keeps none open
    held = [connect(narrow) for _ in range(3)]
    for sock in held:
        sock.sendall(HEAD + b"\r\n")
        assert sock.recv(20).startswith(b"HTTP/1.1 200 ")
    assert answer_to(narrow).startswith(b"HTTP/1.1 503 ")
    held.pop().close()
    while not answer_to(narrow, HEAD + b"connection: close\r\n\r\n").startswith(b"HTTP/1.1 200 "):
        pass  # the server has not seen it close yet
    for sock in held:
        sock.close()


def test_a_client_that_never_reads_its_stream_is_cut_off(runtime: Runtime) -> None:
    """Its request ends with it; others are served meanwhile."""
    with LocalServer(runtime, send_buffer=8192, write_timeout=0.2) as served:
        gone = served.server.counters.clients_gone
        body = {"prompt": [5, 6, 7], "max_tokens": 2000, "ignore_eos": True, "n": 8}
        silent = served.connect("/v1/completions", {**body, "stream": True}, buffer=4096)
        wait_until(lambda: bool(served.server.in_flight))
        served.post("/v1/completions", {"prompt": "quick", "max_tokens": 2})
        wait_until(lambda: served.server.counters.clients_gone == gone + 1)
        wait_until(lambda: not served.server.in_flight)
        assert b"[DONE]" not in all_of(silent)
        silent.close()


def test_a_client_that_never_reads_an_answer_holds_no_connection(served: LocalServer) -> None:
    """Whole answers, which are ready at once, and connections that the server has closed."""
    with LocalServer(served.server.runtime, send_buffer=4096, write_timeout=0.2) as narrow:
        path = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n"
        for head in (path + b"\r\n", path + b"connection: close\r\n\r\n"):
            with connect(narrow, buffer=4096) as sock:
                sock.sendall(head)
                wait_until(lambda: narrow.num_connections == 1)
                wait_until(lambda: narrow.num_connections == 0)
                assert len(all_of(sock)) < len(served.client.get("/openapi.json").content)


def test_a_client_that_reads_slowly_is_not_cut_off() -> None:
    """As long as it takes so much of what waits, in each time."""
    loop, transport = SlowLoop(), SlowTransport()
    protocol: Any = object.__new__(bounded_protocol(ConnectionCounts(9, 9), 10.0))
    protocol.loop, protocol.transport, protocol.flow = loop, transport, FlowControl(transport)
    protocol._write_timer = protocol._unsent_since = None
    transport.unsent = 1_000_000
    protocol.pause_writing()
    for _ in range(10):
        transport.unsent -= LEAST_TAKEN_BYTES
        loop.run_for(10.0)
    protocol.resume_writing()
    loop.run_for(9.0)
    transport.unsent = 100
    protocol.pause_writing()
    loop.run_for(9.0)
    assert not transport.is_aborted
    assert len(loop.timers) == 1
    loop.run_for(1.0)
    assert transport.is_aborted
    assert not loop.timers


class SlowLoop:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, function: Callable[[], None]) -> object:
        self.timers.append((self.now + seconds, function))
        return object()

    def run_for(self, seconds: float) -> None:
        end = self.now + seconds
        while self.timers and min(self.timers)[0] <= end:
            timer = min(self.timers)
            self.timers.remove(timer)
            self.now = timer[0]
            timer[1]()
        self.now = end


class SlowTransport:
    unsent = 0
    is_aborted = False

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def abort(self) -> None:
        self.is_aborted = True


def test_counts_by_address() -> None:
    counts = ConnectionCounts(3, 2)
    assert counts.add("a")
    assert counts.add("a")
    assert not counts.add("a")
    counts.remove("a")
    assert counts.add("b")
    assert not counts.add("c")
    counts.remove("c")
    counts.remove("a")
    assert counts.add("c")


@pytest.mark.parametrize(
    ("settings", "headers", "is_allowed"),
    [
        ({}, {"host": "localhost:8000"}, True),
        ({}, {"host": "127.0.0.1:8000"}, True),
        ({}, {"host": "[::1]:8000"}, True),
        ({}, {}, True),
        ({}, {"host": "evil.example"}, False),  # a page that points its name at 127.0.0.1
        ({}, {"host": "192.168.1.2"}, False),
        ({"allowed_host": "box"}, {"host": "Box:8000"}, True),
        ({}, {"host": "localhost:8000", "origin": "http://localhost:8000"}, True),
        ({}, {"host": "localhost:8000", "origin": "http://localhost:9000"}, False),
        ({}, {"host": "localhost:8000", "origin": "null"}, False),
        ({"cors_origin": "https://chat.example"}, {"origin": "https://chat.example"}, True),
        ({"cors_origin": ["https://chat.example"]}, {"origin": "https://other.example"}, False),
        ({"cors_origin": "*"}, {"origin": "https://other.example"}, True),
        (
            {"host": "0.0.0.0", "allow_unauthenticated_network_access": True},
            {"host": "192.168.1.2:8000"},
            True,
        ),
        (
            {"host": "0.0.0.0", "allow_unauthenticated_network_access": True},
            {"host": "evil.example"},
            False,
        ),
    ],
)
def test_hosts_and_origins(
    settings: dict[str, object], headers: dict[str, str], is_allowed: bool
) -> None:
    hosts = AllowedHosts(ServerConfig(**settings))
    if is_allowed:
        hosts.check(headers)
        return
    with pytest.raises(ApiError) as error:
        hosts.check(headers)
    assert error.value.status == 403


def test_web_pages_and_a_server_without_keys(served: LocalServer, guarded: LocalServer) -> None:
    evil = {"host": "evil.example"}
    assert served.client.get("/v1/cache/tree", headers=evil).status_code == 403
    assert served.client.get("/", headers=evil).status_code == 403
    assert served.client.get("/health/ready").status_code == 200
    for headers in ({}, {"content-type": "text/plain"}):
        answer = served.client.post("/v1/cache/compare", headers=headers)
        assert answer.status_code == 415, answer.text
    assert guarded.client.get("/v1/models", headers=evil).status_code == 401  # keys guard it


def test_pages_of_an_allowed_origin(runtime: Runtime) -> None:
    with LocalServer(runtime, cors_origin="https://chat.example") as served:
        headers = {"origin": "https://chat.example", "access-control-request-method": "POST"}
        answer = served.client.options("/v1/chat/completions", headers=headers)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"


def test_head(served: LocalServer) -> None:
    for path in ("/", "/health", "/health/live", "/health/ready", "/health/startup"):
        answer = served.client.head(path)
        assert answer.status_code == 200
        assert not answer.content


def test_the_health_check_of_the_container(runtime: Runtime) -> None:
    text = (Path(__file__).parents[2] / "Dockerfile").read_text()
    (command,) = re.findall(r'HEALTHCHECK .*\\\n +CMD (\["python", .*\])\n', text)
    code = json.loads(command)[2]
    with LocalServer(None) as loading, LocalServer(runtime) as serving:
        for served, status in ((loading, 1), (serving, 0)):
            here = code.replace("http://127.0.0.1:8000", served.url)
            assert here != code
            done = subprocess.run([sys.executable, "-c", here], capture_output=True, check=False)
            assert done.returncode == status, done.stderr


def test_keys_are_printable(guarded: LocalServer) -> None:
    for key in ("Bearer \xe9" * 3, "Bearer " + "a" * 600, "Bearer a\tb"):
        answer = guarded.client.get("/v1/models", headers={"authorization": key.encode("latin-1")})
        assert answer.status_code == 401
