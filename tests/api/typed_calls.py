"""Calls as a program with types makes them; mypy reads this file, nothing runs it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_type

import numpy as np

from radixserve import Chunk, Completion, EngineConfig, Runtime, SamplingParams

GREEDY = SamplingParams(temperature=0.0, stop=["\n"], logit_bias={5: 1.0}, n=1)
MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "clock"}}]


def prompts() -> Iterator[str]:
    yield "a"


def blocking(rt: Runtime) -> None:
    assert_type(rt.generate("text"), Completion)
    assert_type(rt.generate([1, 2, 3], GREEDY), Completion)
    assert_type(rt.generate(np.arange(3), GREEDY), Completion)
    assert_type(rt.generate(MESSAGES, tools=TOOLS), Completion)
    assert_type(rt.generate(["a", "b"], [GREEDY, GREEDY], progress=False), list[Completion])
    assert_type(rt.generate([[1, 2], [3]]), list[Completion])
    assert_type(rt.generate([MESSAGES, MESSAGES]), list[Completion])
    assert_type(rt.generate(prompts()), list[Completion])
    assert_type(rt.stream("text", GREEDY), Iterator[Chunk])
    assert_type(rt.beam_search("text", 4, 20, length_penalty=0.5), list[Completion])
    assert_type(rt.beam_search(["a", "b"], stop="x"), list[list[Completion]])
    assert_type(rt.cache_stats()["pages_total"], int)
    assert_type(rt.model.vocab_size, int)
    assert_type(rt.memory.pool_tokens, int)
    assert_type(rt.resolved_config.dtype, str)
    SamplingParams(truncation_side="up")  # type: ignore[arg-type]
    Runtime("demo", EngineConfig(page_size=16))
    Runtime("demo", config=EngineConfig(cache="hash"))
    Runtime("demo", num_pages=100, eviction="lfu", trace=None)
    Runtime("demo", page_sise=16)  # type: ignore[call-arg]
    Runtime("demo", page_size="16")  # type: ignore[arg-type]
    rt.generate("text", tool=[])  # type: ignore[call-overload]
    rt.beam_search("text", top_p=0.5)  # type: ignore[call-overload]
    SamplingParams(max_token=3)  # type: ignore[call-arg]
    EngineConfig(chunk_size=3)  # type: ignore[call-arg]


async def awaiting(rt: Runtime) -> None:
    assert_type(await rt.agenerate("text"), Completion)
    assert_type(await rt.agenerate(["a"], progress=True), list[Completion])
    assert_type(await rt.abeam_search("text", 2), list[Completion])
    async for chunk in rt.astream(MESSAGES):
        assert_type(chunk, Chunk)
    async with Runtime("demo") as other:
        assert_type(other, Runtime)
