"""The computing wing's front: a `SchedulerOutput` in, a `ModelRunnerOutput` out.

Owns the model, the KV pool, the attention backend and nothing about requests: rows are read during
`execute` and forgotten. On the CPU a step is done here; on a device it is device_steps.py's.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from radixserve.attention.choice import make_backend
from radixserve.config import EngineConfig
from radixserve.errors import InvalidRequest
from radixserve.models.base import ModelInfo
from radixserve.models.parallel import TPGroup
from radixserve.models.registry import load_model
from radixserve.models.source import find_model
from radixserve.runner.device import check_dtype, choose_device, describe_device
from radixserve.runner.device_queue import DeviceQueue
from radixserve.runner.device_start import start_on_device
from radixserve.runner.device_steps import DeviceSteps, PendingStep
from radixserve.runner.forward_batch import build_forward_batch, num_logits
from radixserve.runner.host_memory import keep_freed_memory
from radixserve.runner.kv_pool import KVPool, choose_num_pages
from radixserve.runner.sampler import sample, score, with_scores
from radixserve.schedule import ModelRunnerOutput, SampleOutput, SchedulerOutput

logger = logging.getLogger("radixserve")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where the memory goes."""

    weight_bytes: int
    pool_bytes: int
    pool_tokens: int
    kv_bytes_per_token: int


@dataclass(frozen=True, slots=True)
class RunnerChoices:
    """What the settings' "auto" came to."""

    device: str  # "cpu", or "cuda:0 (NVIDIA H200)"
    dtype: str  # "bfloat16"
    attention_backend: str
    graph_sizes: tuple[int, ...]  # rows of the decode steps that were recorded
    overlap: bool  # whether the next step is prepared while one runs

    def __str__(self) -> str:
        parts = [self.device, self.dtype, f"{self.attention_backend} attention"]
        if self.graph_sizes:
            parts.append(f"graphs of decode steps of up to {self.graph_sizes[-1]} rows")
        if self.overlap:
            parts.append("overlap")
        return ", ".join(parts)


