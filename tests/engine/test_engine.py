"""The engine over a runner that computes while the host goes on; the model is a formula."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from radixserve.api.engine_factory import make_engine
from radixserve.commands.terminal import format_profile
from radixserve.completion import Completion
from radixserve.config import EngineConfig
from radixserve.engine.engine import Engine
from radixserve.engine.engine_thread import EngineThread
from radixserve.engine.extension import EngineExtension
from radixserve.engine.messages import AbortRequests, GetStats, PauseEngine, ResumeEngine
from radixserve.engine.output_collector import Event, OutputCollector
from radixserve.errors import EngineDead, InvalidRequest
from radixserve.hints.hint import Hint
from radixserve.hints.messages import ApplyHints
from radixserve.output import RequestOutput
from radixserve.request import BeamParams, Request, SamplingParams
from radixserve.schedule import (
    PLACEHOLDER,
    Candidates,
    ModelRunnerOutput,
    SampleOutput,
    SchedulerOutput,
)
from tests.pacing import PATIENCE_S, wait_until

VOCAB, EOS = 97, 1


class ChainRunner:
    """The next token is a function of the last one and its place."""

    overlap_depth = 1
    num_states = 0
    windows = None
    resolved_config = SimpleNamespace(inexact="it has no arithmetic")  # so that nothing is drafted
    info = SimpleNamespace(kv_bytes_per_token=1, num_parameters=1)
    num_pages = 400

    def __init__(self) -> None:
        self.log: list[str] = []
        self.sampled: list[int] = []  # by the last launched step
        self.permits = threading.Semaphore(10_000)  # how many steps the device completes
        self.num_cold = 0  # calls of `warm_up` until nothing is left
        self.is_warm = threading.Event()

    def warm_up(self) -> bool:
        self.log.append("warm")
        self.num_cold -= 1
        if self.num_cold < 0:
            self.is_warm.set()
        return self.num_cold >= 0

    def launch(self, schedule: SchedulerOutput) -> ModelRunnerOutput:
        self.log.append("launch")
        return self.compute(schedule)

    def collect(self, pending: ModelRunnerOutput) -> ModelRunnerOutput:
        assert self.permits.acquire(timeout=PATIENCE_S)
        self.log.append("collect")
        return pending

    def close(self) -> None:
        pass

    def compute(self, schedule: SchedulerOutput) -> ModelRunnerOutput:
        sampled = []
        for row in schedule.rows:
            future = row.future_index
            last = int(row.token_ids[-1]) if future < 0 else self.sampled[future]
            assert last != PLACEHOLDER
            sampled.append((last * 31 + row.end) % VOCAB)
        self.sampled = sampled
        rows = zip(schedule.rows, sampled, strict=True)
        outputs = [None if row.sample is None else SampleOutput(t, None, ()) for row, t in rows]
        return ModelRunnerOutput(tuple(outputs), {"prepare": 0.25, "forward": 0.5, "sample": 0.0})


def request(name: str, tokens: Iterable[int], ends: bool = True, **params: Any) -> Request:
    return Request(
        request_id=name,
        token_ids=np.asarray(list(tokens), np.int32),
        params=SamplingParams(**params),
        seed=0,
        end_ids=frozenset({EOS}) if ends else frozenset(),
        max_len=200,
    )


def run(engine: Engine) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_work():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.check()
    return outputs


def told(outputs: list[RequestOutput]) -> tuple[list[int], str]:
    assert outputs[-1].finish is not None
    assert all(output.finish is None for output in outputs[:-1])
    return [token for output in outputs for token in output.token_ids], outputs[-1].finish.reason


@pytest.mark.parametrize("cache", ["radix", "hash", "off"])
def test_the_same_with_and_without(cache: str) -> None:
    answers = []
    for overlap in (True, False):
        runner = ChainRunner()
        config = EngineConfig(page_size=4, chunked_prefill_size=16, cache=cache, overlap=overlap)
        engine = make_engine(runner, config)
        for i in range(12):
            engine.add(request(f"r{i}", range(2, 20 + i), max_tokens=60))
        answers.append({name: told(outputs) for name, outputs in run(engine).items()})
        ahead = ["launch", "launch"] if overlap else ["launch", "collect"]
        assert runner.log[:2] == ahead
        stats = engine.stats()
        assert stats["pages_private"] == stats["pages_locked"] == 0
        assert (stats["steps_ahead"] > 20) == overlap
        assert stats["forward_s"] == 0.5 * stats["steps"]
        assert ("overlapped with another step" in format_profile(stats)) == overlap
        if overlap:
            assert stats["overlapped_s"] > 0
        else:
            assert stats["overlapped_s"] == 0
    assert answers[0] == answers[1]
    assert {reason for _, reason in answers[0].values()} == {"stop", "length"}


def test_a_runner_that_cannot_overlap_is_not_asked_to() -> None:
    class Plain(ChainRunner):
        overlap_depth = 0

    runner = Plain()
    engine = make_engine(runner, EngineConfig())
    engine.add(request("a", range(2, 20)))
    run(engine)
    assert runner.log == ["launch", "collect"] * (len(runner.log) // 2)
    with pytest.raises(InvalidRequest, match="overlap must be True or False"):
        EngineConfig(overlap=1)  # type: ignore[arg-type]


def test_a_step_in_flight_is_work() -> None:
    engine = make_engine(ChainRunner(), EngineConfig())
    engine.add(request("a", range(2, 20), ends=False))
    assert engine.step() == []
    output = engine.abort("a")
    assert output is not None
    assert output.finish is not None
    assert output.finish.reason == "abort"
    assert engine.has_work()
    assert engine.step() == []
    assert not engine.has_work()
    assert engine.stats()["discarded_tokens"] == 18
    assert engine.step() == []


def test_the_next_step_is_launched_before_the_last_one_is_told() -> None:
    """Also where it had to be waited for: beams."""

    class BeamRunner(ChainRunner):
        def compute(self, schedule: SchedulerOutput) -> ModelRunnerOutput:
            outputs = []
            for one in super().compute(schedule).outputs:
                assert one is not None
                ids = np.array([one.token_id, (one.token_id + 1) % VOCAB], np.int32)
                scores = np.array([-1, -2], np.float32)
                outputs.append(one._replace(candidates=Candidates(ids, scores, scores)))
            return ModelRunnerOutput(tuple(outputs), {})

    runner = BeamRunner()
    engine = make_engine(runner, EngineConfig())
    one = request("a", range(2, 20), ends=False, max_tokens=5)
    engine.add(replace(one, beams=BeamParams(width=1)))
    for _ in range(5):
        engine.step()
        assert runner.log[-1] == "launch"
    assert runner.log == ["launch"] + ["collect", "launch"] * 4
    assert [output.finish is None for output in engine.step()] == [False]


def test_what_an_owner_may_do_between_steps() -> None:
    engine = make_engine(ChainRunner(), EngineConfig(page_size=2))
    engine.add(request("a", range(2, 20), ends=False, max_tokens=30))
    tokens = []
    for turn in range(40):
        tokens += [token for output in engine.step() for token in output.token_ids]
        if turn == 5:
            engine.reset_cache()
        if turn == 8:
            assert engine.lookup(np.arange(2, 20, dtype=np.int32)).cached_len == 0
            assert engine.claim("chat", np.arange(2, 20, dtype=np.int32)) == 0
        if turn == 12:
            engine.add(request("b", range(2, 30), ends=False, max_tokens=1))
        engine.check()
    assert len(tokens) == 31
    assert not engine.has_work()


def test_a_pause_loses_no_token() -> None:
    """It collects the step in flight; whoever resumes at once gets its outputs, too."""
    engine = make_engine(ChainRunner(), EngineConfig())
    wanted = make_engine(ChainRunner(), EngineConfig())
    for each in (engine, wanted):
        each.add(request("a", range(2, 20), ends=False, max_tokens=4))
    outputs: list[RequestOutput] = []
    for turn in range(8):
        outputs += engine.step()
        engine.pause()
        if turn == 1:
            outputs += engine.step()
        engine.resume()
    assert not engine.has_work()
    assert told(outputs) == told(run(wanted)["a"])


def test_everything_is_failed_with_a_step_in_flight() -> None:
    runner = ChainRunner()
    engine = make_engine(runner, EngineConfig())
    engine.add(request("a", range(2, 20), ends=False))
    engine.step()
    assert [output.request_id for output in engine.fail_all(EngineDead("closed"))] == ["a"]
    assert not engine.has_work()
    assert runner.log == ["launch", "collect"]


class DyingRunner(ChainRunner):
    """From its fifth step on nothing is computed any more."""

    def collect(self, pending: ModelRunnerOutput) -> ModelRunnerOutput:
        if self.log.count("collect") >= 4:
            raise EngineDead("cuda:0 can compute nothing any more") from RuntimeError("illegal")
        return super().collect(pending)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_runner_that_is_dead_ends_the_engine(overlap: bool) -> None:
    engine = make_engine(DyingRunner(), EngineConfig(overlap=overlap))
    for name in ("a", "b"):
        engine.add(request(name, range(2, 20), ends=False))
    with pytest.raises(EngineDead, match="nothing any more") as caught:
        run(engine)
    assert isinstance(caught.value.__cause__, RuntimeError)
    engine.fail_all(caught.value)
    assert not engine.has_work()
    engine.check()


class TestThread:
    def setup_method(self) -> None:
        self.ended = threading.Event()

    def collector(self, name: str, events: list[Event], **params: Any) -> OutputCollector:
        def notify(event: Event) -> None:
            events.append(event)
            self.ended.set()

        one = request(name, range(2, 20), ends=False, **params)
        return OutputCollector(one, None, notify, streams=False)

    def test_it_goes_on_while_a_step_is_in_flight(self) -> None:
        runner, events = ChainRunner(), []
        thread = EngineThread(make_engine(runner, EngineConfig()))
        thread.submit([self.collector("a", events, max_tokens=20)])
        assert self.ended.wait(PATIENCE_S)  # without any further message
        (completion,) = events
        assert isinstance(completion, Completion)
        assert len(completion.token_ids) == 20
        stats = thread.call(GetStats())
        assert (stats["waiting"], stats["running"], stats["steps_ahead"]) == (0, 0, 19)
        thread.close()

    def test_it_warms_up_once_while_it_is_idle(self) -> None:
        runner, events = ChainRunner(), []
        runner.num_cold = 3
        thread = EngineThread(make_engine(runner, EngineConfig()))
        thread.submit([self.collector("a", events, max_tokens=2)])
        assert self.ended.wait(PATIENCE_S)  # what is asked for at once comes first
        assert "warm" not in runner.log
        assert runner.is_warm.wait(PATIENCE_S)
        self.ended.clear()
        thread.submit([self.collector("b", events, max_tokens=2)])
        assert self.ended.wait(PATIENCE_S)
        thread.close()
        assert runner.log.count("warm") == 4

    def test_it_warms_up_between_steps_if_it_is_never_idle(self) -> None:
        runner, events = ChainRunner(), []
        runner.num_cold = 3
        thread = EngineThread(make_engine(runner, EngineConfig()))
        thread.submit([self.collector("a", events, max_tokens=80)])
        assert self.ended.wait(PATIENCE_S)
        thread.close()
        assert runner.log.count("warm") == 4
        before = runner.log[: runner.log.index("warm")]
        assert before.count("collect") == 64  # a short answer does not wait for it

    def test_what_ends_by_time_ends_while_it_is_idle(self) -> None:
        """The status, which no message asks for, is that of now."""
        events: list[Event] = []
        engine = make_engine(ChainRunner(), EngineConfig(page_size=1))
        thread = EngineThread(engine)
        thread.submit([self.collector("a", events, max_tokens=2)])
        assert self.ended.wait(PATIENCE_S)
        pin = Hint("pin", np.arange(2, 12, dtype=np.int32), seconds=0.3)
        (answer,) = thread.call(ApplyHints((pin,)))
        assert answer.answer == "accepted"
        assert thread.call(GetStats())["pages_pinned"] == 10
        wait_until(lambda: thread.status().stats["hints"] == 0)
        assert thread.status().stats["pages_pinned"] == 0
        thread.close()

    def test_a_dead_runner(self) -> None:
        """Every request gets the reason, now and later; none is computed."""
        runner, events = DyingRunner(), []
        thread = EngineThread(make_engine(runner, EngineConfig()))
        thread.submit([self.collector(name, events, max_tokens=50) for name in ("a", "b")])
        assert self.ended.wait(PATIENCE_S)
        thread.close()
        assert [str(event) for event in events] == ["cuda:0 can compute nothing any more"] * 2
        num_launched = len(runner.log)
        with pytest.raises(EngineDead, match="nothing any more") as caught:
            thread.check_alive()
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert len(runner.log) == num_launched

    def test_abort_and_close(self) -> None:
        runner, events = ChainRunner(), []
        runner.permits = threading.Semaphore(4)
        engine = make_engine(runner, EngineConfig())
        thread = EngineThread(engine)
        thread.submit([self.collector("a", events, max_tokens=150)])
        # It waits for the fifth step, and the sixth is launched.
        wait_until(lambda: len(runner.log) == 10)
        with ThreadPoolExecutor(1) as pool:
            aborted = pool.submit(thread.abort, ["a"])
            wait_until(lambda: not thread._inbox.empty())
            runner.permits.release()
            assert aborted.result(timeout=PATIENCE_S) == 1
        self.ended.clear()
        thread.submit([self.collector("a", events, max_tokens=3)])  # its last row may be in flight
        runner.permits.release(4)
        assert self.ended.wait(PATIENCE_S)
        first, second = events
        assert isinstance(first, Completion)
        assert isinstance(second, Completion)
        assert (first.finish_reason, second.finish_reason) == ("abort", "length")
        assert len(first.token_ids) == 5
        assert second.token_ids == first.token_ids[:3]
        runner.permits = threading.Semaphore(0)
        thread.submit([self.collector("b", events, max_tokens=100)])
        threading.Timer(0.05, runner.permits.release, (100,)).start()
        thread.close()
        assert isinstance(events[-1], EngineDead)
        assert not engine.has_work()
        assert runner.log.count("launch") == runner.log.count("collect")

    @pytest.mark.parametrize("is_left", [False, True])
    def test_a_request_ends_right_after_a_pause(self, is_left: bool) -> None:
        """Its answer has the token of the step that was in flight."""
        runner, events = ChainRunner(), []
        runner.permits = threading.Semaphore(4)
        thread = EngineThread(make_engine(runner, EngineConfig()))
        collector = self.collector("a", events, max_tokens=150)
        thread.submit([collector])
        wait_until(lambda: len(runner.log) == 10)  # it waits for the fifth step
        thread.post(PauseEngine())
        thread.abandon([collector]) if is_left else thread.post(AbortRequests(None))
        runner.permits.release(100)
        assert self.ended.wait(PATIENCE_S)
        thread.call(ResumeEngine())
        thread.submit([self.collector("b", events, max_tokens=6)])
        wait_until(lambda: len(events) == 2)
        first, second = events
        assert isinstance(first, Completion)
        assert isinstance(second, Completion)
        assert first.usage.completion_tokens == len(first.token_ids) == 6
        assert first.token_ids == second.token_ids
        thread.close()

    def test_a_paused_engine_leaves_the_core_to_others(self) -> None:
        """Also while an extension has work, such as an adapter that goes after open requests."""

        class Busy(EngineExtension):
            num_steps = 0
            has_work = True

            def before_step(self, *, may_wait: bool) -> None:
                del may_wait
                self.num_steps += 1

        engine, busy = make_engine(ChainRunner(), EngineConfig()), Busy()
        engine.extend(busy)
        thread = EngineThread(engine)
        thread.call(PauseEngine())
        before = busy.num_steps
        time.sleep(0.1)
        assert busy.num_steps - before <= 25
        thread.close()

    def test_many_requests_arrive_a_few_between_two_steps_of_others(self) -> None:
        """Never more than 64, while somebody waits for tokens. Many that are alone arrive together,
        and few do not wait for the rest of many."""
        runner, events = ChainRunner(), []
        engine = CountingEngine(runner)
        thread = EngineThread(engine)
        names = [f"r{at}" for at in range(300)]
        thread.submit([self.collector(name, events, max_tokens=1) for name in names])
        wait_until(lambda: len(events) == 300)
        assert engine.num_added == 300
        assert max(engine.added) == 300
        with self.running(runner, thread, events):
            engine.added = [0]
            thread.submit([self.collector(name, events, max_tokens=1) for name in names])
            thread.submit([self.collector("quick", events, max_tokens=1)])
            assert thread.status().waiting >= 301
            runner.permits.release(10)
            wait_until(lambda: engine.num_added == 602)
            assert [count for count in engine.added if count] == [64 + 1, 64, 64, 64, 44]
            runner.permits.release(1000)
        wait_until(lambda: len(events) == 602)  # and the aborted one
        assert thread.status().waiting == thread.status().waiting_tokens == 0
        thread.close()

    def test_requests_that_have_not_arrived_can_be_aborted(self) -> None:
        runner, events = ChainRunner(), []
        engine = CountingEngine(runner)
        thread = EngineThread(engine)
        with self.running(runner, thread, events):
            many = [self.collector(f"r{at}", events, max_tokens=9) for at in range(300)]
            thread.submit(many)
            thread.abandon(many)
            runner.permits.release(1000)
            wait_until(lambda: len(events) == 300)
        assert engine.num_added == 1 + 64
        reasons = [event.finish_reason for event in events if isinstance(event, Completion)]
        assert reasons.count("abort") == 300 + 1
        assert thread.status().waiting == thread.status().waiting_tokens == 0
        thread.close()

    @contextmanager
    def running(
        self, runner: ChainRunner, thread: EngineThread, events: list[Event]
    ) -> Iterator[None]:
        """A request waits for its tokens, and is aborted at the end. The runner has no permits."""
        runner.permits = threading.Semaphore(0)
        num_launched = len(runner.log)
        thread.submit([self.collector("long", events, max_tokens=300)])
        wait_until(lambda: runner.log[num_launched:] == ["launch"] * 2)
        yield
        assert thread.abort(["long"]) == 1


class CountingEngine(Engine):
    """Counts the requests that it gets between two steps."""

    def __init__(self, runner: Any) -> None:
        made = make_engine(runner, EngineConfig(max_running_requests=16))
        super().__init__(runner, made.cache, made.scheduler)
        self.added, self.num_added = [0], 0

    def add(self, *args: Any) -> None:
        self.added[-1] += 1
        self.num_added += 1
        super().add(*args)

    def begin_step(self) -> list[RequestOutput]:
        self.added.append(0)
        return super().begin_step()
