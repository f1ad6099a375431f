"""A thread that does one thing after the other, and that never keeps a process alive."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from radixserve.store.daemon_executor import DaemonExecutor

HANGS = """
import threading
from radixserve.store.daemon_executor import DaemonExecutor
worker = DaemonExecutor("hangs")
worker.submit(threading.Event().wait)
print(worker.shutdown(0.01), flush=True)
"""


def test_it_calls_in_order_and_returns_or_raises() -> None:
    worker, called = DaemonExecutor("test"), list[int]()
    futures = [worker.submit(called.append, number) for number in range(5)]
    division = worker.submit(lambda: 1 // 0)
    assert [future.result(20) for future in futures] == [None] * 5
    with pytest.raises(ZeroDivisionError):
        division.result(20)
    assert called == list(range(5))
    assert worker.submit(sum, (1, 2)).result(20) == 3
    assert worker.shutdown(20)
    assert worker.shutdown(20)


def test_what_is_cancelled_before_its_turn_is_not_called() -> None:
    worker, started, called = DaemonExecutor("test"), threading.Event(), list[int]()
    worker.submit(started.wait, 20)
    future = worker.submit(called.append, 1)
    assert future.cancel()
    started.set()
    assert worker.shutdown(20)
    assert not called


def test_a_job_that_hangs_does_not_keep_the_process_alive() -> None:
    result = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=120, check=True
    )
    assert result.stdout == "False\n"
