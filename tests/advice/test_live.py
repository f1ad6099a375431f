"""Advice while serving: reuse distances against the offline ones, reasons, bounds."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from radixserve import Runtime, SamplingParams
from radixserve.advice.extension import MOST_BLOCKS, AdviceExtension
from radixserve.advice.fingerprints import Fingerprints, Piece, namespace_salt, prefix_ids
from radixserve.advice.report import join_advice
from radixserve.advice.reuse_curve import ReuseCurve
from radixserve.arrays import IntArray
from radixserve.cache import RadixCache
from radixserve.output import Finish, Metrics, Usage
from radixserve.replay import Trace, build_paths, read_trace
from radixserve.replay.sizing import LruCurve
from radixserve.replay.workloads import WORKLOADS, make_workload
from radixserve.request import Request
from tests.replay.traces import SHARED, synthetic_trace

HEADS = {"mooncake_conversation": 300, "agentic_code": 150, "tau_airline": 400, "bbh_fewshot": 900}


def tokens_of(seed: int, count: int) -> IntArray:
    return np.random.default_rng(seed).integers(0, 30_000, count, np.int32)


# -- hashes ---------------------------------------------------------------------------------------


def test_a_prefix_hash_is_of_the_whole_prefix() -> None:
    prints, tokens = Fingerprints(), tokens_of(0, 100)
    ids = prints.prefixes(tokens, 16).tolist()
    assert len(ids) == len(set(ids)) == 6
    assert prints.prefixes(tokens[:40], 16).tolist() == ids[:2]
    sums = prints.sums(tokens)
    ends = np.arange(1, 101)
    (whole,) = prints.hash_all([Piece(tokens, 5)], ends, [slice(0, 100)])
    assert whole.blocks == prefix_ids(sums, 5).tolist()
    # In parts, beside others, it is the same.
    other = Piece(tokens_of(1, 7))
    _, head = prints.hash_all([other, Piece(tokens[:37], 5)], ends, [slice(0, 0), slice(0, 37)])
    tail, _ = prints.hash_all(
        [head.end._replace(tokens=tokens[37:]), other], ends, [slice(37, 100), slice(0, 7)]
    )
    assert head.blocks + tail.blocks == whole.blocks
    assert head.chunks + tail.chunks == whole.chunks
    assert head.chunk_ends + tail.chunk_ends == whole.chunk_ends
    assert tail.end[1:] == whole.end[1:]
    huge = tokens.astype(np.int64) + (1 << 30)
    assert prints.prefixes(huge.astype(np.int32), 16).tolist() != ids
    for place in (0, 40, 95):
        changed = tokens.copy()
        changed[place] += 1
        same = [a == b for a, b in zip(ids, prints.prefixes(changed, 16).tolist(), strict=True)]
        assert same == [16 * (n + 1) <= place for n in range(6)]
    swapped = tokens.copy()
    swapped[[3, 7]] = swapped[[7, 3]]
    assert set(prints.prefixes(swapped, 16).tolist()).isdisjoint(ids)
    assert set(prints.prefixes(tokens, 16, namespace_salt("other")).tolist()).isdisjoint(ids)


def test_chunks_are_the_same_wherever_a_text_stands() -> None:
    prints, text = Fingerprints(), tokens_of(1, 5000)
    ends, ids = prints.chunks(text)
    assert len(ends) == len(ids) == len(set(ids.tolist()))
    assert 8 < 5000 / len(ids) < 32
    for before in (1, 17, 1000):
        _, moved = prints.chunks(np.concatenate((tokens_of(2, before), text)))
        assert (
            len(set(ids.tolist()) - set(moved.tolist())) <= 1
        )  # the first one, which has another begin
    assert not set(prints.chunks(tokens_of(3, 5000)).ids.tolist()) & set(ids.tolist())
    assert not len(prints.chunks(text[:3]).ids)


# -- the curve ------------------------------------------------------------------------------------


def follow(trace: Trace, pool_tokens: int, most_blocks: int = MOST_BLOCKS) -> AdviceExtension:
    """An extension that sees a trace served by an unlimited cache."""
    cache = RadixCache(pool_tokens, 1)
    extension = AdviceExtension(cache, 1, most_blocks=most_blocks)
    reusable = build_paths(trace).reusable.tolist()
    for request in trace:
        given = asked(request.index, request.prompt, request.namespace)
        extension.hold(given, 0.0, lambda _: None)
        finish = ended(len(request.prompt), reusable[request.index])
        extension.on_finish(given, request.output.tolist(), finish, 0.0)
    return extension


@pytest.mark.parametrize("most_blocks", [MOST_BLOCKS, 4_000])
@pytest.mark.parametrize("name", ["", *WORKLOADS])
def test_the_live_curve_is_near_the_offline_one(name: str, most_blocks: int) -> None:
    """Also where blocks are larger, as they are in larger pools: here up to 512 tokens."""
    compare(make_workload(name, 150) if name else synthetic_trace(300), most_blocks)


@pytest.mark.long
@pytest.mark.parametrize("most_blocks", [MOST_BLOCKS, 4_000])
@pytest.mark.parametrize("name", HEADS)
def test_it_is_near_on_public_traces(name: str, most_blocks: int) -> None:
    path = SHARED / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip("the shared traces are not here")
    compare(read_trace(path, limit=HEADS[name]), most_blocks)


def compare(trace: Trace, most_blocks: int) -> None:
    paths = build_paths(trace)
    offline = LruCurve(trace, paths)
    sizes = np.geomspace(trace.longest, max(2 * trace.longest, paths.distinct_tokens), 9)
    pool = int(sizes[-1]) // 4 if most_blocks < MOST_BLOCKS else 1000
    extension = follow(trace, pool, most_blocks)
    for size in sizes.astype(int).tolist():
        wanted = offline.total(size) / trace.prompt_tokens
        assert extension.point(size)["hit_rate"] == pytest.approx(wanted, abs=0.02)
    reusable = paths.reusable_tokens / trace.prompt_tokens
    assert extension.advice()["most_reusable"] == pytest.approx(reusable, abs=0.02)


def test_the_smallest_size_with_so_many_hits() -> None:
    curve = ReuseCurve(16, 10_000)
    rng = np.random.default_rng(0)
    chats = [rng.integers(0, 1 << 40, 40).tolist() for _ in range(60)]
    for _ in range(600):
        curve.arrive(chats[int(60 * rng.random() ** 2)], 16 * 40 + 1)
    for share in (0.5, 0.9, 0.95):
        size = curve.smallest(share * curve.reusable_tokens)
        assert curve.hit_tokens(size) == pytest.approx(share * curve.reusable_tokens)
    assert curve.hit_tokens(curve.smallest(2 * curve.reusable_tokens)) == pytest.approx(
        curve.reusable_tokens
    )
    assert ReuseCurve(16, 10).smallest(0.0) == 0.0


def test_what_was_used_last_is_remembered() -> None:
    """Also when much more has passed than may be remembered, in any order of the ends."""
    curve, rng = ReuseCurve(16, 400), random.Random(0)
    hot = list(range(1, 21))
    pending: list[tuple[int, list[int]]] = []
    for number in range(3000):
        use = curve.arrive([*hot, 1000 + number], 16 * 21 + 1)
        assert use.num_known == (20 if number else 0)
        pending.append((use.number, [10**6 + 3 * number, 10**6 + 3 * number + 1]))
        if len(pending) > 40 or rng.random() < 0.2:
            curve.extend(*pending.pop(rng.randrange(len(pending))), 21)
    assert not curve.knows(1000)
    assert curve.knows(1000 + 2999)
    share = curve.hit_tokens(16 * 20 + 16 * 200) / curve.reusable_tokens
    assert share > 0.99


def test_an_id_may_be_given_again() -> None:
    """Also before the first of its requests was looked at."""
    results = []
    for ids in ([0, 1, 2, 3], [0, 0, 0, 0]):
        extension = AdviceExtension(RadixCache(10_000, 1), 1)
        for place, seed in enumerate((1, 2, 1, 2)):
            request = asked(ids[place], tokens_of(seed, 200 * seed))
            extension.hold(request, 0.0, lambda _: None)
            finish = ended(200 * seed, 0 if place < 2 else 200 * seed - 1)
            extension.on_finish(request, tokens_of(10 + place, 40).tolist(), finish, 0.0)
        results.append((extension.computed, extension.point(10_000)))
    assert results[0] == results[1]
    assert results[0][1]["hit_rate"] == pytest.approx(0.5, abs=0.05)


def test_memory_is_bounded() -> None:
    tracemalloc.start()
    try:
        extension = AdviceExtension(RadixCache(1000, 1), 100)
        for number in range(60):
            request = asked(number, tokens_of(number, 50_000))
            extension.hold(request, 0.0, lambda _: None)
            extension.on_finish(request, [1], ended(50_000, 0), 0.0)
        used, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < most < 64 << 20


# -- reasons --------------------------------------------------------------------------------------


def asked(number: int, tokens: Sequence[int] | IntArray, namespace: str = "") -> Request:
    params = SamplingParams(max_tokens=4, namespace=namespace)
    ids = np.asarray(tokens, np.int32)
    return Request(f"{number}", ids, params, 0, frozenset(), max_len=len(ids) + 4)


def ended(num_prompt: int, cached: int, num_output: int = 1) -> Finish:
    usage = Usage(num_prompt, cached, num_prompt - cached, num_output)
    return Finish("length", usage, Metrics(0.0, 0.0, 0.0), None)


class Followed:
    """An extension with a clock of its own, to which requests are told."""

    def __init__(self, *, has_blocks: bool = False, page_size: int = 1) -> None:
        self.now = 0.0
        self.extension = AdviceExtension(
            RadixCache(10_000 // page_size, page_size),
            1 << 20,
            has_blocks=has_blocks,
            clock=lambda: self.now,
        )
        self.number = 0

    def begin(self, tokens: IntArray, namespace: str = "") -> Request:
        self.number += 1
        request = asked(self.number, tokens, namespace)
        assert not self.extension.hold(request, 0.0, lambda _: None)
        return request

    def end(self, request: Request, cached: int, output: Sequence[int] = (7,)) -> None:
        finish = ended(len(request.token_ids), cached, len(output))
        self.extension.on_finish(request, output, finish, 0.0)

    def serve(self, tokens: IntArray, cached: int, namespace: str = "") -> None:
        self.end(self.begin(tokens, namespace), cached)

    def gains(self, tokens: IntArray, cached: int, namespace: str = "") -> dict[str, int]:
        before = self.counts
        self.serve(tokens, cached, namespace)
        return {name: n - before[name] for name, n in self.counts.items() if n != before[name]}

    @property
    def counts(self) -> dict[str, int]:
        computed = self.extension.advice()["computed"]
        return dict(computed)


def test_each_computed_token_has_a_reason() -> None:
    first, text = tokens_of(0, 320), tokens_of(1, 3200)
    followed = Followed()
    assert followed.gains(first, 0) == {"new": 320}
    assert followed.gains(first, 319) == {"new": 1}
    assert followed.gains(np.concatenate((first, [1, 2])), 320) == {"new": 2}
    followed.now = 30.0
    assert followed.gains(first, 80) == {"evicted": 304 - 80, "new": 16}
    assert followed.extension.advice()["regretted_tokens"] == 304 - 80
    followed.now = 300.0
    assert followed.gains(first, 0)["evicted"] == 304
    assert followed.extension.advice()["regretted_tokens"] == 304 - 80
    assert followed.gains(first, 0, "tenant") == {"namespace": 304, "new": 16}
    followed.serve(text, 0)
    moved = followed.gains(np.concatenate((tokens_of(5, 30), text)), 0)
    assert moved["diverged"] > 0.95 * len(text)
    assert moved["diverged"] + moved["new"] == 30 + len(text)


def test_tokens_that_two_open_requests_compute() -> None:
    followed, tokens = Followed(), tokens_of(0, 320)
    one, two = followed.begin(tokens), followed.begin(tokens)
    followed.end(one, 0)
    followed.end(two, 100)
    assert followed.counts == {
        "new": 320 + 16,
        "twice": 304 - 100,
        "evicted": 0,
        "page": 0,
        "namespace": 0,
        "diverged": 0,
    }


def test_tokens_that_a_block_loses() -> None:
    followed, tokens = Followed(has_blocks=True, page_size=64), tokens_of(0, 320)
    followed.serve(tokens, 0)
    other = np.concatenate((tokens[:250], tokens_of(1, 70)))
    assert followed.gains(other, 192) == {"page": 240 - 192, "new": 320 - 240}


def test_a_request_that_ends_early_counts_what_it_computed() -> None:
    followed, tokens = Followed(), tokens_of(0, 320)
    followed.serve(tokens, 0)
    request = followed.begin(tokens)
    usage = Usage(100, 40, 60, 0)
    followed.extension.on_finish(request, [], Finish("abort", usage, Metrics(0, 0, 0), None), 0.0)
    assert followed.counts["evicted"] == 60


# -- an engine ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with Runtime("random:tiny-llama", device="cpu", num_pages=900, advice=True) as made:
        yield made


def test_an_engine_gives_advice(runtime: Runtime) -> None:
    rng = np.random.default_rng(0)
    system = rng.integers(3, 288, 160).tolist()
    prompts = [system + rng.integers(3, 288, 100).tolist() for _ in range(30)]
    params = SamplingParams(max_tokens=4, temperature=0.0)
    for prompt in prompts + prompts:
        runtime.generate(prompt, params)
    advice, stats = runtime.advice(), runtime.cache_stats()
    assert advice is not None
    assert advice["requests"] == 60
    assert advice["prompt_tokens"] == 60 * 260
    assert advice["reused_tokens"] == stats["reused_tokens"]
    assert sum(advice["computed"].values()) == stats["computed_tokens"]
    # Each prompt comes back after 29 others, 100 tokens each: the pool is too small for them.
    assert advice["computed"]["evicted"] > 0.8 * 30 * 100
    assert advice["regretted_tokens"] == advice["computed"]["evicted"]
    assert advice["pool"]["tokens"] == 900
    assert advice["pool"]["hit_rate"] == pytest.approx(stats["hit_rate"], abs=0.03)
    assert 2500 < advice["enough"]["tokens"] < 4200
    assert advice["enough"]["hit_rate"] > 0.75
    assert advice["next_gib"] == pytest.approx(
        advice["most_reusable"] - advice["pool"]["hit_rate"], abs=1e-6
    )
    rates = [point["hit_rate"] for point in advice["curve"]]
    assert rates == sorted(rates)
    assert "more would lift hits from" in advice["line"]
    assert stats["advice"] == {
        "computed": advice["computed"],
        "regretted_tokens": advice["regretted_tokens"],
        "lines": [advice["line"]],
    }


def test_a_reset_forgets_what_is_cached(runtime: Runtime) -> None:
    prompt = np.random.default_rng(9).integers(3, 288, 200).tolist()
    params = SamplingParams(max_tokens=1)
    runtime.generate(prompt, params)
    runtime.flush_cache()
    before = runtime.cache_stats()["advice"]["computed"]
    runtime.generate(prompt, params)
    after = runtime.cache_stats()["advice"]["computed"]
    assert after["new"] - before["new"] == 200


def test_an_engine_may_go_without() -> None:
    # By default the traffic of so small a model is not followed.
    for settings in ({}, {"advice": False}, {"advice": True, "cache": "off"}):
        with Runtime("random:tiny-llama", device="cpu", num_pages=200, **settings) as plain:
            assert plain.advice() is None
            assert "advice" not in plain.cache_stats()


def test_the_advice_of_replicas_is_joined() -> None:
    each = []
    for number in range(2):
        followed = Followed()
        tokens = tokens_of(number, 320)
        for _ in range(2 + number):
            followed.serve(tokens, 0)
        each.append(followed.extension.advice())
    one, two = each
    joined = join_advice(each)
    assert joined["requests"] == 5
    assert joined["pool"]["tokens"] == 20_000
    assert joined["computed"]["evicted"] == one["computed"]["evicted"] + two["computed"]["evicted"]
    rates = [advice["most_reusable"] for advice in (one, joined, two)]
    assert rates == sorted(rates)
    assert joined["most_reusable"] == pytest.approx((2 * rates[0] + 3 * rates[2]) / 5)
    assert join_advice([one]) == one
