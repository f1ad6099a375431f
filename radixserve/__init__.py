"""radixserve: a serving engine for language models centred on its prefix cache.

Names are loaded when first used, so that `import radixserve` and `radixserve.cache` need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from radixserve._version import __version__

if TYPE_CHECKING:
    from radixserve.branch import Branch
    from radixserve.cache import CachedSequence, Lookup, RadixCache
    from radixserve.chat import ChatSession, HistoryRewritten
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
    from radixserve.runtime import Runtime

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
]

_HOMES = {
    "Branch": "branch",
    "CachedSequence": "cache",
    "ChatSession": "chat",
    "Chunk": "output",
    "Completion": "output",
    "Score": "output",
    "EngineConfig": "config",
    "EngineDead": "errors",
    "HistoryRewritten": "chat",
    "InvalidRequest": "errors",
    "Lookup": "cache",
    "Metrics": "output",
    "ModelNotSupported": "errors",
    "OutOfPages": "errors",
    "RadixCache": "cache",
    "RadixServeError": "errors",
    "Runtime": "runtime",
    "SamplingParams": "request",
    "Usage": "output",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'radixserve' has no attribute {name!r}")
    return getattr(import_module(f"radixserve.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
