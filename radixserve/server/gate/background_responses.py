"""`BackgroundResponses`: responses that are generated while no client waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from radixserve.server.gate.counters import ServerCounters
from radixserve.server.gate.response_store import ResponseStore, StoredResponse
from radixserve.server.gate.session_table import InFlight
from radixserve.server.wire.errors import ApiError, as_api_error

_RETRY_AFTER_S = 5

# The response without its answer, from its status and, if it failed, the error.
Unfinished = Callable[[str, ApiError | None], dict[str, Any]]


# Waits for the answer and stores it. Returns a function that returns the response.
Answer = Callable[[], Awaitable[Callable[[], dict[str, Any]]]]


class ResponseCancelled(Exception):
    """A client cancelled the response."""


class BackgroundResponse:
    """A response that is being generated."""

    def __init__(
        self,
        tenant: str,
        queued: StoredResponse,
        generation: InFlight,
        unfinished: Unfinished,
        report: Callable[[str], None],
    ) -> None:
        """
        queued      its record before the answer
        generation  its engine request
        report      is called with the last status
        """
        self.tenant = tenant
        self.queued = queued
        self.unfinished = unfinished
        self.report = report
        self.refusal: ApiError | None = None  # the queue was full
        self._generation = generation
        self._task: asyncio.Task[None] | None = None

    @property
    def stored(self) -> StoredResponse:
        """Its record as of now: queued until the first token is sampled, then in progress."""
        status = "in_progress" if self._generation.has_generated else "queued"
        return self.queued.with_response(self.unfinished(status, None))

    def run(self, work: Awaitable[None]) -> None:
        """Start `work` as a task."""

        async def run() -> None:
            await work

        self._task = asyncio.create_task(run())

    def end(self, error: Exception) -> None:
        """End it with an error, at its next await."""
        self._generation.end(error)

    async def cancel(self) -> None:
        """End it as cancelled, unless it ends by itself first. Returns after its end."""
        assert self._task is not None
        self.end(ResponseCancelled())
        await asyncio.wait([self._task])


class BackgroundResponses:
    """The responses that are being generated in the background, by id. Once ended, a response moves
    to the ResponseStore, whose bounds also bound what each tenant has running. Owned by the event
    loop."""

    def __init__(self, responses: ResponseStore, counters: ServerCounters) -> None:
        self._responses = responses
        self._counters = counters
        self._running: dict[str, BackgroundResponse] = {}

    async def start(self, response: BackgroundResponse, answer: Answer) -> None:
        """Generate a response.

        Raises ApiError: 429 if the queue is full or the tenant has too many running, 413 if the
        store has no room for this one.
        """
        self._check_room(response)
        self._running[response.queued.response_id] = response
        response.run(self._run(response, answer))
        await asyncio.sleep(0)  # it is submitted
        if response.refusal is not None:
            raise response.refusal

    def find(self, tenant: str, namespace: str, response_id: str) -> BackgroundResponse | None:
        """The response, if it is being generated and belongs to the namespace."""
        response = self._running.get(response_id)
        if response is None or (response.tenant, response.queued.namespace) != (tenant, namespace):
            return None
        return response

    def end_all(self, error: ApiError) -> None:
        """End all with an error: nobody can read them after the server's end."""
        for response in list(self._running.values()):
            response.end(error)

    def _check_room(self, new: BackgroundResponse) -> None:
        num_bytes, max_bytes = new.queued.num_bytes, self._responses.max_bytes
        if num_bytes > max_bytes:
            message = f"the response cannot be stored: its input and history take {num_bytes} bytes"
            raise ApiError(413, f"{message} of at most {max_bytes} (max_response_bytes)")
        own = [response for response in self._running.values() if response.tenant == new.tenant]
        is_full = len(own) >= self._responses.max_responses
        if is_full or sum(each.queued.num_bytes for each in own) + num_bytes > max_bytes:
            raise ApiError(
                429,
                f"{len(own)} of your responses are running in the background, as many as can be "
                "stored (max_responses, max_response_bytes)",
                code="background_full",
                headers={"retry-after": str(_RETRY_AFTER_S)},
            )

    async def _run(self, response: BackgroundResponse, answer: Answer) -> None:
        try:
            body = (await answer())()
        except ResponseCancelled:
            body = response.unfinished("cancelled", None)
        except Exception as error:
            problem = as_api_error(error)
            if problem.code == "queue_full":
                response.refusal = problem
                return
            self._counters.rejected[problem.code or str(problem.status)] += 1
            body = response.unfinished("failed", problem)
        finally:
            del self._running[response.queued.response_id]
        if body["status"] in ("cancelled", "failed"):
            self._responses.put(response.tenant, response.queued.with_response(body))
        response.report(body["status"])
