"""`EngineReplica`: an engine for requests of other processes, which sends outputs in batches."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from radixserve.api.beam_search import stop_check
from radixserve.api.runtime import Runtime
from radixserve.cache import EventBatch, EventSnapshot
from radixserve.engine.core_client import EngineFacts
from radixserve.engine.messages import AbortRequests, EngineMessage, TakeEvents
from radixserve.engine.output_collector import Event, OutputCollector
from radixserve.engine.output_notifier import OutputNotifier
from radixserve.errors import EngineDead
from radixserve.output import EngineStatus, RequestOutput
from radixserve.request import Request
from radixserve.text.tokenizer import Tokenizer

REPORT_EVERY_S = 1.0  # longest time between two reports
_MAX_EVENTS = 100_000  # in one report
FRONTEND_TIMEOUT_S = 30.0  # a frontend that is silent for so long counts as ended


class ReplicaReport(NamedTuple):
    """A replica's report to a frontend: everything since the last report, in order."""

    outputs: list[RequestOutput]
    failures: list[tuple[str, BaseException]]  # by request id
    status: EngineStatus
    events: Sequence[EventBatch | EventSnapshot] = ()  # of the cache; a step late
    settled: Sequence[str] = ()  # ended requests all of whose events are in reports up to this one


class EngineReplica:
    """A Runtime for frontends: processes that hold the callers' requests and texts.

    A frontend reads one stream of reports, about one a step. Its next stream ends the one before
    and the requests reported there. Owned by one event loop.
    """

    def __init__(self, model: str, settings: dict[str, Any]) -> None:
        self._runtime = _ReplicaRuntime(model, **settings)
        self._frontends: dict[str, _Frontend] = {}

    @property
    def num_requests(self) -> int:
        """Requests in the engine, running and waiting."""
        status = self._runtime.status()
        return status.running + status.waiting

    async def facts(self) -> EngineFacts:
        return self._runtime.facts

    async def reports(self, frontend: str, stream: int) -> AsyncIterator[ReplicaReport]:
        """A frontend's stream of reports. `stream`: its number, which `submit` names too."""
        self._drop(frontend)
        reader = self._frontends[frontend] = _Frontend(stream, self._runtime.notifier)
        try:
            while self._frontends.get(frontend) is reader:
                await reader.wait()
                if reader.asking is None or reader.asking.done():
                    reader.asking = asyncio.create_task(self._take_events(reader))
                outputs, failures = reader.take_outputs(), reader.take_failures()
                events, settled = reader.take_events(), reader.take_settled()
                yield ReplicaReport(outputs, failures, self._runtime.status(), events, settled)
        finally:
            if reader.asking is not None:
                reader.asking.cancel()
            if self._frontends.get(frontend) is reader:
                self._drop(frontend)

    async def _take_events(self, frontend: _Frontend) -> None:
        """Pass the cache's events to all frontends; a snapshot to `frontend` if it needs one."""
        needs_snapshot, num_ended = frontend.end is None, len(frontend.ended)
        with contextlib.suppress(EngineDead):
            batch, snapshot = await self.call(TakeEvents(needs_snapshot))
            for other in self._frontends.values():
                other.put_events(batch)
            if snapshot is not None:
                frontend.put_snapshot(snapshot)
            frontend.num_settled = num_ended

    async def submit(self, frontend: str, stream: int, requests: Sequence[Request]) -> bool:
        """Queue requests so that they arrive together; False where the stream has ended."""
        reader = self._find(frontend, stream)
        if reader is not None:
            await asyncio.to_thread(self._runtime.submit_for, reader, requests)
        return reader is not None

    async def end(self, frontend: str, stream: int, request_ids: Sequence[str]) -> None:
        """End requests with finish_reason "abort". Without any id it is a sign of life."""
        if self._find(frontend, stream) is not None and request_ids:
            self._runtime.end(request_ids)

    async def resync(self, frontend: str, stream: int) -> None:
        """The frontend has missed events: a later report carries a snapshot of the cache."""
        reader = self._find(frontend, stream)
        if reader is not None:
            reader.end = None

    async def call(self, message: EngineMessage[Any]) -> Any:
        """The engine's answer to a message."""
        return await self._runtime.ask(message)

    async def check_health(self) -> None:
        """Raises EngineDead. Ends the requests of frontends that have ended."""
        self._runtime.check_alive()
        for name, frontend in list(self._frontends.items()):
            if time.monotonic() - frontend.seen_at > FRONTEND_TIMEOUT_S:
                self._drop(name)

    def _find(self, frontend: str, stream: int) -> _Frontend | None:
        known = self._frontends.get(frontend)
        if known is None or known.stream != stream:
            return None
        known.seen_at = time.monotonic()
        return known

    def _drop(self, frontend: str) -> None:
        dropped = self._frontends.pop(frontend, None)
        if dropped is not None:
            self._runtime.end(list(dropped.open_ids))

    def close(self) -> None:
        self._runtime.close()


