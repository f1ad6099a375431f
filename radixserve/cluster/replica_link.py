"""`ReplicaLink`: the way from `ClusterClient` to one replica; `Replica`: its state there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from radixserve.cluster.replica import ReplicaReport
from radixserve.engine.core_client import EngineFacts
from radixserve.engine.messages import Message
from radixserve.output import EngineStatus
from radixserve.request import Request

_KEEP_S = 5.0  # between two signs of life to a replica
_REPORTS_TO_A_SNAPSHOT = 20  # after them it is asked for again


class ReplicaLink(Protocol):
    """A way to one `EngineReplica`. What its methods raise means that the replica is lost."""

    name: str

    async def facts(self) -> EngineFacts: ...

    def reports(self, frontend: str, stream: int) -> AsyncGenerator[ReplicaReport, None]: ...

    async def submit(self, frontend: str, stream: int, requests: Sequence[Request]) -> bool: ...

    async def end(self, frontend: str, stream: int, request_ids: Sequence[str]) -> None: ...

    async def resync(self, frontend: str, stream: int) -> None:
        """Events were lost: send a snapshot."""
        ...

    async def call(self, message: Message[Any]) -> Any: ...


class Replica:
    """A replica as the frontend knows it, and what is still to be sent to it."""

    def __init__(self, link: ReplicaLink) -> None:
        self.link = link
        self.task: asyncio.Task[None] | None = None
        self.stream = -1  # of its reports
        self.status: EngineStatus | None = None  # None while no reports come
        self._outbox: list[Request] = []
        self._ended: list[str] = []  # ids of requests whose callers have left
        self._lacks_snapshot = False  # one is to be asked for
        self._reports_to_wait = 0  # before a snapshot is asked for again
        self._is_due = asyncio.Event()  # something is to be sent
        self._is_removed = False

    def submit(self, request: Request) -> None:
        """Send it a request."""
        self._outbox.append(request)
        self._is_due.set()

    def end(self, request_id: str) -> None:
        """Tell it that a request's caller has left."""
        self._ended.append(request_id)
        self._is_due.set()

    def note_report(self, status: EngineStatus, *, lacks_events: bool) -> None:
        """Where events were lost a snapshot is asked for, not with every report."""
        self.status = status
        self._reports_to_wait -= 1
        if lacks_events and self._reports_to_wait < 0:
            self._lacks_snapshot, self._reports_to_wait = True, _REPORTS_TO_A_SNAPSHOT
            self._is_due.set()

    def note_lost(self) -> None:
        """Its reports have ended: forget what was to be sent."""
        self.status = None
        self._outbox.clear()
        self._ended.clear()

    def remove(self) -> list[Request]:
        """It is taken away: no call reaches it any more. Returns the requests not sent."""
        self._is_removed = True
        unsent, self._outbox = self._outbox, []
        return unsent

    async def send(self, frontend: str) -> None:
        """Pass on what is due, and a sign of life, until the replica knows the stream no more."""
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
