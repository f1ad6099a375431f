"""/v1/cache/advice and /v1/cache/worth: what operators and tenants see of them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

from radixserve import Runtime
from radixserve.server.gate.tenants import Tenants
from tests.server.local_server import LocalServer
from tests.server.test_tenants import KEYS, as_, write

BODY = {"prompt": "What caching of a prompt is worth, in money", "max_tokens": 2}


def test_an_operator_sees_money_and_seconds(runtime: Runtime) -> None:
    prices = "input=3,cached_input=1,currency=EUR"
    with LocalServer(runtime, prices=prices, enable_per_request_metrics=True) as served:
        body = {**BODY, "session_id": "worth"}
        answers = [served.post("/v1/completions", body) for _ in range(2)]
        worth = served.client.get("/v1/cache/worth").json()
        advice = served.client.get("/v1/cache/advice").json()
    assert worth["prices"] == {"input": 3.0, "cached_input": 1.0, "currency": "EUR"}
    assert worth["saved_money"] == pytest.approx(2e-6 * worth["cached_tokens"])
    assert worth["token_s"] > 0
    (session,) = [one for one in worth["sessions"] if one["session"] == "worth"]
    cached = answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert session["requests"] == 2
    assert session["saved_money"] == pytest.approx(2e-6 * session["cached_tokens"])
    assert worth["last"][-1]["cached_tokens"] == cached > 0
    assert worth["last"][-1]["session"] == "worth"
    assert answers[1]["metrics"]["saved_by_cache_ms"] > 0
    assert sum(advice["computed"].values()) == worth["computed_tokens"]
    assert advice["line"]


def test_a_tenant_sees_its_own_tokens(runtime: Runtime, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    lines = [f"{name} {key}{' admin' if name == 'root' else ''}" for name, key in KEYS.items()]
    tenants = Tenants.load(write(path, "\n".join(lines)))
    with LocalServer(runtime, tenants, prices="input=2") as served:
        for name in ("ann", "ann", "bob"):
            served.post("/v1/completions", BODY, headers=as_(name))
        own = served.client.get("/v1/cache/worth", headers=as_("ann")).json()
        whole = served.client.get("/v1/cache/worth", headers=as_("root")).json()
    assert list(own["tenants"]) == ["ann"]
    assert own["saved_money"] == pytest.approx(2e-6 * own["cached_tokens"])
    assert {one["tenant"] for one in own["last"]} == {"ann"}
    assert not {"saved_s", "token_s", "parts", "ttft_s"} & (own.keys() | own["last"][0].keys())
    assert {"ann", "bob"} <= whole["tenants"].keys()
    assert whole["saved_s"] > 0
