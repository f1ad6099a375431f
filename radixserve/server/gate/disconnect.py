"""`CancelOnDisconnect`: cancels a block of a request's task when its client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Self

from starlette.requests import Request

from radixserve.request import Request as EngineRequest
from radixserve.server.gate.request_log import note
from radixserve.server.gate.state import AppState, caller_of

CLIENT_CLOSED = 499  # the status for log and metrics; the client has closed its connection


class ClientGone(Exception):
    """The client closed its connection."""


class CancelOnDisconnect:
    """A context manager around the work on one request, entered in the request's task.

    When the client closes its connection, the block raises ClientGone. When `end` is called, the
    block raises the given error. Both cancel what the task is awaiting. A client that stays
    connected but stops reading is disconnected by the write timeout: `http_protocol.py`.
    """

    def __init__(
        self, server: AppState, request: Request, *, outlives_client: bool = False
    ) -> None:
        """`outlives_client`: the block goes on after a disconnect."""
        self.server = server
        self._request = request
        self.tenant = caller_of(request).tenant
        self.num_requests = 0  # of the engine
        self._outlives_client = outlives_client
        self._error: Exception | None = None
        self._task: asyncio.Task[Any] | None = None
        self._watcher: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        if not self._outlives_client:
            self._watcher = asyncio.create_task(self._watch())
        self.server.in_flight.add(self)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        task, self._task = self._task, None
        assert task is not None
        if self._watcher is not None:
            self._watcher.cancel()
        self.server.in_flight.discard(self)
        if self._error is not None:
            task.uncancel()
            if isinstance(error, asyncio.CancelledError):
                raise self._error from None

    @property
    def unsubmitted(self) -> Sequence[EngineRequest]:
        """Its engine requests that have not been submitted yet."""
        return ()

    @property
    def has_generated(self) -> bool:
        """Whether a token has been sampled."""
        return False

    def end(self, error: Exception) -> None:
        """Make the block raise `error` at its next await."""
        if self._task is not None and self._error is None:
            self._error = error
            self._task.cancel()

    def note_usage(self, num_requests: int, usage: Mapping[str, Any]) -> None:
        """Count `num_requests` engine requests that have ended. `usage`: their sum, in OpenAI's
        format."""
        self.server.limits.note_finished(num_requests, usage["prompt_tokens"])
        self.server.tenant_usage.add(caller_of(self._request).tenant, usage)
        note(self._request.scope, **usage)

    async def _watch(self) -> None:
        while True:
            message = await self._request.receive()
            if message["type"] == "http.disconnect":
                break
        self.server.counters.clients_gone += 1
        self.end(ClientGone())
