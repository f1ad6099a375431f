"""Messages of callers about stored K/V to the engine's thread; see engine/messages.py."""

from __future__ import annotations

from dataclasses import dataclass

from radixserve.arrays import IntArray
from radixserve.engine.messages import EngineMessage


@dataclass(frozen=True, slots=True)
class FindStored(EngineMessage[int]):
    """Find how much of a prompt is in a store; answers with its leading stored tokens. `folder`: an
    opened one; "" for the kv_store."""

    token_ids: IntArray
    namespace: str
    folder: str = ""


@dataclass(frozen=True, slots=True)
class OpenStore(EngineMessage[None]):
    """Open the store in a folder, which need not be the kv_store, for the messages about it."""

    folder: str


@dataclass(frozen=True, slots=True)
class SavePrefix(EngineMessage[int]):
    """Write the next run of the cached part of some tokens into an opened store; answers with the
    tokens written, 0 if all are stored. `FindStored` has to come first."""

    folder: str
    namespace: str
    tokens: IntArray


@dataclass(frozen=True, slots=True)
class ListStored(EngineMessage[list[tuple[str, IntArray]]]):
    """See `StoredPrefixes.paths`, of an opened folder."""

    folder: str


@dataclass(frozen=True, slots=True)
class LoadPrefix(EngineMessage[int | None]):
    """Load the next run of some tokens from an opened folder into free pages; see
    `KVLoader.load_free`."""

    folder: str
    namespace: str
    tokens: IntArray
