"""How many pages, window pages and recurrent states the memory holds.

On the CPU the settings or the free memory decide. On a device the profile run measures first what
else needs memory (`MemoryUse`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from radixserve.config import (
    MAX_SHORT_WINDOW,
    SWA_FULL_TOKENS_RATIO,
    EngineConfig,
    choose_checkpoint_interval,
    format_bytes,
    parse_bytes,
)
from radixserve.errors import InvalidRequest
from radixserve.models.base import ModelInfo
from radixserve.runner.system_memory import free_memory

MAX_TOKENS = 1 << 23  # of a pool whose size was not set; a small model on a large card ends here
# The ends of a chunk and of a window inside a page, and a copied page prefix.
SPARE_WINDOW_PAGES = 3
# The defaults take at most a fraction of the memory: the pool a quarter of what is free, states an
# eighth of it, or a third of `kv_cache_memory` (pages get the rest).
_POOL_DIVISOR = 4
_STATES_DIVISOR = 8
_SHARED_DIVISOR = 3


class PoolSize(NamedTuple):
    """Pages of a pool. No window pages: layers with windows are in the pages of all others."""

    num_pages: int
    num_window_pages: int = 0


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """A device's memory as seen after the profile run, in bytes."""

    total: int
    free: int  # for any process
    reserved: int  # held by torch, in use or not
    peak: int  # most that torch's tensors took at a time, weights and the run's pool included
    profile_pool: int  # of that the pool of the profile run, which is gone by now
    graphs: int = 0  # to be taken after the pool

    @property
    def needed(self) -> int:
        """Used by everything but the pool: other processes, libraries, weights, tensors."""
        others = self.total - self.free - self.reserved
        return others + self.peak - self.profile_pool + self.graphs


