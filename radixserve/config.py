"""The settings of an engine: `EngineConfig`, one frozen record of groups that check themselves."""

from __future__ import annotations

import numbers
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypedDict, get_args

from radixserve.cache.namespace import Namespace, as_namespace
from radixserve.checks import (
    StrictFields,
    check_choice,
    check_float,
    check_str,
    check_text,
    shown,
)
from radixserve.errors import InvalidRequest
from radixserve.sampling_defaults import check_override

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
WeightDtype = Literal["auto", "int8"]
KVDtype = Literal["auto", "bfloat16", "int8", "fp8_e4m3"]
ModelImpl = Literal["auto", "native", "transformers"]
CacheKind = Literal["radix", "hash", "off"]
HashAlgorithm = Literal["sha256", "xxh3"]
EvictionPolicy = Literal["lru", "arc", "lfu", "fifo", "slru", "priority", "expected-return"]
AdmissionRule = Literal["greedy", "priced"]
SchedulePolicy = Literal["lpm", "fcfs", "dfs-weight"]
AttentionBackendName = Literal["auto", "cpu", "torch", "triton", "flashinfer"]
GenerationConfig = Literal["auto", "none"]
KVStoreWrite = Literal["auto", "finish", "reuse", "evict"]
CHOICES: dict[str, tuple[str, ...]] = {  # by field of EngineConfig
    "dtype": get_args(Dtype),
    "weight_dtype": get_args(WeightDtype),
    "kv_dtype": get_args(KVDtype),
    "model_impl": get_args(ModelImpl),
    "cache": get_args(CacheKind),
    "hash_algorithm": get_args(HashAlgorithm),
    "eviction": get_args(EvictionPolicy),
    "schedule_policy": get_args(SchedulePolicy),
    "admission": get_args(AdmissionRule),
    "attention_backend": get_args(AttentionBackendName),
    "generation_config": get_args(GenerationConfig),
    "kv_store_write": get_args(KVStoreWrite),
}
ATTENTION_BACKENDS, EVICTION_POLICIES = CHOICES["attention_backend"], CHOICES["eviction"]
ADMISSIONS = CHOICES["admission"]
# Default swa_full_tokens_ratio of models whose windows have at most MAX_SHORT_WINDOW positions.
# With longer windows it would lower the hit rates of chats and agents.
SWA_FULL_TOKENS_RATIO = 0.5
MAX_SHORT_WINDOW = 1024
LEAST_CHECKPOINT_INTERVAL = 64  # tokens between recurrent states; closer ones cost too much


class EngineSettings(TypedDict, total=False):
    """The fields of `EngineConfig`, as keyword arguments of `Runtime` for type checkers."""

    device: str
    dtype: Dtype
    weight_dtype: WeightDtype
    activation_bits: int
    kv_dtype: KVDtype
    model_impl: ModelImpl
    tensor_parallel_size: int
    page_size: int
    num_pages: int | None
    kv_cache_memory: int | str | None
    gpu_memory_utilization: float
    chunked_prefill_size: int
    max_running_requests: int
    max_seq_len: int | None
    num_states: int | None
    checkpoint_interval: int | None
    swa_full_tokens_ratio: float | None
    cache: CacheKind
    hash_algorithm: HashAlgorithm
    eviction: EvictionPolicy
    max_lease_share: float
    schedule_policy: SchedulePolicy
    max_overtake: int
    max_wait_s: float | None
    tenant_weights: Mapping[str, float] | None
    admission: AdmissionRule
    max_draft_tokens: int | None
    attention_backend: AttentionBackendName
    cuda_graphs: bool
    overlap: bool
    cascade_attention: bool
    exact: bool | None
    adapters: Mapping[str, str] | None
    adapter_memory: int | str
    image_memory: int | str
    kv_store: str | None
    kv_store_size: int | str
    kv_store_write: KVStoreWrite
    kv_store_min_uses: int
    host_cache_memory: int | str | None
    hint_seconds: float
    max_hint_seconds: float
    max_hint_share: float
    advice: bool | None
    otlp_traces_endpoint: str | None
    trace: str | None
    trace_hash_block: int | None
    kv_events: str | None
    kv_events_topic: str
    kv_events_block_size: int
    generation_config: GenerationConfig
    override_generation_config: Mapping[str, float] | None
    allow_guidance_options: bool
    parse_special_tokens: bool
    seed: int


