"""The store in a Redis server: files as keys, faults as OSError, and an engine that uses it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

pytest.importorskip("redis", reason="the store in a Redis server needs the extra [redis]")

from radixserve import InvalidRequest, Runtime, SamplingParams
from radixserve.store import redis_store
from radixserve.store.redis_store import RedisStore
from tests.store.redis_server import RedisServer

A = f"{'0' * 32}/{'1' * 32}/{'2' * 32}-00000001"
B = f"{'0' * 32}/{'3' * 32}/{'2' * 32}-00000001"
PARAMS = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, digest=True)
PROMPT = [3 + index % 800 for index in range(700)]


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


def test_put_get_has_drop_list(server: RedisServer) -> None:
    store = RedisStore(server.url)
    assert store.get(A) is None
    assert store.get(A, 3) is None
    assert store.put(A, [b"abc", b"def"]) == 6
    assert store.get(A) == b"abcdef"
    assert store.get(A, 2) == b"ab"
    assert store.has(A)
    assert not store.has(B)
    store.put(B, [b"xyz"])
    assert {(file.name, file.num_bytes) for file in store.list()} == {(A, 6), (B, 3)}
    assert all(file.used_at > 0 for file in store.list())
    assert [file.name for file in store.list(A[:65])] == [A]
    store.drop_folder(A[:65])
    assert [file.name for file in store.list()] == [B]
    store.drop(B)
    store.drop(B)
    assert not server.values


def test_what_the_server_refuses_is_an_os_error(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "_TIMEOUT_S", 0.1)
    store = RedisStore(server.url)
    for fault in ("error", "hang"):
        server.fault = fault
        with pytest.raises(OSError, match="the store of K/V"):
            store.put(A, [b"abc"])
        with pytest.raises(OSError, match="the store of K/V"):
            store.get(A)
        store.drop(A)


def test_a_restart_computes_one_token(server: RedisServer) -> None:
    completions = []
    for _ in range(2):
        with Runtime("demo", num_pages=2000, kv_store=server.url) as runtime:
            completions.append(runtime.generate(PROMPT, PARAMS))
            runtime.check()
    cold, warm = completions
    assert (warm.usage.computed_tokens, warm.usage.loaded_tokens) == (1, 699)
    assert (warm.token_ids, warm.digest) == (cold.token_ids, cold.digest)


def test_a_server_that_fails_costs_only_what_it_holds(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "_TIMEOUT_S", 0.1)
    with Runtime("demo", num_pages=2000, kv_store=server.url) as runtime:
        cold = runtime.generate(PROMPT, PARAMS)
    for fault in ("error", "hang"):
        server.fault = ""
        with Runtime("demo", num_pages=2000, kv_store=server.url) as runtime:
            server.fault = fault
            again = runtime.generate(PROMPT, PARAMS)
            assert again.usage.loaded_tokens == 0
            assert (again.token_ids, again.digest) == (cold.token_ids, cold.digest)


def test_a_damaged_value_is_computed_and_written_again(server: RedisServer) -> None:
    with Runtime("demo", num_pages=2000, kv_store=server.url) as runtime:
        cold = runtime.generate(PROMPT, PARAMS)
    for key, value in list(server.values.items()):
        server.values[key] = value[:-100] + bytes([value[-100] ^ 1]) + value[-99:]
    for num_loaded in (0, 699):
        with Runtime("demo", num_pages=2000, kv_store=server.url) as runtime:
            again = runtime.generate(PROMPT, PARAMS)
            failed = runtime.cache_stats()["kv_store"]["failed_reads"]
        assert again.usage.loaded_tokens == num_loaded
        assert failed == (0 if num_loaded else 1)
        assert (again.token_ids, again.digest) == (cold.token_ids, cold.digest)


def test_what_cannot_be_reached_is_refused_in_a_sentence(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidRequest, match="cannot be used"):
        Runtime("demo", num_pages=100, kv_store="redis://127.0.0.1:1/0")
    with pytest.raises(InvalidRequest, match="kv_store="):
        Runtime("demo", num_pages=100, kv_store="redis://127.0.0.1:port/0")
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(InvalidRequest, match=r"radixserve\[redis\]"):
        Runtime("demo", num_pages=100, kv_store=server.url)
