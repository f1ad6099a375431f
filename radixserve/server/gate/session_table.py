"""`SessionTable`: open sessions, whose K/V is evicted last until their leases end."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from radixserve.cache.namespace import as_namespace
from radixserve.request import Request
from radixserve.server.wire.errors import ApiError

_MAX_ID = 256  # characters


class InFlight(Protocol):
    """An HTTP request that is being answered."""

    tenant: str
    num_requests: int  # engine requests that it consists of

    @property
    def unsubmitted(self) -> Sequence[Request]:
        """Its engine requests that have not been submitted yet."""
        ...

    @property
    def has_generated(self) -> bool:
        """Whether a token has been sampled."""
        ...

    def end(self, error: Exception) -> None:
        """End it with an error, at its next await."""
        ...


class SessionTable:
    """Open sessions by name, in order of their last use. Owned by the event loop.

    When a tenant has more than `max_sessions` open, its own least recently used one is closed.
    """

    def __init__(self, lease_s: float, max_sessions: int, close: Callable[[str], None]) -> None:
        """`lease_s`: seconds that a session stays open after its last use. `max_sessions`: per
        tenant. `close`: is called with the name of each session that is closed, and again
        after its last request."""
        self._lease_s = lease_s
        self._max_sessions = max_sessions
        self._close = close
        self._used_at: OrderedDict[str, float] = OrderedDict()
        self._by_tenant: dict[str, OrderedDict[str, None]] = {}  # names, least recently used first
        self._in_flight: dict[str, set[InFlight]] = {}

    def __len__(self) -> int:
        return len(self._used_at)

    def name(self, namespace: str, session_id: str) -> str:
        """The name of a session in the cache, whether it is open or not."""
        return _name(namespace, session_id)

    def use(self, namespace: str, session_id: str) -> str:
        """Open a session or renew its lease. Returns its name in the cache."""
        name = _name(namespace, session_id)
        self._touch(name)
        own = self._by_tenant[as_namespace(namespace).tenant]
        while len(own) > self._max_sessions:
            self._drop(next(iter(own)))
        return name

    def close(self, namespace: str, session_id: str) -> bool:
        """Close a session: its tokens are then evicted first. Returns False if it is not open."""
        return self.close_named(_name(namespace, session_id))

    def close_named(self, name: str) -> bool:
        """`close` for a session's name in the cache."""
        is_open = name in self._used_at
        if is_open:
            self._drop(name)
        return is_open

    def oldest(self, tenant: str) -> str | None:
        """The name of the tenant's least recently used session; None if none is open."""
        return next(iter(self._by_tenant.get(tenant, ())), None)

    def close_expired(self) -> None:
        """Close sessions whose leases have ended; a session with a request in flight is renewed
        instead. O(sessions that are closed or renewed)."""
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
        """A request of the session starts: the lease does not end before `finish`. `supersedes`:
        the session's other requests that have not generated a token end with 409."""
        others = self._in_flight.setdefault(name, set())
        if supersedes:
            error = ApiError(
                409, "a newer request of this session took its place", code="superseded"
            )
            for other in [other for other in others if not other.has_generated]:
                other.end(error)
        others.add(generation)

    def finish(self, name: str, generation: InFlight) -> None:
        """A request of the session has ended. Closes again a session that was closed before the
        request was submitted, which opened it."""
        others = self._in_flight[name]
        others.discard(generation)
        if not others:
            del self._in_flight[name]
            if name not in self._used_at:
                self._close(name)

    def _touch(self, name: str) -> None:
        self._used_at[name] = time.monotonic()
        self._used_at.move_to_end(name)
        own = self._by_tenant.setdefault(as_namespace(namespace_of(name)).tenant, OrderedDict())
        own[name] = None
        own.move_to_end(name)

    def _drop(self, name: str) -> None:
        del self._used_at[name]
        tenant = as_namespace(namespace_of(name)).tenant
        own = self._by_tenant[tenant]
        del own[name]
        if not own:
            del self._by_tenant[tenant]
        self._close(name)


def _name(namespace: str, session_id: str) -> str:
    namespace = str(as_namespace(namespace)._replace(adapter=""))  # one session for all adapters
    return f"{len(namespace)}:{namespace}:{session_id}"  # different for every pair


def namespace_of(name: str) -> str:
    """The namespace in a name that `SessionTable.name` returned."""
    length, _, rest = name.partition(":")
    return rest[: int(length)]


def session_id_in(name: str) -> str:
    """The client's name of the session in a name that `SessionTable.name` returned; other names,
    as Python's, are returned as they are."""
    length, _, rest = name.partition(":")
    return rest[int(length) + 1 :] if length.isdecimal() else name


def check_session_id(session_id: str | None) -> None:
    """Raise ApiError 400 for an id that is empty or too long."""
    if session_id is not None and not 0 < len(session_id) <= _MAX_ID:
        raise ApiError(400, f"session_id must have 1 to {_MAX_ID} characters", param="session_id")
