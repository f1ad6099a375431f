"""What the gate does with headers and paths: content codings, hosts and origins, slashes, probes;
and the routes of other servers about a server."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import logging
import re
import threading
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

from radixserve import Runtime
from radixserve._version import __version__
from radixserve.server.gate.body_decoding import BodyDecoder
from radixserve.server.gate.tenants import Tenants
from tests.pacing import PATIENCE_S
from tests.server.local_server import LocalServer

JSON = {"content-type": "application/json"}
KEYS = {"root": "key-of-root-0123456789", "ann": "key-of-ann-0123456789"}
ASK: dict[str, Any] = {
    "prompt": "A coded body",
    "max_tokens": 2,
    "temperature": 0,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def guarded(runtime: Runtime, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """With keys."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    lines = [f"{name} {key}{' admin' if name == 'root' else ''}" for name, key in KEYS.items()]
    path.write_text("\n".join(lines))
    path.chmod(0o600)
    with LocalServer(runtime, Tenants.load(str(path))) as served:
        yield served


def raw_deflate(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-15)
    return compressor.compress(data) + compressor.flush()


CODINGS: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("gzip", gzip.compress), ("x-gzip", gzip.compress), ("GZIP", gzip.compress),
    ("deflate", zlib.compress), ("deflate", raw_deflate), ("identity", bytes), ("", bytes),
]  # fmt: skip


def send(served: LocalServer, content: Any, path: str = "/v1/completions", **headers: str) -> Any:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return served.client.post(path, content=content, headers={**JSON, **named})


@pytest.mark.parametrize(("coding", "encode"), CODINGS)
def test_a_coded_body_is_decoded(
    coding: str, encode: Callable[[bytes], bytes], served: LocalServer
) -> None:
    plain = served.post("/v1/completions", ASK)
    for body in (ASK, {**ASK, "user": "x" * 200, "metadata": {"a": "b" * 200_000}}):
        coded = encode(json.dumps(body).encode())
        parts = (coded[start : start + 1_000] for start in range(0, len(coded), 1_000))
        for content in (coded, parts):
            answer = send(served, content, content_encoding=coding)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"] == plain["choices"]


@pytest.mark.parametrize(
    ("coding", "content", "message"),
    [
        ("gzip", b"{}", "the body is not valid gzip"),
        (
            "gzip",
            gzip.compress(b'{"prompt": "a"}', mtime=0)[:-3],
            "the body ends before the end of its gzip",
        ),
        (
            "gzip",
            gzip.compress(b'{"a": 1}', mtime=0) * 2,
            "the body goes on after the end of its gzip",
        ),
        (
            "gzip",
            gzip.compress(b'{"a": 1}', mtime=0) + b"x",
            "the body goes on after the end of its gzip",
        ),
        ("deflate", b"\xff\xff\xff", "the body is not valid deflate"),
        ("deflate", raw_deflate(b"{}" * 99)[:-2], "the body ends before the end of its deflate"),
        ("gzip", gzip.compress(b'{"a": ', mtime=0), "not valid JSON"),
    ],
)
def test_a_wrong_code_is_400(
    coding: str, content: bytes, message: str, served: LocalServer
) -> None:
    answer = send(served, content, content_encoding=coding)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize("coding", ["br", "zstd", "compress", "gzip, gzip", "gzip, deflate", "é"])
def test_other_codings_are_415(coding: str, served: LocalServer) -> None:
    headers = {**JSON, "content-encoding": coding.encode("latin-1")}
    answer = served.client.post("/v1/completions", content=b"{}" * 90_000, headers=headers)
    assert answer.status_code == 415
    assert answer.headers["accept-encoding"] == "gzip, deflate"
    assert "the content encoding must be gzip or deflate" in answer.json()["error"]["message"]


@pytest.mark.parametrize("size", [1, 4])
def test_a_decoder_gives_all_of_a_body_in_small_pieces(size: int) -> None:
    data = json.dumps(list(range(3_000))).encode() + bytes(50_000)
    for coding, encode in CODINGS[:5]:
        coded, decoder = encode(data), BodyDecoder.of(coding, 258)
        assert decoder is not None
        parts = [coded[start : start + size] for start in range(0, len(coded), size)]
        pieces = [piece for part in parts for piece in decoder.pieces(part)]
        decoder.check_end()
        assert b"".join(pieces) == data
        assert max(map(len, pieces)) <= 258


