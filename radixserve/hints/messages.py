"""Messages of callers about hints to the engine's thread; see engine/messages.py."""

from __future__ import annotations

from dataclasses import dataclass

from radixserve.engine.messages import EngineMessage
from radixserve.hints.hint import Hint, HintAnswer
from radixserve.reports import HeldByHints


@dataclass(frozen=True, slots=True)
class GetHeld(EngineMessage[HeldByHints]):
    """Count the pins and retains of an owner, and the tokens that they keep cached."""

    owner: str


@dataclass(frozen=True, slots=True)
class ApplyHints(EngineMessage[list[HintAnswer]]):
    """Carry out hints in order; answers with one answer per hint."""

    hints: tuple[Hint, ...]
