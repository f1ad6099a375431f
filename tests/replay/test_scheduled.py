"""Traces through the real scheduler: computed tokens, waiting times, order of admission."""

from __future__ import annotations

import numpy as np
import pytest

from radixserve.errors import InvalidRequest
from radixserve.replay import (
    CacheSpec,
    Serving,
    Trace,
    build_paths,
    replay_direct,
    replay_scheduled,
)
from radixserve.replay.scheduled import ComputeLedger, ScheduledResult, StepModel, predecessors
from tests.replay.traces import make_trace, synthetic_trace

PLAIN = StepModel(fixed_s=1.0, prefill_token_s=0.1, decode_row_s=0.01, kv_token_s=0.001)


def serve(trace: Trace, spec: CacheSpec, **serving: object) -> ScheduledResult:
    return replay_scheduled(trace, build_paths(trace), spec, Serving(**serving))  # type: ignore[arg-type]


def burst(count: int = 60) -> Trace:
    """Requests at once which share prefixes of every length; some are the same to the last token,
    some draw the same outputs, some go on where another one ends."""
    rng = np.random.default_rng(3)
    shared = rng.integers(0, 500, 400).tolist()
    turns = []
    for number in range(count):
        cut = int(rng.integers(1, 400))
        prompt = shared[:cut] + rng.integers(0, 4, int(rng.integers(0, 6))).tolist()
        turns.append((prompt, [number % 3, 7, number % 2, 8, 9][: int(rng.integers(0, 6))]))
    turns += [turns[5], turns[5], ([*turns[7][0], *turns[7][1], 3], [1, 2])]
    return make_trace(turns)


@pytest.mark.pairs
@pytest.mark.parametrize("order", ["lpm", "fcfs", "dfs-weight"])
@pytest.mark.parametrize("chunked_prefill_size", [64, 2048])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_burst_computes_every_prefix_once(
    order: str, chunked_prefill_size: int, page_size: int
) -> None:
    trace = burst()
    spec = CacheSpec(64 * 500, page_size=page_size)
    result = serve(trace, spec, order=order, chunked_prefill_size=chunked_prefill_size)
    distinct = build_paths(trace).distinct_tokens
    assert result.needed_tokens == distinct
    assert result.repeated_tokens == 0
    assert result.compute_ratio == 1.0
    assert result.num_too_large == result.preemptions == 0
    assert result.hit_tokens < result.prompt_tokens


def test_a_small_cache_computes_again() -> None:
    trace = synthetic_trace(120)
    tight = serve(trace, CacheSpec(1500))
    roomy = serve(trace, CacheSpec(10**5))
    assert tight.compute_ratio > 1.2
    assert tight.needed_tokens == roomy.needed_tokens == build_paths(trace).distinct_tokens
    assert tight.computed_tokens > tight.needed_tokens
    assert roomy.compute_ratio == 1.0
    assert tight.hit_rate < roomy.hit_rate
    assert tight.evicted_tokens > 0


def test_blocks_compute_again_what_is_shared_below_a_block() -> None:
    trace = burst()
    result = serve(trace, CacheSpec(64 * 500, page_size=16, index="hash"))
    assert result.compute_ratio > 1.0


def test_far_apart_it_is_the_direct_replay() -> None:
    trace = synthetic_trace(100)
    slow = serve(trace, CacheSpec(1500), time_scale=1e5)
    assert np.array_equal(slow.hits, replay_direct(trace, CacheSpec(1500)).hits)
    assert slow.max_overtaken == 0


def test_times_are_those_of_the_model() -> None:
    """Alone: a step for the prompt, then a step for each token; the second one waits its turn."""
    trace = make_trace([([1, 2, 3, 4], [5, 6, 7]), ([8, 9], [5])], times=[0.0, 0.5])
    result = serve(trace, CacheSpec(100), step=PLAIN)
    first = 1 + 4 * 0.1 + 4 * 0.001
    second = 1 + 0.01 + 5 * 0.001 + 2 * 0.1 + 2 * 0.001  # a decode and the other's prefill
    third = 1 + 0.01 + 6 * 0.001
    assert result.ttft_s.tolist() == pytest.approx([first, first + second - 0.5])
    assert result.span_s == pytest.approx(first + second + third)
    assert result.steps == 3
    assert result.computed_tokens == 4 + 2 + 2
    assert result.ttft_at(50) == pytest.approx(result.mean_ttft_s)


def test_a_turn_is_sent_after_the_answer_that_it_contains() -> None:
    """The second turn is due long before the first has ended; unrelated requests do not wait."""
    first, second = ([1, 2, 3, 4], [5, 6, 7]), ([1, 2, 3, 4, 5, 6, 7, 8], [9, 9])
    trace = make_trace([first, second, ([20, 21], [1, 1])], times=[0.0, 0.1, 0.2])
    assert predecessors(trace, build_paths(trace)).tolist() == [-1, 0, -1]
    result = serve(trace, CacheSpec(100), step=PLAIN)
    alone = serve(make_trace([first]), CacheSpec(100), step=PLAIN)
    assert result.hits.tolist() == [0, 6, 0]
    assert result.max_overtaken == 0  # the unrelated request was sent before the second turn
    last_step = 1 + 0.1 * 2 + 0.001 * 8  # of the prompt's last two tokens
    assert result.ttft_s[1] == pytest.approx(last_step)
    assert result.span_s > alone.span_s + last_step


