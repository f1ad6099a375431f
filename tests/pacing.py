"""To meet a request on its way, however fast the engine is and however slow the test is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from radixserve import Runtime
from radixserve.engine.engine import Engine
from radixserve.output import RequestOutput

PATIENCE_S = 200.0  # of a test that waits for another thread or process


@contextmanager
def held(rt: Runtime, steps: int = 3) -> Iterator[None]:
    """Engines take `steps` more steps, then none until the block ends; they answer meanwhile.

    `rt` is the one that gets work in the block. What it still has to do is done first: a request
    that has just been left would take the steps.
    """
    assert rt.cache_stats() is not None  # it is alive, and between two steps
    wait_until(lambda: rt.status().is_idle)
    left, begin_step = steps, Engine.begin_step

    def held_step(engine: Engine) -> list[RequestOutput]:
        nonlocal left
        if left == 0:
            time.sleep(0.001)
            engine._must_collect = False  # nothing was launched
            return []
        left -= 1
        return begin_step(engine)

    with patch.object(Engine, "begin_step", held_step):
        yield


def wait_until(condition: Callable[[], bool]) -> None:
    """Fail unless it holds within a time that is long on any machine."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.002)


async def until(condition: Callable[[], bool]) -> None:
    """`wait_until` for a test that is a task itself."""
    await asyncio.to_thread(wait_until, condition)
