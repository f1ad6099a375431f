"""Anthropic's `cache_control` marks as a hint: the prompt is retained for their time."""

from __future__ import annotations

from typing import Any

from radixserve.server.anthropic_messages.schema import PromptFields
from radixserve.server.http_generation import HttpGeneration

_SECONDS = {"5m": 300.0, "1h": 3600.0}


def retain_hints(body: PromptFields) -> list[dict[str, Any]]:
    """`cache_hints` of a ChatRequest: one for the whole prompt where any of its blocks or tools has
    a mark, for the longest time among them; every prefix of the prompt is kept with it."""
    marks: list[dict[str, Any]] = []
    if body.cache_control is not None:
        marks.append({"ttl": body.cache_control.ttl})
    stack: list[Any] = [body.system, body.messages, body.tools]
    while stack:
        one = stack.pop()
        if isinstance(one, list):
            stack.extend(one)
        elif isinstance(one, dict):
            mark = one.get("cache_control")
            if isinstance(mark, dict):
                marks.append(mark)
            stack.append(one.get("content"))
    if not marks:
        return []
    seconds = max(_SECONDS[mark.get("ttl") or "5m"] for mark in marks)
    return [{"verb": "retain", "seconds": seconds}]


def num_retained(generation: HttpGeneration) -> int:
    """Leading tokens of the prompt that the marks keep, after the end."""
    return max((found["tokens_covered"] for found in generation.hint_answers), default=0)
