"""`CacheSpec`: a cache to replay a trace through; `ReplayResult`: the result of a replay."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from radixserve.cache import HashBlockCache, PrefixCache, RadixCache
from radixserve.cache_layers import RecurrentLayers, WindowedLayers
from radixserve.checks import check_choice, check_float, check_int, shown
from radixserve.errors import InvalidRequest
from radixserve.replay.trace import Bools, Ints
from radixserve.schedule import WindowLayers

INDEXES = ("radix", "hash", "off")
GIB = 1 << 30
DEFAULT_KV_BYTES = 131_072  # Llama-3-8B in bfloat16: 2 x 32 layers x 8 heads x 128 x 2 bytes
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9}
SPARE_STATES = 64  # states in addition to those at intervals, by default
STATE_SHARE = 1 / 3  # of the cache's memory, for states that take a part of it
_MAX_PAGES = 2**31 - 1


@dataclass(frozen=True, slots=True)
class WindowSpec:
    """A model's layers with windows.

    window_size  positions that such a layer sees
    share        their part of the K/V of a token
    ratio        number of tokens whose K/V of such layers has room, over that of all tokens
    """

    window_size: int
    share: float
    ratio: float

    def __post_init__(self) -> None:
        check_int("window_size", self.window_size, 1)
        check_float("share", self.share, 0.0, 1.0, open_low=True)
        check_float("ratio", self.ratio, 0.0, 1.0, open_low=True)

    @property
    def bytes_per_token(self) -> float:
        """The memory of a token, as a part of that with the K/V of all layers."""
        return 1 - self.share + self.ratio * self.share


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The recurrent states of a model.

    interval      tokens between two kept states; None: `CheckpointSpacing` chooses by
                  `state_tokens`
    num_states    states that have room: in the cache's memory if `state_tokens` is given, else
                  in addition to it
    state_tokens  memory of a state, as the number of tokens whose K/V takes as much
    """

    interval: int | None
    num_states: int
    state_tokens: float = 0.0

    def __post_init__(self) -> None:
        check_int("num_states", self.num_states, 1)
        check_float("state_tokens", self.state_tokens, 0.0, 1e9)

    @property
    def pool_tokens(self) -> float:
        """The memory of all states, as the number of tokens whose K/V takes as much."""
        return self.num_states * self.state_tokens

    @property
    def label(self) -> str:
        if not self.state_tokens:
            return "+states"
        rule = "by bytes" if self.interval is None else f"every {self.interval}"
        return f"+states of {self.state_tokens:g} {rule}"


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """A cache to replay a trace through. Raises InvalidRequest for an unknown policy or index.

    cache_tokens  size; with `windows`, in tokens with the K/V of all layers
    policy        eviction policy of a radix cache
    page_size     tokens per page; of a hash cache: per block
    index         one of INDEXES; "off" reuses nothing
    use_sessions  open a session of the cache for each session of the trace, from its first request
                  to the end of its last one
    states        of a model with recurrent layers
    windows       of a model with layers that see a window of positions
    """

    cache_tokens: int
    policy: str = "lru"
    page_size: int = 1
    index: str = "radix"
    use_sessions: bool = False
    states: StateSpec | None = None
    windows: WindowSpec | None = None

    def __post_init__(self) -> None:
        check_choice("index", self.index, INDEXES)
        check_int("page_size", self.page_size, 1, self.cache_tokens)
        if self.num_pages > _MAX_PAGES:
            raise InvalidRequest(
                f"a cache of {self.cache_tokens} tokens has more than {_MAX_PAGES} pages of "
                f"{self.page_size}: choose a larger page size"
            )
        if self.index == "radix":
            RadixCache(1, 1, self.policy)  # refuses an unknown policy

    @property
    def num_pages(self) -> int:
        share = 1.0 if self.windows is None else self.windows.bytes_per_token
        taken = 0.0 if self.states is None else self.states.pool_tokens
        return max(1, int((self.cache_tokens - taken) / share) // self.page_size)

    @property
    def label(self) -> str:
        """Its name in tables: "lru", "arc+sessions", "hash"."""
        name = self.policy if self.index == "radix" else self.index
        name += "" if self.states is None else self.states.label
        name += "" if self.windows is None else f"+windows {self.windows.ratio:g}"
        return f"{name}+sessions" if self.use_sessions else name

    def make(self, clock: Callable[[], float]) -> PrefixCache:
        """A new, empty cache. `clock`: the time in seconds, by which leases end."""
        if self.index != "hash":
            return RadixCache(
                self.num_pages,
                self.page_size,
                self.policy,
                reuse=self.index != "off",
                layers=self._make_layers(),
                clock=clock,
            )
        # The hash function changes the time of a replay, not its hits.
        hash_algorithm = "sha256" if find_spec("xxhash") is None else "xxh3"
        return HashBlockCache(self.num_pages, self.page_size, hash_algorithm=hash_algorithm)

    def _make_layers(self) -> RecurrentLayers | WindowedLayers | None:
        states, windows = self.states, self.windows
        if states is not None:
            return RecurrentLayers(states.num_states, states.interval, states.state_tokens)
        if windows is None:
            return None
        num_pages = max(1, int(windows.ratio * self.num_pages))
        layers = WindowLayers(num_pages, windows.window_size)
        return WindowedLayers(self.num_pages, self.page_size, layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """The result of a replay through one cache. Counts are prompt tokens, unless their names say
    otherwise."""

    spec: CacheSpec
    hits: Ints  # [requests] reused tokens
    is_served: Bools  # [requests] False: it did not fit, and counts as not reused
    prompt_tokens: int  # of all requests
    evicted_tokens: int
    seconds: float  # duration of the replay itself

    @property
    def hit_tokens(self) -> int:
        return int(self.hits.sum())

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens

    @property
    def num_too_large(self) -> int:
        """Requests that did not fit into the cache."""
        return int((~self.is_served).sum())


def none_if_nan(value: float) -> float | None:
    """Returns a figure for a JSON document, which has no nan."""
    return None if math.isnan(value) else value


class TraceClock:
    """The simulated time of a replay, in seconds since the trace's first request."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def cross(
    sizes: Sequence[int],
    policies: Sequence[str],
    page_sizes: Sequence[int],
    indexes: Sequence[str],
    *,
    use_sessions: bool,
    checkpoint_interval: int = 0,
    num_states: int | None = None,
    state_tokens: Sequence[float] = (),
    windows: WindowSpec | None = None,
) -> list[CacheSpec]:
    """All valid combinations, by page size, then by policy, then by size.

    Hash caches have a single policy, LRU, and do not use sessions; nor does "off", which reuses
    nothing. A radix cache appears several times:

    use_sessions         without sessions and with them
    checkpoint_interval  without states and with them; `num_states`, by default SPARE_STATES and two
                         for each interval of tokens
    state_tokens         twice for each of them (see `StateSpec.state_tokens`): with the intervals
                         that `CheckpointSpacing` chooses, and with `checkpoint_interval`. States
                         take STATE_SHARE of the memory
    windows              without them and with them
    """

    def states(size: int, interval: int | None, state_size: float) -> StateSpec:
        count = num_states
        if count is None and state_size:
            count = max(1, int(size * STATE_SHARE / state_size))
        elif count is None:
            count = SPARE_STATES + 2 * (size // checkpoint_interval)
        return StateSpec(interval, count, state_size)

    kinds: list[tuple[int | None, float] | None] = [None]
    if checkpoint_interval and not state_tokens:
        kinds.append((checkpoint_interval, 0.0))
    for state_size in state_tokens:
        kinds += [(None, state_size), (checkpoint_interval, state_size)]
    variants: list[tuple[tuple[int | None, float] | None, WindowSpec | None]]
    variants = [(kind, None) for kind in kinds]
    if windows is not None:
        variants.append((None, windows))
    return [
        CacheSpec(
            size,
            policy,
            page_size,
            index,
            has_sessions,
            None if kind is None else states(size, *kind),
            layers,
        )
        for page_size in page_sizes
        for index in indexes
        for policy in (policies if index == "radix" else ("lru",))
        for has_sessions in ((False, True) if use_sessions and index == "radix" else (False,))
        for kind, layers in (variants if index == "radix" else variants[:1])
        for size in sizes
    ]


def parse_tokens(text: str, name: str = "a cache size") -> int:
    """The number of tokens in a text such as "500000", "250k" or "0.25M" (powers of 1,000). Raises
    InvalidRequest; `name`: of the number in it."""
    number = text.strip().upper()
    unit = number[-1:] if number[-1:].isalpha() else ""
    try:
        value = float(number.removesuffix(unit)) * _UNITS[unit]
    except (KeyError, ValueError):
        value = 0.0
    if not math.isfinite(value) or not 1 <= value <= 1e15:
        raise InvalidRequest(
            f'{name} must be a number of tokens such as 500000, "250k" or "1M", got {shown(text)}'
        )
    return round(value)
