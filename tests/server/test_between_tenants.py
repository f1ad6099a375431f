"""What one tenant does shows in no answer to another, and takes nothing from it."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

from radixserve import Runtime
from radixserve.config import EngineConfig
from radixserve.reports import EngineStatus
from radixserve.server.app import make_app
from radixserve.server.config import ServerConfig
from radixserve.server.gate import limits, tenant_threads
from radixserve.server.gate.limits import GrammarThreads, Limits, Ration
from radixserve.server.gate.session_table import SessionTable
from radixserve.server.gate.state import AppState
from radixserve.server.gate.tenant_threads import TenantThreads, tenant_of_task
from radixserve.server.gate.tenants import TenantConversations, Tenants
from radixserve.server.prompt.prompt_input import are_long
from radixserve.server.wire.errors import ApiError
from radixserve.text.conversations import AnsweredChat
from tests.pacing import PATIENCE_S, held, wait_until
from tests.server.local_server import LocalServer

KEYS = {"ann": "key-of-ann-0123456789", "bob": "key-of-bob-0123456789"}


@pytest.fixture(scope="module")
def own_runtime() -> Iterator[Runtime]:
    with Runtime("demo", num_pages=2048, page_size=16, advice=True) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def guarded(
    own_runtime: Runtime, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalServer]:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()))
    path.chmod(0o600)
    with LocalServer(own_runtime, Tenants.load(str(path))) as served:
        yield served


def as_(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}"}


PROMPT = "The prompt of another tenant, which no answer may show to others"
SAID = [{"role": "user", "content": PROMPT}]
SHORT = {"max_tokens": 2, "temperature": 0}
BRANCH = "/v1/branches/{branch}"
# A request to each route: method, path, body. Later ones name what earlier ones have made.
ROUTES: list[tuple[str, str, Any]] = [
    ("get", "/health", None),
    ("get", "/health/live", None),
    ("get", "/health/ready", None),
    ("get", "/health/startup", None),
    ("get", "/ping", None),
    ("get", "/version", None),
    ("get", "/get_model_info", None),
    ("get", "/model_info", None),
    ("get", "/v1/models", None),
    ("get", "/v1/models/{name}", None),
    ("get", "/tokenizer_info", None),
    ("post", "/tokenize", {"prompt": PROMPT}),
    ("post", "/detokenize", {"tokens": [5, 6]}),
    ("post", "/v1/completions", {"prompt": PROMPT, "session_id": "s", **SHORT}),
    ("post", "/v1/chat/completions", {"messages": SAID, **SHORT}),
    ("post", "/generate", {"prompt": PROMPT, **SHORT}),
    ("post", "/v1/messages", {"model": "demo", "messages": SAID, **SHORT}),
    ("post", "/v1/messages/count_tokens", {"model": "demo", "messages": SAID}),
    ("post", "/v1/responses", {"input": SAID, "max_output_tokens": 16, "temperature": 0}),
    ("get", "/v1/responses/{response}", None),
    ("get", "/v1/responses/{response}/input_items", None),
    ("post", "/v1/responses/{response}/cancel", {}),
    ("delete", "/v1/responses/{response}", None),
    ("post", "/v1/score", {"prompt": PROMPT, "candidates": [" yes", " no"]}),
    (
        "post",
        "/v1/decisions",
        {"input": PROMPT, "questions": [{"type": "predicate", "instructions": "It is so."}]},
    ),
    ("post", "/v1/branches", {"prompt": PROMPT}),
    ("post", BRANCH + "/extend", {"tokens": " now"}),
    ("post", BRANCH + "/generate", SHORT),
    ("post", BRANCH + "/truncate", {"length": 5}),
    ("post", BRANCH + "/score", {"candidates": [" yes", " no"]}),
    ("post", BRANCH + "/fork", {"n": 2}),
    ("get", BRANCH, None),
    ("delete", BRANCH, None),
    ("post", "/rerank", {"query": "a", "documents": ["b", "c"]}),
    ("post", "/v1/rerank", {"query": "a", "documents": ["b", "d"]}),
    ("post", "/v2/rerank", {"query": "a", "documents": ["b", "e"]}),
    ("post", "/v1/cache/lookup", {"prompt": PROMPT}),
    ("post", "/v1/cache/hints", {"hints": [{"verb": "demote", "prompt": PROMPT}]}),
    ("post", "/v1/cache/snapshot", {}),
    ("post", "/v1/cache/allocator", {"script": [{"add": "a", "prompt": PROMPT}]}),
    ("get", "/v1/cache/tree", None),
    ("get", "/v1/cache/stats", None),
    ("get", "/v1/cache/worth", None),
    ("delete", "/v1/sessions/{session}", None),
]
ADMIN_ROUTES = [
    ("get", "/v1/cache/advice"),
    ("get", "/metrics"),
    ("get", "/load"),
    ("get", "/get_server_info"),
    ("get", "/server_info"),
    ("post", "/flush_cache"),
    ("post", "/reset_prefix_cache"),
    ("post", "/v1/cache/flush"),
    ("post", "/v1/cache/compare"),
    ("post", "/v1/load_lora_adapter"),
    ("post", "/v1/unload_lora_adapter"),
    ("post", "/pause_generation"),
    ("post", "/continue_generation"),
    ("post", "/update_weights_from_disk"),
    ("post", "/update_weights_from_tensor"),
    ("post", "/pause"),
    ("post", "/resume"),
    ("get", "/is_paused"),
    ("get", "/weight_version"),
    ("get", "/get_weight_version"),
]
MORE_TREES = ("?max_nodes=1", "?cache_salt=a")


def seen_by(served: LocalServer, name: str) -> dict[str, Any]:
    """The answers of all routes, in which nothing is left that is made anew each time."""
    made = {"name": "demo", "session": "s", "branch": "", "response": ""}
    count = usage_of(served, name)
    seen = {}
    for method, path, body in ROUTES:
        options = {} if body is None else {"json": body}
        url = path.format(**made)
        answer = served.client.request(method.upper(), url, headers=as_(name), **options)
        expected = 400 if path.endswith("/cancel") else 200  # it is not in the background
        assert answer.status_code == expected, (path, answer.text)
        seen[f"{method} {path}"] = answer.json()
        if path in ("/v1/branches", "/v1/responses"):
            made["branch" if "branches" in path else "response"] = answer.json()["id"]
    for query in MORE_TREES:
        answer = served.client.get(f"/v1/cache/tree{query}", headers=as_(name))
        seen[query] = answer.json()
    now = usage_of(served, name)
    seen["get /v1/cache/stats"] |= {key: now[key] - count[key] for key in now}
    seen["post /v1/cache/snapshot"].pop("counters")  # as in /v1/cache/stats
    seen["get /v1/cache/worth"] = sorted(seen["get /v1/cache/worth"]["tenants"])  # sums, too
    return {path: _without_ids(answer) for path, answer in seen.items()}


def usage_of(served: LocalServer, name: str) -> dict[str, int]:
    """What a tenant's own requests added up to."""
    counts = served.client.get("/v1/cache/stats", headers=as_(name)).json()
    names = ("requests", "prompt_tokens", "cached_tokens", "computed_tokens", "completion_tokens")
    return {key: counts[key] for key in names}


