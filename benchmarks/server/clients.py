"""The same requests, of a server over raw sockets, read with as little work as can be, and of a
`Runtime`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from radixserve import Runtime, SamplingParams


@dataclass(frozen=True)
class Client:
    """How a stream is read. `pause_s`: between two reads; `max_events`: leaves after so many."""

    prompt: Sequence[int]
    max_tokens: int
    pause_s: float = 0.0
    max_events: float = float("inf")


@dataclass
class Stream:
    """What one client saw."""

    first_s: float = 0.0  # until the first event
    num_events: int = 0
    is_done: bool = False


async def read_stream(port: int, client: Client) -> Stream:
    """Ask, and read to the end."""
    body = {"prompt": list(client.prompt), "max_tokens": client.max_tokens}
    content = json.dumps({**body, "ignore_eos": True, "stream": True, "temperature": 0}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    stream, start, last = Stream(), time.perf_counter(), b""
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
    )
    try:
        writer.write(head.encode() + content)
        while stream.num_events < client.max_events and (part := await reader.read(1 << 16)):
            stream.num_events += part.count(b"data: {")
            if stream.num_events and not stream.first_s:
                stream.first_s = time.perf_counter() - start
            last = (last + part)[-64:]
            if client.pause_s:
                await asyncio.sleep(client.pause_s)
        stream.is_done = b"[DONE]" in last
        return stream
    finally:
        writer.close()


def read_streams(port: int, clients: Iterable[Client]) -> tuple[float, list[Stream]]:
    """All at once; the seconds until the last has ended."""

    async def read() -> list[Stream]:
        return await asyncio.gather(*(read_stream(port, client) for client in clients))

    start = time.perf_counter()
    streams = asyncio.run(read())
    return time.perf_counter() - start, streams


# -- of a Runtime; each returns seconds ------------------------------------------------------------


def generate(rt: Runtime, prompts: list[list[int]], tokens: int) -> float:
    start = time.perf_counter()
    rt.generate(prompts, _params(tokens), progress=False)
    return time.perf_counter() - start


def astream(rt: Runtime, prompts: list[list[int]], tokens: int) -> float:
    """A task a request, text with every token."""

    async def read(prompt: list[int]) -> None:
        async for _ in rt.astream(prompt, _params(tokens)):
            pass

    async def read_all() -> None:
        await asyncio.gather(*map(read, prompts))

    start = time.perf_counter()
    asyncio.run(read_all())
    return time.perf_counter() - start


def first_token(rt: Runtime, prompt: list[int], tokens: int) -> float:
    start = time.perf_counter()
    for _ in rt.stream(prompt, _params(tokens)):
        return time.perf_counter() - start
    raise AssertionError("no token came")


def _params(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
