"""What `radixserve replay --advise` says: predictions against replays, sizes, times, tables."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from radixserve.cli import main
from radixserve.replay import CacheSpec, Serving, build_paths, replay_scheduled
from radixserve.replay.caches import GIB
from radixserve.replay.scheduled import StepModel
from radixserve.replay.sizing import (
    ENOUGH,
    HEADROOM,
    LruCurve,
    Pricing,
    advice_document,
    advice_findings,
    advise,
    peak_in_flight,
)
from radixserve.replay.workloads import make_workload
from tests.replay.naive_lru import naive_lru_hits
from tests.replay.traces import make_trace, synthetic_trace

PRICING = Pricing(bytes_per_token=1 << 20)


@pytest.mark.parametrize("name", ["", "chat", "agents"])
def test_predicted_rates_are_those_of_replays(name: str) -> None:
    """At sizes between the longest request and all tokens, none of which made the prediction."""
    trace = make_workload(name, 200) if name else synthetic_trace(200)
    most = build_paths(trace).distinct_tokens
    sizes = np.linspace(trace.longest, max(trace.longest, most), 7)[1:-1].astype(int).tolist()
    advice = advise(trace, PRICING, sizes=sizes)
    for row in [*advice.given, advice.recommended]:
        assert row.error is not None
        assert abs(row.error) < 0.005


@pytest.mark.parametrize("name", ["multi-turn", "rag", "code"])
def test_predictions_are_plain_lru_to_the_token(name: str) -> None:
    trace = make_workload(name, 40)
    curve = LruCurve(trace, build_paths(trace))
    for size in (trace.longest, 2 * trace.longest, 6 * trace.longest):
        assert curve.hits(size).tolist() == naive_lru_hits(trace, size)


def test_the_smallest_size_with_so_many_hits() -> None:
    trace = synthetic_trace(200)
    curve = LruCurve(trace, build_paths(trace))
    reusable = build_paths(trace).reusable_tokens
    assert curve.total(curve.most) == reusable == curve.hits(curve.most).sum()
    for share in (0.9, 0.95, 1.0):
        size = curve.smallest(share * reusable)
        assert size > curve.least
        assert curve.total(size - 1) < share * reusable <= curve.total(size)
    assert curve.smallest(0) == trace.longest
    assert curve.smallest(2 * reusable) == curve.most


def test_the_recommended_size() -> None:
    advice = advise(synthetic_trace(200), PRICING)
    row = advice.recommended
    enough = LruCurve(advice.trace, advice.paths).smallest(ENOUGH * advice.paths.reusable_tokens)
    assert row.cache_tokens == round(HEADROOM * enough) > advice.in_flight_tokens
    assert ENOUGH <= row.of_reusable <= 1.0
    assert row.replayed is not None
    assert row.replayed >= ENOUGH * advice.ideal_rate - 0.005
    assert row.gib == row.cache_tokens * PRICING.bytes_per_token / GIB
    more = advise(advice.trace, PRICING, sizes=[row.cache_tokens + 1024]).given[0]
    assert row.next_gib == pytest.approx(more.predicted - row.predicted)


def test_requests_that_run_together_have_room() -> None:
    """A cache of 95 % of what is reusable, here nothing, would not hold the running requests."""
    turns = [([10 * n + k for k in range(10)], [1] * 100) for n in range(4)]
    trace = make_trace(turns, times=[0.0, 0.1, 0.2, 50.0])
    pricing = Pricing(bytes_per_token=1, step=StepModel(fixed_s=0.01, kv_token_s=0.0))
    assert peak_in_flight(trace, build_paths(trace), pricing) == 3 * 109
    assert advise(trace, pricing).recommended.cache_tokens == round(HEADROOM * 3 * 109)
    shared = make_trace([([1] * 10, [n] * 100) for n in range(4)], times=[0.0, 0.1, 0.2, 50.0])
    assert peak_in_flight(shared, build_paths(shared), pricing) == 10 + 3 * 99
    together = make_trace(turns)
    assert peak_in_flight(together, build_paths(together), pricing) == trace.longest


@pytest.mark.parametrize(("num_prompt", "num_cached"), [(1, 0), (700, 0), (5000, 904), (4096, 0)])
def test_the_first_token_alone_is_as_late_as_in_the_scheduler(
    num_prompt: int, num_cached: int
) -> None:
    pricing = Pricing(bytes_per_token=1, chunk=512)
    prompt = list(range(num_prompt))
    turns = [([*prompt[:num_cached], 9999], [1]), (prompt, [1])] if num_cached else [(prompt, [1])]
    trace = make_trace(turns, times=[100.0 * n for n in range(len(turns))])
    serving = Serving(chunked_prefill_size=512)
    result = replay_scheduled(trace, build_paths(trace), CacheSpec(10_000), serving)
    assert result.hits[-1] == num_cached
    assert pricing.first_token_s(trace.num_prompt, result.hits) == pytest.approx(result.ttft_s)


def test_other_caches_are_compared_with_lru() -> None:
    trace = synthetic_trace(200)
    kinds = [("radix", "fifo", 1, False), ("radix", "lru", 1, True), ("hash", "lru", 16, False)]
    advice = advise(trace, PRICING, kinds=[*kinds, ("off", "lru", 1, False)])
    assert [row.label for row in advice.kinds] == ["fifo", "lru+sessions", "hash", "off"]
    plain = advice.recommended
    assert plain.replayed is not None
    for row in advice.kinds:
        assert row.gain == pytest.approx(row.hit_rate - plain.replayed)
    blocks, off = advice.kinds[2:]
    assert blocks.gain < 0
    assert off.hit_rate == 0.0
    assert off.first_token_s > blocks.first_token_s > plain.first_token_s


def test_a_document_and_its_tables() -> None:
    advice = advise(synthetic_trace(60), PRICING, sizes=[4000], kinds=[("off", "lru", 1, False)])
    document = json.loads(json.dumps(advice_document(advice), allow_nan=False))
    rates = [row["predicted"] for row in document["sizes"]]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(document["ideal_hit_rate"])
    first, sizes, given, kinds = advice_findings(document)
    assert "% of what is reusable" in first.lines[0]
    assert len(sizes.rows) == len(rates)
    assert given.rows[0][0] == "4,000"
    assert [row[0] for row in kinds.rows] == ["lru", "off"]


def test_a_trace_without_anything_reusable() -> None:
    trace = make_trace([([1, 2, 3], ()), ([4, 5], [6])])
    row = advise(trace, PRICING).recommended
    assert (row.predicted, row.replayed, row.of_reusable) == (0.0, 0.0, 0.0)


def test_a_trace_that_is_smaller_than_a_page() -> None:
    trace = make_trace([([1, 2, 3, 4], []), ([1, 2, 3, 5], [])])
    advice = advise(trace, PRICING, kinds=[("radix", "lru", 16, False), ("hash", "lru", 16, False)])
    assert advice.recommended.cache_tokens < 16
    assert [row.page_size for row in advice.kinds] == [16, 16]


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    small = ["--limit", "30", "--json"]
    sizes = ["--cache-tokens", "9k", "--model-config", str(tmp_path)]
    assert main(["replay", "workload:chat", "--advise", *sizes, *small]) == 0
    (document,) = json.loads(capsys.readouterr().out)["traces"]
    assert document["bytes_per_token"] == 2 * 2 * 64 * 2
    assert [row["label"] for row in document["kinds"]] == [
        "arc",
        "slru",
        "lru",
        "lru+sessions",
        "hash",
        "off",
    ]
    assert document["given"][0]["cache_tokens"] == 9000
    chosen = ["--policy", "lru,fifo", "--page-size", "1,32", "--index", "radix,hash"]
    assert main(["replay", "workload:chat", "--advise", *chosen, *small]) == 0
    (document,) = json.loads(capsys.readouterr().out)["traces"]
    kinds = [(row["label"], row["page_size"]) for row in document["kinds"]]
    assert kinds == [("fifo", 1), ("lru", 32), ("lru+sessions", 1), ("hash", 32)]
    names = ["workload:chat", "workload:random"]
    assert main(["replay", *names, "--baseline", *small]) == 0
    rows = json.loads(capsys.readouterr().out)["traces"]
    assert [row["trace"] for row in rows] == names
    assert main(["replay", *names, "--baseline", "--limit", "10"]) == 0
    assert "with a cache and with none" in capsys.readouterr().out
