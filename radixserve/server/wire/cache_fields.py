"""Fields that steer the cache: OpenAI's `prompt_cache_options`, breakpoints and retention, and the
`kv_hints` envelope of vLLM and SGLang."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from radixserve.server.wire.body import Body, Members, Name, Short

MAX_HINTS = 64  # of one request
Lifetime = Literal["30m", "12h"]
Retention = Literal["in_memory", "24h"]
_DEFAULT_LIFETIME: Lifetime = "30m"
_SECONDS = {"30m": 1_800.0, "12h": 43_200.0, "24h": 86_400.0}


class CacheHint(Body):
    """A hint for the K/V of a prompt; see docs/hints.md."""

    verb: Short
    seconds: float | None = None
    max_tokens: int | None = None


class CacheBreakpoint(Body):
    """A mark on a part of a message: later requests begin with the prompt up to this part."""

    skips_unknown: ClassVar[bool] = True

    mode: Literal["explicit"]
    ttl: Lifetime | None = None


class PromptCacheOptions(Body):
    """OpenAI's `prompt_cache_options`.

    mode     "explicit": only breakpoints ask for a lifetime
    ttl      how long the prompt's K/V should stay cached at least
    prewarm  compute the prompt and generate nothing
    comparison_response_id  id of an earlier answer: report where this prompt differs from its
             prompt, and so missed the cache
    """

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Lifetime | None = None
    prewarm: bool | None = None
    comparison_response_id: Short | None = None

    def applied(self) -> dict[str, Any]:
        """The options with their defaults, as answers repeat them."""
        return {
            "mode": self.mode or "implicit",
            "ttl": self.ttl or _DEFAULT_LIFETIME,
            "comparison_response_id": self.comparison_response_id,
        }


class KVHintAction(Body):
    skips_unknown: ClassVar[bool] = True

    action_id: Name
    action_type: Name
    action_version: Name
    payload: Members = {}


class KVHints(Body):
    """The envelope of vLLM and SGLang: versioned actions on the request's K/V."""

    skips_unknown: ClassVar[bool] = True

    protocol_version: Annotated[str, Field(pattern=r"^[01](\.\d+)*$", max_length=32)]
    message_id: Name
    actions: Annotated[list[KVHintAction], Field(max_length=MAX_HINTS, fail_fast=True)] = []


def retain_hints(
    options: PromptCacheOptions | None,
    retention: Retention | None,
    breakpoints: Iterable[CacheBreakpoint],
) -> list[CacheHint]:
    """A `retain` hint for the whole prompt, and so for each of its prefixes, for the longest of the
    requested lifetimes. [] without any."""
    options = options or PromptCacheOptions()
    lifetimes: set[str] = {mark.ttl or options.ttl or _DEFAULT_LIFETIME for mark in breakpoints}
    if options.mode != "explicit" and options.ttl is not None:
        lifetimes.add(options.ttl)
    if options.mode != "explicit" and options.prewarm:
        lifetimes.add(options.ttl or _DEFAULT_LIFETIME)
    if retention is not None and retention != "in_memory":
        lifetimes.add(retention)
    seconds = [_SECONDS[lifetime] for lifetime in lifetimes]
    return [CacheHint(verb="retain", seconds=max(seconds))] if seconds else []


def breakpoints_of(content: Any) -> Iterator[CacheBreakpoint]:
    """The cache breakpoints of a message's parts."""
    for part in content if isinstance(content, list) else ():
        mark = getattr(part, "prompt_cache_breakpoint", None)
        if mark is not None:
            yield mark
