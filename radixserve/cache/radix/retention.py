"""`RetentionPolicy`: the plug point for what a tree keeps longer than its eviction policy would.

A tree has such a policy once a session is opened: an order of eviction around that of the tree. Its
values of a node lie in `Node.retention`, None for nodes of which it knows nothing. A session is an
object of the policy; tree and sequences only hand it on.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any

from radixserve.cache.interface import CacheSession
from radixserve.cache.radix.eviction import EvictionOrder
from radixserve.cache.radix.node import Match, NamespaceTree, Node


class RetentionPolicy(EvictionOrder):
    """Wraps the order `policy`. Only the tree and its cache call it.

    No operation may cost more than O(depth of a path), amortised, unless it says so.
    """

    @abstractmethod
    def open(self, name: str, lease_s: float | None, retain_until: float | None) -> CacheSession:
        """Returns a new session. Raises InvalidRequest for wrong arguments.

        Pages that only closed sessions reached are evicted first. The path to each place where a
        sequence of an open session ended is evicted last, for `lease_s` seconds from then on
        (default: 300; 0: no lease). `retain_until`, on the cache's clock, replaces the lease: until
        then the path is evicted after everything else. Names need not be unique; `stats` shows
        them. A session that is never closed stays open as long as the cache exists.
        """

    @abstractmethod
    def check_session(self, session: object) -> CacheSession:
        """`session` if this policy opened it; else InvalidRequest."""

    # -- prompts, and the tree changes -----------------------------------------------------------

    num_releases = 0  # calls of `on_released` with a session

    @abstractmethod
    def on_prompt(
        self, match: Match, prompt: memoryview, session: CacheSession, num_releases: int | None
    ) -> None:
        """A sequence of that session was acquired for a prompt; its path is locked. `num_releases`:
        when the prompt was sent; None: now."""

    @abstractmethod
    def on_attached(self, leaf: Node, session: CacheSession | None) -> None:
        """A sequence of that session, or of none, has added a leaf, which is locked."""

    @abstractmethod
    def may_extend(self, leaf: Node, session: CacheSession | None) -> bool:
        """Whether what a sequence of that session appends to `leaf` is kept as the leaf is."""

    @abstractmethod
    def on_split(self, upper: Node, lower: Node) -> None:
        """`upper` is the new upper part of `lower`, which has retention values."""

    @abstractmethod
    def count_pages(self, node: Node, pages: int) -> None:
        """`node`, which has retention values, has `pages` more pages; fewer if negative."""

    @abstractmethod
    def on_removed(self, node: Node) -> None:
        """`node`, which has retention values, is about to be unlinked from its parent."""

    @abstractmethod
    def on_reset(self, namespace: NamespaceTree) -> None:
        """The namespace is about to be dropped."""

    @abstractmethod
    def must_split(self, node: Node, session: CacheSession | None) -> bool:
        """Whether a sequence of that session that ends inside `node` leaves its two parts with
        different values."""

    @abstractmethod
    def on_released(self, node: Node, session: CacheSession | None) -> None:
        """A sequence of that session that ends in `node` is about to unlock it."""

    # -- what callers say ---------------------------------------------------------------------

    @abstractmethod
    def demote(self, match: Match, num_tokens: int) -> int:
        """See `PrefixCache.demote`. `match`: that of the prefix of `num_tokens` tokens."""

    @abstractmethod
    def demote_session(self, session: CacheSession) -> int:
        """See `PrefixCache.demote_session`."""

    @abstractmethod
    def held_tokens(self, sessions: Iterable[CacheSession], page_size: int) -> int:
        """See `PrefixCache.held_tokens`."""

    @abstractmethod
    def session_ends(self, session: CacheSession) -> list[Node]:
        """Returns the nodes at which sequences of the session ended."""

    # -- inspection ---------------------------------------------------------------------------

    @property
    @abstractmethod
    def num_retained_pages(self) -> int:
        """See `PrefixCache.num_retained`."""

    @abstractmethod
    def refresh(self) -> None:
        """End what has run out; to be called before `state`."""

    @abstractmethod
    def state(self, node: Node) -> str:
        """Returns "closed", "superseded", "retained", "leased" or "cached", for an unlocked
        node."""

    @abstractmethod
    def names(self, node: Node, limit: int) -> tuple[list[str], int]:
        """Returns the names of up to `limit` sessions that end in `node`, and the number of open
        sessions and of children that sessions reach."""

    @abstractmethod
    def kept_nodes(self) -> Iterator[Node]:
        """Yields the nodes that are evicted last."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Returns its figures of `RadixCache.stats`, see `no_retention`."""

    @abstractmethod
    def check_nodes(self, nodes: list[Node]) -> None:
        """AssertionError at the first value of a node that is wrong. `nodes`: all of the tree."""


MakeRetention = Callable[[EvictionOrder, int, Callable[[], float]], RetentionPolicy]
"""(order, most pages that sessions keep, clock) -> policy"""


def default_retention() -> MakeRetention:
    """Returns the policy of a cache that is given none: `SessionRetention`, loaded when the first
    session is opened."""
    make: MakeRetention = import_module("radixserve.retention").SessionRetention
    return make
