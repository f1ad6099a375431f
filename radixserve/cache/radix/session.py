"""`RadixSession`: a session of a `RadixCache`: the nodes where its sequences ended."""

from __future__ import annotations

from typing import Protocol, Self

from radixserve.cache.radix.node import Node
from radixserve.errors import InvalidRequest

Deadline = tuple[float, int]  # a lease's end on the cache's clock; a number that makes it unique


class SessionCloser(Protocol):
    """The eviction order that the session is part of."""

    def close(self, session: RadixSession) -> None:
        """The session is not continued."""


class RadixSession:
    """A session's end nodes in one `RadixCache`, which made it with `open_session`."""

    __slots__ = ("_order", "end_nodes", "is_open", "lease_s", "name", "retain_until")

    def __init__(
        self, order: SessionCloser, name: str, lease_s: float, retain_until: float | None
    ) -> None:
        self._order = order
        self.name = name
        self.lease_s = lease_s  # 0: none
        self.retain_until = retain_until  # on the cache's clock; None: it does not retain
        self.is_open = True
        self.end_nodes: dict[Node, Deadline | None] = {}  # None: no lease

    def __repr__(self) -> str:
        state = "" if self.is_open else ", closed"
        return f"RadixSession({self.name!r}{state})"

    def close(self) -> None:
        """Close: pages reached only by closed sessions are evicted first. Idempotent.

        O(nodes that no other session reaches).
        """
        if self.is_open:
            self._order.close(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def belongs_to(self, order: SessionCloser | None) -> bool:
        return self._order is order


def check_session(session: object, order: SessionCloser | None) -> RadixSession:
    """`session` if that cache made it; else InvalidRequest."""
    if not isinstance(session, RadixSession) or not session.belongs_to(order):
        raise InvalidRequest("session must come from this cache's open_session")
    return session
