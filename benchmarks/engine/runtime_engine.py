"""radixserve as an `Engine`: `Runtime` and nothing below it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine.base import Answer, Setup, Unavailable

from radixserve import ChatSession, InvalidRequest, Runtime, SamplingParams
from radixserve.commands.terminal import PARTS

BLOCK = 16  # tokens a page of the hash cache


class RuntimeEngine:
    """A `Runtime` that is open."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.num_computed = 0

    @staticmethod
    def open(setup: Setup, cache: str) -> RuntimeEngine:
        """Settings are the defaults but for the size of the cache. Raises Unavailable."""
        page_size = BLOCK if cache == "hash" else 1
        num_pages = setup.work.num_requests + setup.work.num_tokens // page_size + 64
        try:
            runtime = Runtime(
                setup.folder, dtype=setup.dtype, cache=cache, page_size=page_size,
                num_pages=num_pages,
            )  # fmt: skip
        except InvalidRequest as error:
            raise Unavailable(str(error)) from error
        return RuntimeEngine(runtime)

    def serve(
        self,
        prompts: list[list[int]],
        sessions: Sequence[int],  # noqa: ARG002
        num_new: int,
    ) -> list[Answer]:
        """Times are the Runtime's own, which begin when the engine's thread has the request; what
        the call takes beyond them is added to each, so that none is too short."""
        start = time.perf_counter()
        outs = self._runtime.generate(prompts, _greedy(num_new), progress=False)
        beyond = time.perf_counter() - start - max(out.metrics.total_s for out in outs)
        return [replace(one, first_s=one.first_s + beyond) for one in self._answers(outs)]

    def sample(self, prompt: list[int], count: int, num_new: int) -> list[Answer]:
        """Random continuations: n=count or, without a cache, requests with the same seeds."""
        params = SamplingParams(max_tokens=num_new, ignore_eos=True, seed=0)
        if self._runtime.config.cache != "off":
            return self._answers(self._runtime.generate(prompt, replace(params, n=count)))
        each = [replace(params, seed=seed) for seed in range(count)]
        return self._answers(self._runtime.generate([prompt] * count, each, progress=False))

    def beam_search(self, prompt: list[int], width: int, num_new: int) -> list[Answer]:
        outs = self._runtime.beam_search(prompt, width, num_new, ignore_eos=True)
        answers = self._answers(outs)
        return [replace(one, score=out.score) for one, out in zip(answers, outs, strict=True)]

    def chat(self, num_new: int) -> ChatSession:
        return self._runtime.chat(params=_greedy(num_new))

    def count_turns(self, chats: Sequence[ChatSession], outs: Sequence[Any]) -> list[Answer]:
        """The answers of chats' last turns, with the prompts that these were."""
        answers = self._answers(outs)
        ends = [len(out.token_ids) for out in outs]
        prompts = [tuple(chat.tokens[:-n].tolist()) for chat, n in zip(chats, ends, strict=True)]
        return [replace(a, prompt=prompt) for a, prompt in zip(answers, prompts, strict=True)]

    def reset(self) -> None:
        self._runtime.flush_cache()
        self.num_computed = 0

    def stats(self) -> dict[str, float]:
        found = self._runtime.cache_stats()
        return {name: found[name] for name in ("steps", *(f"{part}_s" for part in PARTS))}

    def close(self) -> None:
        self._runtime.close()

    def _answers(self, outs: Sequence[Any]) -> list[Answer]:
        self.num_computed += sum(out.usage.computed_tokens for out in outs)
        return [Answer(out.token_ids, out.metrics.ttft_s) for out in outs]


def _greedy(num_new: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True)
