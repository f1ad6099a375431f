"""What goes wrong while readers are woken ends neither the engine's thread nor other readers."""

from __future__ import annotations

import asyncio
import logging

import pytest

from radixserve.engine.output_notifier import OutputNotifier


def test_a_reader_that_fails_disturbs_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> list[int]:
        woken: list[int] = []

        def fail() -> None:
            raise ValueError("a broken reader")

        waker = OutputNotifier().running()
        waker.call(fail)
        waker.call(lambda: woken.append(1))
        await asyncio.sleep(0.01)
        waker.call(lambda: woken.append(2))
        await asyncio.sleep(0.01)
        return woken

    with caplog.at_level(logging.ERROR, "radixserve"):
        assert asyncio.run(run()) == [1, 2]
    assert caplog.text.count("a reader of outputs has failed") == 1


def test_a_loop_that_cannot_be_woken_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> list[int]:
        woken: list[int] = []
        loop, notifier = asyncio.get_running_loop(), OutputNotifier()
        waker = notifier.running()

        def fail(*_: object) -> None:
            raise RuntimeError("no signal")

        notifier.pause()
        waker.call(lambda: woken.append(1))
        with monkeypatch.context() as context:
            context.setattr(loop, "call_soon_threadsafe", fail)
            notifier.resume()  # in the engine's thread: it must not fail
        waker.call(lambda: woken.append(2))
        await asyncio.sleep(0.01)
        return woken

    with caplog.at_level(logging.ERROR, "radixserve"):
        assert asyncio.run(run()) == [1, 2]
    assert "cannot be woken" in caplog.text
