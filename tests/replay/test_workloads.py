"""Made workloads: what they share, and that an engine with a model finds the same prefixes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from radixserve import Runtime, SamplingParams
from radixserve.arrays import IntArray
from radixserve.replay import (
    CacheSpec,
    PathTable,
    Serving,
    Trace,
    build_paths,
    replay_direct,
)
from radixserve.replay.baseline import baseline_finding, compare_off
from radixserve.replay.shared_prefixes import SharedPrefixes, shared_prefixes
from radixserve.replay.workloads import (
    WORKLOADS,
    build_trace,
    expand_names,
    make_turns,
    make_workload,
    read_workload,
)
from tests.replay.traces import synthetic_trace

POOL = 420  # tokens: scaled workloads have requests of up to 415, and 600 or more in all
SCALES = {"multi-turn": 0.1, "code": 0.03, "summaries": 0.03}
NUM_SHORT = 40


def count_directly(trace: Trace, block_size: int) -> SharedPrefixes:
    """As the class says, by sets of whole prefixes."""
    blocks: dict[tuple[str, bytes], int] = {}
    prefixes: dict[tuple[str, bytes], int] = {}
    for request in trace:
        key, prompt = request.namespace, request.prompt
        for end in range(1, len(prompt) + 1):
            prefix = key, prompt[:end].tobytes()
            prefixes[prefix] = prefixes.get(prefix, 0) + 1
            if end % block_size == 0:
                blocks[prefix] = blocks.get(prefix, 0) + 1
    lengths, reusable = [], []
    known: set[tuple[str, bytes]] = set()
    for request in trace:
        key, prompt = request.namespace, request.prompt
        shared = [
            end for end in range(1, len(prompt) + 1) if prefixes[key, prompt[:end].tobytes()] > 1
        ]
        lengths.append(max(shared, default=0))
        seen = [end for end in range(1, len(prompt)) if (key, prompt[:end].tobytes()) in known]
        reusable.append(max(seen, default=0) / len(prompt))
        kept = request.kept
        known |= {(key, kept[:end].tobytes()) for end in range(1, len(kept) + 1)}
    return SharedPrefixes(
        block_size,
        len(blocks),
        sum(count > 1 for count in blocks.values()),
        float(np.mean(lengths)),
        float(np.mean(trace.num_prompt - lengths)),
        float(np.mean(reusable)),
    )


@pytest.mark.parametrize("name", WORKLOADS)
def test_analysers_figures_are_those_of_a_direct_count(name: str) -> None:
    turns = make_turns(name, 60, seed=3, scale=0.03)
    rng = np.random.default_rng(0)
    trace = build_trace(
        name, turns, lambda index, _: rng.integers(256, 900, turns[index].num_output, np.int32)
    )
    check_counts(trace, build_paths(trace))


def test_the_count_of_other_traces_is_exact_too() -> None:
    """With few tokens, so that prompts part anywhere, and end inside others."""
    for seed in range(4):
        trace = synthetic_trace(40, seed)
        check_counts(trace, build_paths(trace))


def check_counts(trace: Trace, paths: PathTable) -> None:
    for block_size in (1, 16):
        wanted = count_directly(trace, block_size)
        got = shared_prefixes(trace, paths, block_size)
        assert (got.distinct_blocks, got.shared_blocks) == (
            wanted.distinct_blocks,
            wanted.shared_blocks,
        )
        assert got.mean_shared_prefix == pytest.approx(wanted.mean_shared_prefix, abs=1e-9)
        assert got.mean_unique == pytest.approx(wanted.mean_unique, abs=1e-9)
        assert got.mean_reusable == pytest.approx(wanted.mean_reusable, abs=1e-12)


@pytest.fixture(scope="module", params=[POOL, 20_000])
def runtime(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    settings = {"device": "cpu", "eviction": "lru", "admission": "greedy"}
    with Runtime("random:tiny-llama", num_pages=request.param, **settings) as made:
        yield made


@pytest.mark.parametrize("name", WORKLOADS)
def test_hits_are_those_of_an_engine(runtime: Runtime, name: str) -> None:
    """To the token, request by request, with evictions and without: the model's own answers are in
    the prompts of later turns."""
    turns = make_turns(name, NUM_SHORT, seed=1, scale=SCALES.get(name, 0.05), tokens=(3, 288))
    runtime.flush_cache()
    cached = []

    def answer(index: int, prompt: IntArray) -> IntArray:
        params = SamplingParams(
            temperature=1.0, seed=index, max_tokens=turns[index].num_output, ignore_eos=True
        )
        out = runtime.generate(prompt.tolist(), params)
        cached.append(out.usage.cached_tokens)
        return np.asarray(out.token_ids, np.int32)

    trace = build_trace(name, turns, answer)
    spec = CacheSpec(runtime.memory.pool_tokens)
    assert trace.longest <= POOL
    result = replay_direct(trace, spec)
    assert result.hits.tolist() == cached
    if name != "random":
        assert result.hit_tokens > 0
    if spec.cache_tokens == POOL:
        assert result.evicted_tokens > 0
    else:
        assert result.hits.tolist() == build_paths(trace).reusable.tolist()


def test_a_workload_is_a_function_of_its_seed() -> None:
    for name in WORKLOADS:
        trace, again = make_workload(name, 30, 5), make_workload(name, 30, 5)
        other = read_workload(f"workload:{name}:6", 30)
        assert len(trace) == 30
        assert (np.diff(trace.times) >= 0).all()
        for one, two in zip(trace, again, strict=True):
            assert np.array_equal(one.kept, two.kept)
        assert other.name == f"workload:{name}:6"
        assert not np.array_equal(other.request(0).prompt, trace.request(0).prompt)


def test_more_requests_begin_with_the_same() -> None:
    for name in WORKLOADS:
        few, many = make_turns(name, 20), make_turns(name, 60)
        for one, two in zip(few, many[:20], strict=True):
            assert (one.time, one.session, one.parent) == (two.time, two.session, two.parent)
            assert np.array_equal(one.text, two.text)


def test_names_of_workloads() -> None:
    assert expand_names(["a.jsonl", "workload:rag"]) == ["a.jsonl", "workload:rag"]
    assert expand_names(["workload:all:7"]) == [f"workload:{name}:7" for name in WORKLOADS]


def test_shares_are_typical() -> None:
    """What a workload is made of decides how much of it can be reused."""
    rates = {}
    for name in WORKLOADS:
        trace = make_workload(name, 200)
        rates[name] = build_paths(trace).reusable_tokens / trace.prompt_tokens
    assert rates["random"] == 0
    assert rates["summaries"] < 0.1
    assert 0.4 < rates["rag"] < 0.7
    for name in ("chat", "multi-turn", "code", "agents"):
        assert rates[name] > 0.75, name


def test_on_against_off() -> None:
    traces = [make_workload(name, 40) for name in ("chat", "random")]
    documents = [
        compare_off(trace, lambda paths: [CacheSpec(paths.distinct_tokens)], Serving())
        for trace in traces
    ]
    for trace, document in zip(traces, documents, strict=True):
        on, off = document["on"], document["off"]
        assert off["hit_rate"] == 0
        decoded = int((trace.num_output - 1).sum())
        assert off["computed_tokens"] == trace.prompt_tokens + decoded
        assert on["computed_tokens"] == off["computed_tokens"] - round(
            on["hit_rate"] * trace.prompt_tokens
        )
    chat, unlike = documents
    assert chat["on"]["hit_rate"] == chat["ideal_hit_rate"] > 0.8
    assert chat["on"]["ttft_mean_s"] < 0.8 * chat["off"]["ttft_mean_s"]
    assert unlike["on"] == unlike["off"]
    rows = baseline_finding(documents).rows
    assert [row[0] for row in rows] == ["chat", "random"]
