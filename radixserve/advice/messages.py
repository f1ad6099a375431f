"""Messages of callers who ask for advice, and what caching was worth; see engine/messages.py."""

from __future__ import annotations

from dataclasses import dataclass

from radixserve.engine.messages import EngineMessage
from radixserve.reports import CacheAdvice, CacheWorth


@dataclass(frozen=True, slots=True)
class GetAdvice(EngineMessage[CacheAdvice | None]):
    """Read what the traffic so far says about the cache; None if the engine does not follow it."""


@dataclass(frozen=True, slots=True)
class GetWorth(EngineMessage[CacheWorth | None]):
    """Read what caching has saved. tenant: None for all. Answers None where it is not counted."""

    tenant: str | None = None
