"""When a load pays, and how long a store that fails is left alone."""

from __future__ import annotations

import time
from concurrent.futures import Future

import pytest

from radixserve.store.daemon_executor import DaemonExecutor, within
from radixserve.store.health import StoreHealth
from radixserve.store.limits import StoreLimits
from radixserve.store.load_cost import LoadCostModel


class TestLoadCostModel:
    def test_a_load_is_assumed_to_pay_until_some_tokens_were_computed(self) -> None:
        computed = [63]
        cost = LoadCostModel(1000, lambda: (1e-9, computed[0]))
        assert cost.seconds_per_token is None
        assert cost.compute_seconds(5) is None
        assert cost.pays(40)
        computed[0] = 64
        assert cost.compute_seconds(128) == pytest.approx(2e-9)
        assert not cost.pays(40)

    def test_it_takes_latency_and_bytes_by_bandwidth(self) -> None:
        cost = LoadCostModel(1000, lambda: (1.0, 1000))  # 1 ms a token
        cost.latency_s, cost.bandwidth = 0.01, 1e7  # 0.1 ms a token
        assert cost.load_seconds(100) == pytest.approx(0.02)
        assert cost.pays(12)  # 11.2 ms instead of 12
        assert not cost.pays(11)  # 11.1 ms instead of 11

    def test_loads_before_it_count(self) -> None:
        cost = LoadCostModel(1000, lambda: (1.0, 1000))
        cost.latency_s, cost.bandwidth = 0.01, 1e7
        assert cost.pays(100, [690])  # 20 ms after 79 ms, instead of 100
        assert not cost.pays(100, [400, 300, 10])

    def test_what_was_measured_is_averaged(self) -> None:
        cost = LoadCostModel(1000)
        for _ in range(100):
            cost.note_read(10_000_000, 0.1)
        assert cost.bandwidth == pytest.approx(1e8, rel=0.01)
        for _ in range(100):
            cost.note_load(1000, 0.05)  # 10 ms of them for its bytes
        assert cost.latency_s == pytest.approx(0.04, rel=0.01)
        cost.note_load(1000, 0.0)
        assert cost.latency_s == pytest.approx(0.04 * 0.8, rel=0.02)

    def test_a_latency_that_keeps_loads_away_is_forgotten(self) -> None:
        cost = LoadCostModel(1000, lambda: (1.0, 1000))
        cost.latency_s, num_refused = 10.0, 0
        while not cost.pays(1000):
            num_refused += 1
        assert 50 < num_refused < 500


class TestStoreHealth:
    def test_pauses_begin_after_three_failures_in_a_row_and_double(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        now = [1000.0]
        health = StoreHealth("reading", StoreLimits(), lambda: now[0])
        for _ in range(2):
            health.note_failure("late")
        health.note_success()
        for _ in range(2):
            health.note_failure("late")
        assert health.may_try
        for pause_s in (5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0):
            health.note_failure("late")
            health.note_failure("what had begun before")
            now[0] += pause_s - 0.1
            assert not health.may_try
            now[0] += 0.1
            assert health.may_try
        assert health.num_pauses == 8
        assert caplog.text.count("left alone") == 1
        health.note_success()
        assert caplog.text.count("works again") == 1
        health.note_failure("late")
        assert health.may_try


def test_a_call_that_is_abandoned_keeps_its_thread_stuck_until_it_ends() -> None:
    executor, gate = DaemonExecutor("test"), Future[None]()
    first, second = executor.submit(gate.result), executor.submit(lambda: 7)
    while not executor.busy_s:
        time.sleep(0.001)
    executor.abandon(second)  # not begun: it is not made
    assert second.cancelled()
    assert not executor.is_stuck
    executor.abandon(first)
    assert executor.is_stuck
    gate.set_result(None)
    assert executor.submit(lambda: 8).result(10) == 8
    assert not executor.is_stuck
    assert executor.shutdown(10)
    with pytest.raises(RuntimeError, match="was ended"):
        executor.submit(lambda: 9)


def test_a_future_within_a_time() -> None:
    done: Future[int] = Future()
    done.set_result(3)
    assert within(10, done).result(10) == 3
    late: Future[int] = Future()
    with pytest.raises(TimeoutError, match=r"has not answered for 0\.01 s"):
        within(0.01, late).result(10)
    late.set_result(4)  # too late
    failed: Future[int] = Future()
    bounded = within(10, failed)
    failed.set_exception(OSError("no disk"))
    with pytest.raises(OSError, match="no disk"):
        bounded.result(10)
