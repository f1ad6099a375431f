"""`Router`: which replica a request goes to."""

from __future__ import annotations

from typing import Protocol

from radixserve.arrays import IntArray
from radixserve.cluster.replica import Report
from radixserve.request import Request


class Router(Protocol):
    """Owned by one thread. Replicas are known by name from `add` to `remove`."""

    def add(self, replica: str) -> None: ...

    def remove(self, replica: str) -> None: ...

    def update(self, replica: str, report: Report) -> None:
        """What the replica says of its load and its cache."""
        ...

    def choose(self, request: Request) -> str | None:
        """Where it is to run, which counts as load there until `note_end`; None without
        replicas."""
        ...

    def note_end(self, request_id: str) -> None: ...

    def best(self, token_ids: IntArray, namespace: str) -> str | None:
        """Where most of the tokens are cached; None without replicas."""
        ...

    def of_session(self, session: str) -> str | None: ...

    def close_session(self, session: str) -> None: ...


class LeastLoaded:
    """To the replica with the fewest open tokens; a session stays where it is."""

    def __init__(self) -> None:
        self._load: dict[str, int] = {}
        self._open: dict[str, tuple[str, int]] = {}
        self._sessions: dict[str, str] = {}

    def add(self, replica: str) -> None:
        self._load.setdefault(replica, 0)

    def remove(self, replica: str) -> None:
        self._load.pop(replica, None)
        self._open = {key: one for key, one in self._open.items() if one[0] != replica}
        self._sessions = {key: one for key, one in self._sessions.items() if one != replica}

    def update(self, replica: str, report: Report) -> None:
        pass

    def choose(self, request: Request) -> str | None:
        if not self._load:
            return None
        found = self._sessions.get(request.session) or min(self._load, key=self._load.__getitem__)
        if request.session:
            self._sessions[request.session] = found
        size = len(request.token_ids) + request.params.max_tokens
        self._load[found] += size
        self._open[request.request_id] = found, size
        return found

    def note_end(self, request_id: str) -> None:
        replica, size = self._open.pop(request_id, ("", 0))
        if replica in self._load:
            self._load[replica] -= size

    def best(self, token_ids: IntArray, namespace: str) -> str | None:  # noqa: ARG002
        return min(self._load, key=self._load.__getitem__) if self._load else None

    def of_session(self, session: str) -> str | None:
        return self._sessions.get(session)

    def close_session(self, session: str) -> None:
        self._sessions.pop(session, None)
