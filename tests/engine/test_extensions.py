"""Extensions of the engine: the calls that they get, and what happens when one fails."""

# ruff: noqa: ARG002

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from radixserve import Runtime, SamplingParams
from radixserve.engine.extension import EngineExtension, joined
from radixserve.request import Request

PARAMS = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
PROMPT = [*range(5, 25)]


class Counting(EngineExtension):
    """Counts the calls that it gets, and fails at one of them."""

    name = "counting"

    def __init__(self, fails_at: str = "") -> None:
        self.fails_at = fails_at
        self.calls: Counter[str] = Counter()

    def note(self, name: str) -> None:
        self.calls[name] += 1
        if name == self.fails_at:
            raise ValueError(f"no {name}")

    def hold(self, request: Request, queued_at: float, release: Callable[[int], None]) -> bool:
        self.note("hold")
        return False

    def before_step(self, *, may_wait: bool) -> None:
        self.note("before_step")

    def after_step(self, *, is_idle: bool) -> None:
        self.note("after_step")

    def on_release(self, sequence: Any, num_prompt: int, num_reused: int) -> None:
        self.note("on_release")
        assert (sequence.committed_len, num_prompt) == (22, 20)

    def on_finish(self, request: Any, output_ids: Any, finish: Any, arrived_at: float) -> None:
        self.note("on_finish")
        assert len(output_ids) == 3

    def on_reset(self, namespace: str | None) -> None:
        self.note("on_reset")

    def on_idle(self) -> None:
        self.note("on_idle")

    @property
    def has_work(self) -> bool:
        self.note("has_work")
        return False

    @property
    def idle_timeout(self) -> float | None:
        self.note("idle_timeout")
        return None

    def stats(self) -> dict[str, int]:
        self.note("stats")
        return {"calls": self.calls.total()}

    def close(self, timeout_s: float) -> None:
        self.note("close")


class Holding(Counting):
    """Holds every request until it has been asked five times, or for ever."""

    name = "holding"

    def __init__(self, fails_at: str = "", releases: bool = True) -> None:
        super().__init__(fails_at)
        self.releases = releases
        self.held: dict[str, Callable[[int], None]] = {}

    def hold(self, request: Request, queued_at: float, release: Callable[[int], None]) -> bool:
        self.held[request.request_id] = release
        return True

    def let_go(self, request_id: str) -> None:
        self.held.pop(request_id)

    @property
    def has_work(self) -> bool:
        return bool(self.held)

    def before_step(self, *, may_wait: bool) -> None:
        self.calls["before_step"] += 1
        if self.calls["before_step"] % 5 == 0 and self.held:
            self.note("release")
            if self.releases:
                for release in self.held.values():
                    release(7)
                    release(7)  # does nothing
                self.held.clear()


@pytest.fixture
def runtimes() -> Iterator[Callable[[EngineExtension], Runtime]]:
    opened: list[Runtime] = []

    def open_one(extension: EngineExtension) -> Runtime:
        opened.append(Runtime("demo", num_pages=400))
        opened[-1].extend(extension)
        return opened[-1]

    yield open_one
    for runtime in opened:
        runtime.close()


def test_an_extension_gets_its_calls(runtimes: Callable[[EngineExtension], Runtime]) -> None:
    extension = Counting()
    runtime = runtimes(extension)
    assert runtime.generate(PROMPT, PARAMS).finish_reason == "length"
    runtime.flush_cache()
    stats: Any = runtime.cache_stats()
    assert stats["counting"]["calls"] > 0
    assert stats["ended_extensions"] == []
    runtime.close()
    once = ("hold", "on_release", "on_finish", "on_reset", "close")
    assert {name: extension.calls[name] for name in once} == dict.fromkeys(once, 1)
    assert extension.calls["before_step"] == extension.calls["after_step"] >= 3


@pytest.mark.parametrize(
    "call",
    [
        "hold", "before_step", "after_step", "on_release", "on_finish", "on_reset", "on_idle",
        "has_work", "idle_timeout", "stats",
    ],
)  # fmt: skip
def test_an_extension_that_fails_is_ended_and_nothing_else(
    runtimes: Callable[[EngineExtension], Runtime], caplog: pytest.LogCaptureFixture, call: str
) -> None:
    extension = Counting(fails_at=call)
    runtime = runtimes(extension)
    with caplog.at_level(logging.ERROR, "radixserve"):
        for _ in range(3):
            assert runtime.generate(PROMPT, PARAMS).finish_reason == "length"
            runtime.flush_cache()
        stats: Any = runtime.cache_stats()
        runtime.check()
    assert stats["ended_extensions"] == ["counting"]
    assert "counting" not in stats
    assert extension.calls[call] == 1
    assert extension.calls["close"] == 1
    assert caplog.text.count("has failed and is ended") == 1


def test_a_request_is_held_until_it_is_released(
    runtimes: Callable[[EngineExtension], Runtime],
) -> None:
    runtime = runtimes(Holding())
    completion = runtime.generate(PROMPT, PARAMS)
    assert completion.finish_reason == "length"
    assert completion.usage.loaded_tokens == 0  # nothing was cached


def test_extensions_hold_a_request_one_after_the_other(
    runtimes: Callable[[EngineExtension], Runtime],
) -> None:
    first, second = Holding(), Holding()
    runtime = runtimes(first)
    runtime.extend(second)
    runtime.generate(PROMPT, PARAMS)
    completion = runtime.generate(PROMPT, PARAMS)
    assert first.calls["release"] == second.calls["release"] == 2
    assert completion.usage.loaded_tokens == 14  # each says that it has loaded seven
    with runtime.submit([PROMPT], PARAMS) as handle:
        runtime.abort()
        assert {one.finish_reason for one in handle} == {"abort"}
    assert runtime.status().waiting == 0


def test_requests_of_a_holder_that_fails_are_scheduled(
    runtimes: Callable[[EngineExtension], Runtime],
) -> None:
    runtime = runtimes(Holding(fails_at="release"))
    completions = runtime.generate([PROMPT, PROMPT[1:]], PARAMS)
    assert [completion.finish_reason for completion in completions] == ["length"] * 2
    assert runtime.cache_stats()["ended_extensions"] == ["holding"]


def test_a_held_request_can_be_aborted_and_counts_as_waiting(
    runtimes: Callable[[EngineExtension], Runtime],
) -> None:
    runtime = runtimes(Holding(releases=False))
    with runtime.submit([PROMPT, PROMPT], PARAMS) as handle:
        while runtime.status().waiting < 2:
            pass
        assert runtime.status().waiting_tokens == 40
        assert runtime.abort() == 2
        assert {one.finish_reason for one in handle} == {"abort"}
    assert runtime.status().waiting == 0


def test_a_runtime_with_held_requests_can_be_closed(
    runtimes: Callable[[EngineExtension], Runtime],
) -> None:
    extension = Holding(releases=False)
    runtime = runtimes(extension)
    with runtime.submit([PROMPT], PARAMS):
        while not extension.held:
            pass
        runtime.close()


def test_an_extension_may_answer_messages_and_join_futures() -> None:
    from concurrent.futures import Future

    assert joined([]) is None
    futures: list[Future[None]] = [Future() for _ in range(3)]
    whole = joined(futures)
    assert whole is not None
    futures[0].set_result(None)
    futures[2].set_exception(AssertionError("wrong"))
    assert not whole.done()
    futures[1].set_result(None)
    with pytest.raises(AssertionError, match="wrong"):
        whole.result(1)
