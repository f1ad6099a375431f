"""Engine settings: one frozen record, checked when it is made."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Self

from radixserve.errors import InvalidRequest


class StrictFields:
    """Base of keyword-only records whose unknown names raise and say what is allowed."""

    __slots__ = ()

    def __new__(cls, *args: Any, **fields: Any) -> Self:
        allowed = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
        if args:
            raise InvalidRequest(
                f"{cls.__name__} takes keyword arguments only; allowed: {', '.join(allowed)}"
            )
        unknown = sorted(set(fields) - set(allowed))
        if unknown:
            raise InvalidRequest(
                f"unknown {cls.__name__} name {', '.join(map(repr, unknown))}; "
                f"allowed: {', '.join(allowed)}"
            )
        return super().__new__(cls)


def check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    """Raise InvalidRequest unless `value` is an int (not a bool) in [low, high]."""
    limit = f">= {low}" if high is None else f"between {low} and {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be an integer {limit}, got {value!r}")
    if value < low or (high is not None and value > high):
        raise InvalidRequest(f"{name} must be {limit}, got {value}")


def check_float(
    name: str, value: object, low: float, high: float, *, open_low: bool = False
) -> None:
    """Raise InvalidRequest unless `value` is a finite number in [low, high], or in (low, high]."""
    left = f"above {low:g}" if open_low else f">= {low:g}"
    limit = left if math.isinf(high) else f"{left} and <= {high:g}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name} must be a number {limit}, got {value!r}")
    number = float(value)
    if not math.isfinite(number) or number < low or number > high or (open_low and number == low):
        raise InvalidRequest(f"{name} must be a number {limit}, got {value}")


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise InvalidRequest unless `value` is one of `allowed`."""
    if value not in allowed:
        raise InvalidRequest(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class EngineConfig(StrictFields):
    """Settings of an engine. Sizes are in tokens unless the name says otherwise.

    device              "auto" or "cpu"
    dtype               "auto", "float32", "bfloat16"; auto: the checkpoint's, float32 if float16
    page_size           tokens a KV page
    num_pages           pages in the pool, or
    kv_cache_memory     bytes for the pool, "512MB" works; neither: a share of free memory
    chunk_size          prefill tokens a step, over all requests
    max_running         requests that run at the same time
    max_seq_len         longest prompt + output; default: what the model and the pool allow
    cache               "radix", or "off" to reuse nothing
    eviction            order in which unused pages are dropped
    schedule_policy     "lpm" (longest cached prefix first), "fcfs", "dfs-weight"
    max_overtake        no request is overtaken by more than this many later ones
    attention_backend   "auto" or "torch"
    trace               reserved for request traces
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
    trace: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("device", self.device, ("auto", "cpu"))
        check_choice("dtype", self.dtype, ("auto", "float32", "bfloat16"))
        check_int("page_size", self.page_size, 1, 4096)
        if self.num_pages is not None:
            check_int("num_pages", self.num_pages, 1, 2**31 - 1)
        if self.kv_cache_memory is not None:
            if self.num_pages is not None:
                raise InvalidRequest("give num_pages or kv_cache_memory, not both")
            parse_bytes(self.kv_cache_memory)
        check_int("chunk_size", self.chunk_size, 1)
        check_int("max_running", self.max_running, 1)
        if self.max_seq_len is not None:
            check_int("max_seq_len", self.max_seq_len, 2)
        check_choice("cache", self.cache, ("radix", "off"))
        check_choice("eviction", self.eviction, ("lru",))
        check_choice("schedule_policy", self.schedule_policy, ("lpm", "fcfs", "dfs-weight"))
        check_int("max_overtake", self.max_overtake, 0)
        check_choice("attention_backend", self.attention_backend, ("auto", "torch"))
        if self.trace is not None:
            raise InvalidRequest("trace must be None: recording traces is not available yet")
        check_int("seed", self.seed, 0, 2**63 - 1)


_UNITS = {"": 1, "B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}


def parse_bytes(size: int | str) -> int:
    """Bytes of an int or of a string such as "512MB" or "1.5 GB" (powers of 1,024)."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
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
        f'kv_cache_memory must be a positive number of bytes or a string like "512MB", got {size!r}'
    )
