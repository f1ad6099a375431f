"""Engine settings: one frozen record, checked when it is made."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from functools import partial

from radixserve.checks import StrictFields, check_choice, check_int, check_str, shown
from radixserve.errors import InvalidRequest

EVICTIONS = ("lru", "arc", "lfu", "fifo", "slru", "priority")


@dataclass(frozen=True, kw_only=True)
class EngineConfig(StrictFields):
    """Settings of an engine. Sizes are in tokens unless the name says otherwise.

    device              "auto" or "cpu"
    dtype               "auto", "float32", "bfloat16"; auto: the checkpoint's, float32 if float16
    page_size           tokens a KV page; with cache "hash" a block, where 16 is usual
    num_pages           pages in the pool, or
    kv_cache_memory     bytes for the pool, "512MB" works; neither: a share of free memory
    chunk_size          prefill tokens a step, over all requests
    max_running         requests that run at the same time
    max_seq_len         longest prompt + output; default: what the model and the pool allow
    cache               "radix" (to the token), "hash" (whole blocks of page_size tokens), or
                        "off" to reuse nothing
    eviction            order in which unused pages are dropped: "lru", "arc", "lfu", "fifo",
                        "slru", "priority"; cache "hash" has "lru" only
    schedule_policy     "lpm" (longest cached prefix first), "fcfs", "dfs-weight"
    max_overtake        no request is overtaken by more than this many later ones
    attention_backend   "cpu" (kernels compiled for this processor when they are first used),
                        "torch" (PyTorch's operations), or "auto": "cpu" where it can be had
    tree_attention      read pages that running requests share once for all of them, where that pays
    trace               file to which every finished request is appended, for `radixserve replay`
    trace_hash_block    record no token ids but keyed hashes of blocks of so many tokens
    seed                of the random streams of requests that bring none
    """

    device: str = "auto"
    dtype: str = "auto"
    page_size: int = 1
    num_pages: int | None = None
    kv_cache_memory: int | str | None = None
    chunk_size: int = 512
    max_running: int = 64
    max_seq_len: int | None = None
    cache: str = "radix"
    eviction: str = "lru"
    schedule_policy: str = "lpm"
    max_overtake: int = 64
    attention_backend: str = "auto"
    tree_attention: bool = True
    trace: str | None = None
    trace_hash_block: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)  # numpy numbers become plain ones
        check_choice("device", self.device, ("auto", "cpu"))
        check_choice("dtype", self.dtype, ("auto", "float32", "bfloat16"))
        put("page_size", check_int("page_size", self.page_size, 1, 4096))
        if self.num_pages is not None:
            put("num_pages", check_int("num_pages", self.num_pages, 1, 2**31 - 1))
        if self.kv_cache_memory is not None:
            if self.num_pages is not None:
                raise InvalidRequest("give num_pages or kv_cache_memory, not both")
            parse_bytes(self.kv_cache_memory)
        put("chunk_size", check_int("chunk_size", self.chunk_size, 1))
        put("max_running", check_int("max_running", self.max_running, 1))
        if self.max_seq_len is not None:
            put("max_seq_len", check_int("max_seq_len", self.max_seq_len, 2))
        check_choice("cache", self.cache, ("radix", "hash", "off"))
        check_choice("eviction", self.eviction, EVICTIONS)
        if self.cache == "hash" and self.eviction != "lru":
            raise InvalidRequest(
                f'eviction must be "lru" with cache="hash", got {self.eviction!r}; '
                f'cache="radix" has {", ".join(EVICTIONS)}'
            )
        check_choice("schedule_policy", self.schedule_policy, ("lpm", "fcfs", "dfs-weight"))
        put("max_overtake", check_int("max_overtake", self.max_overtake, 0))
        check_choice("attention_backend", self.attention_backend, ("auto", "cpu", "torch"))
        if not isinstance(self.tree_attention, bool):
            raise InvalidRequest(
                f"tree_attention must be True or False, got {shown(self.tree_attention)}"
            )
        if self.trace is not None and not check_str("trace", self.trace):
            raise InvalidRequest("trace must be None or the path of a file, got ''")
        if self.trace_hash_block is not None:
            if self.trace is None:
                raise InvalidRequest("trace_hash_block needs a trace to record")
            put("trace_hash_block", check_int("trace_hash_block", self.trace_hash_block, 1, 4096))
        put("seed", check_int("seed", self.seed, 0, 2**63 - 1))


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