class _Frontend:
    """Outputs, failures and events for a frontend. The engine's thread puts, the loop takes."""

    def __init__(self, stream: int, notifier: OutputNotifier) -> None:
        self.stream = stream
        self.seen_at = time.monotonic()
        self.open_ids: set[str] = set()
        self._outputs: deque[RequestOutput] = deque()
        self._failures: deque[tuple[str, BaseException]] = deque()
        self._waker = notifier.running()  # one signal a step
        self._arrival = asyncio.Event()
        self.asking: asyncio.Task[None] | None = None  # for events
        self.ended: deque[str] = deque()  # requests whose events the frontend may not have yet
        self.num_settled = 0  # of these, the first ones, whose events have arrived
        self.end: int | None = None  # number of the next event; None: a snapshot is needed first
        self._events: list[EventBatch | EventSnapshot] = []
        self._num_events = 0

    def put(self, output: RequestOutput) -> None:
        self._outputs.append(output)
        if output.finish is not None:
            self._note_end(output.request_id)
        self._waker.call(self._arrival.set)

    def fail(self, request_id: str, error: BaseException) -> None:
        self._failures.append((request_id, error))
        self._note_end(request_id)
        self._waker.call(self._arrival.set)

    def _note_end(self, request_id: str) -> None:
        self.open_ids.discard(request_id)
        self.ended.append(request_id)

    def put_events(self, batch: EventBatch) -> None:
        """Add events; after a gap, or with too many for one report, a snapshot replaces them."""
        if self.end is None:
            return
        self._num_events += len(batch.events)
        if batch.first != self.end or self._num_events > _MAX_EVENTS:
            self.end = None
            self._events.clear()
            return
        self.end = batch.end
        self._events.append(batch)
        if batch.events:
            self._arrival.set()

    def put_snapshot(self, snapshot: EventSnapshot) -> None:
        self.end, self._events = snapshot.end, [snapshot]
        self._arrival.set()

    def take_events(self) -> list[EventBatch | EventSnapshot]:
        events, self._events, self._num_events = self._events, [], 0
        return events

    def take_settled(self) -> list[str]:
        """Ended requests whose events were reported; empty while a snapshot is awaited."""
        count = 0 if self.end is None else self.num_settled
        self.num_settled -= count
        return [self.ended.popleft() for _ in range(count)]

    async def wait(self) -> None:
        """Wait for an output or a message, at most REPORT_EVERY_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REPORT_EVERY_S):  # `wait_for` may miss a cancellation
                await self._arrival.wait()
                self._arrival.clear()

    def take_outputs(self) -> list[RequestOutput]:
        return [self._outputs.popleft() for _ in range(len(self._outputs))]

    def take_failures(self) -> list[tuple[str, BaseException]]:
        return [self._failures.popleft() for _ in range(len(self._failures))]


class _ReplicaRuntime(Runtime):
    @property
    def notifier(self) -> OutputNotifier:
        return self._client.notifier

    def submit_for(self, frontend: _Frontend, requests: Sequence[Request]) -> None:
        """Submit requests for a frontend. Blocks while their grammars are compiled."""
        collectors = []
        for request in requests:
            structured_outputs = request.params.structured_outputs
            if structured_outputs is not None:
                request = replace(
                    request, grammar=self._builder.grammars.compile(structured_outputs)
                )
            frontend.open_ids.add(request.request_id)
            collectors.append(_RelayCollector(request, self.tokenizer, frontend))
        self._core.submit(collectors)

    def end(self, request_ids: Sequence[str]) -> None:
        self._core.post(AbortRequests(tuple(request_ids)))

    def check_alive(self) -> None:
        self._core.check_alive()

    async def ask(self, message: EngineMessage[Any]) -> Any:
        return await asyncio.wrap_future(self._core.ask(message))


class _RelayCollector(OutputCollector):
    """Passes outputs on; makes text only to find stop strings."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None, frontend: _Frontend) -> None:
        stops = request.params.stop if tokenizer is not None else ()
        super().__init__(request, tokenizer if stops else None, _ignore, streams=False)
        self._frontend = frontend
        if request.beams is not None and tokenizer is not None and stops:
            self.is_stopped = stop_check(tokenizer, tuple(stops))

    def push(self, output: RequestOutput) -> bool:
        self._frontend.put(output)
        if self.request.beams is not None or output.finish is not None:
            return False
        return super().push(output)

    def fail(self, error: BaseException) -> None:
        self._frontend.fail(self.request.request_id, error)


def _ignore(event: Event) -> None:
    pass
