"""`SessionTable`: open sessions; what they leave cached is kept until their time is over."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from radixserve.server.errors import ApiError

_LONGEST_ID = 256  # characters


class InFlight(Protocol):
    """A request that is being answered."""

    @property
    def has_generated(self) -> bool:
        """A token has been sampled."""
        ...

    def end(self, error: Exception) -> None:
        """End it with an error, soon."""
        ...


class SessionTable:
    """Open sessions by name, the one used last at the end. Owned by the event loop."""

    def __init__(self, lease_s: float, max_sessions: int, close: Callable[[str], None]) -> None:
        """`close`: tells the engine."""
        self._lease_s = lease_s
        self._max_sessions = max_sessions
        self._close = close
        self._used_at: OrderedDict[str, float] = OrderedDict()
        self._in_flight: dict[str, set[InFlight]] = {}

    def __len__(self) -> int:
        return len(self._used_at)

    def name(self, namespace: str, session_id: str) -> str:
        """The cache session's name, open or not."""
        return _name(namespace, session_id)

    def use(self, namespace: str, session_id: str) -> str:
        """The cache session's name; opens it or renews its lease."""
        name = _name(namespace, session_id)
        self._used_at[name] = time.monotonic()
        self._used_at.move_to_end(name)
        while len(self._used_at) > self._max_sessions:
            self._drop(next(iter(self._used_at)))
        return name

    def close(self, namespace: str, session_id: str) -> bool:
        """What it kept is dropped first from now on. False where none is open."""
        name = _name(namespace, session_id)
        is_open = name in self._used_at
        if is_open:
            self._drop(name)
        return is_open

    def close_expired(self) -> None:
        """O(expired ones)."""
        limit = time.monotonic() - self._lease_s
        while self._used_at:
            name, used_at = next(iter(self._used_at.items()))
            if used_at > limit:
                return
            if self._in_flight.get(name):
                self._used_at[name] = time.monotonic()
                self._used_at.move_to_end(name)
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
            for other in [one for one in others if not one.has_generated]:
                other.end(error)
        others.add(generation)

    def finish(self, name: str, generation: InFlight) -> None:
        others = self._in_flight[name]
        others.discard(generation)
        if not others:
            del self._in_flight[name]

    def _drop(self, name: str) -> None:
        del self._used_at[name]
        self._close(name)


def _name(namespace: str, session_id: str) -> str:
    return f"{len(namespace)}:{namespace}:{session_id}"  # no two pairs have the same


def check_session_id(session_id: str | None) -> None:
    if session_id is not None and not 0 < len(session_id) <= _LONGEST_ID:
        raise ApiError(
            400, f"session_id must have 1 to {_LONGEST_ID} characters", param="session_id"
        )
