"""Closed loops in simulated time: who sends when, what is computed, the bound, priced admission."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from radixserve.cli import main
from radixserve.errors import InvalidRequest
from radixserve.replay import CacheSpec, Serving, build_paths
from radixserve.replay.closed_loop import (
    ClosedLoop,
    ClosedLoopResult,
    bound_closed_loop,
    infer_closed_loop,
    read_step_costs,
    replay_closed_loop,
)
from radixserve.replay.scheduled import StepModel
from radixserve.replay.trace import Trace
from tests.replay.traces import make_trace, synthetic_trace

TINY = StepModel(fixed_s=6e-4, prefill_token_s=8e-6, decode_row_s=2e-5, kv_token_s=0.0)
SERVING = Serving(step=TINY, chunked_prefill_size=512)


def scripted(
    count: int, turns: int, *, common: int = 0, first: int = 60, more: int = 10, out: int = 2
) -> tuple[Trace, list[list[int]]]:
    """Sessions that begin with `common` equal tokens; each turn adds `more` and an answer."""
    rng = np.random.default_rng(5)
    head = rng.integers(0, 1000, common).tolist()
    made, sessions = [], []
    for _ in range(count):
        text = [*head, *rng.integers(0, 1000, first).tolist()]
        sessions.append(list(range(len(made), len(made) + turns)))
        for _ in range(turns):
            answer = rng.integers(0, 1000, out).tolist()
            made.append((list(text), answer))
            text += [*answer, *rng.integers(0, 1000, more).tolist()]
    names = [f"s{number}" for number, requests in enumerate(sessions) for _ in requests]
    return make_trace(made, sessions=names), sessions


def in_turn(sessions: list[list[int]], think_s: float) -> ClosedLoop:
    """All begin at once and think equally long."""
    times = np.full(sum(map(len, sessions)), think_s)
    times[[requests[0] for requests in sessions]] = 0.0
    return ClosedLoop(sessions, np.zeros(len(sessions)), times)


def serve(
    trace: Trace,
    loop: ClosedLoop,
    size: int,
    admission: str = "greedy",
    *,
    named: bool = False,
    **settings: object,
) -> ClosedLoopResult:
    policy = "expected-return" if admission == "priced" else "lru"
    serving = replace(SERVING, admission=admission, **settings)  # type: ignore[arg-type]
    return replay_closed_loop(trace, loop, CacheSpec(size, policy, use_sessions=named), serving)


def test_a_session_alone_takes_its_steps_and_its_think_times() -> None:
    trace, sessions = scripted(1, 3)
    result = serve(trace, in_turn(sessions, 5.0), 10_000)
    assert result.computed_tokens == 60 + 2 * 11 + 3  # a turn: what is new, and one decoded token
    steps = 6 * TINY.fixed_s + 82 * TINY.prefill_token_s + 3 * TINY.decode_row_s
    assert result.session_s[0] == pytest.approx(10.0 + steps)
    assert result.fairness == pytest.approx(1.0)
    assert result.mean_wait_s == pytest.approx(steps)
    assert result.makespan_s == pytest.approx(result.session_s[0])


def test_think_times_are_the_gaps_of_the_trace_without_the_answers() -> None:
    turns = [([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6]), ([7], [8])]
    trace = make_trace(turns, times=[0.0, 2.0, 3.0], sessions=["a", "a", None])
    loop = infer_closed_loop(trace, Serving(step=StepModel(fixed_s=0.5, decode_row_s=0.0)))
    assert loop.sessions == [[0, 1], [2]]
    assert loop.think_s.tolist() == [0.0, 1.0, 0.0]
    assert loop.starts.tolist() == [0.0, 3.0]


def test_step_costs_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"fixed_s": 0.25, "prefill_token_s": 1e-5}))
    assert read_step_costs(path) == StepModel(fixed_s=0.25, prefill_token_s=1e-5)
    for wrong in ("[1]", "no", '{"step": 1}', '{"fixed_s": -1}', "[" * 100_000):
        path.write_text(wrong)
        with pytest.raises(InvalidRequest):
            read_step_costs(path)


def test_the_command_prints_a_row_for_each_way_of_serving(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, lines = tmp_path / "trace.jsonl", []
    for number in range(12):
        tokens = [number % 3, *range(20 + number)]
        line = {"time": number / 10, "session": str(number % 3), "tokens": tokens}
        lines.append(json.dumps({**line, "output_length": 3}))
    path.write_text("\n".join(lines))
    argv = ["replay", str(path), "--closed-loop", "--cache-tokens", "60", "--decode-rate", "50"]
    assert main([*argv, "--admission", "greedy,priced", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["traces"][0]["closed_loops"]
    assert [row["cache"] for row in rows] == ["lru", "expected-return"]
    for row in rows:
        assert row["bound_makespan_s"] <= row["makespan_s"]
        assert row["session_mean_s"] <= row["session_worst_s"]
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert "in hindsight" in printed
    assert "makespan" in printed  # no column is cut short, however narrow the output
    assert "\u2026" not in printed


def test_requests_that_do_not_fit_are_named_and_have_no_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"tokens": [1, 2, 3]}\n')
    argv = ["replay", str(path), "--cache-tokens", "2"]
    for mode in ("--closed-loop", "--baseline", "--order=lpm"):
        assert main([*argv, mode, "--json"]) == 0
        assert "NaN" not in capsys.readouterr().out
        assert main([*argv, mode]) == 0
        assert "nan" in capsys.readouterr().out
    assert main([*argv, "--closed-loop"]) == 0
    assert "0.00*" in capsys.readouterr().out


@pytest.mark.parametrize("admission", ["greedy", "priced"])
def test_no_schedule_beats_the_bound(admission: str) -> None:
    trace = synthetic_trace(150)
    loop, paths = infer_closed_loop(trace, SERVING), build_paths(trace)
    for size in (1_500, 4_000, 100_000):
        bound = bound_closed_loop(trace, paths, loop, size, SERVING)
        result = serve(trace, loop, size, admission)
        assert bound.makespan_s <= result.makespan_s
        assert paths.distinct_tokens <= bound.computed_tokens <= result.computed_tokens


class TestPriced:
    def test_without_pressure_it_is_greedy(self) -> None:
        trace = synthetic_trace(150)
        loop = infer_closed_loop(trace, SERVING)
        greedy, priced = (serve(trace, loop, 50_000, name) for name in ("greedy", "priced"))
        assert priced.num_held == 0
        assert priced.steps == greedy.steps
        assert np.array_equal(priced.hits, greedy.hits)
        assert np.array_equal(priced.session_s, greedy.session_s)

    @pytest.mark.parametrize(("think_s", "most"), [(0.0, 0.8), (0.02, 0.7)])
    def test_under_pressure_hot_sessions_are_not_pushed_out(
        self, think_s: float, most: float
    ) -> None:
        """Room for about six of 24 sessions."""
        trace, sessions = scripted(24, 8, first=600, more=100, out=8)
        loop = in_turn(sessions, think_s)
        greedy, priced = (serve(trace, loop, 9_000, name) for name in ("greedy", "priced"))
        assert priced.num_held > 0
        assert priced.mean_session_s <= most * greedy.mean_session_s
        assert priced.computed_tokens <= most * greedy.computed_tokens

    def test_sessions_in_turn_do_not_all_push_each_other_out(self) -> None:
        """With long regular think times none is held back, and a part of them is kept."""
        trace, sessions = scripted(24, 8, first=600, more=100, out=8)
        loop = in_turn(sessions, 0.2)
        greedy, priced = (serve(trace, loop, 9_000, name) for name in ("greedy", "priced"))
        assert greedy.hit_tokens < 0.01 * greedy.prompt_tokens
        assert priced.computed_tokens <= 0.83 * greedy.computed_tokens
        assert priced.mean_session_s <= greedy.mean_session_s

    @pytest.mark.parametrize("head", [0, 200], ids=["apart", "with a common prefix"])
    def test_prompts_that_are_sent_once_push_no_session_out(self, head: int) -> None:
        """Sessions that nobody names, with think times of any length, beside such prompts."""
        rng = np.random.default_rng(7)
        trace, sessions = scripted(6, 12, first=300, more=50, out=8)
        made = [trace.source.tokens(index) for index in range(len(trace))]
        num_turns, common = len(made), rng.integers(0, 1000, head).tolist()
        for _ in range(240):
            prompt = rng.integers(0, 1000, rng.integers(20, 500)).tolist()
            sessions.append([len(made)])
            made.append((common + prompt, rng.integers(0, 1000, 16).tolist()))
        starts = np.concatenate((np.zeros(6), np.sort(rng.uniform(0, 5, 240))))
        thinks = rng.exponential(0.4, len(made))
        thinks[[requests[0] for requests in sessions]] = 0.0
        mixed, loop = make_trace(made), ClosedLoop(sessions, starts, thinks)
        greedy, priced = (serve(mixed, loop, 6_000, name) for name in ("greedy", "priced"))
        of_turns = slice(0, num_turns)
        assert priced.hits[of_turns].sum() > 1.1 * greedy.hits[of_turns].sum()
        once = priced.hits[num_turns:].sum(), greedy.hits[num_turns:].sum()
        assert once[0] >= 0.98 * once[1] - 20  # a few begin alike by chance
        assert priced.session_s[:6].mean() <= greedy.session_s[:6].mean()
        assert priced.session_s[6:].mean() <= greedy.session_s[6:].mean()

    @pytest.mark.parametrize("step_s", [3e-4, 6e-3], ids=["tokens are dear", "steps are dear"])
    @pytest.mark.parametrize("think_s", [0.003, 0.02])
    def test_it_is_as_good_as_the_best_fixed_number(self, step_s: float, think_s: float) -> None:
        """Of running requests: with dear tokens a small one, else a large one. Sessions without
        names all begin before one is known to return."""
        trace, sessions = scripted(24, 8, first=600, more=100, out=8)
        loop, step = in_turn(sessions, think_s), replace(TINY, fixed_s=step_s, prefill_token_s=1e-4)
        fixed = [
            serve(trace, loop, 9_000, step=step, max_running_requests=number).mean_session_s
            for number in (1, 2, 4, 8)
        ]
        named = serve(trace, loop, 9_000, "priced", step=step, named=True)
        assert named.mean_session_s <= 1.06 * min(fixed)  # 1.055 where seven begin and six fit
        unnamed = serve(trace, loop, 9_000, "priced", step=step)
        assert unnamed.mean_session_s <= 1.1 * min(fixed)

    def test_a_shared_prefix_counts_once(self) -> None:
        """32 sessions with 90 % in common fit together, and none is held back."""
        trace, sessions = scripted(32, 6, common=900, first=40, more=10)
        result = serve(trace, in_turn(sessions, 0.02), 900 + 32 * 130, "priced")
        assert result.num_held == 0
        assert (
            result.computed_tokens == serve(trace, in_turn(sessions, 0.02), 10**5).computed_tokens
        )

    def test_eight_hundred_sessions_at_once_all_end(self) -> None:
        trace, sessions = scripted(800, 3)
        result = serve(trace, in_turn(sessions, 0.01), 2_500, "priced")
        assert result.is_served.all()
        assert np.isfinite(result.session_s).all()
        assert result.num_held > 0  # `replay_closed_loop` audits that nothing is left

    def test_first_come_first_served_looks_past_those_held(self) -> None:
        trace, sessions = scripted(24, 8, first=600, more=100, out=8)
        loop = in_turn(sessions, 0.02)
        results = [serve(trace, loop, 9_000, name, order="fcfs") for name in ("greedy", "priced")]
        assert results[1].mean_session_s <= 1.02 * results[0].mean_session_s
