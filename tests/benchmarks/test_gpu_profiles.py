"""A profiler may stay attached and slow down what follows: parts profile after all timed rows."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

MET, MISSED = 1e-4, 10.0  # seconds of a step, far below and far above any limit
Shape = tuple[int, int]  # rows and their context


def load(name: str) -> Any:
    return importlib.import_module(f"gpu.{name}")


class FakeEngine:
    """Records what is timed and what is profiled. A step takes the seconds given for its rows, or
    fails with the error given; half of a step that is not MET is the host's."""

    resolved_config = SimpleNamespace(attention_backend="fake")

    def __init__(self, steps: dict[Shape, float | Exception], bad_profiles: set[Shape]) -> None:
        self.steps, self.bad_profiles = steps, bad_profiles
        self.order: list[tuple[str, Shape]] = []

    def __call__(self, *_: Any, **__: Any) -> FakeEngine:
        return self

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def check_room(self, num_tokens: int, what: str) -> None:
        pass

    def prompts(self, count: int, length: int) -> list[range]:
        return [range(length)] * count

    def decode(self, prompts: list[range], *_: int) -> Any:
        shape = len(prompts), len(prompts[0])
        self.order.append(("timed", shape))
        step = self.steps.get(shape, MISSED)
        if isinstance(step, Exception):
            raise step
        times = load("bench").Times
        device = step if step == MET else step / 2
        figures = load("timed_engine").DecodeFigures
        return figures(times(step, 0.0), times(device, 0.0), 1e-6, *shape)

    def start(self, prompts: list[range], _: int) -> None:
        self.started = len(prompts), len(prompts[0])

    def profile(self, **_: object) -> FakeProfile:
        self.order.append(("profiled", self.started))
        if self.started in self.bad_profiles:
            raise ValueError("no profile of these")
        return FakeProfile()

    def step(self) -> None:
        pass

    def abort_all(self) -> None:
        pass


class FakeProfile:
    """Of one kernel."""

    def __enter__(self) -> FakeProfile:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def key_averages(self) -> list[Any]:
        return [SimpleNamespace(key="kernel", self_device_time_total=3_000.0)]


def run_decode(
    monkeypatch: pytest.MonkeyPatch,
    group: str,
    steps: dict[Shape, float | Exception],
    bad_profiles: set[Shape],
) -> tuple[list[tuple[str, Shape]], list[dict[str, Any]]]:
    """The part `decode` in its full size over an engine that does nothing: the order in which it
    timed and profiled, and its rows."""
    part, jobs, rows = load("part_decode"), load("jobs"), list[dict[str, Any]]()
    settings = jobs.Settings(is_dry=True, ceilings=load("limits").H200)
    tell = lambda kind, one: rows.append(one) if kind == "row" else None  # noqa: E731
    bench = load("bench").Bench(settings, tell)
    bench.is_dry = False
    monkeypatch.setattr(bench, "of_group", lambda _: {})
    engine = FakeEngine(steps, bad_profiles)
    monkeypatch.setattr(part, "TimedEngine", engine)
    monkeypatch.setattr(part, "profile", engine.profile)
    part.run(bench, group)
    return engine.order, rows


def sizes_of(group: str) -> list[Shape]:
    part = load("part_decode")
    sizes = part.OTHERS if group else part.SIZES
    return [(size, context) for context, some in sizes.items() for size in some]


@pytest.mark.parametrize("group", ["", "triton"])
def test_all_rows_are_timed_before_the_first_profile(
    monkeypatch: pytest.MonkeyPatch, group: str
) -> None:
    sizes = sizes_of(group)
    order, rows = run_decode(monkeypatch, group, {}, set())
    assert order == [("timed", one) for one in sizes] + [("profiled", one) for one in sizes]
    assert [bool(row["cells"]) for row in rows] == [True] * len(sizes) + [False] * len(sizes)
    assert all(row["details"]["profile"] == {"kernel": 1.0} for row in rows[len(sizes) :])


@pytest.mark.parametrize("wrong", ["fails", "skipped"])
@pytest.mark.parametrize("group", ["", "triton"])
def test_a_row_that_fails_brings_no_profile_forward(
    monkeypatch: pytest.MonkeyPatch, group: str, wrong: str
) -> None:
    """Each row in turn fails; the next one (in a circle) meets its targets, the profile of the one
    after that fails."""
    sizes = sizes_of(group)
    error = RuntimeError("out of order") if wrong == "fails" else load("jobs").Skip("no room")
    for at, bad in enumerate(sizes):
        good, unprofiled = (sizes[(at + step) % len(sizes)] for step in (1, 2))
        order, rows = run_decode(monkeypatch, group, {bad: error, good: MET}, {unprofiled})
        missed = [one for one in sizes if one not in (bad, good)]
        assert order == [("timed", one) for one in sizes] + [("profiled", one) for one in missed]
        told = [row.get("failed") or row.get("skipped") or "" for row in rows]
        reason = "RuntimeError: out of order" if wrong == "fails" else "no room"
        assert told[at] == reason
        assert told[len(sizes) + missed.index(unprofiled)] == "ValueError: no profile of these"
        assert sum(map(bool, told)) == 2
