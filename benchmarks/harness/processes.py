"""Processes of their own for what is measured: memory and libraries' state are not shared.

`Processes` are forked from one clean process that has imported the heavy libraries and computed
nothing; a `Resident` is an object in one of them, a `ServerProcess` a program that answers over
HTTP. `take_turns` runs what is compared.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from operator import methodcaller
from pathlib import Path
from typing import Any, Self, TypeVar

K, T = TypeVar("K"), TypeVar("T")
_ROOT = Path(__file__).parents[2]
_START_S = 120  # a server must answer by then
_PRELOADED = ("torch", "transformers.models.llama.modeling_llama")


class Processes:
    """Starts processes. `num_threads` holds for every library in them."""

    def __init__(self, num_threads: int, preload: Sequence[str] = ()) -> None:
        self._num_threads = num_threads
        os.environ.update(
            OMP_NUM_THREADS=str(num_threads),
            MKL_NUM_THREADS=str(num_threads),
            HF_HUB_OFFLINE="1",
            TOKENIZERS_PARALLELISM="false",
        )
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*_PRELOADED, *preload])

    def start(self) -> ProcessPoolExecutor:
        """One new process; it runs what is submitted, one after another."""
        return ProcessPoolExecutor(1, self._context, _set_threads, (self._num_threads,))

    def call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """The result of a function in a new process."""
        with self.start() as process:
            return process.submit(function, *arguments, **named).result()


class Resident:
    """What `make(*arguments, **named)` returns, in a new process until the end of the block, which
    closes it."""

    def __init__(
        self, processes: Processes, make: Callable[..., Any], *arguments: Any, **named: Any
    ) -> None:
        """Raises what `make` raises."""
        self._process = processes.start()
        try:
            self._process.submit(_keep, make, *arguments, **named).result()
        except BaseException:
            self._process.shutdown()
            raise

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """`function(it, *arguments)`, there."""
        return self._process.submit(_call_with_kept, function, *arguments).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:
            self.call(methodcaller("close"))


class ServerProcess:
    """The program `command`, started with --port and a free one; raises RuntimeError with what it
    printed if it ends before it answers at the path `health`."""

    def __init__(self, command: Sequence[str], health: str, log: Path, **environment: str) -> None:
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [*command, "--port", str(self.port)],
                env={**os.environ, **environment},
                stdout=output,
                stderr=output,
            )
        self.pid = self._process.pid
        end = time.monotonic() + _START_S
        while self._process.poll() is None and time.monotonic() < end:
            try:
                urllib.request.urlopen(self.address + health, timeout=5).close()
                return
            except OSError:
                time.sleep(0.1)
        self.close()
        raise RuntimeError(f"{command[0]} does not answer:\n{log.read_text()}")

    def close(self) -> int:
        """Its exit status."""
        self._process.terminate()
        return self._process.wait(60)


def free_port() -> int:
    """Returns a free port below those that the system gives to connections: where nothing listens
    yet, a connection to one of those may get the same port, and is then connected to itself."""
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    end = int(given.read_text().split()[0]) if given.exists() else 32768
    while True:
        port = random.randrange(min(10_000, end // 2), end)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def python_path() -> str:
    """PYTHONPATH of programs that import radixserve, also where it is not installed."""
    given = os.environ.get("PYTHONPATH")
    folders = [str(_ROOT / "kernels"), str(_ROOT), *([given] if given else [])]
    return os.pathsep.join(folders)


def take_turns(
    operations: Mapping[K, Callable[[int], T]], rounds: int, warm_up: int = 0
) -> dict[K, list[T]]:
    """The results of every operation, called with the number of the round; all are called once a
    round, in reversed order in every other one. Those of the first `warm_up` rounds are dropped."""
    results: dict[K, list[T]] = {name: [] for name in operations}
    for number in range(warm_up + rounds):
        for name in operations if number % 2 == 0 else [*operations][::-1]:
            result = operations[name](number)
            if number >= warm_up:
                results[name].append(result)
    return results


_kept: list[Any] = []  # in the process of a `Resident`


def _keep(make: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    _kept.append(make(*arguments, **named))


def _call_with_kept(function: Callable[..., T], *arguments: Any) -> T:
    return function(_kept[0], *arguments)


def _set_threads(num_threads: int) -> None:
    import torch

    torch.set_num_threads(num_threads)
    torch.set_num_interop_threads(1)
