"""Traces through replicas that are lost, added and taken away."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.rival_routers import ROUTERS, rival
from radixserve.cli import main
from radixserve.errors import InvalidRequest
from radixserve.replay import (
    Autoscaling,
    CacheSpec,
    Cluster,
    ClusterResult,
    Failures,
    replay_replicas,
)
from radixserve.replay.replicas import Autoscaler
from radixserve.replay.report import changes_finding, replay_clusters
from radixserve.replay.scheduled import StepModel
from tests.replay.traces import Turn, make_trace, synthetic_trace

STEP = StepModel(0.0, 1.0, 1.0, 0.0)  # a second for each token
FAMILY = list(range(10))
SPEC = CacheSpec(10_000)


def cluster(
    num_replicas: int, *losses: tuple[float, int], router: str = "round-robin", start_s: float = 10
) -> Cluster:
    failures = Failures(at=losses)
    return rival(num_replicas, router, 0.1, STEP, failures=failures, start_s=start_s)


@pytest.mark.parametrize("router", [name for name in ROUTERS if name != "offline"])
def test_a_family_is_computed_again_by_the_one_that_comes_back(router: str) -> None:
    turns: list[Turn] = [([*FAMILY, 100 + number], []) for number in range(4)]
    trace = make_trace(turns, times=[0.0, 100.0, 200.0, 300.0])
    result = replay_replicas(trace, SPEC, cluster(1, (150.0, 0), router=router))
    assert result.hits.tolist() == [0, 10, 0, 10]
    assert (result.num_failures, result.num_moved, result.num_failed) == (1, 0, 0)
    assert result.lost_tokens == 12
    assert result.recomputed_tokens == 0
    assert result.alive_s.tolist() == [290.0]
    assert result.work_s.tolist() == [11.0 + 1 + 11 + 1]
    assert result.max_load == 1.0


@pytest.mark.parametrize(
    ("lost_s", "known", "prompt", "work"),
    [(4.5, 4, 10, 4.5), (10.5, 10, 10, 10), (13.5, 12, 13, 13), (17.9, 16, 17, 17)],
)
def test_a_request_goes_on_from_its_tokens(
    lost_s: float, known: int, prompt: int, work: float
) -> None:
    answer = list(range(50, 58))
    trace = make_trace([(FAMILY, answer), ([1000], [])], times=[0.0, 18.0])
    result = replay_replicas(trace, SPEC, cluster(2, (lost_s, 0)))
    assert result.replicas.tolist() == [1, 1]
    assert result.num_moved == 1
    assert result.recomputed_tokens == known
    assert result.hit_rate == -known / 11
    rest = 10 + 8 - prompt
    assert result.work_s.tolist() == [work, prompt + rest + 1]
    assert result.ttft_s[0] == (10 if lost_s >= 10 else lost_s + 10)
    assert result.even_work_s.sum() == pytest.approx(result.work_s.sum())


def test_a_request_that_had_not_begun_finds_what_is_there_where_it_goes() -> None:
    turns: list[Turn] = [(FAMILY, [20]), ([900], []), ([*FAMILY[:5], 30, 31], []), ([901], [])]
    trace = make_trace(turns, times=[0.0, 0.0, 1.0, 18.0])
    result = replay_replicas(trace, SPEC, cluster(2, (4.5, 0)))
    assert result.hits.tolist() == [0, 0, 5, 0]
    assert result.recomputed_tokens == 4
    assert result.num_moved == 2
    apart = replay_replicas(trace, SPEC, cluster(3, (4.5, 0)))  # to replicas 1 and 2
    assert apart.hits.tolist() == [0, 0, 0, 0]


def test_a_request_that_had_ended_stays() -> None:
    trace = make_trace([(FAMILY, [20]), ([901], [])], times=[0.0, 18.0])
    result = replay_replicas(trace, SPEC, cluster(2, (11.0, 0)))
    assert result.replicas.tolist() == [0, 1]
    assert (result.num_failures, result.num_moved) == (1, 0)


def test_three_losses_end_a_request() -> None:
    trace = make_trace([(FAMILY, list(range(100, 400))), ([1], [])], times=[0.0, 200.0])
    losses = [(12.0, 0), (42.0, 0), (72.0, 0)]
    result = replay_replicas(trace, SPEC, cluster(1, *losses))
    assert (result.num_moved, result.num_failed) == (2, 1)
    assert result.replicas.tolist() == [-1, 0]
    assert result.num_too_large == 0
    # at 12 it has 2 tokens and goes on at 22 with 12; the first comes at 34, and 8 until 42
    assert result.recomputed_tokens == (10 + 1) + (12 + 7)
    assert result.ttft_s.tolist() == [10, 1]


def test_requests_wait_for_a_replica_but_not_forever() -> None:
    turns: list[Turn] = [(FAMILY, [20]), ([1], []), ([2], [])]
    trace = make_trace(turns, times=[0.0, 30.0, 100.0])
    result = replay_replicas(trace, SPEC, cluster(1, (5.0, 0), start_s=150.0))
    assert result.num_failed == 2  # at 125 and 150; the third is sent at 155
    assert result.replicas.tolist() == [-1, -1, 0]
    assert np.isnan(result.ttft_s).tolist() == [True, True, False]
    assert result.ttft_s[2] == 56


@pytest.mark.parametrize("num_replicas", [1, 64])
@pytest.mark.parametrize("router", [name for name in ROUTERS if name != "offline"])
def test_no_request_is_lost_and_all_is_the_same_again(router: str, num_replicas: int) -> None:
    trace = synthetic_trace(150, 1)
    failures = Failures(mean_s=20.0 if num_replicas == 1 else 50.0, seed=3)
    common = rival(num_replicas, router, failures=failures, start_s=5.0)
    spec = CacheSpec(trace.longest * 3)
    result, again = (replay_replicas(trace, spec, common) for _ in range(2))
    assert facts(result) == facts(again)
    assert result.num_failed == 0
    assert (result.replicas >= 0).all()
    assert result.num_failures > 5
    assert result.num_failures == sum_of_failures(common, trace.times[-1])
    assert result.even_work_s.sum() == pytest.approx(result.work_s.sum())
    assert result.mean_replicas < num_replicas


@pytest.mark.parametrize("router", [name for name in ROUTERS if name != "offline"])
def test_where_nothing_comes_or_goes_all_is_as_with_fixed_replicas(router: str) -> None:
    trace = synthetic_trace(150, 1)
    spec, fixed = CacheSpec(trace.longest * 3), rival(7, router)
    result = replay_replicas(trace, spec, fixed)
    rule = Autoscaling(min_replicas=7, max_replicas=7)
    other = replay_replicas(
        trace, spec, rival(7, router, failures=Failures(mean_s=1e9), autoscaling=rule)
    )
    assert facts(result) == facts(other)
    assert result.hit_rate == other.hit_rate
    assert result.max_load == pytest.approx(other.max_load, rel=1e-12)
    assert other.mean_replicas == pytest.approx(7.0)


def facts(result: ClusterResult) -> list[object]:
    counts = [result.num_failures, result.num_moved, result.recomputed_tokens, result.lost_tokens]
    return [*counts, result.hits.tolist(), result.replicas.tolist(), result.work_s.tolist()]


def sum_of_failures(cluster: Cluster, until: float) -> int:
    assert cluster.failures is not None
    count = 0
    for replica in range(cluster.num_replicas):
        failure_s, start = cluster.failures.time_to_failure(replica, 0), 0
        while failure_s <= until:
            count, start = count + 1, start + 1
            failure_s += cluster.start_s + cluster.failures.time_to_failure(replica, start)
    return count


def test_the_autoscaler_waits_as_ray_serve_does() -> None:
    rule = Autoscaling(
        max_replicas=4, target_ongoing_requests=2, upscale_delay_s=30, downscale_delay_s=60
    )
    autoscaler = Autoscaler(rule, 1)
    steps = [(10, 5, 1), (30, 3, 1), (40, 5, 3), (50, 1, 3), (60, 6, 3), (70, 1, 3), (120, 0, 3)]
    steps += [(130, 0, 1), (140, 99, 1), (170, 99, 4), (180, 99, 4)]
    for now, ongoing, wanted in steps:
        assert autoscaler.decide(now, ongoing) == wanted, now


@pytest.mark.parametrize("router", [name for name in ROUTERS if name != "offline"])
def test_replicas_are_added_and_taken_away(router: str) -> None:
    turns: list[Turn] = [([number], list(range(100, 248))) for number in range(8)]
    turns += [([50 + number], list(range(20))) for number in range(4)] + [([99], [])]
    trace = make_trace(turns, times=[0.0] * 8 + [255.0] * 4 + [1000.0])
    rule = Autoscaling(max_replicas=4, target_ongoing_requests=2.0, downscale_delay_s=100)
    step = StepModel(0.0, 0.0, 1.0, 0.0)
    result = replay_replicas(trace, SPEC, rival(1, router, 0.1, step, autoscaling=rule, start_s=20))
    # 4 wanted from 10 on, begun at 40, there at 60; fewer wanted from 160 on, gone at 260
    assert result.alive_s.tolist() == [1000.0, 200.0, 200.0, 200.0]
    assert result.mean_replicas == 1.6
    assert (result.replicas == 0).all()  # those on the ones taken away went on on the first
    assert result.num_failures == result.num_failed == 0
    num_moved = {"round-robin": 3, "tree": 4}.get(router, result.num_moved)
    assert result.num_moved == num_moved
    assert result.recomputed_tokens == num_moved * (1 + 4)
    assert result.lost_tokens == num_moved * 20


def test_what_cannot_be_is_refused() -> None:
    trace = make_trace([([1], [])])
    with pytest.raises(InvalidRequest, match="no times"):
        replay_replicas(trace, SPEC, cluster(1))
    with pytest.raises(InvalidRequest, match="mean_s"):
        Failures(0.0)
    with pytest.raises(InvalidRequest, match="num_replicas"):
        Cluster(3, autoscaling=Autoscaling(max_replicas=2))


def test_the_command_tells_what_came_and_went(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "made.jsonl"
    lines = [{"tokens": [*FAMILY, n], "time": 10.0 * n, "output_tokens": [5]} for n in range(30)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    argv = ["replay", str(path), "--replicas", "2", "--cache-tokens", "1k", "--failures", "40"]
    assert main([*argv, "--start-s", "3", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["traces"][0]["replicas"]
    assert [row["router"] for row in rows] == ["tree"]
    assert rows[0]["failures"] > 3
    scaled = [*argv[:-2], "--autoscaling", "max_replicas=3,min_replicas=2"]
    assert main(scaled) == 0
    assert "replicas come and go" in capsys.readouterr().out
    fixed = replay_clusters(synthetic_trace(20), [CacheSpec(10_000)], [Cluster(2)])
    assert changes_finding({"replicas": fixed}) is None
