"""A server in this process: the real application under a real uvicorn, in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Coroutine
from typing import Any, Self

import httpx
import uvicorn

from radixserve import Runtime
from radixserve.server.app import make_app
from radixserve.server.config import ServerConfig
from radixserve.server.gate.state import AppState
from radixserve.server.gate.tenants import Tenants
from radixserve.server.process import listen, uvicorn_config
from radixserve.server.wire.errors import ApiError
from tests.pacing import PATIENCE_S, held, wait_until


class LocalServer:
    """Serves `runtime` until it is left; `client` is an httpx client for it."""

    def __init__(
        self,
        runtime: Runtime | None,
        tenants: Tenants | None = None,
        *,
        send_buffer: int | None = None,
        **settings: Any,
    ) -> None:
        """`send_buffer`: bytes that the system keeps for each connection."""
        config = ServerConfig(**{"port": 0, **settings})
        self.server = AppState(config, "demo", tenants or Tenants())
        if runtime is not None:
            self.server.set_runtime(runtime)
        self._sock = listen(config)
        if send_buffer is not None:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        self.url = f"http://127.0.0.1:{self._sock.getsockname()[1]}"
        # None is closed while its client sends on it.
        self._uvicorn = uvicorn.Server(uvicorn_config(self.server, timeout_keep_alive=600))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.loop: asyncio.AbstractEventLoop | None = None

    def _run(self) -> None:
        async def serve() -> None:
            self.loop = asyncio.get_running_loop()
            self._uvicorn.capture_signals = _no_signals  # type: ignore[method-assign]
            await self._uvicorn.serve(sockets=[self._sock])

        asyncio.run(serve())

    def __enter__(self) -> Self:
        self._thread.start()
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE_S)
        wait_until(lambda: self._uvicorn.started)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self._uvicorn.should_exit = True
        self._uvicorn.force_exit = True
        self.server.json_parser.close()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run it in the server's loop."""
        assert self.loop is not None
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)

    def connect(self, path: str, body: dict[str, Any], buffer: int | None = None) -> socket.socket:
        """A raw connection that has asked; `buffer`: bytes that its system keeps for it."""
        sock = socket.socket()
        if buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        sock.settimeout(PATIENCE_S)
        sock.connect(self.address)
        content = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
        )
        sock.sendall(head.encode() + content)
        return sock

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._sock.getsockname()
        return host, port

    @property
    def num_connections(self) -> int:
        return len(self._uvicorn.server_state.connections)

    @property
    def post_paths(self) -> list[str]:
        """Of every route that takes a body."""
        paths = make_app(self.server).openapi()["paths"]
        return [path for path, methods in paths.items() if "post" in methods]

    def post(self, path: str, body: Any, **options: Any) -> Any:
        """The answer's JSON; fails where the status is not 200."""
        answer = self.client.post(path, json=body, **options)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a stream, without the last one, which says that it is done."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert answer.status_code == 200, lines
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert lines.pop() == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    def break_stream(self, path: str, body: dict[str, Any]) -> list[str]:
        """The lines of a stream whose request fails after its first one."""

        async def fail() -> None:
            (one,) = self.server.in_flight
            one.end(ApiError(500, "it broke"))

        with (
            held(self.server.runtime),
            self.client.stream("POST", path, json={**body, "stream": True}) as answer,
        ):
            lines = answer.iter_lines()
            first = next(lines)
            self.call(fail())
            return [line for line in (first, *lines) if line]


class _no_signals:  # noqa: N801
    """Signals are the test run's."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass
