"""Types of an engine's reports on its cache and requests.

All but `EngineStatus` are plain dicts at run time. The methods of `Runtime` that return them
explain the keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, NotRequired, TypedDict


class Lease(TypedDict):
    """A session's lease on a node, see retention/sessions.py."""

    session: str
    tokens: int  # from the root to the node's end
    seconds_left: float


class LastMinute(TypedDict):
    """What the counters gained in the last 60 seconds; see `RecentCounts.gains`."""

    seconds: float  # fewer than 60 soon after the start
    hit_rate: float
    num_acquired: int
    num_acquired_per_s: float
    acquired_tokens: int
    acquired_tokens_per_s: float
    matched_tokens: int
    matched_tokens_per_s: float
    committed_tokens: int
    committed_tokens_per_s: float
    evicted_tokens: int
    evicted_tokens_per_s: float
    prompted_tokens: int
    prompted_tokens_per_s: float
    reused_tokens: int
    reused_tokens_per_s: float
    prefilled_tokens: int
    prefilled_tokens_per_s: float
    decoded_tokens: int
    decoded_tokens_per_s: float
    generated_tokens: int
    generated_tokens_per_s: float


class StoreStats(TypedDict):
    """Counters of a kv_store since the start, and its size."""

    loaded_tokens: int
    written_tokens: int
    unwritten_tokens: int  # the disk was too slow or refused
    skipped_tokens: int  # evicted before the engine was idle, and not worth writing before
    returned_tokens: int  # computed again after they had been evicted
    failed_reads: int  # files that were damaged, missing or late
    failed_writes: int  # files, and writes that were late
    refused_files: int  # that were damaged or not what their names say
    loading_requests: int  # requests whose stored prefix is being loaded
    unsaved_requests: int  # ended requests whose K/V may still be written
    read_bytes_per_s: int  # as measured
    write_ns_per_kb: int  # of CPU time for 1,000 bytes, as measured
    load_latency_us: int  # of a load beside its bytes, as measured
    store_bytes: int
    store_dropped_files: int  # removed because the store was full
    pauses: int  # in which the store was left alone after it had failed several times
    is_paused: int  # 1 while reads or writes are paused or late


class AdapterStats(TypedDict):
    """LoRA adapters that requests may name."""

    loaded: int
    in_memory: int
    bytes_in_memory: int
    read_again: int  # from their folders, after they had left memory
    held_requests: int  # that wait until their adapter is in memory


class WeightStats(TypedDict):
    """Weights that are replaced while the engine runs."""

    epoch: int  # of the weights now; 0: those of the start
    updates: int
    update_s: float  # in which no step could run for them
    is_paused: int  # 1 while no step runs
    waiting_tensors: int  # of the buckets before the last one


class AdviceStats(TypedDict):
    """What an engine that follows its traffic has counted; see `Runtime.advice`."""

    computed: dict[str, int]  # prompt tokens by reason: see `ComputedTokens`
    regretted_tokens: int  # evicted, and computed again within a minute
    lines: list[str]  # the advice in a sentence; of several replicas one each


class CurvePoint(TypedDict):
    """A cache size, and the hit rate that LRU would have had so far."""

    tokens: int
    bytes: int
    hit_rate: float


class CacheAdvice(TypedDict):
    """What the traffic so far says about the cache; rates are parts of the prompt tokens."""

    seconds: float  # since the engine's start
    requests: int  # that have ended
    prompt_tokens: int  # of requests that have arrived
    reused_tokens: int
    pool: CurvePoint  # the present size
    enough: CurvePoint  # the size that reuses 95 % of what is reusable
    next_gib: float  # the hit rate that one GiB more adds
    most_reusable: float  # hit rate of an unlimited cache, as far as is remembered
    curve: list[CurvePoint]
    computed: dict[str, int]  # see `AdviceStats`
    evicted_tokens: int
    regretted_tokens: int
    line: str


