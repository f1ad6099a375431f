"""Engine settings: one frozen record, checked when it is made."""

from __future__ import annotations

import numbers
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from radixserve.checks import (
    StrictFields,
    check_choice,
    check_float,
    check_str,
    shown,
)
from radixserve.errors import InvalidRequest

ATTENTION_BACKENDS = ("auto", "cpu", "torch", "triton", "flashinfer")
EVICTION_POLICIES = ("lru", "arc", "lfu", "fifo", "slru", "priority")


@dataclass(frozen=True, kw_only=True)
class EngineConfig(StrictFields):
    """Settings of an engine. Sizes are in tokens unless the name says otherwise.

    device              "auto" (a CUDA device where there is one), "cpu", "cuda", or one of several:
                        "cuda:1"
    dtype               "auto", "float32", "bfloat16", "float16" (on CUDA only); auto: the
                        checkpoint's own, and on a CPU float32 where that is float16
    tensor_parallel_size  ranks that compute each layer together: a CUDA device each, or on the CPU
                        as many processes
    page_size           tokens a KV page; with cache "hash" a block, where 16 is usual
    num_pages           pages in the pool, or
    kv_cache_memory     bytes for the pool, "512MB" works; neither: a share of free memory
                        (on a CPU up to a gigabyte of it is resident soon after the start)
    gpu_memory_utilization  on CUDA the share of the card's memory that weights, activations and
                        pool take together, where the pool's size is not given
    chunked_prefill_size  prefill tokens a step, over all requests
    max_running_requests  requests that run at the same time
    max_seq_len         longest prompt + output; default: what the model and the pool allow
    cache               "radix" (to the token), "hash" (whole blocks of page_size tokens), or
                        "off" to reuse nothing
    eviction            order in which unused pages are dropped: "lru", "arc", "lfu", "fifo",
                        "slru", "priority"; cache "hash" has "lru" only
    schedule_policy     "lpm" (longest cached prefix first), "fcfs", "dfs-weight"
    max_overtake        no request is overtaken by more than this many later ones
    attention_backend   "cpu" (kernels compiled for this processor when they are first used),
                        "torch" (PyTorch's operations), on CUDA "flashinfer" and "triton", or
                        "auto": "cpu", on CUDA "flashinfer", else "triton", where it can be had
    cuda_graphs         on CUDA, run decode steps as graphs that were captured at load
    overlap             on CUDA, schedule the next step while the device computes the present one
    cascade_attention   read pages that running requests share once for all of them, where that pays
    trace               file to which every finished request is appended, for `radixserve replay`
    trace_hash_block    record no token ids but keyed hashes of blocks of so many tokens
    seed                of the random streams of requests that bring none, and of random weights
    """

    RENAMED: ClassVar[Mapping[str, str]] = {
        "chunk_size": "chunked_prefill_size",
        "max_running": "max_running_requests",
        "tree_attention": "cascade_attention",
    }

    device: str = "auto"
    dtype: str = "auto"
    tensor_parallel_size: int = 1
    page_size: int = 1
    num_pages: int | None = None
    kv_cache_memory: int | str | None = None
    gpu_memory_utilization: float = 0.9
    chunked_prefill_size: int = 512
    max_running_requests: int = 64
    max_seq_len: int | None = None
    cache: str = "radix"
    eviction: str = "lru"
    schedule_policy: str = "lpm"
    max_overtake: int = 64
    attention_backend: str = "auto"
    cuda_graphs: bool = True
    overlap: bool = True
    cascade_attention: bool = True
    trace: str | None = None
    trace_hash_block: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_ints(
            tensor_parallel_size=(1, 64),
            page_size=(1, 4096),
            num_pages=(1, 2**31 - 1),
            chunked_prefill_size=(1, None),
            max_running_requests=(1, None),
            max_seq_len=(2, None),
            max_overtake=(0, None),
            trace_hash_block=(1, 4096),
            seed=(0, 2**63 - 1),
        )
        name = "gpu_memory_utilization"
        share = check_float(name, self.gpu_memory_utilization, 0.0, 1.0, open_low=True)
        object.__setattr__(self, name, share)
        self._check_bools("cuda_graphs", "overlap", "cascade_attention")
        _check_device(self.device)
        check_choice("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        check_choice("cache", self.cache, ("radix", "hash", "off"))
        check_choice("eviction", self.eviction, EVICTION_POLICIES)
        check_choice("schedule_policy", self.schedule_policy, ("lpm", "fcfs", "dfs-weight"))
        check_choice("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        if self.dtype == "float16" and self.device == "cpu":
            raise InvalidRequest(
                'dtype="float16" needs a CUDA device; device="cpu" has float32 and bfloat16'
            )
        if self.tensor_parallel_size > 1 and ":" in self.device:
            raise InvalidRequest(
                f'device="{self.device}" is one device, and '
                f"tensor_parallel_size={self.tensor_parallel_size} needs as many: "
                'give "cuda", and choose among them with CUDA_VISIBLE_DEVICES'
            )
        if self.kv_cache_memory is not None:
            if self.num_pages is not None:
                raise InvalidRequest("give num_pages or kv_cache_memory, not both")
            parse_bytes(self.kv_cache_memory)
        if self.cache == "hash" and self.eviction != "lru":
            raise InvalidRequest(
                f'eviction must be "lru" with cache="hash", got {self.eviction!r}; '
                f'cache="radix" has {", ".join(EVICTION_POLICIES)}'
            )
        if self.trace is not None and not check_str("trace", self.trace):
            raise InvalidRequest("trace must be None or the path of a file, got ''")
        if self.trace_hash_block is not None and self.trace is None:
            raise InvalidRequest("trace_hash_block needs a trace to record")


def _check_device(device: object) -> None:
    if not isinstance(device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", device):
        raise InvalidRequest(
            f'device must be "auto", "cpu", "cuda" or "cuda:N" for the N-th CUDA device, '
            f"got {shown(device)}"
        )


_UNITS = {"": 1, "B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}


def parse_bytes(size: int | str, name: str = "kv_cache_memory") -> int:
    """Bytes of an int or of a string such as "512MB" or "1.5 GB" (powers of 1,024)."""
    if isinstance(size, numbers.Integral) and not isinstance(size, bool) and size > 0:
        return int(size)
    if isinstance(size, str):
        text = size.strip().upper().replace("IB", "B")
        number = text.rstrip("KMGB ")
        unit = text[len(number) :].strip()
        try:
            value = int(float(number) * _UNITS[unit])
        except (KeyError, ValueError, OverflowError):
            value = 0
        if value > 0:
            return value
    raise InvalidRequest(
        f'{name} must be a positive number of bytes or a string like "512MB", got {size!r}'
    )
