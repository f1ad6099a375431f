"""Engine settings: one frozen record, checked when it is made."""

from __future__ import annotations

import numbers
import re
from dataclasses import dataclass
from typing import TypedDict

from radixserve.checks import (
    StrictFields,
    check_choice,
    check_float,
    check_str,
    check_text,
    shown,
)
from radixserve.errors import InvalidRequest

ATTENTION_BACKENDS = ("auto", "cpu", "torch", "triton", "flashinfer")
HASH_ALGORITHMS = ("sha256", "xxh3")
SWA_FULL_TOKENS_RATIO = 0.5  # of models with windows up to
MAX_SHORT_WINDOW = 1024  # positions: hit rates of chats and agents fall with longer ones
EVICTION_POLICIES = ("lru", "arc", "lfu", "fifo", "slru", "priority")


class EngineSettings(TypedDict, total=False):
    """The fields of `EngineConfig`, as keyword arguments of `Runtime` for type checkers."""

    device: str
    dtype: str
    weight_dtype: str
    model_impl: str
    tensor_parallel_size: int
    page_size: int
    num_pages: int | None
    kv_cache_memory: int | str | None
    gpu_memory_utilization: float
    chunked_prefill_size: int
    max_running_requests: int
    max_seq_len: int | None
    num_states: int | None
    checkpoint_interval: int
    swa_full_tokens_ratio: float | None
    cache: str
    hash_algorithm: str
    eviction: str
    schedule_policy: str
    max_overtake: int
    attention_backend: str
    cuda_graphs: bool
    overlap: bool
    cascade_attention: bool
    hint_seconds: float
    max_hint_seconds: float
    max_hint_share: float
    trace: str | None
    trace_hash_block: int | None
    kv_events: str | None
    kv_events_topic: str
    kv_events_block_size: int
    seed: int


