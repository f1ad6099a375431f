"""Messages about the engine's weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from radixserve.engine.messages import EngineMessage

KVAfterUpdate = Literal["recompute", "stale"]


@dataclass(frozen=True, slots=True)
class UpdateWeights(EngineMessage[int]):
    """Compute with other weights. Answer: the number of the epoch, which is that of before while
    further buckets are to come."""

    weights: str | Mapping[str, Any]  # a path, or tensors by name
    kv: KVAfterUpdate  # what becomes of the K/V of open requests
    version: str | None = None  # the caller's name of the weights
    is_last: bool = True  # else the tensors wait for the buckets that follow


class WeightsInfo(NamedTuple):
    """The present weights."""

    epoch: int
    version: str | None  # the caller's name of them
    is_paused: bool


@dataclass(frozen=True, slots=True)
class GetWeights(EngineMessage[WeightsInfo]):
    """Ask for the present weights."""
