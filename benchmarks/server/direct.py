"""What the server is measured against: the same asked of a `Runtime`. Each function returns
seconds."""

from __future__ import annotations

import asyncio
import time

from radixserve import Runtime, SamplingParams


def generate(rt: Runtime, prompts: list[list[int]], tokens: int) -> float:
    start = time.perf_counter()
    rt.generate(prompts, _params(tokens), progress=False)
    return time.perf_counter() - start


def astream(rt: Runtime, prompts: list[list[int]], tokens: int) -> float:
    """A task a request, text with every token."""

    async def read(prompt: list[int]) -> None:
        async for _ in rt.astream(prompt, _params(tokens)):
            pass

    async def read_all() -> None:
        await asyncio.gather(*map(read, prompts))

    start = time.perf_counter()
    asyncio.run(read_all())
    return time.perf_counter() - start


def first_token(rt: Runtime, prompt: list[int], tokens: int) -> float:
    start = time.perf_counter()
    for _ in rt.stream(prompt, _params(tokens)):
        return time.perf_counter() - start
    raise AssertionError("no token came")


def _params(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
