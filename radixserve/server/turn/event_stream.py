"""`EventStream`: the streaming response of a generation, which is never silent for long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from radixserve.server.gate.disconnect import ClientGone
from radixserve.server.gate.request_log import note
from radixserve.server.turn.http_generation import HttpGeneration
from radixserve.server.wire.errors import ApiError, as_api_error

HEAD_AFTER_S = 0.05  # an error or an event that comes earlier needs no head of its own
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class EventStream(Response):
    """Enters the generation, sends its events, and leaves it.

    The status and the opening are sent HEAD_AFTER_S after the engine was given the request, even if
    nothing is computed yet. An earlier error is raised, and so gets a status of its own; a later
    one becomes the last event. After each `ping_interval` without data, a ping is sent.

    When the client reads slowly, `send` waits, without pings, and the events are joined. When it
    stops reading, the write timeout (`gate/http_protocol.py`) closes the connection, and the
    generation raises ClientGone.

    Between the head and the last part, parts go to the connection past the middleware, each layer
    of which would be called for each token.
    """

    def __init__(
        self,
        generation: HttpGeneration,
        events: AsyncIterator[str],
        *,
        opening: str,
        ping: Callable[[], str],
        failed: Callable[[ApiError], str],
        done: str,
    ) -> None:
        """
        opening  the text that the stream begins with
        ping     returns the text to send after a silence
        failed   returns the text that ends the stream after an error
        done     the text that ends it otherwise
        """
        super().__init__(None, 200, _HEADERS, "text/event-stream")
        del self.headers["content-length"]
        self._generation = generation
        self._events = events
        self._ping = ping
        self._failed = failed
        self._done = done
        self._has_begun = False
        self._unsent = opening  # more than that only if sending was cancelled
        self._sent_at = 0.0  # by the loop's clock
        self._sending = asyncio.Lock()
        self._send_part: Send | None = None  # of the connection, if it is uvicorn's

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        sender = scope.get("radixserve.send")
        self._send_part = None if sender is None else sender()
        try:
            with self._generation:
                pinging = asyncio.create_task(self._end_silences(send))
                try:
                    async for text in self._events:
                        if text:
                            await self._send(send, text)
                finally:
                    pinging.cancel()
            await self._send(send, self._done, more=False)
        except Exception as error:
            if not self._has_begun:
                raise
            if isinstance(error, ClientGone):
                return
            api_error = as_api_error(error)
            code = api_error.code or str(api_error.status)
            self._generation.server.counters.rejected[code] += 1
            note(scope, error=code)
            await self._send(send, self._failed(api_error), more=False)

    async def _end_silences(self, send: Send) -> None:
        """Send the head, then pings. A task beside the one that sends the events."""
        await asyncio.sleep(HEAD_AFTER_S)
        if not self._has_begun:
            await self._send(send, "")
        interval = self._generation.server.config.ping_interval
        loop = asyncio.get_running_loop()
        while interval:
            await asyncio.sleep(self._sent_at + interval - loop.time())
            if self._sending.locked():  # the client reads slowly: pings would only pile up
                self._sent_at = loop.time()
            elif self._sent_at + interval <= loop.time():
                await self._send(send, self._ping())

    async def _send(self, send: Send, text: str, *, more: bool = True) -> None:
        """Send the text, after the head and what is unsent. Cancelling it loses nothing."""
        async with self._sending:
            if not self._has_begun:
                head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                await send(head)
                self._has_begun = True
            self._unsent += text
            part = {"type": "http.response.body", "body": self._unsent.encode(), "more_body": more}
            await (self._send_part if more and self._send_part is not None else send)(part)
            self._unsent = ""
            self._sent_at = asyncio.get_running_loop().time()
