"""Traces through the real caches, one request after another."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest

from radixserve.errors import InvalidRequest
from radixserve.replay import CacheSpec, Trace, build_paths, cross, read_trace, replay_direct
from radixserve.replay.bounds import clairvoyant_hits
from radixserve.replay.caches import parse_tokens
from tests.replay.naive_lru import naive_lru_hits
from tests.replay.traces import SHARED, make_trace, random_turns, synthetic_trace

POLICIES = ("lru", "arc", "lfu", "fifo", "slru", "priority")
# Heads of the shared traces and cache sizes at which much is dropped.
REAL = [
    ("bbh_fewshot", 200, (2_000, 8_000)),
    ("tau_airline", 40, (14_000, 16_000)),
    ("mooncake_conversation", 20, (130_000,)),
    ("agentic_code", 30, (60_000, 100_000)),
]


@cache
def real_trace(name: str, count: int) -> Trace:
    """The head of a shared trace, or a made one where they are not at hand."""
    path = SHARED / f"{name}.jsonl.gz"
    return read_trace(path, limit=count) if path.exists() else synthetic_trace(count, len(name))


@pytest.mark.parametrize(("name", "count", "sizes"), REAL)
def test_lru_is_plain_lru_on_real_traces(name: str, count: int, sizes: tuple[int, ...]) -> None:
    trace = real_trace(name, count)
    for size in sizes:
        result = replay_direct(trace, CacheSpec(size))
        assert result.hits.tolist() == naive_lru_hits(trace, size, whole_edges=True)


@pytest.mark.parametrize(("name", "count", "sizes"), REAL[:2])
def test_hash_blocks_are_plain_lru_on_real_traces(
    name: str, count: int, sizes: tuple[int, ...]
) -> None:
    trace = real_trace(name, count)
    for size in sizes:
        result = replay_direct(trace, CacheSpec(size, page_size=16, index="hash"))
        assert result.hits.tolist() == naive_lru_hits(trace, size, 16)


@pytest.mark.parametrize("seed", range(6))
def test_lru_is_plain_lru_on_random_traces(seed: int) -> None:
    rng = random.Random(seed)
    trace = synthetic_trace(120, seed)
    if seed % 2:
        longest = rng.choice([5, 12, 40])
        trace = make_trace(
            random_turns(rng, 60, longest=longest, alphabet=rng.choice([2, 9]), fresh=True)
        )
    for size in (trace.longest, trace.longest + 3, 3 * trace.longest):
        result = replay_direct(trace, CacheSpec(size))
        assert result.hits.tolist() == naive_lru_hits(trace, size, whole_edges=True)
        blocks = replay_direct(trace, CacheSpec(size, page_size=4, index="hash"))
        if blocks.is_served.all():
            assert blocks.hits.tolist() == naive_lru_hits(trace, size, 4)


SPECS = cross([1500], POLICIES, [1, 16], ["radix", "hash"], use_sessions=True)


@pytest.mark.parametrize("spec", SPECS)
def test_no_cache_beats_the_bound(spec: CacheSpec) -> None:
    trace = synthetic_trace(200)
    paths = build_paths(trace)
    result = replay_direct(trace, spec)
    bound = clairvoyant_hits(paths, trace.num_kept, spec.cache_tokens).sum()
    assert 0 < result.hit_tokens <= bound < paths.reusable_tokens
    assert result.evicted_tokens > 0
    again = replay_direct(trace, spec)
    assert np.array_equal(result.hits, again.hits)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_roomy_radix_cache_reuses_all_there_is(page_size: int) -> None:
    trace = synthetic_trace(200)
    result = replay_direct(trace, CacheSpec(10**6, page_size=page_size))
    assert np.array_equal(result.hits, build_paths(trace).reusable)


def test_what_does_not_fit_counts_as_not_reused() -> None:
    turns = [([1, 2, 3], [4, 5]), (list(range(1, 20)), [7]), ([1, 2, 3], [4] * 30), ([1, 2, 9], ())]
    result = replay_direct(make_trace(turns), CacheSpec(8))
    assert result.is_served.tolist() == [True, False, False, True]
    assert result.hits.tolist() == [0, 0, 0, 2]
    assert result.num_too_large == 2
    assert result.hit_rate == 2 / 28


def test_namespaces_share_nothing() -> None:
    turns = [([1, 2, 3], ()), ([1, 2, 3], ()), ([1, 2, 3], ())]
    result = replay_direct(make_trace(turns, namespaces=["a", "b", "a"]), CacheSpec(100))
    assert result.hits.tolist() == [0, 0, 2]


def test_closed_sessions_make_room_for_open_ones() -> None:
    """A long session that is over is dropped before a short one that comes back."""
    chat, over, other = [1] * 10, [2] * 10, [3] * 10
    turns = [(chat, ()), (over, ()), (other, ()), ([*chat, 5], ())]
    trace = make_trace(turns, times=[0, 1, 2, 3], sessions=["chat", "over", "other", "chat"])
    assert replay_direct(trace, CacheSpec(25)).hits.tolist()[-1] == 5  # its tail had to go
    hinted = replay_direct(trace, CacheSpec(25, use_sessions=True))
    assert hinted.hits.tolist()[-1] == 10


def test_leases_end_in_time_of_the_trace() -> None:
    """An open session is kept before tokens without a session, but only while its lease lasts."""
    chat, seen, new = [1] * 10, [2] * 10, [3] * 8
    turns = [(chat, ()), (seen, ()), (new, ()), ([*chat, 5], ())]

    def last_hit(gap: float) -> int:
        sessions = ["chat", None, None, "chat"]
        trace = make_trace(turns, times=[0, 1, 1 + gap, 2 + gap], sessions=sessions)
        spec = CacheSpec(22, use_sessions=True)
        return int(replay_direct(trace, spec, lease_s=60.0).hits[-1])

    assert last_hit(5.0) == 10
    assert last_hit(600.0) < 10


# -- which caches ---------------------------------------------------------------------------------


def test_sizes_are_read() -> None:
    sizes = {"500000": 500_000, "250k": 250_000, "1M": 10**6, "0.25M": 250_000, " 2g ": 2 * 10**9}
    for text, size in sizes.items():
        assert parse_tokens(text) == size
    for text in ("", "M", "many", "-1", "0", "1T", "nan", "inf", "1e30"):
        with pytest.raises(InvalidRequest, match="1M"):
            parse_tokens(text)


def test_wrong_names_say_what_is_allowed() -> None:
    with pytest.raises(InvalidRequest, match="lru, arc"):
        CacheSpec(100, "newest")
    with pytest.raises(InvalidRequest, match="radix, hash"):
        CacheSpec(100, index="btree")
    with pytest.raises(InvalidRequest, match="page_size"):
        CacheSpec(100, page_size=200)
    with pytest.raises(InvalidRequest, match="larger page size"):
        CacheSpec(10**10)


def test_combinations_leave_out_what_makes_no_sense() -> None:
    specs = cross([10, 20], ["lru", "arc"], [1, 2], ["radix", "hash"], use_sessions=True)
    assert len(specs) == len(set(specs)) == 2 * 2 * (2 * 2 + 1)
    assert {spec.label for spec in specs} == {"lru", "lru+sessions", "arc", "arc+sessions", "hash"}


@pytest.mark.parametrize(("name", "count", "sizes"), REAL)
def test_checkpoints_reuse_nearly_all(name: str, count: int, sizes: tuple[int, ...]) -> None:
    trace = real_trace(name, count)
    exact, kept = (
        replay_direct(trace, spec)
        for spec in cross(
            sizes[-1:], ["lru"], [1], ["radix"], use_sessions=False, checkpoint_interval=512
        )
    )
    assert kept.spec.label == "lru+states"
    # A prefix shorter than the interval has its state only after the second prompt through its end:
    # the many short prefixes of bbh_fewshot cost most, 0.866.
    assert 0.85 * exact.hit_tokens <= kept.hit_tokens <= exact.hit_tokens
