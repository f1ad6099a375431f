"""Two replicas of the demo model on a Ray of their own: pip install "radixserve[cluster,serve]"."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="the cluster needs the extra [cluster]")
pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

import httpx

from radixserve import Runtime, SamplingParams
from radixserve.fleet.ray_serve import start_replicas
from tests.pacing import PATIENCE_S, wait_until
from tests.server.local_server import LocalServer

SETTINGS: dict[str, Any] = {"num_pages": 6000, "max_running_requests": 64}
BODY = {"model": "demo", "max_tokens": 48, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def single() -> Iterator[Runtime]:
    with Runtime("demo", **SETTINGS) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with start_replicas("demo", SETTINGS, 2, silence_s=4.0) as runtime:
        wait_for_replicas(runtime)
        yield runtime


def wait_for_replicas(runtime: Runtime) -> None:
    wait_until(lambda: runtime.status().stats["pages_total"] == 2 * SETTINGS["num_pages"])


def replica_pids() -> list[int]:
    """Of this process's Ray."""
    parents: dict[int, int] = {}
    replicas = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name = (folder / "cmdline").read_bytes()
            parents[int(folder.name)] = int(
                (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
            )
        except OSError:  # it has ended
            continue
        if b"ServeReplica" in name:
            replicas.append(int(folder.name))
    return [pid for pid in replicas if os.getpid() in ancestors(pid, parents)]


def ancestors(pid: int, parents: dict[int, int]) -> Iterator[int]:
    while pid in parents:
        pid = parents[pid]
        yield pid


async def read(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> str:
    """The text of a streamed completion."""
    text = ""
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                found = httpx.Response(200, content=line[6:]).json()
                assert "error" not in found, found
                text += "".join(choice["text"] for choice in found["choices"])
    return text


def bodies() -> list[dict[str, Any]]:
    return [
        {**BODY, "prompt": f"How do I open file {at} in Python?", "seed": at,
         "temperature": (at % 2) * 0.8}
        for at in range(50)
    ]  # fmt: skip


def expected(single: Runtime) -> list[str]:
    asked = bodies()
    params = [
        SamplingParams(
            max_tokens=48, ignore_eos=True, seed=one["seed"], temperature=one["temperature"]
        )
        for one in asked
    ]
    return [one.text for one in single.generate([one["prompt"] for one in asked], params)]


def test_the_openai_client_gets_its_answers(runtime: Runtime) -> None:
    openai = pytest.importorskip("openai", reason="pip install openai")
    with LocalServer(runtime) as served:
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none")
        question = [{"role": "user", "content": "How do I sort a list?"}]
        answer = client.chat.completions.create(model="demo", messages=question, max_tokens=20)
        assert answer.choices[0].message.content
        stream = client.chat.completions.create(
            model="demo", messages=question, max_tokens=20, stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert text
        assert served.client.get("/metrics").status_code == 200
        assert served.client.get("/health/ready").status_code == 200


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_every_client_gets_its_whole_answer_when_a_replica_ends(
    runtime: Runtime, single: Runtime, number: signal.Signals
) -> None:
    wanted = expected(single)
    wait_for_replicas(runtime)
    first = replica_pids()[0]

    async def end_one() -> None:
        """When they are at work."""
        while runtime.status().running < 2:
            await asyncio.sleep(0.005)
        os.kill(first, number)

    async def run(url: str) -> list[str]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=PATIENCE_S, limits=limits) as client:
            ending = asyncio.create_task(end_one())
            found = await asyncio.gather(*(read(client, url, body) for body in bodies()))
            await ending
            return found

    with LocalServer(runtime) as served:
        assert asyncio.run(run(served.url)) == wanted
    if number == signal.SIGSTOP:  # Ray waits for it
        os.kill(first, signal.SIGKILL)
    wait_for_replicas(runtime)  # another one took its place
    assert runtime.generate(["How do I sort a list?"], SamplingParams(max_tokens=5))[0].token_ids
