"""radixserve: a serving engine for language models centred on its prefix cache.

Names are loaded when first used, so that `import radixserve` and `radixserve.cache` need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from radixserve._version import __version__

if TYPE_CHECKING:
    from radixserve.api.branch import Branch, BranchQuery, generate_all, score_all
    from radixserve.api.chat import ChatSession, HistoryRewritten
    from radixserve.api.runtime import Runtime
    from radixserve.cache import Lookup, RadixCache, RadixSequence
    from radixserve.cache.diagnosis import Diagnosis
    from radixserve.completion import Chunk, Completion, Score
    from radixserve.config import EngineConfig
    from radixserve.decisions import Decision, Option, Question
    from radixserve.errors import (
        EngineDead,
        InvalidRequest,
        ModelNotSupported,
        OutOfPages,
        RadixServeError,
        RequestFailed,
    )
    from radixserve.hints.hint import Hint, HintAnswer
    from radixserve.output import Metrics, Usage
    from radixserve.recipes import search
    from radixserve.request import BeamParams, SamplingParams
    from radixserve.structured_outputs import StructuredOutput

__all__ = [
    "BeamParams",
    "Branch",
    "BranchQuery",
    "ChatSession",
    "Chunk",
    "Completion",
    "Decision",
    "Diagnosis",
    "EngineConfig",
    "EngineDead",
    "Hint",
    "HintAnswer",
    "HistoryRewritten",
    "InvalidRequest",
    "Lookup",
    "Metrics",
    "ModelNotSupported",
    "Option",
    "OutOfPages",
    "Question",
    "RadixCache",
    "RadixSequence",
    "RadixServeError",
    "RequestFailed",
    "Runtime",
    "SamplingParams",
    "Score",
    "StructuredOutput",
    "Usage",
    "__version__",
    "generate_all",
    "score_all",
    "search",
]

_HOMES = {
    "api.branch": ("Branch", "BranchQuery", "generate_all", "score_all"),
    "api.chat": ("ChatSession", "HistoryRewritten"),
    "api.runtime": ("Runtime",),
    "cache": ("RadixSequence", "Lookup", "RadixCache"),
    "cache.diagnosis": ("Diagnosis",),
    "completion": ("Chunk", "Completion", "Score"),
    "config": ("EngineConfig",),
    "decisions": ("Decision", "Option", "Question"),
    "errors": (
        "EngineDead",
        "InvalidRequest",
        "ModelNotSupported",
        "OutOfPages",
        "RadixServeError",
        "RequestFailed",
    ),
    "hints.hint": ("Hint", "HintAnswer"),
    "structured_outputs": ("StructuredOutput",),
    "output": ("Metrics", "Usage"),
    "request": ("BeamParams", "SamplingParams"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "search":
        return import_module("radixserve.recipes.search")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'radixserve' has no attribute {name!r}")
    return getattr(import_module(f"radixserve.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
