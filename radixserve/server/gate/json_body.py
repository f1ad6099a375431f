"""The JSON body of a request: parsed once, large ones in a process of their own.

Python's JSON parser holds the interpreter for as long as it runs, also in a thread: a body of
megabytes would stop every stream.
"""

from __future__ import annotations

import asyncio
import io
import os
import pickle
import sys
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from radixserve.server.gate import json_parse
from radixserve.server.wire.errors import ApiError
from radixserve_kernels.freed_memory import return_freed_memory

_INLINE_BYTES = 32 * 1024  # the largest body that the event loop parses itself
_LARGE_BODY = 32 * 1024  # bytes
_PIPE_BYTES = 1 << 20  # that are read ahead
_BODIES_A_PROCESS = 64  # then a new one takes over, and its memory is given back
_RETURN_EVERY = 128 * 1024 * 1024  # bytes of large bodies
_RETURN_AFTER_S = 1.0  # without a large body
# Large blocks go back to the system at once; 1 arena: the process has one thread.
_MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "1048576",
}


class JsonParser:
    """Owned by the event loop. `close` ends the process of large bodies."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._num_parsed = 0  # by this process
        self._lock = asyncio.Lock()
        self._turns: dict[str, _Turn] = {}  # by tenant

    async def parse(self, parts: list[bytes | bytearray], tenant: str) -> Any:
        """The value of a JSON text in parts, which are taken out of their list. Long lists of token
        ids are of the type array("q"). Raises ApiError 400.

        Large bodies of a tenant wait for each other, so that others' wait for one of them only.
        """
        if sum(map(len, parts)) <= _INLINE_BYTES:
            body = b"".join(parts)
            parts.clear()
            try:
                return json_parse.parse(body)
            except json_parse.BodyError as error:
                raise ApiError(400, str(error), code="invalid_json") from None
        turn = self._turns.setdefault(tenant, _Turn())
        turn.num_waiting += 1
        try:
            async with turn.lock, self._lock:
                problem, value = await self._parse_large(parts)
        finally:
            turn.num_waiting -= 1
            if not turn.num_waiting:
                del self._turns[tenant]
        if problem is not None:
            raise ApiError(400, problem, code="invalid_json")
        return value

    def close(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        self._process = None

    async def _parse_large(self, parts: list[bytes | bytearray]) -> tuple[str | None, Any]:
        is_whole = False
        try:
            process = await self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(sum(map(len, parts)).to_bytes(8, "little"))
            parts.reverse()
            while parts:
                process.stdin.write(parts.pop())
                await process.stdin.drain()
            answer = _Pieces()
            while length := int.from_bytes(await process.stdout.readexactly(8), "little"):
                while length:
                    piece = await process.stdout.read(min(length, _PIPE_BYTES))
                    if not piece:
                        raise asyncio.IncompleteReadError(b"", length)
                    answer.append(piece)
                    length -= len(piece)
            is_whole = True
        except (OSError, asyncio.IncompleteReadError):
            message = "the body could not be parsed; try again"
            raise ApiError(503, message, headers={"retry-after": "1"}) from None
        finally:
            if not is_whole or self._num_parsed >= _BODIES_A_PROCESS:
                self.close()  # also where the client left: half an answer may be on its way
        problem, value = pickle.load(answer)
        return problem, value

    async def _running(self) -> asyncio.subprocess.Process:
        """The process, started where none runs."""
        if self._process is None or self._process.returncode is not None:
            self._num_parsed = 0
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                json_parse.__file__,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_PIPE_BYTES,
                env={**os.environ, **_MALLOC},
            )
        self._num_parsed += 1
        return self._process


class _Turn:
    """A tenant's turn to parse large bodies."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.num_waiting = 0


class _Pieces:
    """A file for `pickle.load` that lets go of what has been read."""

    def __init__(self) -> None:
        self._pieces: deque[memoryview] = deque()

    def append(self, piece: bytes) -> None:
        self._pieces.append(memoryview(piece))

    def read(self, size: int) -> bytes:
        data = io.BytesIO()
        while size and self._pieces:
            piece = self._pieces.popleft()
            data.write(piece[:size])
            if len(piece) > size:
                self._pieces.appendleft(piece[size:])
            size -= min(size, len(piece))
        return data.getvalue()

    def readline(self) -> bytes:
        raise pickle.UnpicklingError("no binary pickle has lines")


class FreedMemory:
    """Returns to the system what large bodies took: while they come, and when none came for a
    second. Owned by the event loop.

    The allocator keeps freed memory for the engine's steps, for each thread by itself.
    """

    def __init__(self) -> None:
        self._num_bytes = 0  # of large bodies since the last return
        self._returning: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def add(self, num_bytes: int) -> None:
        """A request with a body of so many bytes has ended."""
        if num_bytes <= _LARGE_BODY:
            return
        self._num_bytes += num_bytes
        if self._num_bytes >= _RETURN_EVERY:
            self._return()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(_RETURN_AFTER_S, self._return)

    def _return(self) -> None:
        if self._num_bytes and (self._returning is None or self._returning.done()):
            self._num_bytes = 0
            self._returning = asyncio.create_task(asyncio.to_thread(return_freed_memory))


class JsonRoute(APIRoute):
    """A route whose body is what the middleware has parsed. Large ones are checked in a thread."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_parsed(request: Request) -> Response:
            field = self.body_field
            if field is not None and has_large_body(request):
                value, errors = await asyncio.to_thread(
                    field.validate, request.scope["radixserve.json"], loc=("body",)
                )
                if errors:
                    raise RequestValidationError(errors)
                request.scope["radixserve.json"] = value  # what is checked passes again at once
            return await handle(_ParsedRequest(request.scope, request.receive))

        return handle_parsed


class _ParsedRequest(Request):
    async def json(self) -> Any:
        return self.scope["radixserve.json"]


def has_large_body(request: Request) -> bool:
    """Whether its body is so large that all work on it belongs into another thread."""
    num_bytes: int = request.scope.get("radixserve.body_bytes", 0)
    return num_bytes > _LARGE_BODY
