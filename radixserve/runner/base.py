"""`ModelRunner`: the engine's interface to a runner, on one device or on several.

A runner owns the model, the KV pool and the attention backend. Rows are read during `launch` only;
on a device a request's slot (`req_pool_idx`) keeps its pages and, with penalties, token counts.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from radixserve.attention.base import AttentionBackend
from radixserve.config import EngineConfig
from radixserve.errors import InvalidRequest
from radixserve.models.base import LanguageModel, ModelInfo
from radixserve.models.parallel import TPGroup
from radixserve.models.registry import load_model
from radixserve.models.source import find_model
from radixserve.runner.device import check_dtype, describe_device
from radixserve.runner.kv_pool import KVPool
from radixserve.schedule import ModelRunnerOutput, SchedulerOutput, WindowLayers

logger = logging.getLogger("radixserve")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where the memory goes."""

    weight_bytes: int
    pool_bytes: int
    pool_tokens: int
    kv_bytes_per_token: int
    states_bytes: int = 0  # of recurrent layers
    window_tokens: int = 0  # tokens whose K and V of layers with windows have room; 0: pool_tokens


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """The settings with every "auto" resolved."""

    device: str  # "cpu", or "cuda:0 (NVIDIA H200)"
    dtype: str  # "bfloat16"
    attention_backend: str
    graph_sizes: tuple[int, ...]  # rows of the captured decode steps
    overlap: bool  # whether the next step is prepared while one runs
    piecewise_tokens: int = 0  # steps of up to so many tokens are graphs but for their attention

    def __str__(self) -> str:
        parts = [self.device, self.dtype, f"{self.attention_backend} attention"]
        if self.graph_sizes:
            parts.append(f"graphs of decode steps of up to {self.graph_sizes[-1]} rows")
        if self.piecewise_tokens:
            parts.append(f"piecewise graphs of up to {self.piecewise_tokens} tokens")
        if self.overlap:
            parts.append("overlap")
        return ", ".join(parts)


class ModelRunner(ABC):
    """A `SchedulerOutput` in, a `ModelRunnerOutput` out. One thread; `close` from any.

    Steps run in the order of their launches, one after the other, each one's page copies first.
    """

    model_path: Path | None  # a folder or a GGUF file; None: random weights
    info: ModelInfo
    num_pages: int
    num_states: int = 0  # recurrent states, of a model with such layers
    windows: WindowLayers | None = None  # layers whose K and V have window pages
    overlap_depth: int  # steps that may be in flight when the next one is launched: 0 or 1
    backend_name: str
    resolved_config: ResolvedConfig
    # Called in `launch` or `collect` when the host is about to wait for the device, or to compute
    # without Python's lock: other threads may run.
    before_wait: Callable[[], None] | None = None

    @abstractmethod
    def launch(self, schedule: SchedulerOutput) -> Any:
        """Queue a step, or compute it; returns what `collect` takes.

        Raises ValueError on a row whose pages do not fit it; nothing of the step was computed then.
        """

    @abstractmethod
    def collect(self, pending: Any) -> ModelRunnerOutput:
        """Wait for a launched step, in the order of the launches; each once."""

    @abstractmethod
    def memory_plan(self) -> MemoryPlan: ...

    def note_wait(self) -> None:
        if self.before_wait is not None:
            self.before_wait()

    def close(self) -> None:
        """End the processes that the runner started. Can be called again."""
        return


RunnerKind = Callable[[str, EngineConfig, TPGroup | None], ModelRunner]  # of one device; a class


class SingleDeviceRunner(ModelRunner):
    """A `ModelRunner` with a model and a pool of its own, of one device."""

    model: LanguageModel
    pool: KVPool
    backend: AttentionBackend  # of steps that no graph serves

    def __init__(self, parts: LoadedModel, config: EngineConfig) -> None:
        self.model_path, self.info = parts.model_path, parts.model.info
        self.model, self._device, self._config = parts.model, parts.device, config

    def memory_plan(self) -> MemoryPlan:
        return MemoryPlan(
            weight_bytes=self.info.weight_bytes,
            pool_bytes=self.pool.num_bytes,
            pool_tokens=self.num_pages * self.pool.page_size,
            kv_bytes_per_token=self.info.kv_bytes_per_token,
            states_bytes=self.num_states * self.info.state_bytes,
            window_tokens=self.pool.num_window_pages * self.pool.page_size,
        )

    def _describe(self, graph_sizes: tuple[int, ...] = (), piecewise_tokens: int = 0) -> None:
        """Set the descriptive attributes once pool and backend are there, and log them."""
        self.num_pages, self.backend_name = self.pool.num_pages, self.backend.name
        self.resolved_config = ResolvedConfig(
            device=describe_device(self._device),
            dtype=str(self.info.dtype).removeprefix("torch."),
            attention_backend=self.backend_name,
            graph_sizes=graph_sizes,
            overlap=self._config.overlap and self.overlap_depth > 0,
            piecewise_tokens=piecewise_tokens,
        )
        logger.info(
            "%s, %d parameters, on %s; %d pages of %d tokens (%d MiB)",
            self.info.architecture,
            self.info.num_parameters,
            self.resolved_config,
            self.num_pages,
            self.pool.page_size,
            self.pool.num_bytes >> 20,
        )
        if self.num_states:
            states_bytes = self.num_states * self.info.state_bytes
            logger.info("%d recurrent states (%d MiB)", self.num_states, states_bytes >> 20)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device."""

    model: LanguageModel
    backend_name: str  # of the attention backend to run it with
    device: torch.device
    model_path: Path | None


def load_on_device(
    model_path: str, config: EngineConfig, device: torch.device, tp_group: TPGroup | None
) -> LoadedModel:
    """model_path: a checkpoint folder, a hub id or "random:" and a known size.

    Raises InvalidRequest (no such model, a setting that does not fit it) or ModelNotSupported
    (naming the reason).
    """
    check_dtype(config.dtype, device)
    source = find_model(model_path, config.seed)
    model, backend_name = load_model(source, config, device, tp_group)
    longest = model.info.max_positions
    if config.max_seq_len is not None and config.max_seq_len > longest:
        raise InvalidRequest(f"max_seq_len must be at most the model's {longest} positions")
    return LoadedModel(model, backend_name, device, source.path)
