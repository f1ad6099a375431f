"""`serve`: the server's process: its socket, loading the model, signals, and shutdown.

SIGTERM drains: `Process._drain` refuses new requests and waits for those in flight. An engine that
has failed ends the process, too, with exit code 1, so that a supervisor starts it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import uvicorn

from radixserve.api.progress import loading_bar
from radixserve.api.runtime import Runtime
from radixserve.errors import EngineDead, InvalidRequest, RadixServeError
from radixserve.sampling_defaults import describe_sampling
from radixserve.server.app import build_main_validators, make_app
from radixserve.server.config import ServerConfig
from radixserve.server.gate.http_protocol import ConnectionCounts, bounded_protocol
from radixserve.server.gate.state import AppState
from radixserve.server.gate.tenant_threads import TenantThreads
from radixserve.server.gate.tenants import Tenants
from radixserve.server.wire.errors import ApiError

_log = logging.getLogger("radixserve")
_BACKLOG = 2048
_SWITCH_INTERVAL_S = 0.0005  # of the GIL between the threads of engine and loop; default: 5 ms
_SWEEP_EVERY_S = 5.0
_TERMINATED = 128 + signal.SIGTERM
_WATCH_EVERY_S = 0.5  # whether the engine lives
_ANSWER_S = 5.0  # for the answers of open requests after the engine has ended
_END_S = 1.0  # for the errors of those that `shutdown_timeout` ended


def serve(model: str, engine: Mapping[str, Any], config: ServerConfig) -> int:
    """Listen, load the model, and answer requests until a signal. Returns the exit code.

    Raises InvalidRequest for a wrong setting, ModelNotSupported for a model that cannot be run,
    OSError for a port in use or a model that does not exist.
    """
    tenants = Tenants.load(config.api_key_file)
    sock = listen(config)
    with sock:
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        settings = {**engine, "tenant_weights": tenants.weights} if tenants else engine
        return _run(Process(model, settings, config, tenants, sock))


def _run(process: Process) -> int:
    try:
        import uvloop
    except ImportError:  # not available on this system
        return asyncio.run(process.run())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(process.run())


def listen(config: ServerConfig) -> socket.socket:
    """A listening socket at the configured address. Raises OSError, which names the address."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    sock = socket.socket(family)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _keep_alive(sock)
        sock.bind((config.host, config.port))
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        reason = error.strerror or str(error)
        raise OSError(f"cannot listen at {config.host}:{config.port}: {reason}") from None
    return sock


def _keep_alive(sock: socket.socket) -> None:
    """Probe silent connections, which inherit these options. A client whose machine is gone is
    noticed within a minute or so, and address translators do not forget one that waits for an
    answer."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def uvicorn_config(server: AppState, **options: Any) -> uvicorn.Config:
    """uvicorn's configuration for the application. `options` override ours."""
    config = server.config
    counts = ConnectionCounts(config.max_connections, config.max_connections_per_address)
    return uvicorn.Config(
        make_app(server),
        **{
            "log_config": None,
            "access_log": False,
            "lifespan": "off",
            "server_header": False,
            "timeout_keep_alive": 75,
            "http": bounded_protocol(counts, config.write_timeout),
            "ws": "none",
            **options,
        },
    )


