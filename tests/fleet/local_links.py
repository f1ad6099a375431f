"""Replicas in this process, and a Runtime over them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any

import pytest

from radixserve import EngineConfig, Runtime, SamplingParams
from radixserve.engine.core_client import EngineFacts
from radixserve.engine.messages import EngineMessage
from radixserve.fleet.cluster_client import ClusterClient
from radixserve.fleet.cluster_runtime import ClusterRuntime
from radixserve.fleet.replica import EngineReplica, ReplicaReport
from radixserve.fleet.replica_router import ReplicaRouter
from radixserve.reports import EngineStatus
from radixserve.request import Request
from tests.pacing import PATIENCE_S, wait_until

SETTINGS: dict[str, Any] = {"num_pages": 4000, "max_running_requests": 16}
PROMPTS = [f"How do I write number {at} to a file in Python?" for at in range(12)]
PARAMS = [
    SamplingParams(max_tokens=40, temperature=(at % 3) * 0.5, seed=at, ignore_eos=True)
    for at in range(len(PROMPTS))
]


class Link:
    """To a replica in this process, which can be taken away."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.replica = EngineReplica("demo", SETTINGS)
        self.is_cut = self.hangs = False
        self.cut_after: int | None = None  # outputs
        self.spoil: Callable[[ReplicaReport], ReplicaReport] = lambda report: report
        self.num_outputs = self.num_resyncs = self.num_requests = 0

    def check(self) -> None:
        if self.is_cut:
            raise ConnectionError("the replica is gone")

    async def facts(self) -> EngineFacts:
        self.check()
        return await self.replica.facts()

    async def reports(self, frontend: str, stream: int) -> AsyncGenerator[ReplicaReport, None]:
        self.check()
        async for report in self.replica.reports(frontend, stream):
            while self.hangs:
                await asyncio.sleep(0.05)
            self.check()
            yield self.spoil(report)
            self.num_outputs += len(report.outputs)
            if self.cut_after is not None and self.num_outputs >= self.cut_after:
                self.cut_after, self.is_cut = None, True

    async def submit(self, frontend: str, stream: int, requests: Sequence[Request]) -> bool:
        self.check()
        self.num_requests += len(requests)
        return await self.replica.submit(frontend, stream, requests)

    async def end(self, frontend: str, stream: int, request_ids: Sequence[str]) -> None:
        self.check()
        await self.replica.end(frontend, stream, request_ids)

    async def resync(self, frontend: str, stream: int) -> None:
        self.check()
        self.num_resyncs += 1
        await self.replica.resync(frontend, stream)

    async def call(self, message: EngineMessage[Any]) -> Any:
        self.check()
        return await self.replica.call(message)


class SilentLink(Link):
    """To a replica that never answers, without an engine."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.requests: list[Request] = []

    async def facts(self) -> Any:
        return None

    async def reports(self, *_: Any) -> AsyncGenerator[ReplicaReport, None]:
        status = EngineStatus(
            is_alive=True,
            is_idle=True,
            stepped_at=0.0,
            running=0,
            waiting=0,
            waiting_tokens=0,
            stats={"pages_total": 1},
        )
        yield ReplicaReport([], [], status)
        await asyncio.sleep(PATIENCE_S)

    async def submit(self, _: str, __: int, requests: Sequence[Request]) -> bool:
        self.requests += requests
        return True

    async def end(self, *_: Any) -> None:
        pass


@pytest.fixture
def links() -> Iterator[list[Link]]:
    links = [Link("a"), Link("b")]
    yield links
    for link in links:
        link.replica.close()


@contextlib.contextmanager
def scaled_cluster(
    links: Sequence[Link], silence_s: float = PATIENCE_S, drain_s: float = PATIENCE_S
) -> Iterator[tuple[ClusterClient, ClusterRuntime]]:
    """The client is told by the test which replicas there are; `links` at the beginning."""
    client = ClusterClient(ReplicaRouter(), silence_s=silence_s, drain_s=drain_s)
    client.set_replicas(links)
    with ClusterRuntime(client, EngineConfig(**SETTINGS), lambda: None) as runtime:
        wait_for_links(runtime, len(links))
        yield client, runtime


@contextlib.contextmanager
def cluster(links: Sequence[Link], silence_s: float = PATIENCE_S) -> Iterator[ClusterRuntime]:
    with scaled_cluster(links, silence_s) as (_, runtime):
        yield runtime


def wait_for_links(runtime: Runtime, count: int) -> None:
    """Until so many replicas report, and no other one."""
    wait_until(lambda: runtime.status().stats.get("pages_total") == count * SETTINGS["num_pages"])