class SettingsGroup(StrictFields, ABC):
    """Settings of one subject, a base of `EngineConfig`."""

    __slots__ = ()

    @abstractmethod
    def _check(self) -> None:
        """Raise InvalidRequest for wrong values; numbers become plain ones."""

    def _check_shares(self, *names: str, open_low: bool = False) -> None:
        """Make each field a plain float from 0 to 1, with `open_low` above 0."""
        for name in names:
            share = check_float(name, getattr(self, name), 0.0, 1.0, open_low=open_low)
            object.__setattr__(self, name, share)


@dataclass(frozen=True, kw_only=True, repr=False)
class ModelSettings(SettingsGroup):
    """How the model is loaded and computed.

    device              "auto" (a CUDA device if the machine has one), "cpu", "cuda", or one of
                        several CUDA devices: "cuda:1"
    dtype               "auto", "float32", "bfloat16", "float16" (on CUDA only). "auto" takes the
                        checkpoint's dtype, and float32 on a CPU if that is float16
    weight_dtype        "auto" (a GGUF file's matrices of 8 bits or less keep their form on the CPU
                        and are widened to dtype on CUDA), or "int8" to pack any model's matrices
                        in 8 bits at load, on the CPU only
    activation_bits     16 or 8: bits to which the CPU rounds activations before weights of 8 or 4
                        bits. 16 holds for the head, attention's projections, and the first and last
                        layer's MLPs; the others have 8. 8 everywhere is faster in batches and
                        further from the widened weights
    kv_dtype            dtype of stored K and V: "auto" (the model's), "bfloat16", "int8", half as
                        large, with a scale for each head of a token, or "fp8_e4m3" on CUDA devices,
                        where int8 needs attention_backend "triton"; see docs/quantization.md
    model_impl          "auto" (the native decoder if it computes the model, else transformers'
                        code), "native", or "transformers", which is slower and useful to compare
    tensor_parallel_size  number of ranks that compute each layer together: one CUDA device per
                        rank, or one process per rank on the CPU
    attention_backend   "cpu" (kernels compiled for this processor on first use), "torch" (PyTorch's
                        operations), on CUDA "flashinfer" and "triton", or "auto": the first that
                        can be used of "cpu" on a CPU, "flashinfer" and "triton" on CUDA
    cuda_graphs         on CUDA, run decode steps as graphs captured at load, and other steps of up
                        to 512 tokens as graphs between their attention calls
    overlap             on CUDA, schedule the next step while the device computes the present one
    cascade_attention   read pages that running requests share once for all of them, if that is
                        faster
    exact               a token's logits have the same bits whatever is cached or runs in the same
                        batch, by default on the CPU only: see docs/exactness.md. False may be
                        faster on the CPU: shared pages are read together to their last token. True
                        is slower on CUDA: the Triton kernels run, and pages that rows share are
                        read by each of them
    adapters            {name: folder} of LoRA adapters to load, as PEFT saves them; requests name
                        theirs, see docs/adapters.md
    adapter_memory      most bytes of adapters in memory; the least recently used ones leave it and
                        are read again when a request names them
    image_memory        most bytes of embeddings of pictures, and of their pixels once more
    seed                seed of random weights, and of the requests that have none
    """

    device: str = "auto"
    dtype: Dtype = "auto"
    weight_dtype: WeightDtype = "auto"
    activation_bits: int = 16
    kv_dtype: KVDtype = "auto"
    model_impl: ModelImpl = "auto"
    tensor_parallel_size: int = 1
    attention_backend: AttentionBackendName = "auto"
    cuda_graphs: bool = True
    overlap: bool = True
    cascade_attention: bool = True
    exact: bool | None = None
    adapters: Mapping[str, str] | None = field(default=None, hash=False)
    adapter_memory: int | str = "1GB"
    image_memory: int | str = "512MB"
    seed: int = 0

    def _check(self) -> None:
        self._check_ints(tensor_parallel_size=(1, 64), seed=(0, 2**63 - 1))
        self._check_bools("cuda_graphs", "overlap", "cascade_attention")
        if self.exact is not None:
            self._check_bools("exact")
        parse_bytes(self.adapter_memory, "adapter_memory")
        parse_bytes(self.image_memory, "image_memory")
        if self.adapters is not None:
            object.__setattr__(self, "adapters", _check_adapters(self.adapters))
        if self.activation_bits not in (8, 16):
            bits = shown(self.activation_bits)
            raise InvalidRequest(f"activation_bits must be 8 or 16, got {bits}")
        device = self.device
        if not isinstance(device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", device):
            raise InvalidRequest(
                f'device must be "auto", "cpu", "cuda" or "cuda:N" for the N-th CUDA device, '
                f"got {shown(device)}"
            )
        if self.dtype == "float16" and device == "cpu":
            raise InvalidRequest(
                'dtype="float16" needs a CUDA device; device="cpu" has float32 and bfloat16'
            )
        if self.weight_dtype != "auto" and device.startswith("cuda"):
            raise InvalidRequest(
                f'weight_dtype="{self.weight_dtype}" is computed on the CPU only; '
                f'device="{device}" has "auto"'
            )
        if self.tensor_parallel_size > 1 and ":" in device:
            raise InvalidRequest(
                f'device="{device}" is one device, and '
                f"tensor_parallel_size={self.tensor_parallel_size} needs as many: "
                'give "cuda", and choose among them with CUDA_VISIBLE_DEVICES'
            )

    def is_exact_on(self, device_type: str) -> bool:
        """Whether answers are exact on a device of type "cpu" or "cuda". `exact` None means True on
        the CPU."""
        return device_type == "cpu" if self.exact is None else self.exact


@dataclass(frozen=True, kw_only=True, repr=False)
class PoolSettings(SettingsGroup):
    """Sizes of the KV pool and of what lies beside it. In tokens unless the name says otherwise.

    page_size           tokens per KV page. Default: 1; 16 with cache "hash", the size of a block
    num_pages           number of pages in the pool; default: as many as kv_cache_memory holds
    kv_cache_memory     bytes of the pool, recurrent states included; "512MB" works. Default: a
                        share of free memory (on a CPU it becomes resident as it is filled)
    gpu_memory_utilization  share of a CUDA device's memory for weights, activations and pool
                        together, if the pool's size is not given
    num_states          number of recurrent states, for running requests and for checkpoints in the
                        tree; models with recurrent layers only. Default: a share of free memory, of
                        kv_cache_memory, or on CUDA of the memory left for states and pool
    checkpoint_interval  tokens between two kept states of a sequence. Default: by the memory of a
                        state and of a token's K/V, closer near the beginning
    swa_full_tokens_ratio  for models with sliding-window layers: tokens whose K/V of these layers
                        fits into the pool, divided by the tokens whose other K/V fits. Below 1 the
                        pool holds more tokens in the same memory, and drops K/V before the windows
                        in use when it is full. 1 drops none. Default: 0.5 for windows of up to
                        1,024 positions, else 1; 1 if num_pages is given, with cache "hash" or
                        several ranks
    """

    page_size: int = None  # type: ignore[assignment]  # see `EngineConfig._choose_defaults`
    num_pages: int | None = None
    kv_cache_memory: int | str | None = None
    gpu_memory_utilization: float = 0.9
    num_states: int | None = None
    checkpoint_interval: int | None = None
    swa_full_tokens_ratio: float | None = None

    def _check(self) -> None:
        self._check_ints(
            page_size=(1, 4096),
            num_pages=(1, 2**31 - 1),
            num_states=(1, 2**31 - 1),
            checkpoint_interval=(1, None),
        )
        self._check_shares("gpu_memory_utilization", open_low=True)
        if self.swa_full_tokens_ratio is not None:
            self._check_shares("swa_full_tokens_ratio", open_low=True)
        if self.kv_cache_memory is not None:
            if self.num_pages is not None:
                raise InvalidRequest("give num_pages or kv_cache_memory, not both")
            parse_bytes(self.kv_cache_memory)


@dataclass(frozen=True, kw_only=True, repr=False)
class CacheSettings(SettingsGroup):
    """What is reused, and what is evicted first.

    cache               "radix" (to the token), "hash" (whole blocks of page_size tokens), or
                        "off" to reuse nothing
    hash_algorithm      hash of a block's key with cache "hash": "sha256", or "xxh3", which is
                        faster and needs the package xxhash
    eviction            order in which unused pages are evicted: "lru", "arc", "lfu", "fifo",
                        "slru", "priority", "expected-return"; cache "hash" has "lru" only.
                        Default: "expected-return" with admission "priced", else "lru"
    max_lease_share     share of the pool that the leases of open sessions may fill, of cache
                        "radix"; the leases that began first end early
    """

    cache: CacheKind = "radix"
    hash_algorithm: HashAlgorithm = "sha256"
    eviction: EvictionPolicy = field(default=None, metadata={"usual": "expected-return"})  # type: ignore[arg-type]
    max_lease_share: float = 0.5

    def _check(self) -> None:
        self._check_shares("max_lease_share")
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


@dataclass(frozen=True, kw_only=True, repr=False)
class SchedulerSettings(SettingsGroup):
    """Which requests run, and how much of them in a step. Sizes are in tokens.

    chunked_prefill_size  prefill tokens per step, over all requests
    max_running_requests  number of requests that run at the same time
    max_seq_len         most tokens of prompt and output together. Default: what the model and the
                        pool allow
    schedule_policy     "lpm" (longest cached prefix first; with admission "priced" and too few free
                        pages shortest job first), "fcfs", "dfs-weight"
    max_overtake        most later requests of its tenant that may be admitted before a waiting
                        request. Default: 4096 with admission "priced", else 64
    max_wait_s          seconds after which no later request is admitted before a waiting request;
                        default: no limit
    tenant_weights      {tenant: weight}: shares of the computed tokens between tenants that wait;
                        the others have 1. A tenant is what stands before the first "/" of a
                        request's namespace. `radixserve serve` takes them from the key file
    admission           "priced": a request waits that would evict K/V of more worth; see
                        docs/priced-admission.md. "greedy": a request starts if it fits. Default:
                        "priced", but "greedy" if cache is not "radix" or eviction names an order
                        other than "expected-return"
    max_draft_tokens    most guessed tokens of a request that a step verifies beside its last token;
                        answers stay the same, see docs/drafts.md. 0: none. Default: 32 on a CPU, 0
                        on a device and where `resolved_config.inexact` names a reason
    """

    chunked_prefill_size: int = 512
    max_running_requests: int = 64
    max_seq_len: int | None = None
    schedule_policy: SchedulePolicy = "lpm"
    max_overtake: int = field(default=None, metadata={"usual": 4096})  # type: ignore[assignment]
    max_wait_s: float | None = None
    tenant_weights: Mapping[str, float] | None = field(default=None, hash=False)
    admission: AdmissionRule = field(default=None, metadata={"usual": "priced"})  # type: ignore[arg-type]
    max_draft_tokens: int | None = None

    def _check(self) -> None:
        self._check_ints(
            chunked_prefill_size=(1, None),
            max_running_requests=(1, 1_000_000),
            max_seq_len=(2, None),
            max_overtake=(0, None),
            max_draft_tokens=(0, 256),
        )
        if self.max_wait_s is not None:
            self._check_floats(max_wait_s=(0.0, 1e9))
        if self.tenant_weights is not None:
            weights = _check_tenant_weights(self.tenant_weights)
            object.__setattr__(self, "tenant_weights", weights)


@dataclass(frozen=True, kw_only=True, repr=False)
class KVStoreSettings(SettingsGroup):
    """K/V outside the pool: on disk, in Redis, in host memory.

    kv_store            folder that keeps the K/V of ended requests: a restart finds it, and so do
                        requests that come back after the pool has evicted it; or the address of a
                        Redis server, "redis://HOST:PORT/0"
    kv_store_size       most bytes of the folder's files; the least recently used ones are removed
    kv_store_write      what is written when: "auto" (all when the engine is idle, sooner what costs
                        less to write than loads are expected to save), "finish" (all tokens of a
                        request when it ends), "reuse" (tokens that were used kv_store_min_uses
                        times), or "evict" (all tokens, before the pool may evict them)
    kv_store_min_uses   see kv_store_write
    host_cache_memory   bytes of pinned host memory for what the device's pool evicts, in front of
                        kv_store or alone; not on the CPU, whose pool is in host memory
    """

    kv_store: str | None = None
    kv_store_size: int | str = "8GB"
    kv_store_write: KVStoreWrite = "auto"
    kv_store_min_uses: int = 2
    host_cache_memory: int | str | None = None

    def _check(self) -> None:
        self._check_ints(kv_store_min_uses=(1, None))
        parse_bytes(self.kv_store_size, "kv_store_size")
        if self.kv_store is not None and not check_str("kv_store", self.kv_store):
            raise InvalidRequest("kv_store must be None or the path of a folder, got ''")
        if self.host_cache_memory is not None:
            parse_bytes(self.host_cache_memory, "host_cache_memory")


@dataclass(frozen=True, kw_only=True, repr=False)
class HintSettings(SettingsGroup):
    """Limits of hints.

    hint_seconds        seconds that a pin or retain lasts if the hint names none
    max_hint_seconds    most seconds that a pin or retain lasts
    max_hint_share      share of the pool that all pins and retains together may hold
    """

    hint_seconds: float = 300.0
    max_hint_seconds: float = 3600.0
    max_hint_share: float = 0.5

    def _check(self) -> None:
        self._check_floats(hint_seconds=(0.0, 1e9), max_hint_seconds=(0.0, 1e9))
        self._check_shares("max_hint_share")


@dataclass(frozen=True, kw_only=True, repr=False)
class ExportSettings(SettingsGroup):
    """What the engine records and publishes.

    advice              follow the traffic: what more memory would be worth, and why tokens were
                        computed; see docs/advice.md. None: with models of at least 20 million
                        parameters, of whose time it takes less than 1 %
    otlp_traces_endpoint  URL of an OpenTelemetry collector, which gets spans of each request (OTLP
                        over HTTP): http://localhost:4318/v1/traces. Needs the extra [otel]
    trace               file to which every finished request is appended, for `radixserve replay`
    trace_hash_block    block size in tokens: the trace gets keyed hashes of blocks in place of
                        token ids
    kv_events           ZeroMQ addresses that publish the stored and removed blocks in vLLM's
                        format, "PUB[,REPLAY]": tcp://*:5557,tcp://*:5558
    kv_events_topic     topic of these messages; llm-d reads kv@POD@MODEL
    kv_events_block_size  tokens per block of these messages, whatever the page_size
    """

    advice: bool | None = None
    otlp_traces_endpoint: str | None = None
    trace: str | None = None
    trace_hash_block: int | None = None
    kv_events: str | None = None
    kv_events_topic: str = ""
    kv_events_block_size: int = 16

    def _check(self) -> None:
        if self.advice is not None:
            self._check_bools("advice")
        url = self.otlp_traces_endpoint
        if url is not None and not re.match(
            r"https?://\S+", check_str("otlp_traces_endpoint", url)
        ):
            raise InvalidRequest(
                "otlp_traces_endpoint must be a URL such as http://localhost:4318/v1/traces, "
                f"got {shown(url)}"
            )
        self._check_ints(trace_hash_block=(1, 4096), kv_events_block_size=(1, 4096))
        if self.trace is not None and not check_str("trace", self.trace):
            raise InvalidRequest("trace must be None or the path of a file, got ''")
        if self.trace_hash_block is not None and self.trace is None:
            raise InvalidRequest("trace_hash_block needs a trace to record")
        check_text("kv_events_topic", self.kv_events_topic)
        if self.kv_events is not None:
            addresses = check_str("kv_events", self.kv_events).split(",")
            if len(addresses) > 2 or not all("://" in address for address in addresses):
                raise InvalidRequest(
                    "kv_events must be one or two addresses, such as "
                    f'"tcp://*:5557,tcp://*:5558", got {self.kv_events!r}'
                )


@dataclass(frozen=True, kw_only=True, repr=False)
class TextSettings(SettingsGroup):
    """How requests are read, and what they leave out.

    generation_config   "auto": sampling fields that a request leaves out are the model's: those of
                        its generation_config.json or GGUF file, else of its model card, for other
                        GGUF files llama.cpp's. "none": temperature 1 and no filter
    override_generation_config  sampling defaults that replace the model's, such as
                        {"temperature": 0.2}: temperature, top_k, top_p, min_p, repetition_penalty
    allow_guidance_options  read "x-guidance", the options of llguidance, in JSON schemas; else it
                        is left out
    parse_special_tokens  special tokens written in chat messages are control tokens, not text
    """

    generation_config: GenerationConfig = "auto"
    override_generation_config: Mapping[str, float] | None = field(default=None, hash=False)
    allow_guidance_options: bool = False
    parse_special_tokens: bool = False

    def _check(self) -> None:
        self._check_bools("allow_guidance_options", "parse_special_tokens")
        if (override := self.override_generation_config) is not None:
            object.__setattr__(self, "override_generation_config", check_override(override))


# Fields are in the order of the bases, the last one first.
@dataclass(frozen=True, kw_only=True, repr=False)
class EngineConfig(
    TextSettings,
    ExportSettings,
    HintSettings,
    KVStoreSettings,
    SchedulerSettings,
    CacheSettings,
    PoolSettings,
    ModelSettings,
):
    """The settings of an engine, see the groups above. Raises InvalidRequest when made."""

    def __post_init__(self) -> None:
        self._choose_defaults()
        for name, choices in CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        for group in reversed(EngineConfig.__bases__):
            assert issubclass(group, SettingsGroup)
            group._check(self)
        self._check_combinations()

    def _choose_defaults(self) -> None:
        """Set the fields whose defaults depend on others."""
        admission, is_radix = self.admission, self.cache == "radix"
        if admission is None:
            is_ordered = self.eviction not in (None, "expected-return")
            admission = "greedy" if is_ordered or not is_radix else "priced"
        is_priced = admission == "priced" and is_radix
        implied = {
            "admission": admission,
            "eviction": "expected-return" if is_priced else "lru",
            "max_overtake": default_max_overtake(admission),
            "page_size": 16 if self.cache == "hash" else 1,
        }
        for name, value in implied.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    def _check_combinations(self) -> None:
        """Check settings of several groups against each other."""
        for name in ("kv_store", "host_cache_memory"):
            if getattr(self, name) is not None and self.cache != "radix":
                raise InvalidRequest(f'{name} needs cache="radix", got cache="{self.cache}"')
        if self.admission == "priced" and self.eviction != "expected-return":
            raise InvalidRequest(
                'admission="priced" needs cache="radix" and eviction="expected-return", '
                f"got cache={self.cache!r} and eviction={self.eviction!r}"
            )
        ratio, num_ranks = self.swa_full_tokens_ratio, self.tensor_parallel_size
        if ratio not in (None, 1.0) and (self.cache == "hash" or num_ranks > 1):
            other = 'cache="hash"' if self.cache == "hash" else f"tensor_parallel_size={num_ranks}"
            raise InvalidRequest(
                f"swa_full_tokens_ratio must be None or 1 with {other}, got {ratio}"
            )


def default_max_overtake(admission: str) -> int:
    """Returns the default of `max_overtake`. It is large for priced admission, which admits
    returning sessions before new ones: a small bound would prevent that."""
    return 4096 if admission == "priced" else 64


def _check_adapters(adapters: object) -> dict[str, str]:
    if not isinstance(adapters, Mapping):
        raise InvalidRequest(f"adapters must be {{name: folder}}, got {shown(adapters)}")
    name, folder = "a name of adapters", "a folder of adapters"
    return {
        check_text(name, key): check_str(folder, os.fspath(path) if _is_path(path) else path)
        for key, path in adapters.items()
    }


def _is_path(path: object) -> bool:
    return isinstance(path, os.PathLike)


def _check_tenant_weights(weights: object) -> dict[str, float]:
    if not isinstance(weights, Mapping):
        raise InvalidRequest(f"tenant_weights must be {{tenant: weight}}, got {shown(weights)}")
    checked = {}
    for tenant, weight in weights.items():
        if as_namespace(check_text("a tenant of tenant_weights", tenant)) != Namespace(tenant):
            raise InvalidRequest(
                f'a tenant of tenant_weights has no "/", got {shown(tenant)}: what stands before '
                "the first one in a namespace is the tenant"
            )
        name = f"tenant_weights of {shown(tenant)}"
        checked[tenant] = check_float(name, weight, 1e-3, 1e6)
    return checked


def choose_checkpoint_interval(interval: int | None, state_tokens: float) -> int:
    """Returns the tokens from one kept state of a long sequence to the next: `interval` if it is
    given, else a power of two so that states take at most the memory of the K/V between them.
    `state_tokens`: number of tokens whose K/V takes the memory of a state."""
    if interval is not None:
        return interval
    chosen = LEAST_CHECKPOINT_INTERVAL
    while chosen < state_tokens:
        chosen *= 2
    return chosen


_UNITS = {"": 1, "B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40}


def parse_bytes(size: int | str, name: str = "kv_cache_memory") -> int:
    """Returns the bytes of an int or of a string such as "512MB" or "1.5 GB" (powers of 1,024).
    Raises InvalidRequest, which calls the value `name`."""
    if isinstance(size, numbers.Integral) and not isinstance(size, bool) and size > 0:
        return int(size)
    if isinstance(size, str):
        text = size.strip().upper().replace("IB", "B")
        number = text.rstrip("KMGTB ")
        unit = text[len(number) :].strip()
        try:
            value = int(float(number) * _UNITS[unit])
        except (KeyError, ValueError, OverflowError):
            value = 0
        if value > 0:
            return value
    raise InvalidRequest(
        f'{name} must be a positive number of bytes or a string like "512MB" (KB, MB, GB, TB), '
        f"got {shown(size)}"
    )


def format_bytes(count: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"
