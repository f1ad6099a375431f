"""Replicas of the demo model on a Ray of their own, added and taken away by load."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("ray", reason="the cluster needs the extra [cluster]")

from radixserve import Runtime, SamplingParams
from radixserve.fleet.ray_serve import start_replicas
from tests.pacing import until

SETTINGS: dict[str, Any] = {"num_pages": 4000, "max_running_requests": 16}
RULE = {
    "max_replicas": 2,
    "target_ongoing_requests": 4,
    "metrics_interval_s": 0.5,
    "look_back_period_s": 1.0,
    "upscale_delay_s": 0.0,
    "downscale_delay_s": 2.0,
}
PROMPTS = [f"How do I write number {at} to a file in Python?" for at in range(6)]
PARAMS = [
    SamplingParams(max_tokens=200, temperature=(at % 2) * 0.8, seed=at, ignore_eos=True)
    for at in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with start_replicas("demo", SETTINGS, 1, autoscaling=RULE) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def expected() -> list[tuple[str, list[int]]]:
    with Runtime("demo", **SETTINGS) as single:
        return [(one.text, one.token_ids) for one in single.generate(PROMPTS, PARAMS)]


def count(runtime: Runtime) -> float:
    """Replicas that report."""
    return runtime.status().stats["pages_total"] / SETTINGS["num_pages"]


def test_load_adds_a_replica_and_less_of_it_takes_it_away(
    runtime: Runtime, expected: list[tuple[str, list[int]]]
) -> None:
    numbers = itertools.count()

    async def read(at: int) -> tuple[str, list[int]]:
        text, ids = "", []
        async for chunk in runtime.astream(PROMPTS[at], PARAMS[at]):
            text += chunk.text
            ids += chunk.token_ids
        return text, ids

    async def client(task: asyncio.Task[None]) -> None:
        """Ask again and again until the task is done."""
        while not task.done():
            at = next(numbers) % len(PROMPTS)
            assert await read(at) == expected[at]

    async def ask_until(wanted: int, num_clients: int) -> None:
        task = asyncio.create_task(until(lambda: count(runtime) == wanted))
        await asyncio.gather(task, *(client(task) for _ in range(num_clients)))

    async def run() -> None:
        await ask_until(2, 12)
        await ask_until(1, 3)

    assert count(runtime) == 1
    asyncio.run(run())
    assert count(runtime) == 1