def test_predecessors() -> None:
    """Also where only the beginning of an output came back, or two drew nearly the same."""
    prompt = [1, 2, 3]
    turns = [
        (prompt, [4, 5, 6, 7]),
        (prompt, [4, 5, 8, 9]),
        ([*prompt, 4, 5, 6, 7, 0], [1]),  # from the first
        ([*prompt, 4, 5, 8, 0], [1]),  # from the second
        ([*prompt, 4, 0, 0], [1]),  # from one of the two
        ([*prompt, 6, 0], [1, 1]),  # from none
        ([*prompt, 6, 0, 1, 1, 2], [1]),
    ]
    trace = make_trace(turns)
    assert predecessors(trace, build_paths(trace)).tolist() == [-1, -1, 0, 1, 1, -1, 5]


def test_longest_prefix_first_overtakes_and_fcfs_does_not() -> None:
    """A warm prefix, then many unrelated requests and, after them, some that share it."""
    warm = list(range(100, 300))
    unrelated = [([number] * 150, [1] * 5) for number in range(10)]
    sharing = [([*warm, number], [1] * 5) for number in range(10)]
    times = [0.0] + [20.0] * 20
    trace = make_trace([(warm, [1]), *unrelated, *sharing], times=times)
    settings = {"step": PLAIN, "max_running_requests": 2, "chunked_prefill_size": 200}
    lpm = serve(trace, CacheSpec(10**5), order="lpm", **settings)
    fcfs = serve(trace, CacheSpec(10**5), order="fcfs", **settings)
    bounded = serve(trace, CacheSpec(10**5), order="lpm", max_overtake=3, **settings)
    assert fcfs.max_overtaken == 0
    assert lpm.max_overtaken == 10
    assert 0 < bounded.max_overtaken <= 3
    assert lpm.compute_ratio == fcfs.compute_ratio == 1.0


def test_preemption_is_counted_and_everything_ends() -> None:
    turns = [([number] * 30, list(range(60))) for number in range(6)]
    result = serve(make_trace(turns), CacheSpec(150), max_running_requests=6)
    assert result.preemptions > 0
    assert not np.isnan(result.ttft_s).any()
    assert result.needed_tokens == 6 * 89


def test_what_does_not_fit_is_passed_over() -> None:
    trace = make_trace([([1, 2, 3], [4]), (list(range(50)), [1]), ([1, 2, 3], [4] * 50)])
    result = serve(trace, CacheSpec(20))
    assert result.num_too_large == 2
    assert np.isnan(result.ttft_s).tolist() == [False, True, True]
    nothing = serve(make_trace([(list(range(50)), [1])]), CacheSpec(20))
    assert (nothing.compute_ratio, nothing.max_overtaken, nothing.span_s) == (1.0, 0, 0.0)
    assert np.isnan(nothing.ttft_at(99))
    assert np.isnan(nothing.mean_ttft_s)


def test_sessions_of_the_trace_are_sessions_of_the_cache() -> None:
    """As in the direct replay: closed sessions are evicted before open ones."""
    chat, over, other = [1] * 10, [2] * 10, [3] * 10
    turns = [(chat, ()), (over, ()), (other, ()), ([*chat, 5], ())]
    sessions = ["chat", "over", "other", "chat"]
    trace = make_trace(turns, times=[0, 10, 20, 30], sessions=sessions)
    assert serve(trace, CacheSpec(25)).hits.tolist()[-1] == 5
    assert serve(trace, CacheSpec(25, use_sessions=True)).hits.tolist()[-1] == 10


def test_two_runs_are_the_same() -> None:
    trace = synthetic_trace(100)
    one, two = (serve(trace, CacheSpec(2000), time_scale=0.01) for _ in range(2))
    assert np.array_equal(one.ttft_s, two.ttft_s)
    assert (one.steps, one.preemptions) == (two.steps, two.preemptions)


def test_the_ledger_excuses_only_what_cannot_be_helped() -> None:
    trace = make_trace([([1, 2, 3], [4, 5]), ([1, 2, 3], [4, 5]), ([1, 2, 3, 4, 9], [7])])
    ledger = ComputeLedger(trace, build_paths(trace))
    ledger.note(0, 0, 3)
    ledger.note(0, 3, 4)
    assert (ledger.computed, ledger.needed, ledger.repeated) == (4, 4, 0)
    ledger.note(1, 2, 3)  # its last token
    ledger.note(1, 3, 4)  # drawn
    assert (ledger.computed, ledger.needed, ledger.repeated) == (6, 4, 0)
    ledger.note(1, 2, 4)  # after a preemption
    assert (ledger.computed, ledger.needed, ledger.repeated) == (8, 4, 2)
    ledger.note(2, 2, 5)
    assert (ledger.computed, ledger.needed, ledger.repeated) == (11, 5, 4)
    assert ledger.ratio == 9 / 5


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="lpm, fcfs, dfs-weight"):
        Serving(order="random")
    with pytest.raises(InvalidRequest, match="fixed_s"):
        StepModel(fixed_s=-1.0)
