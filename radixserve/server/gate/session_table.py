"""`SessionTable`: open sessions, whose K/V is evicted last until their leases end."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from radixserve.request import Request, tenant_of
from radixserve.server.wire.errors import ApiError

_LONGEST_ID = 256  # characters


class InFlight(Protocol):
    """A request that is being answered."""

    tenant: str
    num_requests: int  # of the engine

    @property
    def unsubmitted(self) -> Sequence[Request]:
        """Its requests that were not submitted to the engine yet."""
        ...

    @property
    def has_generated(self) -> bool:
        """A token has been sampled."""
        ...

    def end(self, error: Exception) -> None:
        """End it with an error, soon."""
        ...


class SessionTable:
    """Open sessions by name, the one used last at the end. Owned by the event loop.

    A tenant that opens more than `max_sessions` closes its own oldest one, never another's.
    """

    def __init__(self, lease_s: float, max_sessions: int, close: Callable[[str], None]) -> None:
        """`max_sessions`: of each tenant. `close`: closes the engine's session."""
        self._lease_s = lease_s
        self._max_sessions = max_sessions
        self._close = close
        self._used_at: OrderedDict[str, float] = OrderedDict()
        self._by_tenant: dict[str, OrderedDict[str, None]] = {}  # names, in the same order
        self._in_flight: dict[str, set[InFlight]] = {}

    def __len__(self) -> int:
        return len(self._used_at)

    def name(self, namespace: str, session_id: str) -> str:
        """The cache session's name, open or not."""
        return _name(namespace, session_id)

    def use(self, namespace: str, session_id: str) -> str:
        """The cache session's name; opens it or renews its lease."""
        name = _name(namespace, session_id)
        self._touch(name)
        own = self._by_tenant[tenant_of(namespace)]
        while len(own) > self._max_sessions:
            self._drop(next(iter(own)))
        return name

    def close(self, namespace: str, session_id: str) -> bool:
        """Close a session: its tokens are evicted first. False if it is not open."""
        return self.close_named(_name(namespace, session_id))

    def close_named(self, name: str) -> bool:
        """`close` by the cache session's name."""
        is_open = name in self._used_at
        if is_open:
            self._drop(name)
        return is_open

    def oldest(self, tenant: str) -> str | None:
        """The name of the tenant's session that was used longest ago."""
        return next(iter(self._by_tenant.get(tenant, ())), None)

    def close_expired(self) -> None:
        """O(expired ones)."""
        limit = time.monotonic() - self._lease_s
        while self._used_at:
            name, used_at = next(iter(self._used_at.items()))
            if used_at > limit:
                return
            if self._in_flight.get(name):
                self._touch(name)
            else:
                self._drop(name)

    def begin(self, name: str, generation: InFlight, *, supersedes: bool) -> None:
        """A request of the session starts; `supersedes`: older ones that have generated nothing
        yet end with 409."""
        others = self._in_flight.setdefault(name, set())
        if supersedes:
            error = ApiError(
                409, "a newer request of this session took its place", code="superseded"
            )
            for other in [other for other in others if not other.has_generated]:
                other.end(error)
        others.add(generation)

    def finish(self, name: str, generation: InFlight) -> None:
        others = self._in_flight[name]
        others.discard(generation)
        if not others:
            del self._in_flight[name]

    def _touch(self, name: str) -> None:
        self._used_at[name] = time.monotonic()
        self._used_at.move_to_end(name)
        own = self._by_tenant.setdefault(tenant_of(namespace_of(name)), OrderedDict())
        own[name] = None
        own.move_to_end(name)

    def _drop(self, name: str) -> None:
        del self._used_at[name]
        tenant = tenant_of(namespace_of(name))
        own = self._by_tenant[tenant]
        del own[name]
        if not own:
            del self._by_tenant[tenant]
        self._close(name)


def _name(namespace: str, session_id: str) -> str:
    return f"{len(namespace)}:{namespace}:{session_id}"  # no two pairs have the same


def namespace_of(name: str) -> str:
    """The namespace in a name that the table gave."""
    length, _, rest = name.partition(":")
    return rest[: int(length)]


def check_session_id(session_id: str | None) -> None:
    if session_id is not None and not 0 < len(session_id) <= _LONGEST_ID:
        raise ApiError(
            400, f"session_id must have 1 to {_LONGEST_ID} characters", param="session_id"
        )
