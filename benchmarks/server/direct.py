"""The engine that the server is measured against: a `Runtime` in a process of its own. Each
function but `open_runtime` returns seconds."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from radixserve import Runtime, SamplingParams

_opened: list[Runtime] = []


def open_runtime(folder: Path, settings: dict[str, Any]) -> None:
    _opened.append(Runtime(folder, **settings))


def close_runtime() -> None:
    _opened.pop().close()


def generate(prompts: list[list[int]], tokens: int) -> float:
    start = time.perf_counter()
    _opened[0].generate(prompts, _params(tokens), progress=False)
    return time.perf_counter() - start


def astream(prompts: list[list[int]], tokens: int) -> float:
    """A task a request, text with every token."""

    async def read(prompt: list[int]) -> None:
        async for _ in _opened[0].astream(prompt, _params(tokens)):
            pass

    async def read_all() -> None:
        await asyncio.gather(*map(read, prompts))

    start = time.perf_counter()
    asyncio.run(read_all())
    return time.perf_counter() - start


def first_token(prompt: list[int], tokens: int) -> float:
    start = time.perf_counter()
    for _ in _opened[0].stream(prompt, _params(tokens)):
        return time.perf_counter() - start
    raise AssertionError("no token came")


def _params(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
