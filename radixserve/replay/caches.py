"""Which caches to compare, and how to make them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from radixserve.cache import HashBlockCache, PrefixCache, RadixCache
from radixserve.checks import check_choice, check_int, shown
from radixserve.errors import InvalidRequest

INDEXES = ("radix", "hash")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9}
_MOST = 2**31 - 1  # pages


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """A cache to replay a trace through. InvalidRequest for names that no cache knows.

    `use_holders`: each session is a holder, open from its first request to the end of its last one.
    """

    cache_tokens: int
    policy: str = "lru"
    page_size: int = 1
    index: str = "radix"
    use_holders: bool = False

    def __post_init__(self) -> None:
        check_choice("index", self.index, INDEXES)
        check_int("page_size", self.page_size, 1, self.cache_tokens)
        if self.cache_tokens // self.page_size > _MOST:
            raise InvalidRequest(
                f"a cache of {self.cache_tokens} tokens has more than {_MOST} pages of "
                f"{self.page_size}: choose a larger page size"
            )
        if self.index == "radix":
            RadixCache(1, 1, self.policy)  # knows which policies there are

    @property
    def num_pages(self) -> int:
        return self.cache_tokens // self.page_size

    @property
    def label(self) -> str:
        """What it is called in tables: "lru", "arc+holders", "hash"."""
        name = self.policy if self.index == "radix" else self.index
        return f"{name}+holders" if self.use_holders else name

    def make(self, clock: Callable[[], float]) -> PrefixCache:
        """An empty cache; `clock` gives the time (seconds) by which leases end."""
        if self.index == "radix":
            return RadixCache(self.num_pages, self.page_size, self.policy, clock=clock)
        # Which hash it is changes the time, not the hits.
        hash_name = "sha256" if find_spec("xxhash") is None else "xxh3"
        return HashBlockCache(self.num_pages, self.page_size, hash_name=hash_name)


def cross(
    sizes: Sequence[int],
    policies: Sequence[str],
    page_sizes: Sequence[int],
    indexes: Sequence[str],
    *,
    use_holders: bool,
) -> list[CacheSpec]:
    """Every combination that makes sense, by page size, then by policy, then by size.

    Hash caches have one policy, LRU, and heed no holders. With `use_holders` every radix cache is
    there without hints and with them.
    """
    specs = []
    for page_size in page_sizes:
        for index in indexes:
            hints = (False, True) if use_holders and index == "radix" else (False,)
            for policy in policies if index == "radix" else ("lru",):
                specs += [
                    CacheSpec(size, policy, page_size, index, hint)
                    for hint in hints
                    for size in sizes
                ]
    return specs


def parse_tokens(text: str) -> int:
    """Tokens of "500000", "250k", "1M" or "0.25M" (powers of 1,000). Raises InvalidRequest."""
    number = text.strip().upper()
    unit = number[-1:] if number[-1:].isalpha() else ""
    try:
        value = float(number.removesuffix(unit)) * _UNITS[unit]
    except (KeyError, ValueError):
        value = 0.0
    if not math.isfinite(value) or not 1 <= value <= 1e15:
        raise InvalidRequest(
            f'a cache size must be a number of tokens such as 500000, "250k" or "1M", '
            f"got {shown(text)}"
        )
    return round(value)


class TraceClock:
    """The time of a replay, in seconds since the trace's first request."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
