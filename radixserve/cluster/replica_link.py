"""`ReplicaLink`: a connection to one replica; `Replica`: the client's record of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from radixserve.cluster.replica import ReplicaReport
from radixserve.engine.core_client import EngineFacts
from radixserve.engine.messages import EngineMessage
from radixserve.output import EngineStatus
from radixserve.request import Request

_KEEP_S = 5.0  # between two signs of life to a replica
_REPORTS_TO_A_SNAPSHOT = 20  # after them it is requested again


class ReplicaLink(Protocol):
    """A connection to one `EngineReplica`. An exception from any method means that it is lost."""

    name: str

    async def facts(self) -> EngineFacts: ...

    def reports(self, frontend: str, stream: int) -> AsyncGenerator[ReplicaReport, None]: ...

    async def submit(self, frontend: str, stream: int, requests: Sequence[Request]) -> bool: ...

    async def end(self, frontend: str, stream: int, request_ids: Sequence[str]) -> None: ...

    async def resync(self, frontend: str, stream: int) -> None:
        """Events were lost: send a snapshot."""
        ...

    async def call(self, message: EngineMessage[Any]) -> Any: ...


class Replica:
    """A frontend's record of a replica, with the messages still to be sent to it."""

    def __init__(self, link: ReplicaLink) -> None:
        self.link = link
        self.task: asyncio.Task[None] | None = None
        self.stream = -1  # of its reports
        self.status: EngineStatus | None = None  # None without reports
        self._outbox: list[Request] = []
        self._ended: list[str] = []  # ids of requests that no caller waits for
        self._lacks_snapshot = False  # a snapshot is to be requested
        self._reports_to_wait = 0  # before a snapshot is requested again
        self._is_due = asyncio.Event()  # something is to be sent
        self._is_removed = False

    def submit(self, request: Request) -> None:
        """Send it a request."""
        self._outbox.append(request)
        self._is_due.set()

    def end(self, request_id: str) -> None:
        """End a request that no caller waits for."""
        self._ended.append(request_id)
        self._is_due.set()

    def note_report(self, status: EngineStatus, *, lacks_events: bool) -> None:
        """Take in a report's status. Where events were lost, ask for a snapshot now and then."""
        self.status = status
        self._reports_to_wait -= 1
        if lacks_events and self._reports_to_wait < 0:
            self._lacks_snapshot, self._reports_to_wait = True, _REPORTS_TO_A_SNAPSHOT
            self._is_due.set()

    def note_lost(self) -> None:
        """Its reports have ended: drop the messages that were not sent."""
        self.status = None
        self._outbox.clear()
        self._ended.clear()

    def remove(self) -> list[Request]:
        """Send nothing more to it. Returns the requests that were not sent."""
        self._is_removed = True
        unsent, self._outbox = self._outbox, []
        return unsent

    async def send(self, frontend: str) -> None:
        """Send due messages, else signs of life, until the replica no longer knows the stream."""
        link, stream = self.link, self.stream
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_KEEP_S):  # `wait_for` may miss a cancellation
                    await self._is_due.wait()
            self._is_due.clear()
            if self._is_removed:
                continue
            requests, self._outbox = self._outbox, []
            ended, self._ended = self._ended, []
            if requests and not await link.submit(frontend, stream, requests):
                return
            if self._lacks_snapshot:
                self._lacks_snapshot = False
                await link.resync(frontend, stream)
            if ended or not requests:
                await link.end(frontend, stream, ended)
