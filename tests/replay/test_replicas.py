"""Traces through several caches and a router."""

from __future__ import annotations

import random

import pytest

from benchmarks.rival_routers import ROUTERS, rival
from radixserve.replay import CacheSpec, Cluster, Failures, replay_direct, replay_replicas
from radixserve.replay.report import cluster_finding, replay_clusters
from tests.replay.traces import Turn, make_trace, synthetic_trace


@pytest.mark.parametrize("router", ROUTERS)
def test_one_replica_is_one_cache(router: str) -> None:
    trace = synthetic_trace(60, 3)
    spec = CacheSpec(trace.longest * 3)
    result = replay_replicas(trace, spec, rival(1, router))
    assert result.hits.tolist() == replay_direct(trace, spec).hits.tolist()
    assert result.max_load == 1.0


def make_chats(num_chats: int, num_turns: int) -> list[Turn]:
    """Chats of three groups, each with a system prompt, in a random order."""
    rng, fresh, turns = random.Random(1), iter(range(1000, 10**6)), []
    chats = [[n % 3] * 50 for n in range(num_chats)]
    for at in rng.sample(range(num_chats * num_turns), num_chats * num_turns):
        chat = chats[at % num_chats]
        chat += [next(fresh) for _ in range(20)]
        answer = [next(fresh) for _ in range(10)]
        turns.append((list(chat), answer))
        chat += answer
    return turns


@pytest.mark.parametrize("delay", [0.0, 3.0])
def test_the_tree_router_keeps_what_belongs_together_and_spreads_the_work(delay: float) -> None:
    turns = make_chats(40, 12)
    trace = make_trace(turns, times=[0.5 * n for n in range(len(turns))])
    spec = CacheSpec(6000)
    whole = replay_direct(trace, CacheSpec(4 * 6000)).hit_rate
    tree = replay_replicas(trace, spec, rival(4, "tree", delay))
    blind = replay_replicas(trace, spec, rival(4, "round-robin"))
    assert tree.hit_rate > 0.93 * whole
    assert tree.hit_rate > blind.hit_rate + 0.1
    assert tree.max_load < 1.2
    again = replay_replicas(trace, spec, rival(4, "tree", delay))
    assert again.replicas.tolist() == tree.replicas.tolist()


def test_with_knowledge_of_the_future_a_conversation_is_cut_once_a_replica() -> None:
    turns = make_chats(40, 12)
    chats = [str(prompt[50]) for prompt, _ in turns]  # each has another first token of its own
    trace = make_trace(turns, times=[0.5 * n for n in range(len(turns))], sessions=chats)
    result = replay_replicas(trace, CacheSpec(20_000), rival(7, "offline"))
    assert result.max_load < 1.1
    whole = replay_direct(trace, CacheSpec(7 * 20_000))
    assert whole.hits.sum() - result.hits.sum() < 6 * trace.longest + 3 * 7 * 50


def test_requests_that_fit_nowhere_are_passed_over() -> None:
    trace = make_trace([([1, 2, 3], [4]), (list(range(50)), []), ([1, 2, 3, 5], [])])
    result = replay_replicas(trace, CacheSpec(20), rival(1, "tree"))
    assert result.is_served.tolist() == [True, False, True]
    assert result.hits.tolist() == [0, 0, 3]
    (row,) = replay_clusters(trace, [CacheSpec(20)], [Cluster(2)])
    assert row["too_large_requests"] == 1
    assert (
        cluster_finding({"trace": "made", "requests": 3, "replicas": [row]})
        .markdown()
        .count("tree")
        == 1
    )


def test_a_router_that_knows_the_future_needs_a_fixed_cluster() -> None:
    with pytest.raises(ValueError, match="offline"):
        rival(2, "offline", failures=Failures(mean_s=60.0))
