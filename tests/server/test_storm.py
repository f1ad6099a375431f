"""A storm of clients of every kind, many of which leave in the middle."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

from radixserve import Runtime
from tests.pacing import PATIENCE_S, wait_until
from tests.server.local_server import LocalServer

MINUTES = float(os.environ.get("RADIXSERVE_STORM_MINUTES", "20"))
WORDS = ["json", "list", "sort", "def", "module", "the", "open", "file", "path", "class"]


def storm(runtime: Runtime, seed: int, is_over: Callable[[int], bool]) -> dict[int, int]:
    """Answers by status; 0: the client left. `is_over`: whether a client ends after so many."""
    counts: dict[int, int] = {}
    with LocalServer(runtime, max_queued_requests=40, max_n=8) as served:
        port = int(served.url.rpartition(":")[2])
        asyncio.run(_clients(port, seed, is_over, counts))
        wait_until(lambda: not served.server.in_flight and runtime.status().is_idle)
        served.server.sessions.close_expired()
        assert served.client.get("/health/ready").status_code == 200
        assert served.client.get("/metrics").status_code == 200
        for number in range(8):
            served.client.delete(f"/v1/sessions/s{number}")
    return counts


async def _clients(
    port: int, seed: int, is_over: Callable[[int], bool], counts: dict[int, int]
) -> None:
    async def client(number: int) -> None:
        rng = random.Random(seed * 1_000 + number)
        for _ in itertools.takewhile(lambda turn: not is_over(turn), itertools.count()):
            path, body = request(rng)
            status = await ask(port, path, body, rng)
            counts[status] = counts.get(status, 0) + 1
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() * 0.1)

    await asyncio.gather(*map(client, range(32)))


def request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    text = " ".join(rng.choices(WORDS, k=rng.randint(1, 40)))
    sampling: dict[str, Any] = {"max_tokens": rng.randint(1, 40), "temperature": rng.random() * 2}
    if rng.random() < 0.3:
        sampling["n"] = rng.randint(1, 9)  # 9 is refused
    if rng.random() < 0.2:
        sampling["stop"] = ["e"]
    if rng.random() < 0.3:
        sampling |= {"session_id": f"s{rng.randint(0, 7)}", "supersede": rng.random() < 0.5}
    if rng.random() < 0.3:
        sampling["cache_salt"] = rng.choice("ab")
    if rng.random() < 0.5:
        sampling["stream"] = True
    kind = rng.random()
    if kind < 0.4:
        messages = [{"role": "user", "content": text}]
        return "/v1/chat/completions", {"messages": messages, **sampling}
    if kind < 0.8:
        return "/v1/completions", {"prompt": text, **sampling}
    if kind < 0.9:
        return "/v1/score", {"prompt": text, "candidates": [" a", " b c"]}
    return "/v1/cache/lookup", {"prompt": text}


async def ask(port: int, path: str, body: dict[str, Any], rng: random.Random) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
    )
    try:
        writer.write(head.encode() + content)
        if rng.random() < 0.3:  # leaves, before or after the first bytes
            if rng.random() < 0.5:
                await reader.read(1)
            else:
                await asyncio.sleep(rng.random() * 0.2)
            return 0
        if rng.random() < 0.2:
            await asyncio.sleep(rng.random())  # reads late
        answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
        status = int(answer.split(b" ", 2)[1])
        assert status in (200, 400, 409, 429), answer
        if status == 200:
            ends = (b"finish_reason", b"usage", b"reason", b'"superseded"')  # after its head
            assert any(end in answer for end in ends), answer
        return status
    finally:
        writer.close()


def check_drained(runtime: Runtime) -> None:
    runtime.check()
    stats = runtime.cache_stats()
    assert stats["running"] == stats["waiting"] == stats["pages_private"] == 0
    assert stats["pages_locked"] == 0


def test_a_short_storm(runtime: Runtime) -> None:
    counts = storm(runtime, 1, lambda turn: turn == 4)
    check_drained(runtime)
    assert counts[200] > 5
    assert counts[0] > 2


@pytest.mark.long
@pytest.mark.timeout(60 * MINUTES + 600)
def test_a_long_storm(runtime: Runtime) -> None:
    for number in range(max(1, round(MINUTES))):
        end = time.monotonic() + 60
        counts = storm(runtime, 100 + number, lambda _, end=end: time.monotonic() > end)
        check_drained(runtime)
        assert counts[200] > 50
