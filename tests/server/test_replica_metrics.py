"""/metrics and /health over replicas that are lost, removed and come back."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

from prometheus_client.parser import text_string_to_metric_families

from radixserve import SamplingParams
from radixserve.fleet.cluster_runtime import ClusterRuntime
from tests.fleet.local_links import SETTINGS, Link, links, scaled_cluster, wait_for_links
from tests.pacing import wait_until
from tests.server.local_server import LocalServer

PARAMS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


__all__ = ["links"]


def generate(runtime: ClusterRuntime) -> None:
    runtime.generate([f"Question {number} of several." for number in range(8)], PARAMS)


def read(served: LocalServer, kind: str) -> dict[tuple[str, ...], float]:
    """The samples of counters or gauges by name and labels."""
    answer = served.client.get("/metrics")
    assert answer.status_code == 200, answer.text
    return {
        (sample.name, *sorted(map(str, sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        if family.type == kind
        for sample in family.samples
        if sample.name != f"{family.name}_created"
    }


def test_counters_do_not_fall_when_replicas_go(
    links: list[Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixserve.fleet.replica.REPORT_EVERY_S", 0.02)
    first, second = links
    with (
        scaled_cluster(links) as (client, runtime),
        LocalServer(runtime, ready_timeout=0.01) as served,
    ):
        generate(runtime)
        assert first.num_requests
        assert second.num_requests
        generated = runtime.cache_stats()["generated_tokens"]
        assert generated == 8 * PARAMS.max_tokens
        wait_until(lambda: runtime.status().stats["generated_tokens"] == generated)
        before = read(served, "counter")

        def check(num_replicas: int) -> None:
            nonlocal before
            now = read(served, "counter")
            fallen = {name for name, value in before.items() if now.get(name, -1.0) < value}
            assert not fallen
            before = now
            assert now["radixserve:generation_tokens_total",] == generated
            assert runtime.cache_stats()["generated_tokens"] == generated
            gauges = read(served, "gauge")
            assert gauges["radixserve:replicas",] == num_replicas
            num_pages = sum(
                value for (name, *_), value in gauges.items() if name == "radixserve:pages"
            )
            assert runtime.status().stats["pages_total"] == num_replicas * SETTINGS["num_pages"]
            assert bool(num_pages) == bool(num_replicas)

        second.is_cut = True
        wait_for_links(runtime, 1)
        check(1)
        second.is_cut = False
        wait_for_links(runtime, 2)
        check(2)
        client.set_replicas([first])
        wait_for_links(runtime, 1)
        check(1)
        client.set_replicas([])
        wait_for_links(runtime, 0)
        check(0)
        wait_until(lambda: served.client.get("/health").status_code == 503)
        assert "no replica has reported" in served.client.get("/health").json()["status"]
