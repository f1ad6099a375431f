"""JSON responses, and the text of server-sent events (SSE)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from starlette.responses import Response

DONE = "data: [DONE]\n\n"
PING = ": ping\n\n"  # a comment
quote: Callable[[str], str] = json.dumps  # a string as JSON


def dump(value: Any) -> str:
    """Compact JSON in ASCII. Raises ValueError for numbers that JSON does not have."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def answer(value: Any, status: int = 200) -> Response:
    """A response of compact JSON in ASCII, since texts may contain invalid Unicode."""
    return answer_json(dump(value), status)


def answer_json(text: str, status: int = 200) -> Response:
    """A response of the JSON text that `dump` returned."""
    return Response(text, status, media_type="application/json")


def event(value: Any) -> str:
    """A server-sent event without a name, as OpenAI's chats and completions use."""
    return f"data: {dump(value)}\n\n"


def named_event(name: str, value: Any) -> str:
    """A named event, as Anthropic's messages and OpenAI's responses use."""
    return f"event: {name}\ndata: {dump(value)}\n\n"
