"""Spans of requests in an OTLP collector: names, parents, times and counts; nothing without one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra [otel]")

from opentelemetry.sdk.trace import TracerProvider

from radixserve import InvalidRequest, Runtime, SamplingParams
from tests.spans.collector import Collector, attributes

PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARAMS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as made:
        yield made


@pytest.fixture(scope="module")
def runtime(collector: Collector) -> Iterator[Runtime]:
    settings = {"device": "cpu", "otlp_traces_endpoint": collector.url}
    with Runtime("random:tiny-llama", num_pages=4000, **settings) as made:  # type: ignore[arg-type]
        yield made


def prompt_of(seed: int, count: int = 100) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(3, 288, count).tolist()
    return tokens


def test_a_request_has_its_spans(runtime: Runtime, collector: Collector) -> None:
    outs = [
        runtime.generate(prompt_of(0), PARAMS),
        runtime.generate([*prompt_of(0), 5, 6], PARAMS),
    ]
    spans = collector.wait(lambda spans: sum(span.name == "decode" for span in spans) >= 2)
    by_id = {attributes(one).get("gen_ai.response.id"): one for one in spans}
    for out in outs:
        root = by_id[out.request_id]
        usage, found = out.usage, attributes(root)
        assert root.name.startswith("generate ")
        assert not root.parent_span_id
        assert found["gen_ai.usage.input_tokens"] == usage.prompt_tokens
        assert found["gen_ai.usage.cache_read.input_tokens"] == usage.cached_tokens
        assert found["gen_ai.usage.output_tokens"] == 4
        assert found["gen_ai.response.finish_reasons"] == ["length"]
        assert found["gen_ai.request.max_tokens"] == 4
        assert found["radixserve.computed_tokens"] == usage.computed_tokens
        assert found["radixserve.tier"] == ("pool" if usage.cached_tokens else "none")
        assert out.miss is not None
        assert found["radixserve.miss.reason"] == out.miss.reason
        children = [one for one in spans if one.parent_span_id == root.span_id]
        assert [one.name for one in children] == ["queue", "prefill", "decode"]
        assert {one.trace_id for one in children} == {root.trace_id}
        ends = [one.end_time_unix_nano for one in children]
        starts = [one.start_time_unix_nano for one in children]
        assert starts[0] == root.start_time_unix_nano
        assert starts[1:] == ends[:2]
        assert ends[2] == root.end_time_unix_nano
        assert out.metrics.ttft_s is not None
        assert (ends[1] - starts[0]) / 1e9 == pytest.approx(out.metrics.ttft_s, abs=1e-5)
        counts = attributes(children[1])
        assert counts["radixserve.cached_tokens"] == usage.cached_tokens
        assert counts["radixserve.computed_tokens"] == usage.computed_tokens
    assert outs[1].usage.cached_tokens == 100


def test_a_callers_span_is_the_parent(runtime: Runtime, collector: Collector) -> None:
    tracer = TracerProvider().get_tracer("test")
    with tracer.start_as_current_span("outer") as outer:
        out = runtime.generate(prompt_of(1), PARAMS)
        context = outer.get_span_context()
    spans = collector.wait(
        lambda spans: any(
            attributes(one).get("gen_ai.response.id") == out.request_id for one in spans
        )
    )
    (root,) = [one for one in spans if attributes(one).get("gen_ai.response.id") == out.request_id]
    assert root.trace_id == context.trace_id.to_bytes(16)
    assert root.parent_span_id == context.span_id.to_bytes(8)


def test_w3c_headers_of_http_clients(runtime: Runtime, collector: Collector) -> None:
    pytest.importorskip("fastapi", reason="the server needs the extra [serve]")
    from tests.server.local_server import LocalServer

    trace, span = PARENT
    with LocalServer(runtime) as served:
        body = {"prompt": prompt_of(2), "max_tokens": 3, "ignore_eos": True, "n": 2}
        headers = {"traceparent": f"00-{trace}-{span}-01"}
        served.post("/v1/completions", body, headers=headers)
        served.post("/v1/completions", body, headers={"traceparent": "nonsense"})
    wanted = bytes.fromhex(trace)
    spans = collector.wait(
        lambda spans: sum(one.trace_id == wanted and one.name == "decode" for one in spans) >= 2
    )
    mine = [one for one in spans if one.trace_id == wanted]
    roots = [one for one in mine if one.name.startswith("generate ")]
    assert [one.parent_span_id.hex() for one in roots] == [span, span]
    assert len(mine) == 2 * 4


def test_loads_have_a_span(tmp_path: Path, collector: Collector) -> None:
    settings = {
        "device": "cpu",
        "num_pages": 4000,
        "kv_store": str(tmp_path),
        "kv_store_write": "finish",
        "otlp_traces_endpoint": collector.url,
    }
    prompt = prompt_of(3, 480)
    with Runtime("random:tiny-llama", **settings) as first:  # type: ignore[arg-type]
        first.generate(prompt, PARAMS)
    with Runtime("random:tiny-llama", **settings) as second:  # type: ignore[arg-type]
        out = second.generate(prompt, PARAMS)
    if not out.usage.loaded_tokens:
        pytest.skip("computing was faster than loading")

    def loads(spans: list[Any]) -> list[Any]:  # those of the first Runtime found nothing
        named = [one for one in spans if one.name == "load"]
        return [one for one in named if attributes(one)["radixserve.loaded_tokens"]]

    spans = collector.wait(lambda spans: bool(loads(spans)))
    (load,) = loads(spans)
    assert attributes(load)["radixserve.loaded_tokens"] == out.usage.loaded_tokens
    (root,) = [one for one in spans if one.span_id == load.parent_span_id]
    assert attributes(root)["radixserve.tier"] == "disk"
    assert root.start_time_unix_nano <= load.start_time_unix_nano
    assert load.start_time_unix_nano < load.end_time_unix_nano <= root.end_time_unix_nano


def test_a_collector_that_is_gone_disturbs_nobody() -> None:
    settings = {"device": "cpu", "otlp_traces_endpoint": "http://127.0.0.1:9/v1/traces"}
    with Runtime("random:tiny-llama", num_pages=500, **settings) as made:  # type: ignore[arg-type]
        assert made.generate(prompt_of(4), PARAMS).usage.completion_tokens == 4
        assert made.cache_stats()["ended_extensions"] == []
    with pytest.raises(InvalidRequest, match="otlp_traces_endpoint"):
        Runtime("random:tiny-llama", otlp_traces_endpoint="localhost")


def test_nothing_is_imported_without_an_endpoint() -> None:
    code = (
        "import sys; from radixserve import Runtime, SamplingParams\n"
        "with Runtime('random:tiny-llama', device='cpu', num_pages=200) as rt:\n"
        "    rt.generate([5, 6, 7], SamplingParams(max_tokens=2))\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
        "assert 'radixserve.spans.extension' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
