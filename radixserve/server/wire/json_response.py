"""Answers as JSON, and as server-sent events."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from starlette.responses import Response

DONE = "data: [DONE]\n\n"
quote: Callable[[str], str] = json.dumps  # a text as JSON


def dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def answer(value: Any, status: int = 200) -> Response:
    """A response of compact JSON in ASCII, since texts may not be valid Unicode."""
    return answer_json(dump(value), status)


def answer_json(text: str, status: int = 200) -> Response:
    """A response of what `dump` returned."""
    return Response(text, status, media_type="application/json")


def event(value: Any) -> str:
    return f"data: {dump(value)}\n\n"


def named_event(name: str, value: Any) -> str:
    """A named event, as Anthropic's messages and OpenAI's responses use."""
    return f"event: {name}\ndata: {dump(value)}\n\n"
