"""transformers as contenders: `generate`, `generate` on copied caches, continuous batching.

Prefilled tokens are counted where they go into the model: all of its inputs, padding included, less
the tokens decoded.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from engine_contenders import Answer, Job, Unavailable
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


class Model:
    """A checkpoint in transformers, and how many tokens went through it."""

    def __init__(self, job: Job) -> None:
        transformers_logging.disable_progress_bar()
        transformers_logging.set_verbosity_error()
        dtype = getattr(torch, job.dtype)
        self.model = AutoModelForCausalLM.from_pretrained(job.folder, dtype=dtype).eval()
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = PAD
        self.model.register_forward_pre_hook(self._count, with_kwargs=True)
        self.num_tokens = 0

    def _count(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = args[0] if args else kwargs["input_ids"]
        self.num_tokens += ids.numel()

    def prefill(self, prompt: Sequence[int]) -> DynamicCache:
        """The keys and values of `prompt`."""
        cache = DynamicCache(config=self.model.config)
        with torch.inference_mode():
            self.model(torch.tensor([list(prompt)]), past_key_values=cache, logits_to_keep=1)
        return cache

    def generate(
        self, prompts: list[list[int]], num_new: int, cache: DynamicCache | None = None
    ) -> tuple[list[list[int]], float, DynamicCache]:
        """(new tokens, the moment of the first ones, the cache after them), greedy."""
        ids, mask = pad_left(prompts)
        clock = _Clock()
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=mask,
                past_key_values=cache,
                max_new_tokens=num_new,
                do_sample=False,
                stopping_criteria=StoppingCriteriaList([clock]),
                return_dict_in_generate=True,
            )
        assert clock.first is not None
        return out.sequences[:, ids.shape[1] :].tolist(), clock.first, out.past_key_values


def pad_left(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [B, n] with padding first, and their attention mask."""
    longest = max(map(len, prompts))
    ids = [[PAD] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids), torch.tensor(mask)


class _Clock(StoppingCriteria):
    """Stops nothing; knows when the first token was there."""

    def __init__(self) -> None:
        self.first: float | None = None

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:  # noqa: ARG002
        if self.first is None:
            self.first = time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Generate:
    """`generate` as it is: every prompt is computed whole."""

    def __init__(self, job: Job) -> None:
        self._model = Model(job)
        self._workload = job.workload
        self.num_prefilled = 0

    def serve(self, prompts: list[list[int]], sessions: Sequence[int]) -> list[Answer]:
        start, before = time.perf_counter(), self._model.num_tokens
        num_new = self._workload.num_new
        cache = self._take_cache(prompts, sessions)
        outputs, first, cache = self._model.generate(prompts, num_new, cache)
        self._keep_cache(cache, sessions)
        decoded = len(prompts) * (num_new - 1)
        self.num_prefilled += self._model.num_tokens - before - decoded
        return [Answer(output, first - start) for output in outputs]

    def _take_cache(
        self,
        prompts: list[list[int]],  # noqa: ARG002
        sessions: Sequence[int],  # noqa: ARG002
    ) -> DynamicCache | None:
        """What is already computed of these prompts."""
        return None

    def _keep_cache(self, cache: DynamicCache, sessions: Sequence[int]) -> None:
        """Called with what is computed now."""

    def reset(self) -> None:
        self.num_prefilled = 0

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


class CopiedPrefix(Generate):
    """`generate` with caches that the application keeps: it knows what its prompts share."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._prefix: DynamicCache | None = None
        self._caches: dict[tuple[int, ...], DynamicCache] = {}  # of sessions that go on, batched

    def _take_cache(self, prompts: list[list[int]], sessions: Sequence[int]) -> DynamicCache | None:
        if not self._workload.num_shared:
            return self._caches.pop(tuple(sessions), None)
        if self._prefix is None:
            self._prefix = self._model.prefill(prompts[0][: self._workload.num_shared])
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


class Continuous:
    """transformers' continuous batching: one manager from `reset` to `reset`."""

    def __init__(self, job: Job) -> None:
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
        self._model = Model(job)
        self._workload = job.workload
        num_blocks = job.num_tokens // _BLOCK + 2 * job.workload.num_requests
        self._settings = ContinuousBatchingConfig(
            page_size=_BLOCK, num_blocks=num_blocks, max_batch_tokens=_BATCH_TOKENS
        )
        self._config = GenerationConfig(
            max_new_tokens=job.workload.num_new, do_sample=False, eos_token_id=-1, pad_token_id=PAD
        )
        self._stack = contextlib.ExitStack()
        self.num_prefilled = 0
        try:
            self.reset()
            self.serve([[1, 2, 3]], [0])
        except Exception as error:
            self.close()
            raise Unavailable(f"continuous batching cannot run: {error!r}") from error

    def serve(self, prompts: list[list[int]], sessions: Sequence[int]) -> list[Answer]:  # noqa: ARG002
        start, before = time.perf_counter(), self._model.num_tokens
        names = self._manager.add_requests(
            prompts, max_new_tokens=self._workload.num_new, record_timestamps=True
        )
        done: dict[str, Any] = {}
        while len(done) < len(names):
            result = self._manager.get_result(timeout=1)
            if result is None and not self._manager.is_running():
                raise RuntimeError("the generation thread has ended")
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(result.error)
                done[result.request_id] = result
        outs = [done[name] for name in names]
        decoded = sum(len(out.generated_tokens) - 1 for out in outs)
        self.num_prefilled += self._model.num_tokens - before - decoded
        return [Answer(out.generated_tokens, out.timestamps[0] - start) for out in outs]

    def reset(self) -> None:
        """A new manager: the old one's cache cannot be emptied."""
        self._stack.close()
        opened = self._model.model.continuous_batching_context_manager(
            generation_config=self._config, continuous_batching_config=self._settings, warmup=False
        )
        self._manager = self._stack.enter_context(opened)
        self.num_prefilled = 0

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self._stack.close()
