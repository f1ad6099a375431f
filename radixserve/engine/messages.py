"""Messages of callers to the engine's thread, as plain data that could cross processes.

Each is processed between two steps. `EngineThread.call` waits for the answer, `EngineThread.post`
does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from radixserve.arrays import IntArray
from radixserve.cache import EventBatch, EventSnapshot, Lookup, SnapshotView
from radixserve.reports import EngineStats, EvictionCandidate, TreeDump
from radixserve.request import Request

Answer = TypeVar("Answer")


class EngineMessage(Generic[Answer]):
    """Base of all messages. `Answer`: the type of the value that `call` returns for it."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class AddRequests(EngineMessage[None]):
    """Queue requests so that they arrive together: all of them or, after an error, none."""

    submission: int  # identifies the caller's collectors, since request ids may be used again
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class AbandonRequests(EngineMessage[None]):
    """End the open requests of a submission that no caller waits for."""

    submission: int


@dataclass(frozen=True, slots=True)
class AbortRequests(EngineMessage[int]):
    """End requests, all where None, with finish_reason "abort". Answer: how many were open."""

    request_ids: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class LookUpPrompt(EngineMessage[Lookup]):
    """Look up how much of a prompt is cached, and why not more; see `PrefixCache.lookup`."""

    token_ids: IntArray
    namespace: str
    compare_namespaces: bool = True


@dataclass(frozen=True, slots=True)
class GetStats(EngineMessage[EngineStats]):
    """Read the counters and gauges; see `Engine.stats`."""


@dataclass(frozen=True, slots=True)
class DumpTree(EngineMessage[TreeDump]):
    """Read the cache's tree as nested dicts, of one namespace if it is given."""

    max_nodes: int
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class PreviewEviction(EngineMessage[list[EvictionCandidate]]):
    """Read the next `count` evictions; see `PrefixCache.eviction_preview`."""

    count: int


@dataclass(frozen=True, slots=True)
class TakeSnapshot(EngineMessage[dict[str, Any]]):
    """Take a bounded snapshot of the cache and of the requests."""

    view: SnapshotView


@dataclass(frozen=True, slots=True)
class TakeEvents(EngineMessage[tuple[EventBatch, EventSnapshot | None]]):
    """Take the cache's events since the last call, and a snapshot if wanted."""

    with_snapshot: bool


@dataclass(frozen=True, slots=True)
class ResetCache(EngineMessage[None]):
    """Drop the cached prefixes of one namespace and those below it; of all where None."""

    namespace: str | None


@dataclass(frozen=True, slots=True)
class PauseEngine(EngineMessage[None]):
    """See `Engine.pause`."""


@dataclass(frozen=True, slots=True)
class ResumeEngine(EngineMessage[None]):
    """See `Engine.resume`."""


@dataclass(frozen=True, slots=True)
class ListPrefixes(EngineMessage[list[tuple[str, IntArray]]]):
    """See `PrefixCache.prefixes`."""

    namespace: str | None


@dataclass(frozen=True, slots=True)
class CheckCache(EngineMessage[None]):
    """Audit the cache; answers with AssertionError where an invariant is broken."""


@dataclass(frozen=True, slots=True)
class SessionClaim:
    """Let a session claim the cached part of `tokens`; a new session is opened."""

    name: str
    tokens: IntArray
    namespace: str


@dataclass(frozen=True, slots=True)
class ClaimSessions(EngineMessage[None]):
    """Let several sessions claim cached tokens."""

    claims: tuple[SessionClaim, ...]


@dataclass(frozen=True, slots=True)
class CloseSession(EngineMessage[None]):
    """Close a session after its `successors` have claimed their tokens. `reopened`: open it again
    with this claim."""

    name: str
    successors: tuple[SessionClaim, ...] = ()
    reopened: SessionClaim | None = None
