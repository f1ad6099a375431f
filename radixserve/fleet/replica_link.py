"""`ReplicaLink`: a connection to one replica; `Replica`: the client's record of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from radixserve.engine.core_client import EngineFacts
from radixserve.engine.messages import EngineMessage
from radixserve.fleet.replica import ReplicaReport
from radixserve.reports import EngineStatus
from radixserve.request import Request

_KEEPALIVE_S = 5.0  # longest time between two messages to a replica
_REPORTS_TO_A_SNAPSHOT = 20  # a snapshot that has not come after so many is requested again


class ReplicaLink(Protocol):
    """A connection to an `EngineReplica`, with its methods. An exception means that the replica is
    lost."""

    name: str

    async def facts(self) -> EngineFacts: ...

    def reports(self, frontend: str, stream: int) -> AsyncGenerator[ReplicaReport, None]: ...

    async def submit(self, frontend: str, stream: int, requests: Sequence[Request]) -> bool: ...

    async def end(self, frontend: str, stream: int, request_ids: Sequence[str]) -> None: ...

    async def resync(self, frontend: str, stream: int) -> None:
        """Ask for a snapshot of the cache, since events were lost."""
        ...

    async def call(self, message: EngineMessage[Any]) -> Any: ...


class Replica:
    """A frontend's record of a replica, with the messages that wait to be sent to it."""

    def __init__(self, link: ReplicaLink) -> None:
        self.link = link
        self.task: asyncio.Task[None] | None = None
        self.stream = -1  # number of the stream of its reports
        self.status: EngineStatus | None = None  # of its last report; None while it is lost
        self.stats: Mapping[str, Any] = {}  # of its last report; counters only while it is lost
        self._outbox: list[Request] = []
        self._ended: list[str] = []  # ids of requests to end there
        self._lacks_snapshot = False  # whether to request a snapshot
        self._reports_to_wait = 0  # reports before a snapshot is requested again
        self._is_due = asyncio.Event()  # set when a message waits to be sent
        self._is_removed = False

    def submit(self, request: Request) -> None:
        """Queue a request to be sent."""
        self._outbox.append(request)
        self._is_due.set()

    def end(self, request_id: str) -> None:
        """Queue the end of a request whose caller has left."""
        self._ended.append(request_id)
        self._is_due.set()

    def note_report(self, status: EngineStatus, *, lacks_events: bool) -> None:
        """Take in a report's status. If cache events were lost, request a snapshot, again after
        every _REPORTS_TO_A_SNAPSHOT reports."""
        self.status, self.stats = status, status.stats
        self._reports_to_wait -= 1
        if lacks_events and self._reports_to_wait < 0:
            self._lacks_snapshot, self._reports_to_wait = True, _REPORTS_TO_A_SNAPSHOT
            self._is_due.set()

    def note_lost(self) -> None:
        """The replica was lost: drop the messages that were not sent."""
        self.status = None
        self._outbox.clear()
        self._ended.clear()

    def remove(self) -> list[Request]:
        """Send no more messages. Returns the requests that were not sent."""
        self._is_removed = True
        unsent, self._outbox = self._outbox, []
        return unsent

    async def send(self, frontend: str) -> None:
        """Send messages as they become due, and at least one every _KEEPALIVE_S. Returns when the
        replica says that the stream has ended."""
        link, stream = self.link, self.stream
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_KEEPALIVE_S):  # `wait_for` may miss a cancellation
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
