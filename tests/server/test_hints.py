"""Hints over HTTP: every verb, bounds, tenants that never see each other, requests' own hints."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

from radixserve import Runtime
from radixserve.server.gate.tenants import Tenants
from tests.pacing import wait_until
from tests.server.local_server import LocalServer

PROMPT = "The urllib module opens addresses, and what else does it do for a program?"
USER = [{"role": "user", "content": "What is a socket, in one line?"}]
RIGHTS = {"ann": "", "bob": " share", "root": " admin"}
KEYS = {name: f"key-of-{name}-0123456789" for name in RIGHTS}


@pytest.fixture(autouse=True)
def _clean(runtime: Runtime) -> Iterator[None]:
    runtime.flush_cache()
    yield
    runtime.flush_cache()
    assert runtime.cache_stats()["hints"] == 0


@pytest.fixture
def guarded(runtime: Runtime, tmp_path: Path) -> Iterator[LocalServer]:
    path = tmp_path / "keys"
    path.write_text("\n".join(f"{name} {KEYS[name]}{right}" for name, right in RIGHTS.items()))
    os.chmod(path, 0o600)
    with LocalServer(runtime, Tenants.load(str(path)), hint_budget_tokens=30) as served:
        yield served


def as_(name: str) -> dict[str, Any]:
    return {"headers": {"authorization": f"Bearer {KEYS[name]}"}}


def ask(served: LocalServer, prompt: str = PROMPT, name: str = "", **fields: Any) -> Any:
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
    return served.post("/v1/completions", body, **(as_(name) if name else {}))


def cached(served: LocalServer, prompt: str = PROMPT, name: str = "") -> int:
    usage = ask(served, prompt, name)["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def hint(served: LocalServer, *hints: dict[str, Any], name: str = "", **fields: Any) -> list[Any]:
    extra = as_(name) if name else {}
    found = served.post("/v1/cache/hints", {"hints": list(hints), **fields}, **extra)
    assert found["object"] == "list"
    data: list[Any] = found["data"]
    return data


def retain(**fields: Any) -> dict[str, Any]:
    return {"verb": "retain", "prompt": PROMPT, **fields}


def test_one_call_a_verb(served: LocalServer, runtime: Runtime) -> None:
    size = ask(served)["usage"]["prompt_tokens"]
    (answer,) = hint(served, retain(seconds=20))
    assert answer == {
        "verb": "retain",
        "answer": "accepted",
        "tokens_found": size,
        "tokens_covered": size,
        "seconds": 20.0,
        "reason": "",
    }
    answers = hint(served, *({**retain(), "verb": verb} for verb in ("pin", "share", "demote")))
    assert [one["verb"] for one in answers] == ["pin", "share", "demote"]
    assert [one["answer"] for one in answers] == ["accepted"] * 3
    hint(served, {"verb": "prefetch", "prompt": "Nobody has asked this question before"})
    wait_until(lambda: not runtime.cache_stats()["prefetches"])
    assert cached(served, "Nobody has asked this question before") > 0


def test_messages_token_ids_and_sessions(served: LocalServer, runtime: Runtime) -> None:
    body = {"messages": USER, "max_tokens": 2, "session_id": "s"}
    size = served.post("/v1/chat/completions", body)["usage"]["prompt_tokens"]
    ids = runtime.tokenize(PROMPT).tolist()
    answers = hint(
        served,
        {"verb": "retain", "messages": USER},
        {"verb": "pin", "session_id": "s"},
        {"verb": "pin", "prompt": ids},
        {"verb": "pin", "session_id": "other"},
    )
    assert [one["answer"] for one in answers] == ["accepted", "accepted", "missing", "missing"]
    assert answers[0]["tokens_covered"] == size
    assert answers[1]["tokens_covered"] > size
    stats = served.client.get("/v1/cache/stats").json()
    assert stats["pinned_tokens"] >= stats["retained_tokens"] - 1 > 0
    assert hint(served, {"verb": "demote", "session_id": "s"})[0]["answer"] == "accepted"
    assert served.client.delete("/v1/sessions/s").status_code == 404, "it is closed"


def test_a_prompt_that_is_too_long_has_its_code(served: LocalServer) -> None:
    body = {"hints": [retain(prompt="a " * 40_000)]}
    error = served.client.post("/v1/cache/hints", json=body).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "hints[0].prompt")


def test_bounds_are_cut_and_budgets_run_out(guarded: LocalServer) -> None:
    ask(guarded, name="ann")
    answer = hint(guarded, retain(seconds=1e6, max_tokens=5), name="ann")[0]
    assert (answer["answer"], answer["tokens_covered"], answer["seconds"]) == ("clipped", 5, 3600)
    long = PROMPT + " And then, and after that, and at the end, and so on and on and on?" * 2
    ask(guarded, long, name="ann")
    answer = hint(guarded, {"verb": "pin", "prompt": long}, name="ann")[0]
    assert (answer["answer"], answer["tokens_covered"]) == ("clipped", 30)
    assert "budget of 30 tokens" in answer["reason"]
    stats = guarded.client.get("/v1/cache/stats", **as_("ann")).json()
    assert (stats["pins"], stats["retains"], stats["held_tokens"]) == (1, 1, 30)
    assert stats["hint_budget_tokens"] == 30
    assert guarded.client.get("/v1/cache/stats", **as_("bob")).json()["held_tokens"] == 0
    ask(guarded, "Something else entirely", name="ann")
    answer = hint(guarded, retain(prompt="Something else entirely"), name="ann")[0]
    assert answer["answer"] == "rejected"
    ask(guarded, name="bob")
    answer = hint(guarded, retain(max_tokens=30), name="bob")[0]
    assert answer["tokens_covered"] > 0, "a budget is a tenant's own"


def test_nothing_of_other_tenants_is_found(guarded: LocalServer) -> None:
    ask(guarded, name="ann", session_id="s")
    for verb in ("retain", "pin", "demote", "share"):
        one = {"verb": verb, "prompt": PROMPT}
        answers = hint(guarded, one, {**one, "prompt": "never seen at all"}, name="bob")
        assert answers[0] == answers[1], "the same as for what nobody has"
        assert answers[0]["answer"] == "missing"
    assert hint(guarded, {"verb": "pin", "session_id": "s"}, name="bob")[0]["answer"] == "missing"
    assert hint(guarded, {"verb": "pin", "session_id": "s"}, name="ann")[0]["answer"] == "accepted"
    answer = guarded.client.post(
        "/v1/cache/hints", json={"hints": [retain()], "tenant": "ann"}, **as_("bob")
    )
    assert answer.status_code == 403
    assert hint(guarded, retain(), name="root", tenant="ann")[0]["answer"] == "accepted"
    assert hint(guarded, retain(), name="root")[0]["answer"] == "missing"
    assert hint(guarded, retain(cache_salt="x"), name="ann")[0]["answer"] == "missing"


def test_sharing_needs_leave(guarded: LocalServer) -> None:
    ask(guarded, name="ann")
    answer = hint(guarded, {"verb": "share", "prompt": PROMPT}, name="ann")[0]
    assert (answer["answer"], answer["reason"]) == (
        "rejected",
        "the key has no permission to share",
    )
    assert cached(guarded, PROMPT + " Tell me.", "root") == 0
    ask(guarded, name="bob")
    assert hint(guarded, {"verb": "share", "prompt": PROMPT}, name="bob")[0]["answer"] == "accepted"
    found = cached(guarded, PROMPT + " Tell me.", "ann")
    assert found > 0
    assert cached(guarded, PROMPT + " Show me.", "root") == found
    answer = hint(guarded, {"verb": "share", "prompt": PROMPT, "seconds": 0}, name="bob")[0]
    assert answer["answer"] == "accepted"


def test_a_requests_own_hints(served: LocalServer, runtime: Runtime) -> None:
    own = [{"verb": "retain", "seconds": 5}, {"verb": "pin", "seconds": 5, "max_tokens": 3}]
    found = ask(served, cache_hints=own)
    assert [one["answer"] for one in found["cache_hints"]] == ["accepted", "accepted"]
    assert found["cache_hints"][1]["tokens_covered"] == 3
    assert runtime.cache_stats()["pages_pinned"] == 3
    assert "cache_hints" not in ask(served)
    body = {"messages": USER, "max_tokens": 2, "cache_hints": own[:1]}
    found = served.post("/v1/chat/completions", body)
    assert found["cache_hints"][0]["tokens_covered"] == found["usage"]["prompt_tokens"]
    found = served.post("/generate", {"text": PROMPT, "cache_hints": [{"verb": "demote"}]})
    assert found["cache_hints"][0]["answer"] == "accepted"
    found = ask(served, [PROMPT, PROMPT + " Two."], cache_hints=own[:1])  # type: ignore[arg-type]
    assert found["cache_hints"][0]["tokens_covered"] > found["usage"]["prompt_tokens"] / 2


@pytest.mark.parametrize("usage", [{}, {"stream_options": {"include_usage": True}}])
def test_own_hints_end_a_stream(served: LocalServer, usage: dict[str, Any]) -> None:
    fields = {"max_tokens": 3, "cache_hints": [{"verb": "retain"}], **usage}
    for path, prompt in (
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": USER}),
    ):
        last = served.stream(path, {**prompt, **fields})[-1]
        assert last["choices"] == []
        assert [one["answer"] for one in last["cache_hints"]] == ["accepted"]
    if not usage:
        last = served.stream("/generate", {"text": PROMPT, "cache_hints": [{"verb": "pin"}]})[-1]
        assert last["meta_info"]["finish_reason"] is not None
        assert last["cache_hints"][0]["answer"] == "accepted"


def test_metrics_and_preview(served: LocalServer, runtime: Runtime) -> None:
    ask(served)
    hint(served, retain(), retain(prompt="never seen at all"))
    text = wait_for_metrics(served, runtime)
    for line in (
        'radixserve:hints_total{answer="accepted",verb="retain"}',
        'radixserve:hints_total{answer="missing",verb="retain"}',
        "radixserve:retained_tokens",
        'radixserve:pages{owner="pinned"}',
        "radixserve:prefetched_tokens_total",
        "radixserve:broken_pins_total",
    ):
        assert line in text, line
    reasons = [entry["reason"] for entry in runtime.eviction_preview(10_000)]
    assert any(reason.startswith("retained until") for reason in reasons)


def wait_for_metrics(served: LocalServer, runtime: Runtime) -> str:
    wait_until(lambda: runtime.status().stats.get("pages_retained", 0) > 0)
    return served.client.get("/metrics").text


@pytest.mark.parametrize(("ttl", "seconds"), [("5m", 300), ("1h", 3600)])
def test_cache_control_of_messages_retains(
    served: LocalServer, runtime: Runtime, ttl: str, seconds: int
) -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": ttl}}
    system = [{"type": "text", "text": "Be short.", **mark}]
    body = {"model": "demo", "max_tokens": 2, "messages": USER}
    served.post("/v1/messages", body)
    assert runtime.cache_stats()["hints"] == 0
    served.post("/v1/messages", {**body, "system": system})
    stats = runtime.cache_stats()
    assert stats["hints"] == 1
    assert stats["pages_retained"] > 10
    reasons = [entry["reason"] for entry in runtime.eviction_preview(10_000)]
    assert any(reason.startswith(f"retained until {seconds} s") for reason in reasons)
