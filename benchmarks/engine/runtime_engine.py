"""radixserve as an `Engine`: `Runtime` and nothing below it."""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine.base import Answer, Engine, Prompts, Setup, Unavailable

from radixserve import ChatSession, InvalidRequest, Runtime, SamplingParams
from radixserve.commands.terminal import PARTS

BLOCK = 16  # tokens a page of the hash cache


class RuntimeEngine(Engine):
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @classmethod
    def open(cls, setup: Setup, cache: str, **settings: Any) -> RuntimeEngine:
        """Settings are the defaults but for the size of the cache. Raises Unavailable."""
        page_size = BLOCK if cache == "hash" else 1
        num_pages = setup.work.num_requests + setup.work.num_tokens // page_size + 64
        room: dict[str, Any] = {"page_size": page_size, "num_pages": num_pages, **settings}
        try:
            return cls(Runtime(setup.folder, dtype=setup.dtype, cache=cache, **room))
        except InvalidRequest as error:
            raise Unavailable(str(error)) from error

    def serve(self, prompts: Prompts, _sessions: Sequence[int], num_new: int) -> list[Answer]:
        """Times are the Runtime's own, which begin when the engine's thread has the request; what
        the call takes beyond them is added to each, so that none is too short."""
        start = time.perf_counter()
        outs = self._runtime.generate(prompts, _greedy(num_new), progress=False)
        beyond = time.perf_counter() - start - max(out.metrics.total_s for out in outs)
        return [replace(answer, first_s=answer.first_s + beyond) for answer in self._answers(outs)]

    def sample(self, prompt: Sequence[int], count: int, num_new: int) -> list[Answer]:
        """Random continuations: n=count or, without a cache, requests with the same seeds."""
        params = SamplingParams(max_tokens=num_new, ignore_eos=True, seed=0)
        if self._runtime.config.cache != "off":
            return self._answers(self._runtime.generate(list(prompt), replace(params, n=count)))
        each = [replace(params, seed=seed) for seed in range(count)]
        prompts = [list(prompt)] * count
        return self._answers(self._runtime.generate(prompts, each, progress=False))

    def beam_search(self, prompt: Sequence[int], width: int, num_new: int) -> list[Answer]:
        outs = self._runtime.beam_search(list(prompt), width, num_new, ignore_eos=True)
        answers = self._answers(outs)
        return [replace(answer, score=out.score) for answer, out in zip(answers, outs, strict=True)]

    def chat(self, said: Sequence[Sequence[str]], num_new: int) -> list[Answer]:
        """`said[turn][session]`; all sessions send their turn at the same moment."""
        warnings.simplefilter("error")  # a history that is rewritten would spoil the counts
        chats = [self._runtime.chat(params=_greedy(num_new)) for _ in said[0]]
        answers = []
        for turn in said:
            outs = asyncio.run(_send(chats, turn))
            ends = [
                chat.tokens[: -len(out.token_ids)] for chat, out in zip(chats, outs, strict=True)
            ]
            pairs = zip(self._answers(outs), ends, strict=True)
            answers += [replace(answer, prompt=tuple(ids.tolist())) for answer, ids in pairs]
        for chat in chats:
            chat.close()
        return answers

    def reset(self) -> None:
        self._runtime.flush_cache()
        super().reset()

    def stats(self) -> dict[str, float]:
        stats = self._runtime.cache_stats()
        return {name: stats[name] for name in ("steps", *(f"{part}_s" for part in PARTS))}

    def close(self) -> None:
        self._runtime.close()

    def _answers(self, outs: Sequence[Any]) -> list[Answer]:
        self.num_computed += sum(out.usage.computed_tokens for out in outs)
        return [Answer(out.token_ids, out.metrics.ttft_s) for out in outs]


async def _send(chats: list[ChatSession], said: Sequence[str]) -> list[Any]:
    return await asyncio.gather(*(c.asend(text) for c, text in zip(chats, said, strict=True)))


def _greedy(num_new: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True)
