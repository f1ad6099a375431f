"""`DraftExtension`: the drafts of an engine, and the message that adds a source to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from radixserve.cache import PrefixCache, RadixCache
from radixserve.drafts import budget
from radixserve.drafts.drafter import Drafts
from radixserve.drafts.source import DraftSource
from radixserve.engine.engine import Engine
from radixserve.engine.extension import EngineExtension
from radixserve.engine.messages import EngineMessage

if TYPE_CHECKING:
    from radixserve.runner.base import ModelRunner


@dataclass(frozen=True, slots=True)
class AddDraftSource(EngineMessage[None]):
    """Ask another source for drafts, before those that are there."""

    source: DraftSource


class DraftExtension(EngineExtension):
    """Makes the scheduler's drafter, which without `max_tokens` drafts for requests with
    jump_forward alone what their grammars force."""

    name = "drafts"

    def __init__(self, engine: Engine, max_tokens: int) -> None:
        """`max_tokens`: most drafts of a row."""
        from radixserve.drafts.forced import ForcedTokens

        others = default_sources(engine.cache) if max_tokens else []
        self._drafts = Drafts([ForcedTokens(), *others], max_tokens)
        engine.set_drafter(self._drafts, is_for_jumps=not max_tokens)

    def answer(self, message: EngineMessage[Any], answer: Any) -> Any:
        if isinstance(message, AddDraftSource):
            self._drafts.sources.insert(0, message.source)
        return answer

    def on_reset(self, namespace: str | None) -> None:
        for source in self._drafts.sources:
            source.reset(namespace)

    def stats(self) -> dict[str, Any]:
        return self._drafts.stats()


def most_drafts(given: int | None, runner: ModelRunner) -> int:
    """Returns `given`; without it `budget.DEFAULT_DRAFTS` where drafts change no answer and keep no
    step from being scheduled ahead, as on a CPU, else 0."""
    if given is not None:
        return given
    return 0 if runner.overlap_depth or runner.resolved_config.inexact else budget.DEFAULT_DRAFTS


def default_sources(cache: PrefixCache) -> list[DraftSource]:
    """Returns all sources but `ForcedTokens`, the first to be asked first."""
    from radixserve.drafts.namespace_text import NamespaceText
    from radixserve.drafts.own_text import OwnText
    from radixserve.drafts.prediction import Prediction
    from radixserve.drafts.tree import CachedContinuation

    sources: list[DraftSource] = [Prediction(), CachedContinuation(), OwnText()]
    return [*sources, NamespaceText(cache)] if isinstance(cache, RadixCache) else sources