def choose_num_pages(config: EngineConfig, info: ModelInfo, states_bytes: int = 0) -> int:
    """Pages of the pool: `num_pages`, what fits `kv_cache_memory` beside the states of recurrent
    layers, or a default.

    The default is what `max_running_requests` sequences of full length need, at most a share of the
    memory that is free now. Raises InvalidRequest if not one page fits.
    """
    if config.num_pages is not None:
        return config.num_pages
    page_bytes = info.kv_bytes_per_token * config.page_size
    if config.kv_cache_memory is not None:
        allowed = parse_bytes(config.kv_cache_memory)
        if allowed < page_bytes + states_bytes:
            beside = f" beside {states_bytes} bytes of states" if states_bytes else ""
            raise InvalidRequest(
                f"kv_cache_memory of {allowed} bytes holds no page{beside}; a page of "
                f"{config.page_size} tokens of this model needs {page_bytes} bytes"
            )
        return min((allowed - states_bytes) // page_bytes, 2**31 - 1)
    longest = min(config.max_seq_len or info.max_positions, info.max_positions)
    wanted = config.max_running_requests * -(-longest // config.page_size)
    free = free_memory()
    fitting = min(free // _POOL_DIVISOR, free - states_bytes) // page_bytes
    if fitting < 1:
        raise InvalidRequest(
            f"a page of {config.page_size} tokens of this model needs {page_bytes} bytes, more "
            f"than a quarter of the free memory, {format_bytes(free)}; set num_pages or "
            "kv_cache_memory"
        )
    return max(1, min(wanted, fitting))


def choose_pool_size(config: EngineConfig, info: ModelInfo, states_bytes: int = 0) -> PoolSize:
    """`choose_num_pages`, divided by `divide_pool`."""
    return divide_pool(config, info, choose_num_pages(config, info, states_bytes))


def divide_pool(config: EngineConfig, info: ModelInfo, num_pages: int) -> PoolSize:
    """Split the memory of `num_pages` pages into full pages and window pages. A `num_pages` of the
    settings is kept, and window pages are added.

    The memory is not split if it holds `max_running_requests` sequences of full length, or if
    layers with windows differ in their heads. There are at least as many window pages as one
    sequence needs for a window and a chunk of its prompt, or a picture that is not cut.
    """
    size = config.page_size
    ratio = config.swa_full_tokens_ratio
    if ratio is None:
        is_short = config.num_pages is None and info.window_size <= MAX_SHORT_WINDOW
        ratio = SWA_FULL_TOKENS_RATIO if is_short else 1.0
    longest = min(config.max_seq_len or info.max_positions, info.max_positions)
    window_shapes = {info.shapes_of_kv[layer] for layer in info.window_layers}
    if longest <= info.window_size or len(window_shapes) != 1 or ratio == 1:
        return PoolSize(num_pages)
    whole = PoolSize(num_pages)
    chunk = max(config.chunked_prefill_size, info.uncut_rows)
    least = -(-(info.window_size + chunk) // size) + SPARE_WINDOW_PAGES
    if config.num_pages is not None:
        num_window_pages = max(least, math.ceil(ratio * num_pages))
    else:
        wanted = config.max_running_requests * -(-longest // size)
        if config.kv_cache_memory is None and num_pages >= wanted:
            return whole
        of_windows = info.window_bytes_per_token * size
        others = info.kv_bytes_per_token * size - of_windows
        num_bytes = num_pages * (of_windows + others)
        num_window_pages = max(least, int(num_bytes / (of_windows + others / ratio)))
        left = num_bytes - num_window_pages * of_windows
        num_pages = left // others if others else math.ceil(num_window_pages / ratio)
    if num_window_pages >= num_pages:
        return whole
    return PoolSize(min(num_pages, 2**31 - 1), num_window_pages)


def choose_num_states(
    config: EngineConfig, info: ModelInfo, device_bytes: int | None = None
) -> int:
    """`num_states`, or four per running request plus one per checkpoint interval of the pool's
    tokens; 0 where the model has none. The default takes at most a share of the free memory or of
    `kv_cache_memory`, which holds them.

    device_bytes: what a device has left for states and, without num_pages, for pages. Raises
    InvalidRequest if they do not fit, or the requests that may run would not have one each.
    """
    if not info.states:
        return 0
    if device_bytes is not None:
        whole, where, divisor = (
            device_bytes,
            "the memory left on the device",
            _SHARED_DIVISOR,
        )
    elif config.kv_cache_memory is not None:
        whole, where, divisor = (
            parse_bytes(config.kv_cache_memory),
            "kv_cache_memory",
            _SHARED_DIVISOR,
        )
    else:
        whole, where, divisor = free_memory(), "the free memory", _STATES_DIVISOR
    if config.num_states is not None:
        if (needed := config.num_states * info.state_bytes) > whole:
            raise InvalidRequest(
                f"num_states={config.num_states} of {info.state_bytes} bytes need {needed} bytes; "
                f"{where} of {whole} bytes holds {max(0, whole) // info.state_bytes}"
            )
        return config.num_states
    fitting = whole // divisor // info.state_bytes
    if fitting < (least := config.max_running_requests):
        share = {_STATES_DIVISOR: "an eighth", _SHARED_DIVISOR: "a third"}[divisor]
        raise InvalidRequest(
            f"{least} recurrent states of this model need {least * info.state_bytes} bytes, more "
            f"than {share} of {where}, {format_bytes(max(0, whole))}; set a smaller "
            "max_running_requests, or num_states"
        )
    if device_bytes is not None and config.num_pages is None:
        num_tokens = min(device_bytes // info.kv_bytes_per_token, MAX_TOKENS)
    else:
        num_tokens = choose_num_pages(config, info) * config.page_size
    interval = choose_checkpoint_interval(config.checkpoint_interval, info.state_tokens)
    wanted = 4 * config.max_running_requests + num_tokens // interval
    return min(wanted, fitting)


def given_sizes(
    config: EngineConfig, info: ModelInfo, device: torch.device
) -> tuple[int | None, int]:
    """Pages and states where the settings or the CPU's memory decide them; None and 0: measure."""
    if device.type == "cuda" and config.kv_cache_memory is None:
        return config.num_pages, 0
    num_states = choose_num_states(config, info)
    return choose_num_pages(config, info, num_states * info.state_bytes), num_states


def choose_device_sizes(
    config: EngineConfig, info: ModelInfo, use: MemoryUse, num_pages: int | None, num_states: int
) -> tuple[int, int]:
    """Pages and states: as `given_sizes` has them, else what fits beside what the profile run used.

    Raises what `choose_num_states` and `fitting_pages` raise.
    """
    share, page_bytes = config.gpu_memory_utilization, info.kv_bytes_per_token * config.page_size
    if not num_states:
        left = available_bytes(use, share) - (num_pages or 0) * page_bytes
        num_states = choose_num_states(config, info, left)
    if num_pages is None:
        states_bytes = num_states * info.state_bytes
        num_pages = fitting_pages(use, share, page_bytes, config.page_size, states_bytes)
    return num_pages, num_states


def available_bytes(use: MemoryUse, share: float) -> int:
    """Bytes that `share` of the card's memory leaves for the pool and recurrent states; may be
    negative."""
    return int(use.total * share) - use.needed


def fitting_pages(
    use: MemoryUse, share: float, page_bytes: int, page_size: int, states_bytes: int = 0
) -> int:
    """Pages in `share` of the card's memory, beside other needs and the states of
    recurrent layers.

    Raises InvalidRequest if not one fits.
    """
    available = available_bytes(use, share) - states_bytes
    if available < page_bytes:
        needed = format_bytes(use.needed + states_bytes)
        others = (
            "weights, activations, recurrent states" if states_bytes else "weights, activations"
        )
        raise InvalidRequest(
            f"gpu_memory_utilization={share:g} of {format_bytes(use.total)} leaves no room for a "
            f"KV pool: {others} and others on the card take {needed}; "
            "allow more, or set a smaller chunked_prefill_size or max_running_requests"
        )
    return min(available // page_bytes, max(1, MAX_TOKENS // page_size))


def max_pages(device: torch.device, info: ModelInfo, page_size: int) -> int:
    """An upper bound of the pages that fit on a CUDA device, with or without window pages."""
    total = int(torch.cuda.get_device_properties(device).total_memory)
    least = info.kv_bytes_per_token - info.window_bytes_per_token
    return max(1, total // (least * page_size)) if least else 2**31 - 1


def adapter_bytes(config: EngineConfig) -> int:
    """Memory of adapters, which is taken after the pool; 0 where none is loaded at the start."""
    return parse_bytes(config.adapter_memory, "adapter_memory") if config.adapters else 0


def graph_bytes(num_rows: int, vocab_size: int) -> int:
    """About the memory of graphs of up to so many rows: logits in float32, as computed and as
    handed out, and as much for everything before them."""
    return 3 * num_rows * vocab_size * 4
