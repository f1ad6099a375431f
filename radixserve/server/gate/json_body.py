"""The JSON body of a request: it is parsed once, a large one in a child process.

A JSON parser keeps the GIL while it runs, even in another thread: a body of the largest size would
stall every stream for more than 50 ms, whichever parser (benchmarks/bench_json_bodies.py).
"""

from __future__ import annotations

import asyncio
import io
import os
import pickle
import sys
import warnings
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic.warnings import UnsupportedFieldAttributeWarning
from starlette.requests import Request
from starlette.responses import Response

from radixserve.server.gate import json_parse
from radixserve.server.wire.errors import ApiError
from radixserve_kernels.freed_memory import return_freed_memory

_INLINE_BYTES = 32 * 1024  # the largest body that the event loop parses itself
_LARGE_BODY = 32 * 1024  # bytes; larger bodies are validated and translated in threads
_PIPE_BYTES = 1 << 20  # buffered at most between the two processes
_BODIES_PER_PROCESS = 64  # then a new process is started, so that the system gets the memory back
_RETURN_EVERY = 128 * 1024 * 1024  # bytes of large bodies between two returns of freed memory
_RETURN_AFTER_S = 1.0  # without a large body, after which freed memory is returned, too
# The child returns large blocks to the system at once; it has one thread and needs one arena.
_MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "1048576",
}


class JsonParser:
    """Parses small bodies in the event loop and large ones in a child process, which is started on
    demand. Owned by the event loop."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._num_parsed = 0  # bodies, by the current process
        self._lock = asyncio.Lock()
        self._turns: dict[str, _Turn] = {}  # by tenant

    async def parse(self, parts: list[bytes | bytearray], tenant: str) -> Any:
        """The value of the JSON text in `parts`, which is emptied. Long lists of token ids become
        array("q"). Raises ApiError: 400 for wrong JSON, 503 if the child process ended.

        A tenant's large bodies wait for each other, so that another tenant's body waits for at
        most one of them.
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
        """Kill the child process. The next large body starts a new one."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        self._process = None

    async def _parse_large(self, parts: list[bytes | bytearray]) -> tuple[str | None, Any]:
        """(error message or None, value), from the child process. Raises ApiError 503."""
        is_whole = False
        try:
            process = await self._running_process()
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
            if not is_whole or self._num_parsed >= _BODIES_PER_PROCESS:
                self.close()  # after a cancellation, too: the pipe may contain half an answer
        problem, value = pickle.load(answer)
        return problem, value

    async def _running_process(self) -> asyncio.subprocess.Process:
        """The child process, which is started if it is not running."""
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
    """The lock under which a tenant's large bodies are parsed one after another."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.num_waiting = 0  # bodies, the one that is being parsed included


class _Pieces:
    """A file object for `pickle.load` that frees what has been read."""

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
        raise pickle.UnpicklingError("a binary pickle does not have lines")


class FreedMemory:
    """Returns the memory of large bodies to the operating system: after every _RETURN_EVERY bytes
    of them, and when none has come for _RETURN_AFTER_S. Owned by the event loop.

    The allocator keeps freed memory, separately for each thread, so that the engine's steps get it
    again quickly. What large bodies freed would otherwise stay there.
    """

    def __init__(self) -> None:
        self._num_bytes = 0  # of large bodies since memory was last returned
        self._returning: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def add(self, num_bytes: int) -> None:
        """Count a request that has ended and had a body of `num_bytes`."""
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
    """A route that takes its body from `RequestMiddleware`, which has parsed it. Large bodies are
    validated in a thread. The validator is built for the first body."""

    _is_built = False

    def build_validator(self) -> None:
        """Build what validates the body, in some ten milliseconds."""
        if self.body_field is not None and not self._is_built:
            self._is_built = True
            with warnings.catch_warnings():  # FastAPI gives a body's field an alias
                warnings.simplefilter("ignore", UnsupportedFieldAttributeWarning)
                self.body_field.validate({})

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_parsed(request: Request) -> Response:
            self.build_validator()
            field = self.body_field
            if field is not None and has_large_body(request):
                value, errors = await asyncio.to_thread(
                    field.validate, request.scope["radixserve.json"], loc=("body",)
                )
                if errors:
                    raise RequestValidationError(errors)
                request.scope["radixserve.json"] = value  # a model: validating it again is cheap
            return await handle(_ParsedRequest(request.scope, request.receive))

        return handle_parsed


class _ParsedRequest(Request):
    async def json(self) -> Any:
        return self.scope["radixserve.json"]


def has_large_body(request: Request) -> bool:
    """Whether a request's body is so large that work on it must not run in the event loop."""
    num_bytes: int = request.scope.get("radixserve.body_bytes", 0)
    return num_bytes > _LARGE_BODY
