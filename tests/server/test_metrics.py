"""/metrics, the dashboard's queries, and the log of requests."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

from prometheus_client.parser import text_string_to_metric_families

from radixserve import Runtime
from tests.pacing import wait_until
from tests.server.local_server import LocalServer

ROOT = Path(__file__).parent.parent.parent
VLLM = """num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries
    prefix_cache_hits prompt_tokens prompt_tokens_cached generation_tokens
    time_to_first_token_seconds inter_token_latency_seconds e2e_request_latency_seconds
    request_queue_time_seconds request_success num_preemptions request_prompt_tokens
    request_generation_tokens request_max_num_generation_tokens request_prefill_time_seconds
    request_decode_time_seconds""".split()  # the board of its examples reads these


def read(served: LocalServer) -> tuple[dict[str, float], set[str]]:
    """Samples without labels of their own by name, and the names of all families."""
    text = served.client.get("/metrics").text
    families = list(text_string_to_metric_families(text))
    samples = {
        sample.name: sample.value
        for family in families
        for sample in family.samples
        if set(sample.labels) <= {"model_name"}
    }
    return samples, {family.name for family in families}


def test_metrics_count_what_was_asked(served: LocalServer, runtime: Runtime) -> None:
    before, _ = read(served)
    body = {"prompt": "Count this prompt", "max_tokens": 5, "ignore_eos": True, "n": 2}
    usage = served.post("/v1/completions", body)["usage"]
    stats = runtime.cache_stats()
    after, names = read(served)
    for name in ("radixserve:", "vllm:"):
        grown = {
            key: after[name + key] - before[name + key]
            for key in ("generation_tokens_total", "e2e_request_latency_seconds_count",
                        "time_to_first_token_seconds_count",
                        "inter_token_latency_seconds_count", "request_generation_tokens_sum",
                        "request_max_num_generation_tokens_sum", "request_prompt_tokens_sum",
                        "request_prefill_time_seconds_count", "request_decode_time_seconds_count")
        }  # fmt: skip
        prompt = 2 * usage["prompt_tokens"]
        assert list(grown.values()) == [usage["completion_tokens"], 2, 2, 8, 10, 5, prompt, 2, 2]
    assert after["radixserve:prompt_tokens_total"] == stats["prompted_tokens"]
    assert after["radixserve:cached_tokens_total"] == stats["reused_tokens"]
    assert {f"vllm:{name}" for name in VLLM} <= names


def test_a_token_that_no_answer_has_is_in_no_tenants_sum(served: LocalServer) -> None:
    def num_generated() -> object:
        return served.server.tenant_usage.of("")["completion_tokens"]

    before = num_generated()
    served.post("/v1/completions", {"prompt": "a b", "echo": True, "max_tokens": 0})
    messages = [{"role": "user", "content": "a"}]
    for options in ({}, {"stream": True}):
        prewarm = {"prompt_cache_options": {"prewarm": True}, **options}
        served.client.post("/v1/chat/completions", json={"messages": messages, **prewarm})
    assert num_generated() == before


def test_every_refused_request_is_a_rejection(served: LocalServer) -> None:
    counters = served.server.counters
    before = counters.rejected.copy(), counters.statuses.copy()
    for path, body in (
        ("/v1/completions", {"prompt": "a", "max_tokens": -2}),
        ("/v1/completions", {"prompt": "a", "model": "another"}),
        ("/v1/nothing", {}),
    ):
        assert served.client.post(path, json=body).status_code >= 400
    assert served.client.post("/v1/completions", content="{}").status_code == 415
    reasons = {"400": 1, "model_not_found": 1, "404": 1, "415": 1}
    assert counters.rejected - before[0] == reasons
    wait_until(lambda: counters.statuses - before[1] == {"400": 1, "404": 2, "415": 1})


def test_the_dashboard_asks_for_what_is_there(served: LocalServer) -> None:
    served.client.post("/v1/completions", json={"prompt": "x", "tools": [1]})
    text = served.client.get("/metrics").text
    board = json.loads((ROOT / "docs" / "radixserve-dashboard.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(queries) > 15
    for query in queries:
        for name in re.findall(r"radixserve:\w+", query):
            assert f"\n{name}" in text, name


def test_the_alerts_ask_for_what_is_there(served: LocalServer) -> None:
    yaml = pytest.importorskip("yaml")
    served.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
    text = served.client.get("/metrics").text
    (group,) = yaml.safe_load((ROOT / "docs" / "radixserve-alerts.yml").read_text())["groups"]
    assert len(group["rules"]) > 5
    for rule in group["rules"]:
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("warning", "critical")
        for name in re.findall(r"radixserve:\w+", rule["expr"]):
            assert f"\n{name}" in text, name


def test_every_metric_stands_in_the_documentation(served: LocalServer) -> None:
    _, names = read(served)
    page = (ROOT / "docs" / "serving.md").read_text().split("## Metrics")[1].split("\n## ")[0]
    documented: set[str] = set()
    for row in re.findall(r"^\| (.*?) \| (.*?) ?\| ", page, re.MULTILINE):
        ours = re.findall(r"`(\w+)", row[0])
        vllms = ours if row[1] == "the same" else re.findall(r"`(\w+)", row[1])
        documented |= {f"radixserve:{name}" for name in ours} | {f"vllm:{name}" for name in vllms}
    assert names == documented


def test_every_route_stands_in_the_documentation(served: LocalServer) -> None:
    page = (ROOT / "docs" / "serving.md").read_text()
    for path in served.client.get("/openapi.json").json()["paths"]:
        parts = map(re.escape, re.split(r"\{\w+\}", path))
        assert re.search(r"\{\w+\}".join(parts), page), path


def test_the_log_has_ids_and_counts_and_no_text(
    runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    caplog.set_level(logging.INFO, "radixserve.requests")
    with LocalServer(runtime, log_requests=True) as served:
        body = {"prompt": "a secret", "max_tokens": 2, "ignore_eos": True}
        served.post("/v1/completions", body, headers={"traceparent": trace})
        served.client.post("/v1/completions", json={})
    first, second = (json.loads(record.message) for record in caplog.records)
    assert first["traceparent"] == trace
    assert (first["path"], first["status"]) == ("/v1/completions", 200)
    assert first["completion_tokens"] == 2
    assert second["status"] == 400
    assert "secret" not in caplog.text
