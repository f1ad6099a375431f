"""`ReplicaLink`: the way from `ClusterClient` to one replica; `Replica`: its state there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from radixserve.cluster.replica import Report
from radixserve.engine.core_client import EngineFacts
from radixserve.engine.messages import Message
from radixserve.output import EngineStatus
from radixserve.request import Request


class ReplicaLink(Protocol):
    """A way to one `EngineReplica`. What its methods raise means that the replica is lost."""

    name: str

    async def facts(self) -> EngineFacts: ...

    def reports(self, frontend: str, stream: int) -> AsyncGenerator[Report, None]: ...

    async def submit(self, frontend: str, stream: int, requests: Sequence[Request]) -> bool: ...

    async def end(self, frontend: str, stream: int, request_ids: Sequence[str]) -> None: ...

    async def resync(self, frontend: str, stream: int) -> None:
        """Events were lost: send a snapshot."""
        ...

    async def call(self, message: Message[Any]) -> Any: ...


class Replica:
    """What the frontend knows of a replica while there is one."""

    def __init__(self, link: ReplicaLink) -> None:
        self.link = link
        self.task: asyncio.Task[None] | None = None
        self.stream = -1  # of its reports
        self.status: EngineStatus | None = None  # None while no reports come
        self.outbox: list[Request] = []
        self.ended: list[str] = []  # ids of requests whose callers have left
        self.lacks_snapshot = False  # one is to be asked for
        self.reports_to_wait = 0  # before a snapshot is asked for again
        self.is_due = asyncio.Event()  # something is to be sent
