"""transformers as engines: `generate`, `generate` on copied caches, continuous batching.

Prompt tokens computed are counted where they go into the model: all of its inputs, padding
included, less the tokens decoded.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from engine.base import Answer, Engine, Prompts, Setup, Unavailable
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import ContinuousBatchingConfig
from transformers.utils import logging as transformers_logging

PAD = 0
_BLOCK = 256  # tokens a page of continuous batching: its default
_BATCH_TOKENS = 512  # of one of its steps; radixserve's default


class TransformersEngine(Engine):
    """A checkpoint in transformers, and how many tokens went through it."""

    def __init__(self, setup: Setup) -> None:
        transformers_logging.disable_progress_bar()
        transformers_logging.set_verbosity_error()
        dtype = getattr(torch, setup.dtype)
        self._model = AutoModelForCausalLM.from_pretrained(setup.folder, dtype=dtype).eval()
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = PAD
        self._model.register_forward_pre_hook(self._count, with_kwargs=True)
        self._work, self._workload = setup.work, setup.work.workload

    def _count(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.num_computed += (args[0] if args else kwargs["input_ids"]).numel()


class _FirstToken(StoppingCriteria):
    """Stops nothing; keeps the moment of the first token."""

    at: float | None = None

    def __call__(self, input_ids: Any, _scores: Any, **_: Any) -> Any:
        if self.at is None:
            self.at = time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Generate(TransformersEngine):
    """`generate` as it is: every prompt is computed whole."""

    def serve(self, prompts: Prompts, sessions: Sequence[int], num_new: int) -> list[Answer]:
        start, first = time.perf_counter(), _FirstToken()
        cache = self._take_cache(prompts, sessions)
        how = {"do_sample": False, "stopping_criteria": StoppingCriteriaList([first])}
        rows, out = self._generate(prompts, num_new, len(prompts), past_key_values=cache, **how)
        self._keep_cache(out.past_key_values, sessions)
        assert first.at is not None
        return [Answer(row, first.at - start) for row in rows]

    def sample(self, prompt: Sequence[int], count: int, num_new: int) -> list[Answer]:
        torch.manual_seed(0)
        how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        rows, _ = self._generate([prompt], num_new, count, num_return_sequences=count, **how)
        return [Answer(row) for row in rows]

    def beam_search(self, prompt: Sequence[int], width: int, num_new: int) -> list[Answer]:
        how = {"do_sample": False, "num_beams": width, "num_return_sequences": width}
        rows, out = self._generate([prompt], num_new, width, output_scores=True, **how)
        pairs = zip(rows, out.sequences_scores.tolist(), strict=True)
        return [Answer(row, score=score) for row, score in pairs]

    def _generate(
        self, prompts: Sequence[Sequence[int]], num_new: int, num_rows: int, **how: Any
    ) -> tuple[list[list[int]], Any]:
        """The new tokens of each of `num_rows` rows, and all that `generate` returns."""
        longest = max(map(len, prompts))  # padding first
        ids = torch.tensor([[PAD] * (longest - len(row)) + list(row) for row in prompts])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts])
        how = {"attention_mask": mask, "return_dict_in_generate": True, **how}
        with torch.inference_mode():
            out = self._model.generate(ids, max_new_tokens=num_new, **how)
        self.num_computed -= num_rows * (num_new - 1)  # tokens decoded are no prompt tokens
        return out.sequences[:, longest:].tolist(), out

    def _take_cache(self, prompts: Prompts, sessions: Sequence[int]) -> Any:  # noqa: ARG002
        """The part of these prompts that is computed already."""
        return None

    def _keep_cache(self, cache: DynamicCache, sessions: Sequence[int]) -> None:
        """Called with the cache after `generate`."""


class Copied(Generate):
    """`generate` with caches that the application keeps: it knows what its prompts share."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._prefix: DynamicCache | None = None
        self._caches: dict[tuple[int, ...], DynamicCache] = {}  # of sessions that go on, batched

    def _take_cache(self, prompts: Prompts, sessions: Sequence[int]) -> Any:
        if not self._workload.num_shared:
            return self._caches.pop(tuple(sessions), None)
        if self._prefix is None:
            shared = torch.tensor([prompts[0][: self._workload.num_shared]])
            self._prefix = DynamicCache(config=self._model.config)
            with torch.inference_mode():
                self._model(shared, past_key_values=self._prefix, logits_to_keep=1)
        cache = copy.deepcopy(self._prefix)
        if len(prompts) > 1:
            cache.batch_repeat_interleave(len(prompts))
        return cache

    def _keep_cache(self, cache: DynamicCache, sessions: Sequence[int]) -> None:
        if len(self._workload.rounds) > 1:
            self._caches[tuple(sessions)] = cache

    def reset(self) -> None:
        super().reset()
        self._prefix = None
        self._caches.clear()


class Continuous(TransformersEngine):
    """transformers' continuous batching: one manager from `reset` to `reset`."""

    def __init__(self, setup: Setup) -> None:
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
        super().__init__(setup)
        num_new = self._workload.num_new
        num_blocks = self._work.num_tokens // _BLOCK + 2 * self._work.num_requests
        self._settings = ContinuousBatchingConfig(
            page_size=_BLOCK, num_blocks=num_blocks, max_batch_tokens=_BATCH_TOKENS
        )
        self._config = GenerationConfig(
            max_new_tokens=num_new, do_sample=False, eos_token_id=-1, pad_token_id=PAD
        )
        self._stack = contextlib.ExitStack()
        try:
            self.reset()
            self.serve([[1, 2, 3]], [0], num_new)
        except Exception as error:
            self.close()
            raise Unavailable(f"continuous batching cannot run: {error!r}") from error

    def serve(self, prompts: Prompts, _sessions: Sequence[int], num_new: int) -> list[Answer]:
        start = time.perf_counter()
        names = self._manager.add_requests(prompts, max_new_tokens=num_new, record_timestamps=True)
        done: dict[str, Any] = {}
        while len(done) < len(names):
            result = self._manager.get_result(timeout=1)
            if result is None and not self._manager.is_running():
                raise RuntimeError("the generation thread has ended")
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(result.error)
                done[result.request_id] = result
        self.num_computed -= len(names) * (num_new - 1)
        outs = [done[name] for name in names]
        return [Answer(out.generated_tokens, out.timestamps[0] - start) for out in outs]

    def reset(self) -> None:
        """A new manager: the old one's cache cannot be emptied."""
        self._stack.close()
        opened = self._model.continuous_batching_context_manager(
            generation_config=self._config, continuous_batching_config=self._settings, warmup=False
        )
        self._manager = self._stack.enter_context(opened)
        super().reset()

    def close(self) -> None:
        self._stack.close()
