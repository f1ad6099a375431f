"""radixserve: a serving engine for language models centred on its prefix cache.

Names are loaded when first used, so that `import radixserve` and `radixserve.cache` need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from radixserve._version import __version__

if TYPE_CHECKING:
    from radixserve.api import search
    from radixserve.api.branch import Branch, generate_all, score_all
    from radixserve.api.chat import ChatSession, HistoryRewritten
    from radixserve.api.runtime import Runtime
    from radixserve.cache import CachedSequence, Lookup, RadixCache
    from radixserve.config import EngineConfig
    from radixserve.errors import (
        EngineDead,
        InvalidRequest,
        ModelNotSupported,
        OutOfPages,
        RadixServeError,
    )
    from radixserve.output import Chunk, Completion, Metrics, Score, Usage
    from radixserve.request import SamplingParams

__all__ = [
    "Branch",
    "CachedSequence",
    "ChatSession",
    "Chunk",
    "Completion",
    "EngineConfig",
    "EngineDead",
    "HistoryRewritten",
    "InvalidRequest",
    "Lookup",
    "Metrics",
    "ModelNotSupported",
    "OutOfPages",
    "RadixCache",
    "RadixServeError",
    "Runtime",
    "SamplingParams",
    "Score",
    "Usage",
    "__version__",
    "generate_all",
    "score_all",
    "search",
]

_HOMES = {
    "Branch": "api.branch",
    "CachedSequence": "cache",
    "ChatSession": "api.chat",
    "Chunk": "output",
    "Completion": "output",
    "Score": "output",
    "EngineConfig": "config",
    "EngineDead": "errors",
    "HistoryRewritten": "api.chat",
    "InvalidRequest": "errors",
    "Lookup": "cache",
    "Metrics": "output",
    "ModelNotSupported": "errors",
    "OutOfPages": "errors",
    "RadixCache": "cache",
    "RadixServeError": "errors",
    "Runtime": "api.runtime",
    "SamplingParams": "request",
    "Usage": "output",
    "generate_all": "api.branch",
    "score_all": "api.branch",
}


def __getattr__(name: str) -> Any:
    if name == "search":
        return import_module("radixserve.api.search")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'radixserve' has no attribute {name!r}")
    return getattr(import_module(f"radixserve.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
