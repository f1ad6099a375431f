"""Processes of their own for what is measured: memory and libraries' state are not shared.

All are forked from one clean process that has imported the heavy libraries and computed nothing.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_PRELOADED = ("torch", "transformers.models.llama.modeling_llama")


class Child:
    """A process and the pipe to it."""

    def __init__(self, name: str, process: Any, pipe: Connection) -> None:
        self._name, self._process, self._pipe = name, process, pipe

    def send(self, message: object) -> None:
        self._pipe.send(message)

    def receive(self) -> Any:
        """Its next message. Raises RuntimeError when it has ended instead."""
        try:
            return self._pipe.recv()
        except EOFError:
            raise RuntimeError(
                f"the process of {self._name} has ended; its error is above"
            ) from None

    def join(self) -> None:
        self._process.join()


class Processes:
    """Starts processes. `num_threads` holds for every library in them."""

    def __init__(self, num_threads: int, preload: Sequence[str] = ()) -> None:
        self._num_threads = num_threads
        for name in _THREAD_VARIABLES:
            os.environ[name] = str(num_threads)
        os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*_PRELOADED, *preload])

    def start(self, name: str, function: Callable[..., None], *arguments: Any) -> Child:
        """Run `function(pipe, *arguments)` in a new process."""
        parent_end, child_end = self._context.Pipe()
        process = self._context.Process(
            target=_run, args=(self._num_threads, function, child_end, arguments), daemon=True
        )
        process.start()
        child_end.close()
        return Child(name, process, parent_end)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a function in a new process."""
        child = self.start(function.__name__, _call, function, arguments)
        result = child.receive()
        child.join()
        return result


def _run(
    num_threads: int, function: Callable[..., None], pipe: Connection, arguments: tuple[Any, ...]
) -> None:
    import torch

    torch.set_num_threads(num_threads)
    torch.set_num_interop_threads(1)
    function(pipe, *arguments)


def _call(pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    pipe.send(function(*arguments))