def test_a_bomb_is_413_within_the_bound_of_memory_and_holds_nobody(runtime: Runtime) -> None:
    bomb = gzip.compress(bytes(300_000_000), 6)
    with LocalServer(runtime, max_body="16MB") as served:
        holds = [0.0]
        is_over = threading.Event()

        async def watch() -> None:
            while not is_over.is_set():
                began = time.perf_counter()
                await asyncio.sleep(0.001)
                holds.append(time.perf_counter() - began)

        assert served.loop is not None
        watching = asyncio.run_coroutine_threadsafe(watch(), served.loop)
        tracemalloc.start()
        answers = [send(served, bomb, content_encoding="gzip") for _ in range(3)]
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        is_over.set()
        watching.result(10)
    assert {answer.status_code for answer in answers} == {413}
    assert "larger than 16777216 bytes" in answers[0].text
    assert peak < 40_000_000
    assert max(holds) < 0.5  # 0.05 on a machine that is not busy


@pytest.mark.parametrize(
    "host",
    ["[::1", "::1", "[localhost]", "[1::2::3]", "local host", "a/b", "localhost:http", "a@b",
     "localhost:99999", "localhost:8000:1", "localhost:", "é", "localhost,evil", "[::1]x"],
)  # fmt: skip
def test_a_host_that_is_none_is_400(host: str, served: LocalServer, guarded: LocalServer) -> None:
    for server in (served, guarded):
        for path in ("/v1/models", "/no-such-path", "/health"):
            answer = server.client.get(path, headers={"host": host.encode("latin-1")})
            assert answer.status_code == 400, path
            assert "the Host header is not a host" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "origin",
    ["http://[::1", "http://[", "http://localhost:x", "localhost", "http://", "://localhost", "é",
     "http://a@{host}", "http://{host}/path", "http://{host}?a", "http://\u00bd", "file://", ""],
)  # fmt: skip
def test_a_broken_origin_is_403(origin: str, served: LocalServer) -> None:
    host = served.url.removeprefix("http://")
    origin = origin.replace("{host}", host)
    answer = served.client.get("/v1/models", headers={"origin": origin.encode("latin-1")})
    assert answer.status_code == 403, answer.text
    assert served.client.get("/v1/models", headers={"origin": f"http://{host}"}).is_success


@pytest.mark.parametrize(
    "name", ["authorization", "content-encoding", "content-type", "host", "origin", "x-api-key"]
)
def test_a_header_that_comes_twice_is_400(name: str, served: LocalServer) -> None:
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=PATIENCE_S)
    connection.putrequest("POST", "/v1/completions", skip_host=True)
    for header in ("host", "content-type", name, name):
        connection.putheader(header, "localhost")
    connection.putheader("content-length", "2")
    connection.endheaders(b"{}")
    answer = connection.getresponse()
    assert answer.status == 400
    message = json.loads(answer.read())["error"]["message"]
    assert re.fullmatch(f"the header (host|content-type|{name}) comes more than once", message)
    connection.close()


@pytest.mark.parametrize(
    ("value", "status"),
    [("application/json", 200), ("Application/JSON; charset=UTF-8", 200),
     ('application/json;charset="utf-8"', 200), ("application/json; charset=us-ascii", 200),
     ("application/json; profile=x", 200), ("application/json;", 200),
     ("application/json; charset=latin-1", 415), ("application/json; charset=utf-16", 415),
     ("text/json", 415), ("application/jsonx", 415), ("", 415), (";", 415), ("é", 415)],
)  # fmt: skip
def test_content_types(value: str, status: int, served: LocalServer) -> None:
    headers = {"content-type": value.encode("latin-1")}
    answer = served.client.post("/tokenize", content=b'{"prompt": "a"}', headers=headers)
    assert answer.status_code == status


def test_malformed_headers_that_are_only_noted(served: LocalServer) -> None:
    headers = dict.fromkeys(("traceparent", "x-request-id", "user-agent"), b"\xff\x01 \x7f")
    headers |= {"x-session-id": b"\xfc" * 300, "authorization": b"\xff", "accept": b"\xff"}
    answer = served.client.post("/v1/completions", json=ASK, headers=headers)
    assert answer.status_code in (200, 400)  # 400 where the parser of HTTP refuses the bytes


