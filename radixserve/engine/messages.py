"""Messages of callers to the engine's thread: plain data, so that it could be another process.

Each is carried out between two steps. `EngineThread.call` waits for the answer,
`EngineThread.post` does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from radixserve.arrays import IntArray
from radixserve.cache import EventBatch, EventSnapshot, Lookup, SnapshotView
from radixserve.hint import Hint, HintAnswer
from radixserve.request import Request

Answer = TypeVar("Answer")


class Message(Generic[Answer]):
    """`Answer`: the type of what `call` returns for it."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class AddRequests(Message[None]):
    """Queue requests so that they arrive together: all of them or, after an error, none."""

    submission: int  # names the caller's collectors; an id of a request may be used again
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class AbandonRequests(Message[None]):
    """End what is left of a submission: its caller takes no more answers."""

    submission: int


@dataclass(frozen=True, slots=True)
class AbortRequests(Message[int]):
    """End requests, all where None, with finish_reason "abort". Answer: how many were open."""

    request_ids: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class LookUpPrompt(Message[Lookup]):
    """How much of a prompt is cached, and why not more; see `PrefixCache.lookup`."""

    token_ids: IntArray
    namespace: str
    compare_namespaces: bool = True


@dataclass(frozen=True, slots=True)
class GetStats(Message[dict[str, Any]]):
    """Counters and gauges."""


@dataclass(frozen=True, slots=True)
class DumpTree(Message[dict[str, Any]]):
    """The cache's tree as nested dicts, of one namespace where it is given."""

    max_nodes: int
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class PreviewEviction(Message[list[dict[str, Any]]]):
    """What eviction would take next."""

    count: int


@dataclass(frozen=True, slots=True)
class TakeSnapshot(Message[dict[str, Any]]):
    """A bounded snapshot of the cache and of the requests."""

    view: SnapshotView


@dataclass(frozen=True, slots=True)
class TakeEvents(Message[tuple[EventBatch, EventSnapshot | None]]):
    """What the cache has stored and dropped since the last one; and all that it holds."""

    with_snapshot: bool


@dataclass(frozen=True, slots=True)
class ResetCache(Message[None]):
    """Forget what is cached in one namespace, in all where None."""

    namespace: str | None


@dataclass(frozen=True, slots=True)
class CheckCache(Message[None]):
    """Audit the cache; answers with AssertionError where an invariant is broken."""


@dataclass(frozen=True, slots=True)
class SessionClaim:
    """A session claims what is cached of `tokens`; it is opened if need be."""

    name: str
    tokens: IntArray
    namespace: str


@dataclass(frozen=True, slots=True)
class ClaimSessions(Message[None]):
    """Several sessions claim."""

    claims: tuple[SessionClaim, ...]


@dataclass(frozen=True, slots=True)
class CloseSession(Message[None]):
    """Close a session after its `successors` have claimed; `reopened`: its next claim."""

    name: str
    successors: tuple[SessionClaim, ...] = ()
    reopened: SessionClaim | None = None


@dataclass(frozen=True, slots=True)
class GetHeld(Message[dict[str, int]]):
    """What the pins and retains of an owner hold now."""

    owner: str


@dataclass(frozen=True, slots=True)
class ApplyHints(Message[list[HintAnswer]]):
    """Carry out hints in order; an answer each."""

    hints: tuple[Hint, ...]