class Worth(TypedDict):
    """What caching has saved. A request that ended early counts the tokens that it processed."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    saved_s: float  # what the cached tokens would have taken to compute


class SessionWorth(Worth):
    """The same, of one session."""

    tenant: str
    session: str


class RequestWorth(TypedDict):
    """The same, of one request."""

    request_id: str
    tenant: str
    session: str
    arrived_at: float  # in seconds since 1970
    prompt_tokens: int
    cached_tokens: int
    saved_s: float
    ttft_s: float | None  # until its first token


class CacheWorth(Worth):
    """The same, in sum, by tenant, by session, and of the last requests."""

    token_s: float  # measured seconds of a computed prompt token
    tenants: dict[str, Worth]
    sessions: list[SessionWorth]  # the last used one last
    last: list[RequestWorth]
    parts: dict[str, float]  # of the time of steps: schedule, prepare, forward, sample, commit


class EngineStats(TypedDict):
    """Counters since the start and gauges; see `PrefixCache.stats`, `SchedulerStats` and
    `Engine.stats`."""

    # pages of the cache
    page_size: int
    pages_total: int
    pages_free: int
    pages_tree: int
    pages_locked: int
    pages_private: int
    pages_cached: int
    pages_referenced: int
    pages_shared: int
    pages_leased: int
    pages_closed: int
    pages_retained: int
    pages_pinned: int
    old_epoch_pages: int  # of K/V that other weights computed
    # contents of the cache now
    namespaces: int
    nodes: int
    sequences: int
    sessions: int
    watches: int
    leases: list[Lease]
    # the cache's counters
    splits: int
    collisions: int
    acquired_tokens: int
    matched_tokens: int
    copied_tokens: int
    committed_tokens: int
    duplicate_tokens: int
    evicted_tokens: int
    retained_evicted_pages: int
    superseded_tokens: int
    num_acquired: int
    num_resets: int
    # requests now
    running: int
    waiting: int
    waiting_tokens: int
    # the scheduler's counters
    steps: int
    steps_ahead: int
    finished: int
    aborted: int
    failed: int
    preemptions: int
    prompted_tokens: int
    reused_tokens: int
    gained_while_waiting_tokens: int
    computed_tokens: int
    recomputed_tokens: int
    prefilled_tokens: int
    decoded_tokens: int
    discarded_tokens: int
    prefetched_tokens: int
    generated_tokens: int
    drafted_tokens: int
    accepted_draft_tokens: int
    drafts: NotRequired[dict[str, dict[str, int]]]  # by source: see docs/drafts.md
    # scores of tokens
    kept_scores: int  # since the start, with the tokens in the tree
    read_scores: int  # that were not computed again
    # parts that are always there
    adapters: NotRequired[AdapterStats]
    weights: NotRequired[WeightStats]
    # hints
    hints: int
    broken_pins: int
    shared_prefixes: int
    shared_tokens: int
    prefetches: int
    # rates, and seconds spent by part of a step
    hit_rate: float
    last_minute: LastMinute
    ended_extensions: list[str]  # names of those that have failed
    kv_store: NotRequired[StoreStats]  # of an engine that has one
    advice: NotRequired[AdviceStats]  # of an engine that follows its traffic
    worth: NotRequired[dict[str, float]]  # of the same: saved_s, see `Worth`
    schedule_s: float
    prepare_s: float
    forward_s: float
    sample_s: float
    commit_s: float
    overlapped_s: float
    prefill_s: float
    decode_s: float
    # of models with recurrent layers
    states_total: NotRequired[int]
    states_free: NotRequired[int]
    states_tree: NotRequired[int]
    states_private: NotRequired[int]
    evicted_checkpoints: NotRequired[int]
    # of models with window pages
    window_pages_total: NotRequired[int]
    window_pages_free: NotRequired[int]
    window_pages_used: NotRequired[int]
    evicted_window_pages: NotRequired[int]


class HeldByHints(TypedDict):
    """The number of an owner's pins and retains, and the cached tokens that they keep."""

    pins: int
    retains: int
    held_tokens: int


class EvictionCandidate(TypedDict):
    """A node or block that will be evicted; see `PrefixCache.eviction_preview`."""

    namespace: str
    start: int
    tokens: list[int]
    num_tokens: int
    num_pages: int
    idle_s: float
    reason: str


class Fragmentation(TypedDict):
    """Token slots of the pages in use, and those without a token."""

    pages: int
    slots: int
    unused_slots: int
    unused_share: float


class SequencePages(TypedDict):
    """The page table of a running request."""

    request_id: str
    length: int
    committed_len: int
    cached_len: int
    num_private: int
    pages: list[int]


class NodeFacts(TypedDict):
    """A node of the tree, or a block; see `PrefixCache.dump`."""

    start: int
    tokens: list[int]
    num_tokens: int
    pages: list[int]
    lock_ref: int
    sequences: int
    state: str
    last_use: float | None


class TreeNode(NodeFacts):
    """A node with the nodes below it."""

    children: list[TreeNode]


class FlatNode(NodeFacts):
    """A node in a list, parents before children."""

    id: int
    parent: int | None
    namespace: str


class _Dump(TypedDict):
    page_size: int
    truncated: bool
    sequences: list[SequencePages]
    fragmentation: Fragmentation


class TreeDump(_Dump):
    """The tree as nested dicts, with the root of each namespace."""

    namespaces: dict[str, TreeNode]


class FlatTreeDump(_Dump):
    """The tree as one list of nodes; see `flat_tree`."""

    nodes: list[FlatNode]


class EngineStatus(NamedTuple):
    """The state of the engine's thread, read without waiting for it."""

    is_alive: bool
    is_idle: bool  # whether it has no request to compute
    stepped_at: float  # time.monotonic() after the last step; now, while it is idle
    running: int  # requests
    waiting: int  # requests, including those that the thread has not read yet
    waiting_tokens: int  # prompt tokens of the waiting requests
    stats: Mapping[str, Any]  # see `Runtime.cache_stats`; at most 0.25 s old while it steps