def test_a_slash_at_the_end_of_a_path(served: LocalServer, guarded: LocalServer) -> None:
    for path in ("/v1/models", "/health", "/version", "/v1/cache/stats", "/v1/models/demo"):
        answer = served.client.get(f"{path}/")
        assert answer.status_code == 200, path
    assert served.client.get("/v1/models/").json()["data"][0]["id"] == "demo"
    assert guarded.client.get("/health/").status_code == 200
    assert guarded.client.get("/v1/models/").status_code == 401
    for path in ("/v1/completions/", "/v1/completions//"):
        assert served.post(path, ASK)["choices"] == served.post("/v1/completions", ASK)["choices"]
    assert served.client.get("//").status_code == 200
    assert served.client.post("/v1/completions/x/", json={}).status_code == 404


def test_routes_of_other_servers(served: LocalServer, runtime: Runtime) -> None:
    assert served.client.get("/version").json() == {"version": __version__}
    assert served.client.get("/ping").status_code == served.client.post("/ping").status_code == 200
    assert served.client.get("/load").json() == {"server_load": 0}
    for path in ("/get_model_info", "/model_info"):
        facts = served.client.get(path).json()
        assert facts["model_path"] == "demo"
        assert facts["is_generation"] is True
        assert facts["max_model_len"] == runtime.max_seq_len
    for path in ("/get_server_info", "/server_info"):
        facts = served.client.get(path).json()
        assert facts["max_total_num_tokens"] == 8192
        assert facts["page_size"] == 1
        assert facts["version"] == __version__
        assert not {"api_key_file", "kv_store"} & set(facts)
    for path in ("/flush_cache", "/reset_prefix_cache"):
        served.post("/v1/completions", ASK)
        assert runtime.lookup(ASK["prompt"]).cached_len
        assert served.client.post(path).status_code == 200
        assert not runtime.lookup(ASK["prompt"]).cached_len
        origin = {"origin": "http://evil.example"}
        assert served.client.post(path, headers=origin).status_code == 403
        assert served.client.post(path, content=b"x").status_code == 415


def test_who_may_use_them(guarded: LocalServer) -> None:
    admin, tenant = ({"authorization": f"Bearer {KEYS[name]}"} for name in ("root", "ann"))
    for method, path in (
        ("GET", "/load"), ("GET", "/get_server_info"), ("POST", "/flush_cache"),
        ("POST", "/reset_prefix_cache"),
    ):  # fmt: skip
        assert guarded.client.request(method, path).status_code == 401
        assert guarded.client.request(method, path, headers=tenant).status_code == 403
        assert guarded.client.request(method, path, headers=admin).status_code == 200
    assert guarded.client.get("/ping").status_code == 200
    for path in ("/version", "/get_model_info"):
        assert guarded.client.get(path).status_code == 401
        assert guarded.client.get(path, headers=tenant).status_code == 200


def test_invocations_are_answered_by_the_route_of_their_body(served: LocalServer) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    for body, key in ((chat, "choices"), (ASK, "choices"), ({"text": "a"}, "meta_info"),
                      ({"input": "a", "max_output_tokens": 16}, "output")):  # fmt: skip
        assert key in served.post("/invocations", body)
    for body in ({}, [], {"other": 1}):
        answer = served.client.post("/invocations", json=body)
        assert answer.status_code == 400
        assert "must have messages or prompt" in answer.json()["error"]["message"]
    assert served.client.get("/invocations").status_code == 404


def test_the_log_leaves_out_probes_that_succeed(
    runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "radixserve.requests")
    paths = ["/health", "/health/live", "/health/", "/ping", "/metrics", "/v1/models"]
    for settings, logged in (({}, paths[-1:]), ({"log_probes": True}, paths)):
        caplog.clear()
        with LocalServer(runtime, log_requests=True, **settings) as served:
            for path in paths:
                assert served.client.get(path).status_code == 200
            served.client.delete("/metrics")
        lines = [json.loads(record.message) for record in caplog.records]
        assert [line["path"] for line in lines[:-1]] == [path.rstrip("/") for path in logged]
        assert (lines[-1]["path"], lines[-1]["status"]) == ("/metrics", 405)
