"""An `Engine` driven step by step, without threads: what single steps are measured on.

Nothing is simulated: requests go through scheduler, cache and runner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from radixserve.api.engine_factory import make_engine
from radixserve.arrays import IntArray
from radixserve.config import EngineConfig
from radixserve.output import RequestOutput
from radixserve.request import Request, SamplingParams

MAX_STEPS = 100_000  # without progress something is broken


class StepLoop:
    """An engine over `runner`, greedy requests of exact lengths, and random prompts."""

    def __init__(self, runner: Any, config: EngineConfig, vocab: int) -> None:
        self.engine = make_engine(runner, config)
        self._vocab = vocab
        self._rng = np.random.default_rng(0)
        self._num_requests = 0
        self._open: set[str] = set()

    def tokens(self, length: int) -> IntArray:
        """Random token ids."""
        return self._rng.integers(0, self._vocab, length).astype(np.int32)

    def add(self, prompt: IntArray, num_new: int) -> str:
        """Queue a request that ends after `num_new` tokens."""
        self._num_requests += 1
        request = Request(
            request_id=f"r{self._num_requests}",
            token_ids=prompt,
            params=SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True),
            seed=0,
            end_ids=frozenset(),
            max_len=len(prompt) + num_new + 1,
        )
        self.engine.add(request)
        self._open.add(request.request_id)
        return request.request_id

    def step(self) -> list[RequestOutput]:
        """A step of the engine; raises the error of a request that failed."""
        outputs = self.engine.step()
        for output in outputs:
            if output.finish is not None:
                self._open.discard(output.request_id)
                if output.finish.error is not None:
                    raise output.finish.error
        return outputs

    def step_until(self, is_done: Callable[[], bool]) -> None:
        for _ in range(MAX_STEPS):
            if is_done():
                return
            self.step()
        raise RuntimeError(f"not done after {MAX_STEPS} steps")

    def drain(self) -> None:
        """Until nothing is left to do."""
        self.step_until(lambda: not self.engine.has_work())

    def start_decoding(self, prompts: Sequence[IntArray], num_new: int) -> None:
        """Compute all prompts; from here on every step decodes a token of each request."""
        for prompt in prompts:
            self.add(prompt, num_new)
        decoded = 0
        while (now := self.engine.stats()["decoded_tokens"]) - decoded < len(prompts):
            decoded = now
            self.step()

    def abort_all(self) -> None:
        """End all requests; what they computed stays cached."""
        for request_id in sorted(self._open):
            self.engine.abort(request_id)
        self._open.clear()
        self.drain()
