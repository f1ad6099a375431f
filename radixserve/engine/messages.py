"""Messages of callers to the engine's thread: plain data, so that it could be another process.

Each message is carried out between two steps. `EngineThread.call` returns its answer, which each
docstring names; `EngineThread.post` does not wait for one.
"""

from __future__ import annotations

from dataclasses import dataclass

from radixserve.arrays import IntArray
from radixserve.request import Request


@dataclass(frozen=True, slots=True)
class AddRequests:
    """Queue requests so that they arrive together: all of them or, after an error, none."""

    submission: int  # names the caller's tickets; an id of a request may be used again
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class AbandonRequests:
    """End what is left of a submission: its caller takes no more answers."""

    submission: int


@dataclass(frozen=True, slots=True)
class AbortRequests:
    """End requests, all where None, with finish_reason "abort" -> int, how many were open."""

    request_ids: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class LookUpPrompt:
    """How much of a prompt is cached, and why not more -> Lookup."""

    token_ids: IntArray
    namespace: str


@dataclass(frozen=True, slots=True)
class GetStats:
    """Counters and gauges -> dict[str, Any]."""


@dataclass(frozen=True, slots=True)
class DumpTree:
    """The cache's tree as nested dicts -> dict[str, Any]."""

    max_nodes: int


@dataclass(frozen=True, slots=True)
class ResetCache:
    """Forget what is cached in one namespace, in all where None."""

    namespace: str | None


@dataclass(frozen=True, slots=True)
class CheckCache:
    """Audit the cache; answers with AssertionError where a law is broken."""


@dataclass(frozen=True, slots=True)
class SessionClaim:
    """A session claims what is cached of `tokens`; it is opened if need be."""

    name: str
    tokens: IntArray
    namespace: str


@dataclass(frozen=True, slots=True)
class ClaimSessions:
    """Several sessions claim."""

    claims: tuple[SessionClaim, ...]


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Close a session after its `heirs` have claimed; where `reopened`, it claims anew then."""

    name: str
    heirs: tuple[SessionClaim, ...] = ()
    reopened: SessionClaim | None = None


Message = (
    AddRequests
    | AbandonRequests
    | AbortRequests
    | LookUpPrompt
    | GetStats
    | DumpTree
    | ResetCache
    | CheckCache
    | ClaimSessions
    | CloseSession
)
