"""`EngineReplica`: an engine that runs requests of other processes and reports to them."""

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
from radixserve.output import RequestOutput
from radixserve.reports import EngineStatus
from radixserve.request import Request
from radixserve.text.tokenizer import Tokenizer

REPORT_EVERY_S = 1.0  # longest time between two reports
_MAX_EVENTS = 100_000  # in one report
FRONTEND_TIMEOUT_S = 30.0  # a frontend without a message for so long counts as ended


class ReplicaReport(NamedTuple):
    """A replica's report to a frontend: what happened since the last report, in order.

    outputs   of the frontend's requests
    failures  of its requests, by request id
    status    of the engine: its load
    events    cache events, which tell the router what the replica has stored and evicted; they are
              a step late, and a snapshot replaces events that were lost
    settled   ids of ended requests all of whose cache events were in this report or earlier ones
    """

    outputs: list[RequestOutput]
    failures: list[tuple[str, BaseException]]
    status: EngineStatus
    events: Sequence[EventBatch | EventSnapshot] = ()
    settled: Sequence[str] = ()


class EngineReplica:
    """A Runtime for frontends: other processes, which have the callers' requests and texts.

    A frontend reads a stream of reports, about one per step. When it opens another stream, the
    earlier stream and its requests end. Owned by one event loop.
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
        """The reports to a frontend. `stream`: the stream's number, which the frontend's other
        calls repeat."""
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
        """Give the cache's new events to all frontends, and a snapshot to `frontend` if it needs
        one."""
        needs_snapshot, num_ended = frontend.end is None, len(frontend.ended)
        with contextlib.suppress(EngineDead):
            batch, snapshot = await self.call(TakeEvents(needs_snapshot))
            for other in self._frontends.values():
                other.put_events(batch)
            if snapshot is not None:
                frontend.put_snapshot(snapshot)
            frontend.num_settled = num_ended

    async def submit(self, frontend: str, stream: int, requests: Sequence[Request]) -> bool:
        """Submit requests to the engine together. Returns False if the stream has ended; requests
        end with it."""
        reader = self._find(frontend, stream)
        if reader is None:
            return False
        await asyncio.to_thread(self._runtime.submit_for, reader, requests)
        if self._frontends.get(frontend) is reader:
            return True
        self._runtime.end([request.request_id for request in requests])
        return False

    async def end(self, frontend: str, stream: int, request_ids: Sequence[str]) -> None:
        """Abort requests. Without ids, the call only shows that the frontend is alive."""
        if self._find(frontend, stream) is not None and request_ids:
            self._runtime.end(request_ids)

    async def resync(self, frontend: str, stream: int) -> None:
        """The frontend has missed cache events: send it a snapshot in a later report."""
        reader = self._find(frontend, stream)
        if reader is not None:
            reader.end = None

    async def call(self, message: EngineMessage[Any]) -> Any:
        """The engine's answer to a message."""
        return await self._runtime.ask(message)

    async def check_health(self) -> None:
        """Raise EngineDead if the engine is dead. Aborts the requests of frontends that have not
        sent a message for FRONTEND_TIMEOUT_S."""
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
    """What is to be reported to a frontend. The engine's thread puts, the event loop takes."""

    def __init__(self, stream: int, notifier: OutputNotifier) -> None:
        self.stream = stream
        self.seen_at = time.monotonic()
        self.open_ids: set[str] = set()
        self._outputs: deque[RequestOutput] = deque()
        self._failures: deque[tuple[str, BaseException]] = deque()
        self._waker = notifier.running()  # signals once per step
        self._arrival = asyncio.Event()
        self.asking: asyncio.Task[None] | None = None  # asks the engine for events
        self.ended: deque[str] = deque()  # ended requests that were not reported as settled
        self.num_settled = 0  # how many of them, from the first, have all their events here
        self.end: int | None = None  # number of the next event; None: needs a snapshot first
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
        """Add events. After a gap, or if there are too many for one report, a snapshot will replace
        them."""
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
        """The ids of requests to report as settled; [] while a snapshot is needed."""
        count = 0 if self.end is None else self.num_settled
        self.num_settled -= count
        return [self.ended.popleft() for _ in range(count)]

    async def wait(self) -> None:
        """Wait until there is something to report, at most REPORT_EVERY_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REPORT_EVERY_S):  # `wait_for` may miss a cancellation
                await self._arrival.wait()
                self._arrival.clear()

    def take_outputs(self) -> list[RequestOutput]:
        return [self._outputs.popleft() for _ in range(len(self._outputs))]

    def take_failures(self) -> list[tuple[str, BaseException]]:
        return [self._failures.popleft() for _ in range(len(self._failures))]


class _ReplicaRuntime(Runtime):
    """A Runtime whose outputs go to frontends."""

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
    """Passes a request's outputs to its frontend. Decodes text only to find stop strings."""

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
