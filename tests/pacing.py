"""To meet a request on its way, however fast the engine is and however slow the test is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from radixserve import Runtime
from radixserve.output import RequestOutput


@contextmanager
def held(rt: Runtime, steps: int = 3) -> Iterator[None]:
    """The engine takes `steps` more steps, then none until the block ends; it answers meanwhile."""
    engine, left = rt._worker._engine, steps
    step = engine.step

    def held_step(**how: bool) -> list[RequestOutput]:
        nonlocal left
        if left == 0:
            time.sleep(0.001)
            return []
        left -= 1
        return step(**how)

    with patch.object(engine, "step", held_step):
        yield


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Fail unless it holds within that time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.002)


async def until(condition: Callable[[], bool]) -> None:
    """`wait_until` for a test that is a task itself."""
    await asyncio.to_thread(wait_until, condition)