class ModelRunner:
    """A loaded model with its KV pool. One thread.

    model_path is a checkpoint folder, a hub id or "random:" and a known size. `ranks`: this is one
    of several runners that compute each layer together. `on_device`: take a CUDA device's path on
    the CPU as well, by the kernels' references: for tests and dry runs. Raises InvalidRequest
    (no such model or device, no room) or ModelNotSupported (naming the reason).
    """

    def __init__(
        self,
        model_path: str,
        config: EngineConfig,
        ranks: TPGroup | None = None,
        *,
        on_device: bool = False,
    ) -> None:
        device = choose_device(config.device, config.attention_backend)
        check_dtype(config.dtype, device)
        source = find_model(model_path, config.seed)
        self.model_path = source.path
        self._device = device
        if device.type == "cpu":
            keep_freed_memory()
            if on_device and config.attention_backend == "auto":
                config = replace(config, attention_backend="triton")
        self._model, backend = load_model(source, config, device, ranks)
        self.info: ModelInfo = self._model.info
        longest = self.info.max_positions
        if config.max_seq_len is not None and config.max_seq_len > longest:
            raise InvalidRequest(f"max_seq_len must be at most the model's {longest} positions")
        self.kv_bytes_per_token = self.info.kv_bytes_per_token
        self._draws = ranks is None or ranks.rank == 0
        self._steps: DeviceSteps | None = None
        if on_device or device.type != "cpu":
            started = start_on_device(self._model, backend, config, DeviceQueue(device), ranks)
            self._steps, self._pool = started.steps, started.pool
            self._backend = started.backend
        else:
            num_pages = choose_num_pages(config, self.info)
            num_pages = num_pages if ranks is None else ranks.agree(num_pages)
            self._pool = KVPool(self.info, num_pages, config.page_size, device)
            self._backend = make_backend(
                backend, self._pool.kv, self.info.num_heads, shares=config.cascade_attention
            )
        self.num_pages = self._pool.num_pages
        self.backend_name = self._backend.name
        self.choices = RunnerChoices(
            device=describe_device(device),
            dtype=str(self.info.dtype).removeprefix("torch."),
            attention_backend=self.backend_name,
            graph_sizes=() if self._steps is None else self._steps.graphs.sizes,
            overlap=self.can_overlap and config.overlap,
        )
        logger.info(
            "%s, %d parameters, on %s; %d pages of %d tokens (%d MiB)",
            self.info.architecture,
            self.info.num_parameters,
            self.choices,
            self.num_pages,
            config.page_size,
            self._pool.num_bytes >> 20,
        )
        if device.type != "cpu" and config.dtype == "auto" and self.info.dtype == torch.float32:
            logger.info('the checkpoint is in float32; dtype="bfloat16" is far faster on a GPU')

    @property
    def overlap_depth(self) -> int:
        """Steps that may be in flight when the next one is launched: 0 or 1."""
        return int(self.can_overlap)

    @property
    def can_overlap(self) -> bool:
        """Whether a step can be launched before the one before it is collected."""
        return self._steps is not None

    def close(self) -> None:
        """Nothing to end."""

    def memory_plan(self) -> MemoryPlan:
        return MemoryPlan(
            weight_bytes=self.info.weight_bytes,
            pool_bytes=self._pool.num_bytes,
            pool_tokens=self.num_pages * self._pool.page_size,
            kv_bytes_per_token=self.kv_bytes_per_token,
        )

    def execute(self, schedule: SchedulerOutput) -> ModelRunnerOutput:
        """Copy page heads, run every row through the model in one forward, draw the tokens.

        Raises ValueError on a row whose pages do not fit it; nothing was written then, apart from
        the copies.
        """
        if self._steps is not None:
            return self._steps.collect(self._steps.launch(schedule))
        return self._execute(schedule)

    def launch(self, schedule: SchedulerOutput) -> PendingStep | ModelRunnerOutput:
        """Begin `execute`; what is returned is for `collect`. Without `can_overlap` it waits."""
        return self._execute(schedule) if self._steps is None else self._steps.launch(schedule)

    def collect(self, pending: PendingStep | ModelRunnerOutput) -> ModelRunnerOutput:
        """The result of a launched step, in the order of the launches."""
        if isinstance(pending, ModelRunnerOutput):
            return pending
        assert self._steps is not None
        return self._steps.collect(pending)

    @torch.inference_mode()
    def _execute(self, schedule: SchedulerOutput) -> ModelRunnerOutput:
        """`execute` on the CPU, at once."""
        began = time.perf_counter()
        self._pool.copy_heads(schedule.cow_copies)
        rows = schedule.rows
        if not rows:
            return ModelRunnerOutput((), {"prepare": 0.0, "forward": 0.0, "sample": 0.0})
        batch = build_forward_batch(rows, self._pool.page_size, self._device)
        self._backend.plan(batch)
        prepared = time.perf_counter()
        logits = self._model.forward(batch, self._backend)  # [S, V]
        computed = time.perf_counter()
        outputs = _draw(logits, schedule) if self._draws else ()
        seconds = {
            "prepare": prepared - began,
            "forward": computed - prepared,
            "sample": time.perf_counter() - computed,
        }
        return ModelRunnerOutput(outputs, seconds)


def _draw(logits: Tensor, schedule: SchedulerOutput) -> tuple[SampleOutput | None, ...]:
    """A token or scores for each row that asks for them."""
    rows = schedule.rows
    specs = [row.sample for row in rows if row.sample is not None]
    if len(specs) == len(logits):
        outputs = sample(logits, specs)
        if len(outputs) == len(rows):
            return tuple(outputs)
        drawn = iter(outputs)
        return tuple(None if row.sample is None else next(drawn) for row in rows)
    counts = num_logits(rows)
    ends = np.cumsum(counts)  # a token is drawn behind a row's last one
    sources = [int(ends[at]) - 1 for at, row in enumerate(rows) if row.sample is not None]
    drawn = iter(sample(logits[sources], specs))
    answers: list[SampleOutput | None] = []
    for row, begin in zip(rows, (ends - counts).tolist(), strict=True):
        output = None if row.sample is None else next(drawn)
        if row.logprob_targets is not None:
            scored = score(
                logits[begin : begin + len(row.logprob_targets)],
                row.logprob_targets,
                row.num_top_logprobs,
            )
            output = with_scores(output, scored)
        answers.append(output)
    return tuple(answers)