class Process:
    """Runs the server. While the model is being loaded, only health is answered; other requests get
    503."""

    def __init__(
        self,
        model: str,
        engine: Mapping[str, Any],
        config: ServerConfig,
        tenants: Tenants,
        sock: socket.socket,
    ) -> None:
        self._model = model
        self._engine = dict(engine)
        self._sock = sock
        self._config = config
        self.server = AppState(config, model, tenants)
        settings = uvicorn_config(self.server)
        self._uvicorn = _Uvicorn(settings)
        self._stopping: asyncio.Task[None] | None = None
        self._exit_code = 0

    async def run(self) -> int:
        """Load the model and serve until a signal. Returns the exit code; raises what loading the
        model raised."""
        asyncio.get_running_loop().set_default_executor(TenantThreads())
        self._take_signals()
        loading = asyncio.create_task(self._load())
        serving = asyncio.create_task(self._uvicorn.serve(sockets=[self._sock]))
        sweeping = asyncio.create_task(self._sweep())
        watching = asyncio.create_task(self._watch())
        try:
            await asyncio.wait({loading, serving}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                loading.result()  # raises the error of `_load`
            await serving
            return self._exit_code
        finally:
            sweeping.cancel()
            watching.cancel()
            self._uvicorn.should_exit = True
            with contextlib.suppress(asyncio.CancelledError):
                await serving
            gc.unfreeze()
            self.server.json_parser.close()
            self.server.grammar_threads.close()
            if self.server.is_loaded:
                await asyncio.to_thread(self.server.runtime.close)

    async def _load(self) -> None:
        runtime = await asyncio.to_thread(self._load_runtime)
        build_main_validators()
        self._take_signals()  # replaces Ray's handler, which aborts 3 seconds after SIGTERM
        self.server.set_runtime(runtime)
        host, port = self._sock.getsockname()[:2]
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        _log.info("tool calls: %s", self.server.parser_configs.choice)
        _log.info("serving %s at http://%s", self.server.model_name, where)
        _log.info("sampling by default: %s", describe_sampling(runtime.sampling_defaults))
        if (store := self._engine.get("kv_store")) and not self._config.replicas:
            threading.Thread(
                target=_warm, args=(runtime, store), name="radixserve-warm", daemon=True
            ).start()

    def _load_runtime(self) -> Runtime:
        """Load the model. The garbage collector is off until all is imported. It skips what was
        imported, and later the loaded model, which never become garbage."""
        if not self._config.replicas:
            import_module("radixserve.runner.factory")  # and PyTorch
        gc.freeze()
        gc.enable()
        runtime = self._make_runtime()
        gc.collect()
        gc.freeze()
        return runtime

    def _make_runtime(self) -> Runtime:
        config = self._config
        if not config.replicas:
            with loading_bar(self._model):
                return Runtime(self._model, **self._engine)
        try:
            from radixserve.fleet.ray_serve import start_replicas
        except ImportError as error:
            raise InvalidRequest(
                f'replicas need more packages ({error}): pip install "radixserve[cluster]"'
            ) from None
        return start_replicas(
            self._model,
            self._engine,
            config.replicas,
            autoscaling=config.autoscaling,
            address=config.ray_address,
        )

    async def _sweep(self) -> None:
        """Close sessions and branches whose leases have ended, every few seconds."""
        while True:
            await asyncio.sleep(_SWEEP_EVERY_S)
            if self.server.is_loaded:
                self.server.sessions.close_expired()
                self.server.branches.close_expired()

    async def _watch(self) -> None:
        """End the process, with exit code 1, once the engine has ended: no request can be answered
        any more. The open ones get their errors first."""
        while not self.server.is_loaded or self.server.runtime.status().is_alive:
            await asyncio.sleep(_WATCH_EVERY_S)
        if self._stopping is not None:
            return  # it was closed by a signal
        self.server.is_draining = True
        self._exit_code = 1
        _log.critical("the engine has ended; the server ends with exit code 1")
        await self._wait_for_answers(_ANSWER_S)
        self._uvicorn.should_exit = True
        self._uvicorn.force_exit = True

    # -- shutdown -----------------------------------------------------------------------------

    def _take_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)

    def _stop(self) -> None:
        """The first signal drains; the second one, or one before the model is loaded, exits at
        once."""
        if self._stopping is not None or not self.server.is_loaded:
            os._exit(_TERMINATED)
        self._stopping = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        """Refuse new requests with 503, end responses in the background, whose answers could not be
        read any more, wait up to `shutdown_timeout` until the other requests are answered, then end
        the rest with an error."""
        server = self.server
        server.is_draining = True
        error = ApiError(503, "the server was shut down before the answer ended", code="shutdown")
        server.background.end_all(error)
        _log.info("shutting down: %d requests in flight", len(server.in_flight))
        await self._wait_for_answers(self._config.shutdown_timeout)
        for request in list(server.in_flight):
            request.end(error)
        await self._wait_for_answers(_END_S)
        self._uvicorn.should_exit = True
        self._uvicorn.force_exit = True

    async def _wait_for_answers(self, seconds: float) -> None:
        """Wait until no request is being read or answered and all answers are sent, at most so many
        seconds."""
        server, loop = self.server, asyncio.get_running_loop()
        connections: Any = self._uvicorn.server_state.connections
        deadline = loop.time() + seconds
        while loop.time() < deadline and (
            server.in_flight
            or server.admitted
            or any(each.transport.get_write_buffer_size() for each in connections)
        ):
            await asyncio.sleep(0.02)


def _warm(runtime: Runtime, store: str) -> None:
    """Load what the kv_store has into free pages, the last used first, while no request is open.
    A thread of its own: a server that is never idle would occupy one of the pool for good."""
    began = time.monotonic()
    try:
        num_tokens = runtime.load_cache(store, while_idle=True)
    except EngineDead:  # the server was stopped meanwhile
        return
    except (RadixServeError, OSError) as error:
        _log.warning("kv_store: nothing more is loaded at the start: %s", error)
        return
    seconds = time.monotonic() - began
    _log.info("kv_store: %d tokens loaded in %.1f s", num_tokens, seconds)


class _Uvicorn(uvicorn.Server):
    """uvicorn's server without its signal handlers: `Process` has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
