"""`HintExtension`: hints as an extension of the engine."""

from __future__ import annotations

from typing import Any

from radixserve.engine.engine import Engine
from radixserve.engine.extension import EngineExtension
from radixserve.engine.messages import EngineMessage
from radixserve.hints.granted import Hints
from radixserve.hints.hint import Hint, HintAnswer, HintLimits
from radixserve.hints.messages import ApplyHints, GetHeld
from radixserve.hints.prefetches import Prefetches

_EXPIRY_S = 1.0  # between two looks of an idle engine at pins and retains that may have expired


class HintExtension(EngineExtension):
    """Applies hints between two steps. Pins, retains and shared prefixes act in the scheduler,
    prefetches in the engine."""

    name = "hints"

    def __init__(self, engine: Engine, limits: HintLimits) -> None:
        self._prefetches = Prefetches(engine)
        self._hints = Hints(engine.cache, engine.scheduler.sessions, limits, self._prefetches)
        engine.scheduler.plug_in(self._hints)

    def answer(self, message: EngineMessage[Any], answer: Any) -> Any:
        match message:
            case ApplyHints(hints):
                return [self._apply(hint) for hint in hints]
            case GetHeld(owner):
                return self._hints.held(owner)
        return answer

    def _apply(self, hint: Hint) -> HintAnswer:
        return self._prefetches.add(hint) if hint.verb == "prefetch" else self._hints.apply(hint)

    def on_reset(self, namespace: str | None) -> None:
        self._hints.forget(namespace)

    @property
    def idle_timeout(self) -> float | None:
        return _EXPIRY_S if len(self._hints) else None
