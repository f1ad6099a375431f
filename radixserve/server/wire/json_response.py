"""JSON responses, and the text of server-sent events (SSE)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

from starlette.responses import Response

DONE = "data: [DONE]\n\n"
_MANY_LOGPROBS = 1_000  # in an answer that is written in another thread
_ITEMS = 64  # of a list that `dump_parts` writes at a time
PING = ": ping\n\n"  # a comment
quote: Callable[[str], str] = json.dumps  # a string as JSON


def dump(value: Any) -> str:
    """Compact JSON in ASCII. Raises ValueError for numbers that JSON does not have."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def dump_parts(value: Any, depth: int = 5) -> Iterator[str]:
    """The text of `dump(value)` in pieces, each of bounded work: `dump` keeps Python's lock until
    it is done, which delays all threads. `depth`: levels below which values are small."""
    if depth and value and isinstance(value, dict):
        for at, (name, member) in enumerate(value.items()):
            yield f"{',' if at else '{'}{quote(name)}:"
            yield from dump_parts(member, depth - 1)
        yield "}"
    elif depth and value and isinstance(value, list):
        has_parts = depth > 3 and isinstance(value[0], dict)  # choices, scores
        for start in range(0, len(value), 1 if has_parts else _ITEMS):
            yield "," if start else "["
            if has_parts:
                yield from dump_parts(value[start], depth - 1)
            else:
                yield dump(value[start : start + _ITEMS])[1:-1]
        yield "]"
    else:
        yield dump(value)


def answer(value: Any, status: int = 200) -> Response:
    """A response of compact JSON in ASCII, since texts may contain invalid Unicode."""
    return answer_json(dump(value), status)


async def answer_of(form: Callable[[], Any], num_logprobs: int) -> Response:
    """The response of the JSON values that `form` returns. If they are many, another thread makes
    and writes them, part by part: the event loop and the engine go on."""
    if num_logprobs <= _MANY_LOGPROBS:
        return answer(form())
    return answer_json(await asyncio.to_thread(lambda: "".join(dump_parts(form()))))


def answer_json(text: str, status: int = 200) -> Response:
    """A response of the JSON text that `dump` returned."""
    return Response(text, status, media_type="application/json")


def event(value: Any) -> str:
    """A server-sent event without a name, as OpenAI's chats and completions use."""
    return f"data: {dump(value)}\n\n"


def named_event(name: str, value: Any) -> str:
    """A named event, as Anthropic's messages and OpenAI's responses use."""
    return f"event: {name}\ndata: {dump(value)}\n\n"
