"""The computing wing's front: a `Schedule` in, a `StepOutput` out.

Owns the model, the KV pool, the attention backend and nothing about requests: rows are read during
`execute` and forgotten.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from radixserve.attention.choice import make_backend
from radixserve.config import EngineConfig
from radixserve.errors import InvalidRequest
from radixserve.models.base import ModelInfo
from radixserve.models.registry import load_model
from radixserve.models.weights import find_checkpoint
from radixserve.runner.forward_batch import build_forward_batch, num_logits
from radixserve.runner.host_memory import keep_freed_memory
from radixserve.runner.kv_pool import KVPool, choose_num_pages
from radixserve.runner.sampler import sample, score
from radixserve.schedule import RowOutput, Schedule, StepOutput

logger = logging.getLogger("radixserve")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where the memory goes."""

    weight_bytes: int
    pool_bytes: int
    pool_tokens: int
    kv_bytes_per_token: int


class ModelRunner:
    """A loaded model with its KV pool. One thread.

    model_path is a checkpoint folder or a hub id. Raises InvalidRequest (no such model, no room)
    or ModelNotSupported (naming the reason).
    """

    def __init__(self, model_path: str, config: EngineConfig) -> None:
        self.folder = find_checkpoint(model_path)
        device = torch.device("cpu" if config.device == "auto" else config.device)
        self._device = device
        if device.type == "cpu":
            keep_freed_memory()
        self._model, backend = load_model(
            self.folder, config.dtype, device, config.attention_backend
        )
        self.info: ModelInfo = self._model.info
        longest = self.info.max_positions
        if config.max_seq_len is not None and config.max_seq_len > longest:
            raise InvalidRequest(f"max_seq_len must be at most the model's {longest} positions")
        self.kv_bytes_per_token = self.info.kv_bytes_per_token
        self.num_pages = choose_num_pages(config, self.info)
        self._pool = KVPool(self.info, self.num_pages, config.page_size, device)
        self._backend = make_backend(
            backend, self._pool.kv, self.info.num_heads, shares=config.tree_attention
        )
        self.backend_name = self._backend.name
        logger.info(
            "%s, %d parameters, %s; %d pages of %d tokens (%d MiB)",
            self.info.architecture,
            self.info.num_parameters,
            self.info.dtype,
            self.num_pages,
            config.page_size,
            self._pool.num_bytes >> 20,
        )

    def memory_plan(self) -> MemoryPlan:
        return MemoryPlan(
            weight_bytes=self.info.weight_bytes,
            pool_bytes=self._pool.num_bytes,
            pool_tokens=self.num_pages * self._pool.page_size,
            kv_bytes_per_token=self.kv_bytes_per_token,
        )

    @torch.inference_mode()
    def execute(self, schedule: Schedule) -> StepOutput:
        """Copy page heads, run every row through the model in one forward, draw the tokens.

        Raises ValueError on a row whose pages do not fit it; nothing was written then, apart from
        the copies.
        """
        began = time.perf_counter()
        self._pool.copy_heads(schedule.copies)
        rows = schedule.rows
        if not rows:
            return StepOutput((), {"prepare": 0.0, "forward": 0.0, "sample": 0.0})
        batch = build_forward_batch(rows, self._pool.page_size, self._device)
        self._backend.plan(batch)
        prepared = time.perf_counter()
        logits = self._model.forward(batch, self._backend)  # [S, V]
        computed = time.perf_counter()
        outputs = _draw(logits, schedule)
        seconds = {
            "prepare": prepared - began,
            "forward": computed - prepared,
            "sample": time.perf_counter() - computed,
        }
        return StepOutput(outputs, seconds)


def _draw(logits: Tensor, schedule: Schedule) -> tuple[RowOutput | None, ...]:
    """A token or scores for each row that asks for them, and a token for each twin."""
    rows, twins = schedule.rows, schedule.twins
    specs = [row.sample for row in rows if row.sample is not None]
    if not twins and len(specs) == len(logits):
        outputs = sample(logits, specs)
        if len(outputs) == len(rows):
            return tuple(outputs)
        drawn = iter(outputs)
        return tuple(None if row.sample is None else next(drawn) for row in rows)
    counts = num_logits(rows)
    ends = np.cumsum(counts)  # a token is drawn behind a row's last one
    sources = [int(ends[at]) - 1 for at, row in enumerate(rows) if row.sample is not None]
    sources += [int(ends[twin.row]) - 1 for twin in twins]
    specs += [twin.sample for twin in twins]
    drawn = iter(sample(logits[sources], specs))
    answers: list[RowOutput | None] = []
    for row, begin in zip(rows, (ends - counts).tolist(), strict=True):
        output = None if row.sample is None else next(drawn)
        if row.targets is not None:
            scored = score(logits[begin : begin + len(row.targets)], row.targets, row.num_top)
            if output is None or scored.error is not None:
                output = scored
            else:
                output = output._replace(scores=scored.scores, top_scores=scored.top_scores)
        answers.append(output)
    return (*answers, *drawn)
