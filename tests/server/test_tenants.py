"""Keys and namespaces: no tenant sees, hits or ends what is another's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

from radixserve import InvalidRequest, Runtime
from radixserve.server.config import ServerConfig
from radixserve.server.gate.tenants import Tenants
from radixserve.server.wire.errors import ApiError
from tests.server.local_server import LocalServer

KEYS = {name: f"key-of-{name}-0123456789" for name in ("ann", "bob", "root")}
PROMPT = "The urllib module opens addresses, and what else does it do?"
ROUTES = ["/v1/models", "/v1/models/demo", "/tokenizer_info", "/v1/cache/stats", "/v1/cache/tree",
          "/metrics", "/openapi.json", "/v1/responses/a", "/v1/nothing"]  # fmt: skip
POSTS = ["/v1/completions", "/v1/chat/completions", "/generate", "/v1/score", "/tokenize",
         "/detokenize", "/v1/cache/lookup", "/v1/cache/flush", "/v1/cache/snapshot",
         "/v1/cache/compare", "/v1/cache/hints", "/v1/responses", "/v1/decisions"]  # fmt: skip


@pytest.fixture(scope="module")
def guarded(runtime: Runtime, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    path = tmp_path_factory.mktemp("keys") / "keys"
    lines = [f"{name} {key}{' admin' if name == 'root' else ''}" for name, key in KEYS.items()]
    write(path, "# the tenants\n\n" + "\n".join(lines))
    runtime.flush_cache()
    with LocalServer(runtime, Tenants.load(str(path))) as served:
        yield served


def write(path: Path, text: str) -> str:
    path.write_text(text)
    os.chmod(path, 0o600)
    return str(path)


def as_(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}"}


def cached(served: LocalServer, name: str, prompt: str = PROMPT, **fields: Any) -> int:
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
    usage = served.post("/v1/completions", body, headers=as_(name))["usage"]
    tokens = usage["prompt_tokens_details"]["cached_tokens"]
    assert isinstance(tokens, int)
    return tokens


def test_a_flush_is_of_the_tenant_and_the_salt_that_it_names(guarded: LocalServer) -> None:
    for name, salt in (("root", None), ("root", "s"), ("ann", "s")):
        cached(guarded, name, cache_salt=salt)
    for body, flushed in (
        ({"cache_salt": "s"}, "root/s"),
        ({"tenant": "ann", "cache_salt": "s"}, "ann/s"),
        ({"tenant": "root"}, "root"),
    ):
        name, _, salt = flushed.partition("/")
        assert cached(guarded, name, cache_salt=salt or None) > 0
        answer = guarded.post("/v1/cache/flush", body, headers=as_("root"))
        assert answer == {"flushed": flushed}
        assert cached(guarded, name, cache_salt=salt or None) == 0


@pytest.mark.parametrize("key", [None, "wrong", "sha256:" + "0" * 64, "Bearer"])
def test_every_route_but_health_needs_a_key(guarded: LocalServer, key: str | None) -> None:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    for method, paths in (("GET", ROUTES), ("POST", POSTS), ("DELETE", ["/v1/sessions/a"])):
        for path in paths:
            answer = guarded.client.request(method, path, headers=headers)
            assert answer.status_code == 401, path
            assert answer.json()["error"]["code"] == "invalid_api_key"
    for path in ("/health", "/health/live", "/health/ready", "/health/startup"):
        answer = guarded.client.get(path)
        assert answer.status_code == 200
        assert "cache" not in answer.json()


def test_a_key_may_come_in_either_header(guarded: LocalServer) -> None:
    for headers in (as_("ann"), {"x-api-key": KEYS["ann"]}):
        assert guarded.client.get("/v1/models", headers=headers).status_code == 200


def test_admin_routes(guarded: LocalServer) -> None:
    assert guarded.client.get("/metrics", headers=as_("ann")).status_code == 403
    assert guarded.client.get("/metrics", headers=as_("root")).status_code == 200
    body: dict[str, Any] = {}
    flush = "/v1/cache/flush"
    assert guarded.client.post(flush, json=body, headers=as_("ann")).status_code == 403
    assert guarded.client.post(flush, json=body, headers=as_("root")).status_code == 200
    tree = "/v1/cache/tree?tenant=bob"
    assert guarded.client.get(tree, headers=as_("ann")).status_code == 403
    assert guarded.client.get(tree, headers=as_("root")).status_code == 200


def test_no_tenant_hits_anothers_cache_and_each_hits_its_own(guarded: LocalServer) -> None:
    assert cached(guarded, "ann") == 0
    assert cached(guarded, "bob") == 0
    length = cached(guarded, "ann")
    assert length > 5
    assert cached(guarded, "bob") == length
    assert cached(guarded, "bob", cache_salt="x") == 0
    assert cached(guarded, "bob", cache_salt="x") == length
    assert cached(guarded, "root", cache_salt="x") == 0
    assert cached(guarded, "ann", cache_salt="bob") == 0  # no salt leads to another tenant


def test_chats_scores_and_generate_keep_apart(guarded: LocalServer) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "A chat apart"}],
                                 "max_tokens": 2},
        "/generate": {"text": "A generation apart from others", "sampling_params":
                      {"max_new_tokens": 2}},
        "/v1/score": {"prompt": "A score apart from others", "candidates": [" a b", " c d"]},
        "/v1/decisions": {"input": "A decision apart from others", "questions":
                          [{"type": "predicate", "instructions": "It is apart."}]},
    }  # fmt: skip
    for path, body in bodies.items():
        counts = []
        for name in ("ann", "bob", "ann"):
            answer = guarded.post(path, body, headers=as_(name))
            usage = answer.get("usage") or answer["meta_info"]
            details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details", usage)
            counts.append(details["cached_tokens"])
        assert counts[0] == counts[1] < counts[2], path


def test_a_look_up_tells_nothing_of_others(guarded: LocalServer) -> None:
    """Neither what they hold nor that they hold anything."""
    prompt = "Only ann has this secret prompt: the colour is blue"
    before = guarded.post("/v1/cache/lookup", {"prompt": prompt}, headers=as_("bob"))
    cached(guarded, "ann", prompt)
    assert guarded.post("/v1/cache/lookup", {"prompt": prompt}, headers=as_("bob")) == before
    mine = guarded.post("/v1/cache/lookup", {"prompt": prompt}, headers=as_("ann"))
    assert mine["reason"] == "full"
    assert mine["cached_tokens"] > 5


def test_the_tree_and_the_stats_are_ones_own(guarded: LocalServer) -> None:
    for name, salt in (("ann", "s"), ("bob", "")):
        cached(guarded, name, f"A prompt of {name}'s alone", cache_salt=salt)
    trees = {n: guarded.client.get("/v1/cache/tree", headers=as_(n)).json() for n in KEYS}
    of = {name: set(tree["namespaces"]) for name, tree in trees.items()}
    assert "ann/s" in of["ann"]
    assert {name.partition("/")[0] for name in of["ann"]} == {"ann"}
    assert {name.partition("/")[0] for name in of["bob"]} == {"bob"}
    assert of["ann"] | of["bob"] <= of["root"]
    before = guarded.client.get("/v1/cache/stats", headers=as_("bob")).json()
    cached(guarded, "ann", "Another prompt of ann's")
    after = guarded.client.get("/v1/cache/stats", headers=as_("bob")).json()
    assert before == after
    assert set(after) == {"tenant", "requests", "prompt_tokens", "cached_tokens",
                          "computed_tokens", "completion_tokens", "pins", "retains",
                          "held_tokens", "hint_budget_tokens"}  # fmt: skip
    assert "pages_total" in guarded.client.get("/v1/cache/stats", headers=as_("root")).json()


def test_scores_count_in_the_stats_of_their_tenant(guarded: LocalServer) -> None:
    def requests() -> int:
        stats = guarded.client.get("/v1/cache/stats", headers=as_("bob")).json()
        assert stats["computed_tokens"] + stats["cached_tokens"] == stats["prompt_tokens"]
        return int(stats["requests"])

    before = requests()
    guarded.post("/v1/score", {"prompt": "A score", "candidates": [" a"]}, headers=as_("bob"))
    assert requests() == before + 1


def test_sessions_are_ones_own(guarded: LocalServer) -> None:
    cached(guarded, "ann", session_id="s")
    gone = guarded.client.delete("/v1/sessions/s", headers=as_("bob"))
    assert gone.status_code == 404
    assert guarded.client.delete("/v1/sessions/s", headers=as_("ann")).status_code == 200
    assert guarded.client.delete("/v1/sessions/s", headers=as_("ann")).status_code == 404


def test_key_files(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    digest = "sha256:" + "ab" * 32
    for text, message in (
        ("", "holds no key"),
        ("ann", "a line is TENANT KEY"),
        ("ann 0123456789abcdef boss", "a line is TENANT KEY"),
        ("admin 0123456789abcdef", "only called admin. For a key with that right write admin KEY"),
        ("share 0123456789abcdef admin", "only called share"),
        ("a/b 0123456789abcdef", "a tenant's name"),
        ("ann short", "16 to 512 printable ASCII characters"),
        ("ann sha256:abc", "64 hexadecimal digits"),
        (f"ann {digest}\nbob {digest}", "holds a key twice"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            Tenants.load(write(path, text))
    write(path, "ann 0123456789abcdef")
    os.chmod(path, 0o640)
    with pytest.raises(InvalidRequest, match="may be read by others"):
        Tenants.load(str(path))


def test_a_digest_stands_for_its_key(tmp_path: Path) -> None:
    import hashlib

    key = "a-key-that-is-not-in-the-file"
    digest = hashlib.sha256(key.encode()).hexdigest()
    tenants = Tenants.load(write(tmp_path / "keys", f"ann sha256:{digest} admin"))
    caller = tenants.caller(f"Bearer {key}", None)
    assert (caller.tenant, caller.is_admin) == ("ann", True)
    with pytest.raises(ApiError):
        tenants.caller(f"Bearer {digest}", None)


def test_without_keys_only_this_machine_is_served() -> None:
    with pytest.raises(InvalidRequest, match="reachable from other machines"):
        ServerConfig(host="0.0.0.0")
    ServerConfig(host="0.0.0.0", allow_unauthenticated_network_access=True)
    ServerConfig(host="0.0.0.0", api_key_file="keys")
    ServerConfig(host="127.0.0.1")
