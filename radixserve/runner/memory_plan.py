"""`plan_memory`: what CUDA devices of a given memory would hold, without a device or weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from radixserve.config import EngineConfig
from radixserve.models.base import ModelInfo
from radixserve.models.decoder import describe_part
from radixserve.models.decoder_tensors import describe
from radixserve.models.source import ModelSource
from radixserve.runner.cuda_graph import capture_sizes
from radixserve.runner.piecewise_graph import GRAPH_BYTES
from radixserve.runner.pool_sizing import (
    MemoryUse,
    PoolSize,
    adapter_bytes,
    choose_device_sizes,
    divide_pool,
    given_sizes,
    graph_bytes,
)

CONTEXT_BYTES = 600 << 20  # about what CUDA and its libraries take on a device


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What each of several equal devices would hold. `pool_tokens` are those of all of them
    together: each has its part of every token's K/V, of `kv_bytes_per_token`."""

    weight_bytes: int
    working_bytes: int  # estimate: of the largest step, CUDA graphs and libraries
    kv_bytes_per_token: int
    pool_bytes: int
    pool_tokens: int
    window_tokens: int  # with K/V in layers with windows; 0: all tokens have it
    window_size: int
    states_bytes: int

    def num_sessions(self, num_tokens: int) -> int:
        """How many sequences of this length, which share nothing, fit at the same time."""
        number = self.pool_tokens // num_tokens
        if self.window_tokens:
            number = min(number, self.window_tokens // min(num_tokens, self.window_size))
        return number


def plan_memory(
    source: ModelSource,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    config: EngineConfig,
    device_bytes: int,
) -> MemoryPlan:
    """Divide the memory of `config.tensor_parallel_size` devices as an engine would.

    The profile run is replaced by an estimate. `kv_dtype`: of K and V; None: `dtype`. Raises
    InvalidRequest where the model does not fit or cannot be split, ModelNotSupported for a model
    that is not native.
    """
    num_ranks = config.tensor_parallel_size
    part = describe(source, dtype) if num_ranks == 1 else describe_part(source, dtype, num_ranks)
    info = replace(part, kv_dtype=kv_dtype)
    working = _working_bytes(info, config)
    use = MemoryUse(
        total=device_bytes,
        free=device_bytes,
        reserved=0,
        peak=info.weight_bytes + working,
        profile_pool=0,
    )
    given = given_sizes(config, info, torch.device("cuda"))
    num_pages, num_states = choose_device_sizes(config, info, use, *given)
    is_divided = num_ranks == 1 and not num_states and config.cache != "hash"
    size = divide_pool(config, info, num_pages) if is_divided else PoolSize(num_pages)
    of_windows = info.window_bytes_per_token if size.num_window_pages else 0
    page_tokens = config.page_size
    pool_bytes = size.num_pages * (info.kv_bytes_per_token - of_windows)
    return MemoryPlan(
        weight_bytes=info.weight_bytes,
        working_bytes=working,
        kv_bytes_per_token=info.kv_bytes_per_token,
        pool_bytes=(pool_bytes + size.num_window_pages * of_windows) * page_tokens,
        pool_tokens=size.num_pages * page_tokens,
        window_tokens=size.num_window_pages * page_tokens,
        window_size=info.window_size,
        states_bytes=num_states * info.state_bytes,
    )


def _working_bytes(info: ModelInfo, config: EngineConfig) -> int:
    """An estimate: logits of the largest step, in which every token is scored, and three copies of
    its hidden features; graphs; CUDA itself."""
    num_tokens = config.chunked_prefill_size + config.max_running_requests
    features = 3 * num_tokens * info.hidden_size * info.dtype.itemsize
    graphs = 0
    if config.cuda_graphs:
        rows = max(capture_sizes(config.max_running_requests))
        graphs = graph_bytes(rows, info.vocab_size) + GRAPH_BYTES
    others = features + graphs + adapter_bytes(config)
    return CONTEXT_BYTES + graph_bytes(num_tokens, info.vocab_size) + others