@dataclass(frozen=True, kw_only=True, repr=False)
class EngineConfig(StrictFields):
    """Settings of an engine. Sizes are in tokens unless the name says otherwise.

    device              "auto" (a CUDA device where there is one), "cpu", "cuda", or one of several:
                        "cuda:1"
    dtype               "auto", "float32", "bfloat16", "float16" (on CUDA only); auto: the
                        checkpoint's own, and on a CPU float32 where that is float16
    weight_dtype        "auto" (a GGUF file's matrices of 8 bits or less stay so on the CPU, and are
                        widened to dtype on CUDA), or "int8" to pack any model's matrices in 8 bits
                        at load, on the CPU only
    model_impl          "auto" (the native decoder where it computes the model, else transformers'
                        code), "native", or "transformers", which is slower and of use to compare
    tensor_parallel_size  ranks that compute each layer together: a CUDA device each, or on the CPU
                        as many processes
    page_size           tokens a KV page; default: 1, with cache "hash" 16, the size of a block
    num_pages           pages in the pool, or
    kv_cache_memory     bytes for the pool, recurrent states included, "512MB" works; neither: a
                        share of free memory (on a CPU it becomes resident as it is filled)
    gpu_memory_utilization  on CUDA the share of the card's memory that weights, activations and
                        pool take together, where the pool's size is not given
    chunked_prefill_size  prefill tokens a step, over all requests
    max_running_requests  requests that run at the same time
    max_seq_len         longest prompt + output; default: what the model and the pool allow
    num_states          recurrent states of models that have such layers, for running requests and
                        for checkpoints in the tree; default: a share of free memory, of
                        kv_cache_memory, or on CUDA of what is left for states and pool
    checkpoint_interval  tokens from one kept state of a sequence to the next
    swa_full_tokens_ratio  of models whose layers partly see a window of positions only: the tokens
                        whose K/V of such layers the pool holds, over the tokens whose other K/V it
                        holds. Below 1 it holds more tokens in the same memory; K/V before the
                        windows in use is dropped when it is short. 1: none is. Default: 0.5
                        for windows of up to 1,024 positions, else 1; 1 where num_pages is given,
                        with cache "hash", several ranks and attention_backend "flashinfer"
    cache               "radix" (to the token), "hash" (whole blocks of page_size tokens), or
                        "off" to reuse nothing
    hash_algorithm      of a block's key with cache "hash": "sha256", or "xxh3", which is faster
                        and needs the package xxhash
    eviction            order in which unused pages are dropped: "lru", "arc", "lfu", "fifo",
                        "slru", "priority"; cache "hash" has "lru" only
    schedule_policy     "lpm" (longest cached prefix first), "fcfs", "dfs-weight"
    max_overtake        no request is overtaken by more than this many later ones
    attention_backend   "cpu" (kernels compiled for this processor when they are first used),
                        "torch" (PyTorch's operations), on CUDA "flashinfer" and "triton", or
                        "auto": "cpu", on CUDA "flashinfer", else "triton", where it can be had
    cuda_graphs         on CUDA, run decode steps as graphs that were captured at load, other
                        steps of up to 512 tokens as graphs between their attention calls
    overlap             on CUDA, schedule the next step while the device computes the present one
    cascade_attention   read pages that running requests share once for all of them, where that pays
    hint_seconds        seconds that a pin or retain lasts where the hint names none, up to
    max_hint_seconds    which is the most that one lasts
    max_hint_share      share of the pool that all of them together may hold
    trace               file to which every finished request is appended, for `radixserve replay`
    trace_hash_block    record no token ids but keyed hashes of blocks of so many tokens
    kv_events           publish what the cache stores and drops, in vLLM's format: "PUB[,REPLAY]",
                        addresses of ZeroMQ such as tcp://*:5557,tcp://*:5558
    kv_events_topic     of these messages; llm-d reads kv@POD@MODEL
    kv_events_block_size  tokens a block in them, whatever the page_size
    seed                of the random streams of requests that bring none, and of random weights
    """

    device: str = "auto"
    dtype: str = "auto"
    weight_dtype: str = "auto"
    model_impl: str = "auto"
    tensor_parallel_size: int = 1
    page_size: int = None  # type: ignore[assignment]  # __post_init__ sets the cache's default
    num_pages: int | None = None
    kv_cache_memory: int | str | None = None
    gpu_memory_utilization: float = 0.9
    chunked_prefill_size: int = 512
    max_running_requests: int = 64
    max_seq_len: int | None = None
    num_states: int | None = None
    checkpoint_interval: int = 512
    swa_full_tokens_ratio: float | None = None
    cache: str = "radix"
    hash_algorithm: str = "sha256"
    eviction: str = "lru"
    schedule_policy: str = "lpm"
    max_overtake: int = 64
    attention_backend: str = "auto"
    cuda_graphs: bool = True
    overlap: bool = True
    cascade_attention: bool = True
    hint_seconds: float = 300.0
    max_hint_seconds: float = 3600.0
    max_hint_share: float = 0.5
    trace: str | None = None
    trace_hash_block: int | None = None
    kv_events: str | None = None
    kv_events_topic: str = ""
    kv_events_block_size: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("cache", self.cache, ("radix", "hash", "off"))
        if self.page_size is None:
            object.__setattr__(self, "page_size", 16 if self.cache == "hash" else 1)
        self._check_ints(
            tensor_parallel_size=(1, 64),
            page_size=(1, 4096),
            num_pages=(1, 2**31 - 1),
            chunked_prefill_size=(1, None),
            max_running_requests=(1, None),
            max_seq_len=(2, None),
            num_states=(1, 2**31 - 1),
            checkpoint_interval=(1, None),
            max_overtake=(0, None),
            trace_hash_block=(1, 4096),
            kv_events_block_size=(1, 4096),
            seed=(0, 2**63 - 1),
        )
        name = "gpu_memory_utilization"
        share = check_float(name, self.gpu_memory_utilization, 0.0, 1.0, open_low=True)
        object.__setattr__(self, name, share)
        if self.swa_full_tokens_ratio is not None:
            self._check_windows(self.swa_full_tokens_ratio)
        most = 1e9
        self._check_floats(
            hint_seconds=(0.0, most), max_hint_seconds=(0.0, most), max_hint_share=(0.0, 1.0)
        )
        self._check_bools("cuda_graphs", "overlap", "cascade_attention")
        _check_device(self.device)
        check_choice("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        check_choice("hash_algorithm", self.hash_algorithm, HASH_ALGORITHMS)
        check_choice("weight_dtype", self.weight_dtype, ("auto", "int8"))
        check_choice("model_impl", self.model_impl, ("auto", "native", "transformers"))
        check_choice("eviction", self.eviction, EVICTION_POLICIES)
        check_choice("schedule_policy", self.schedule_policy, ("lpm", "fcfs", "dfs-weight"))
        check_choice("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        if self.dtype == "float16" and self.device == "cpu":
            raise InvalidRequest(
                'dtype="float16" needs a CUDA device; device="cpu" has float32 and bfloat16'
            )
        if self.weight_dtype != "auto" and self.device.startswith("cuda"):
            raise InvalidRequest(
                f'weight_dtype="{self.weight_dtype}" is computed on the CPU only; '
                f'device="{self.device}" has "auto"'
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
        if self.cache != "hash" and self.hash_algorithm != "sha256":
            raise InvalidRequest(
                f'hash_algorithm="{self.hash_algorithm}" needs cache="hash", got {self.cache!r}: '
                "the others hash nothing"
            )
        if self.trace is not None and not check_str("trace", self.trace):
            raise InvalidRequest("trace must be None or the path of a file, got ''")
        if self.trace_hash_block is not None and self.trace is None:
            raise InvalidRequest("trace_hash_block needs a trace to record")
        check_text("kv_events_topic", self.kv_events_topic)
        if self.kv_events is not None:
            addresses = check_str("kv_events", self.kv_events).split(",")
            if len(addresses) > 2 or not all("://" in one for one in addresses):
                raise InvalidRequest(
                    "kv_events must be one or two addresses, such as "
                    f'"tcp://*:5557,tcp://*:5558", got {self.kv_events!r}'
                )

    def _check_windows(self, ratio: float) -> None:
        name = "swa_full_tokens_ratio"
        object.__setattr__(self, name, check_float(name, ratio, 0.0, 1.0, open_low=True))
        for other, is_one in (
            ('cache="hash"', self.cache == "hash"),
            (f"tensor_parallel_size={self.tensor_parallel_size}", self.tensor_parallel_size != 1),
        ):
            if is_one and self.swa_full_tokens_ratio != 1:
                raise InvalidRequest(f"{name} must be None or 1 with {other}, got {ratio}")


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