def test_the_table_has_every_route(guarded: LocalServer) -> None:
    paths = make_app(guarded.server).openapi()["paths"]
    routes = {(method, path) for path, methods in paths.items() for method in methods}
    of_table = {(method, path.replace("{branch}", "{branch_id}")
                 .replace("{response}", "{response_id}").replace("{session}", "{session_id}"))
                for method, path, _ in ROUTES}  # fmt: skip
    assert of_table | set(ADMIN_ROUTES) == routes
    for method, path in ADMIN_ROUTES:
        options = {"json": {}} if method == "post" else {}
        answer = guarded.client.request(method.upper(), path, headers=as_("bob"), **options)
        assert answer.status_code == 403, path
    answer = guarded.client.get("/v1/cache/tree?tenant=ann", headers=as_("bob"))
    assert answer.status_code == 403


def test_no_answer_shows_what_another_tenant_does(
    guarded: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SHARE", 1.0)  # reads of the tree need not wait
    for _ in range(3):  # from now on bob's own work changes nothing any more
        before = seen_by(guarded, "bob")
    assert seen_by(guarded, "bob") == before
    seen_by(guarded, "ann")
    for text in (PROMPT, "x y z " * 50):
        body = {"prompt": text, "max_tokens": 30, "session_id": "s", "cache_salt": "a"}
        guarded.post("/v1/completions", body, headers=as_("ann"))
        guarded.post("/v1/completions", {"prompt": text, "max_tokens": 9}, headers=as_("ann"))
        guarded.post("/v1/branches", {"prompt": text}, headers=as_("ann"))
    after = seen_by(guarded, "bob")
    for path, answer in before.items():
        assert after[path] == answer, path


NEW_EACH_TIME = frozenset({
    "id", "parent", "created", "created_at", "completed_at", "response_id", "item_id", "at",
    "next_s", "cost_ms", "age_s", "last_used", "tick", "used_at", "last_use", "idle_s",
    "e2e_latency", "time_s", "ttft_s", "previous_response_id", "first_id", "last_id",
})  # fmt: skip


def _without_ids(value: Any) -> Any:
    """Names, times and numbers of nodes are made anew all the time."""
    if isinstance(value, dict):
        return {
            name: _without_ids(part) for name, part in value.items() if name not in NEW_EACH_TIME
        }
    return [_without_ids(part) for part in value] if isinstance(value, list) else value


def test_reads_of_the_tree_and_snapshots_have_one_ration(
    guarded: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits for its turn, and says what it has cost."""
    rations: list[tuple[str, int]] = []
    for name in ("pause", "spend"):
        do = getattr(Ration, name)

        def note(ration: Ration, *cost: float, name: str = name, do: Any = do) -> Any:
            rations.append((name, id(ration)))
            return do(ration, *cost)

        monkeypatch.setattr(Ration, name, note)
    for number in range(2):  # the same snapshot twice would be made once
        assert guarded.client.get("/v1/cache/tree", headers=as_("ann")).status_code == 200
        guarded.post("/v1/cache/snapshot", {"opened": [number]}, headers=as_("bob"))
    assert [name for name, _ in rations] == ["pause", "spend"] * 4
    assert len({ration for _, ration in rations}) == 1


def test_reads_of_the_tree_take_a_hundredth_of_the_time() -> None:
    """However many ask; what waits is bounded."""
    now, worked, give_way = 0.0, 0.0, asyncio.sleep
    ration = Ration(lambda: now)

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += max(0.0, seconds)
        await give_way(0)

    async def read() -> None:
        nonlocal now, worked
        async with ration.turn():
            await ration.pause()
            now, worked = now + 0.02, worked + 0.02
            ration.spend(0.02)

    async def read_all() -> list[Any]:
        with patch.object(limits.asyncio, "sleep", sleep):
            return await asyncio.gather(*(read() for _ in range(40)), return_exceptions=True)

    errors = [error for error in asyncio.run(read_all()) if error is not None]
    assert len(errors) == 40 - 32
    assert all(isinstance(error, ApiError) and error.status == 429 for error in errors)
    assert worked == pytest.approx(32 * 0.02)
    assert worked <= 0.011 * now + 0.02


def test_sessions_of_a_tenant_close_its_own_only() -> None:
    closed: list[str] = []
    table = SessionTable(300.0, 2, closed.append)
    first = table.use("ann", "first")
    kept = [table.use("bob", str(number)) for number in range(2)]
    for number in range(5):
        table.use("ann/salt", str(number))
    assert first in closed
    assert not set(kept) & set(closed)
    assert len(table) == 4
    assert table.close("bob", "0")
    assert not table.close("bob", "0")


def test_a_lease_ends_in_order_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    from radixserve.server.gate import session_table

    now = 0.0
    monkeypatch.setattr(session_table, "time", SimpleNamespace(monotonic=lambda: now))
    closed: list[str] = []
    table = SessionTable(10.0, 5, closed.append)
    table.use("ann", "a")
    now = 5.0
    table.use("bob", "b")
    now = 12.0
    table.close_expired()
    assert closed == [table.name("ann", "a")]


def test_conversations_of_a_tenant_push_out_its_own_only() -> None:
    chats = TenantConversations(2)
    ids = np.arange(3, dtype=np.int32)
    chats.note("bob", AnsweredChat("hello there", ids, "there"))
    for number in range(5):
        chats.note("ann", AnsweredChat(f"{number} hello", ids, "hello"))
    assert chats.find("bob", "hello there and on", ["there"]) is not None
    assert chats.find("ann", "0 hello and on", ["hello"]) is None
    assert chats.find("ann", "4 hello and on", ["hello"]) is not None
    assert len(chats) == 3
    chats.forget("bob")
    assert len(chats) == 2


def status(waiting: int, waiting_tokens: int = 0) -> EngineStatus:
    return EngineStatus(True, False, 0.0, 0, waiting, waiting_tokens, {})


def test_samples_count_against_the_queue() -> None:
    limits = Limits(ServerConfig(max_queued_requests=100))
    limits.check(status(0), 100, 5)
    with pytest.raises(ApiError) as error:
        limits.check(status(0), 131_072, 1024)
    assert error.value.status == 400
    with pytest.raises(ApiError) as error:
        limits.check(status(60), 41, 5)
    assert error.value.status == 429


def test_a_tenant_gets_its_share_of_a_full_queue() -> None:
    limits = Limits(ServerConfig(max_queued_requests=100))
    limits.check(status(20), 20, 5, share=0.25, own_waiting=20)  # less than half is in use
    limits.check(status(60), 5, 5, share=0.25, own_waiting=20)
    with pytest.raises(ApiError, match="your share of the queue, 25") as error:
        limits.check(status(60), 6, 5, share=0.25, own_waiting=20)
    assert error.value.headers["retry-after"] == "5"
    limits.check(status(60), 30, 5, share=0.5, own_waiting=10)


def test_retry_after_is_an_estimate_from_the_queue() -> None:
    limits = Limits(ServerConfig(max_queued_requests=100))
    for _ in range(10):
        limits.note_finished(1, 10)
    assert limits.wait_s(100, 0) >= 1
    assert limits.wait_s(100_000_000, 0) == 60


def test_weights(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("ann 0123456789abcdef weight=3\nbob 0123456789abcdeg\nbob 0123456789abcdeh\n")
    path.chmod(0o600)
    tenants = Tenants.load(str(path))
    assert tenants.share("ann") == 0.75
    assert tenants.share("bob") == 0.25
    assert Tenants().share("") == 1.0
    assert EngineConfig(tenant_weights=tenants.weights).tenant_weights == {"ann": 3.0, "bob": 1.0}


def test_salts_are_short(guarded: LocalServer) -> None:
    salt = "s" * 257
    answer = guarded.client.get(f"/v1/cache/tree?cache_salt={salt}", headers=as_("ann"))
    assert answer.status_code == 400
    body = {"prompt": "a", "max_tokens": 1, "cache_salt": salt}
    answer = guarded.client.post("/v1/completions", json=body, headers=as_("ann"))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "cache_salt"


def test_priorities_above_others_are_an_admins(guarded: LocalServer) -> None:
    for priority, status_code in ((1_000_000, 403), (1, 403), (0, 200), (-5, 200)):
        body = {"prompt": "a", "max_tokens": 1, "priority": priority}
        answer = guarded.client.post("/v1/completions", json=body, headers=as_("ann"))
        assert answer.status_code == status_code, answer.text


def test_grammars_of_a_tenant_leave_a_thread_to_others() -> None:
    """One tenant's slow grammars take two threads of four; another's is compiled at once."""

    async def compile_all() -> None:
        threads = GrammarThreads()
        gate = threading.Event()

        def wait() -> None:
            gate.wait(PATIENCE_S)

        slow = [asyncio.create_task(threads.run("ann", wait)) for _ in range(12)]
        await asyncio.sleep(0)
        await asyncio.wait_for(threads.run("bob", lambda: None), PATIENCE_S)
        assert not any(task.done() for task in slow)
        more = [asyncio.create_task(threads.run("ann", wait)) for _ in range(20)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as error:
            await threads.run("ann", wait)
        assert error.value.status == 429
        gate.set()
        await asyncio.gather(*slow, *more)
        threads.close()

    asyncio.run(compile_all())


def test_many_short_prompts_are_read_beside_the_event_loop() -> None:
    """Each costs more than its text: 1,024 of one token held the loop for 50 ms."""
    assert are_long([[1]] * 1_024)
    assert are_long(["b c d"] * 200)
    assert are_long(["a" * 10_000])
    assert not are_long(["How do I sort a list?"] * 20)
    assert not are_long([])


def test_threads_of_a_tenant_leave_some_to_others() -> None:
    """Texts of one tenant that take long to tokenise; another's work is done at once."""

    async def work_all() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(TenantThreads())
        gate = threading.Event()
        running: list[str] = []

        async def work(tenant: str, name: str) -> None:
            tenant_of_task.set(tenant)

            def wait() -> None:
                running.append(name)
                if tenant == "ann":
                    assert gate.wait(PATIENCE_S)

            await asyncio.to_thread(wait)

        slow = [asyncio.create_task(work("ann", str(number))) for number in range(40)]
        await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.create_task(work("bob", "bob")), PATIENCE_S)
        assert len(running) <= tenant_threads._THREADS_PER_TENANT + 1
        slow[-1].cancel()  # before its turn
        await asyncio.wait(slow[-1:], timeout=PATIENCE_S)
        gate.set()
        results = await asyncio.gather(*slow, return_exceptions=True)
        assert results[:-1] == [None] * 39
        assert len(running) == 40
        deadline = time.monotonic() + PATIENCE_S  # a result comes before its thread is free
        while loop._default_executor._num_running:  # type: ignore[attr-defined]
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        assert not loop._default_executor._waiting  # type: ignore[attr-defined]

    asyncio.run(work_all())


def test_many_prompts_of_a_tenant_take_its_share_of_the_slots(
    guarded: LocalServer, own_runtime: Runtime
) -> None:
    """Beside another tenant; those that it holds back count as waiting, and end with it."""
    state = guarded.server
    slots = own_runtime.config.max_running_requests
    assert state.num_at_once("ann") == slots * 3 // 4  # no other is active
    body = {"max_tokens": 500, "ignore_eos": True}

    def ask(prompt: Any, name: str) -> int:
        given = {**body, "prompt": prompt}
        return guarded.client.post("/v1/completions", json=given, headers=as_(name)).status_code

    with ThreadPoolExecutor(2) as pool:
        with held(own_runtime, steps=450):  # both have begun by then
            others = pool.submit(ask, [5], "bob")
            wait_until(lambda: bool(state.in_flight))
            assert state.num_at_once("ann") == slots // 2
            many = pool.submit(ask, [[number, 5] for number in range(slots + 6)], "ann")
            wait_until(lambda: own_runtime.status().running >= 1 + slots // 2)
            assert own_runtime.status().running == 1 + slots // 2
            assert state.engine_status().waiting == slots + 6 - slots // 2
            assert state.engine_status().waiting_tokens == 2 * (slots + 6 - slots // 2)
        assert others.result() == many.result() == 200
    wait_until(lambda: not state.in_flight)
    assert state.engine_status().waiting == 0
    assert AppState(ServerConfig(), "demo", Tenants()).num_at_once("") is None


def test_bodies_of_a_tenant_leave_room_to_others(own_runtime: Runtime, tmp_path: Path) -> None:
    """Large ones that never come whole."""
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()))
    keys.chmod(0o600)
    with LocalServer(own_runtime, Tenants.load(str(keys)), max_body="1MB") as served:
        host, port = served.url.removeprefix("http://").split(":")
        head = (
            f"POST /tokenize HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEYS['ann']}"
            "\r\ncontent-type: application/json\r\ncontent-length: 1000000\r\n\r\n"
        )
        with contextlib.ExitStack() as stack:
            socks = [
                stack.enter_context(socket.create_connection((host, int(port)), PATIENCE_S))
                for _ in range(12)
            ]
            for sock in socks:
                with contextlib.suppress(OSError):  # it was refused already
                    sock.sendall(head.encode() + b" " * 999_999)
            wait_until(lambda: len(select.select(socks, [], [], 0)[0]) == 12 - 4)  # are refused
            for size in (9, 100_000):
                served.post("/tokenize", {"prompt": " " * size}, headers=as_("bob"))
            served.post("/tokenize", {"prompt": "small"}, headers=as_("ann"))


def test_too_many_samples_are_refused_at_once(guarded: LocalServer) -> None:
    body = {"prompt": [[1]] * 1024, "n": 128, "max_tokens": 1}
    answer = guarded.client.post("/v1/completions", json=body, headers=as_("ann"))
    assert answer.status_code == 400
    assert "131072" in answer.json()["error"]["message"]
