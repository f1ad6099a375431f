"""A client that sends all that may hurt others, until it is ended: `hostile_client.py PORT KEY`.

Prints each answer that is a 5xx of the server's own. Runs at the lowest priority: a real one has a
processor of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import httpx

_BOMBS: list[Any] = [
    {"hints": [{}] * 200_000},
    {"stop_token_ids": ["a"] * 400_000, "prompt": "a"},
    {"prompt": [[1]] * 1024, "n": 128},
    {"prompt": [[1]] * 512, "max_tokens": 1},
    {"prompt": "a", "cache_salt": "s" * 1_000_000},
    {"prompt": "a", "priority": 1_000_000, "max_tokens": 50},
    {f"field{number}": number for number in range(50_000)},
    {"prompt": "long words " * 200_000},
    {"prompt": list(range(100_000, 400_000))},
    {"prompt": "a", "bad_words": ["bad"] * 1_000, "max_tokens": 1},
    {"prompt": "a", "logit_bias": {str(number): 1 for number in range(4_000)}, "max_tokens": 1},
]
Asked = tuple[str, str, Any]  # method, path, body
_SAID = [{"role": "user", "content": "a"}] * 5_000


def _schema(number: int) -> Asked:
    """Which no one has compiled yet."""
    properties = {f"p{number}_{index}": {"type": "string"} for index in range(300)}
    schema = {"type": "object", "properties": properties}
    body = {"prompt": "a", "max_tokens": 1, "structured_outputs": {"json": schema}}
    return "POST", "/v1/completions", body


_KINDS: list[Callable[[int], Asked]] = [
    _schema,
    _schema,
    lambda number: ("GET", f"/v1/cache/tree?max_nodes=10000&depth={number % 60}", None),
    lambda number: ("POST", "/v1/cache/snapshot", {"opened": [number]}),
    lambda number: (
        "POST",
        "/v1/completions",
        {"prompt": f"session {number}", "max_tokens": 1, "session_id": f"s{number}"},
    ),
    lambda number: (
        "POST",
        "/v1/cache/hints",
        {"hints": [{"verb": "pin", "prompt": f"pinned {number} " * 50}] * 60},
    ),
    lambda _: ("POST", "/v1/chat/completions", {"messages": _SAID, "max_tokens": 1}),
    lambda _: ("POST", "/tokenize", {"prompt": "words and words " * 2_000}),
    lambda _: ("POST", "/v1/score", {"prompt": "a", "candidates": ["b c d"] * 500}),
    lambda _: ("POST", "/v1/messages", {"model": "demo", "messages": _SAID, "max_tokens": 1}),
]
_ALLOWED_5XX = {503}  # it says when to come again


async def _ask(client: httpx.AsyncClient, numbers: itertools.count[int]) -> None:
    contents = [json.dumps(bomb) for bomb in _BOMBS]  # once: this program shares the processor
    for number in numbers:
        kind = number % (len(_BOMBS) + len(_KINDS))
        if kind < len(_BOMBS):
            method, path, content = "POST", "/v1/completions", contents[kind]
        else:
            method, path, body = _KINDS[kind - len(_BOMBS)](number)
            content = json.dumps(body) if body is not None else ""
        answer = await client.request(method, path, content=content or None)
        if answer.status_code >= 500 and answer.status_code not in _ALLOWED_5XX:
            print(answer.status_code, path, content[:80], answer.text[:200], flush=True)


async def _leave(client: httpx.AsyncClient) -> None:
    """Streams that are left after their first event."""
    body = {"prompt": "a", "max_tokens": 1_000, "stream": True, "ignore_eos": True}
    while True:
        with contextlib.suppress(httpx.HTTPError):
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for _ in answer.aiter_bytes():
                    break
        await asyncio.sleep(0.1)


async def _dawdle(port: int, start: bytes) -> None:
    """Connections whose requests come a byte at a time, and never whole."""
    while True:
        with contextlib.suppress(OSError):
            connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
            for _, writer in connections:
                writer.write(start)
            for _ in range(50):
                await asyncio.sleep(0.1)
                for _, writer in connections:
                    writer.write(b"x")
            for _, writer in connections:
                writer.close()


async def main(port: int, key: str) -> None:
    os.nice(19)
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    body = (
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
        "content-type: application/json\r\ncontent-length: 30000000\r\n\r\n"
    )
    numbers = itertools.count()
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=120, limits=limits
    ) as client:
        await asyncio.gather(
            *(_ask(client, numbers) for _ in range(8)),
            *(_leave(client) for _ in range(4)),
            _dawdle(port, b"GET / HTTP/1.1\r\nx: "),
            _dawdle(port, body.encode()),
        )


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
