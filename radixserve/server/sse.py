"""Server-sent events: answers piece by piece."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from radixserve.server.disconnect import ClientGone
from radixserve.server.errors import ApiError, as_api_error
from radixserve.server.http_generation import HttpGeneration
from radixserve.server.json_response import dump

DONE = "data: [DONE]\n\n"
quote: Callable[[str], str] = json.dumps  # a text as JSON
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def event(value: Any) -> str:
    return f"data: {dump(value)}\n\n"


def named_event(name: str, value: Any) -> str:
    """With its name in a line of its own, as Anthropic and OpenAI's responses have it."""
    return f"event: {name}\ndata: {dump(value)}\n\n"


def _failed(error: ApiError) -> str:
    return event(error.body()) + DONE


class EventStream(Response):
    """The events that `frames` makes of a generation; entered here, left when all are sent.

    An error before the first event is raised, so that it has a status of its own; later ones are
    the last event. A slow reader holds up its own events only.
    """

    def __init__(
        self,
        generation: HttpGeneration,
        frames: Callable[[HttpGeneration], AsyncIterator[str]],
        *,
        done: str = DONE,
        failed: Callable[[ApiError], str] = _failed,
    ) -> None:
        """`done` ends the stream, or else what `failed` makes of an error."""
        super().__init__(None, 200, _HEADERS, "text/event-stream")
        del self.headers["content-length"]
        self._generation = generation
        self._frames = frames
        self._done = done
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        has_begun = False
        try:
            with self._generation as generation:
                async for text in self._frames(generation):
                    if not has_begun:
                        has_begun = True
                        await self._begin(send)
                    await send(_body(text, more=True))
            await send(_body(self._done, more=False))
        except ClientGone:
            return
        except Exception as error:
            if not has_begun:
                raise
            await send(_body(self._failed(as_api_error(error)), more=False))

    async def _begin(self, send: Send) -> None:
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(head)


def _body(text: str, *, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}
