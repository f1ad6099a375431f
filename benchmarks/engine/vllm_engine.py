"""vLLM's build for CPUs as an `Engine`, in the same process, with its defaults."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from typing import Any

from engine.base import Answer, Engine, Prompts, Setup, Unavailable

BLOCK = 32  # tokens a block of its cache: the least on CPUs
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the process that is measured computes
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


class VllmEngine(Engine):
    def __init__(self, setup: Setup) -> None:
        """Raises Unavailable."""
        os.environ.update(_ENVIRONMENT)
        try:
            from vllm import LLM, SamplingParams
        except ImportError as error:
            raise Unavailable(f"it is not installed: {error}") from error
        self._llm = LLM(
            str(setup.folder),
            dtype=setup.dtype,
            skip_tokenizer_init=True,
            block_size=BLOCK,
            disable_log_stats=True,
        )
        self._params = SamplingParams
        self._ids = map(str, itertools.count())

    def serve(self, prompts: Prompts, _sessions: Sequence[int], num_new: int) -> list[Answer]:
        engine: Any = self._llm.llm_engine
        how = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
        params = self._params(max_tokens=num_new, **how)
        start, first, done = time.perf_counter(), {}, {}
        ids = [next(self._ids) for _ in prompts]
        for name, prompt in zip(ids, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for out in engine.step():
                first.setdefault(out.request_id, time.perf_counter() - start)
                if out.finished:
                    done[out.request_id] = out
        self.num_computed += sum(
            len(prompt) - (done[name].num_cached_tokens or 0)
            for name, prompt in zip(ids, prompts, strict=True)
        )
        return [Answer(list(done[name].outputs[0].token_ids), first[name]) for name in ids]

    def reset(self) -> None:
        self._llm.reset_prefix_cache()
        super().reset()
