"""`DaemonExecutor`: a thread that runs calls in turn and that never keeps a process alive."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class DaemonExecutor:
    """As a ThreadPoolExecutor of one thread. But the interpreter does not wait for the thread at
    its end: a disk that hangs may block it for ever."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._jobs = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Call it after all that was submitted before."""
        future: Future[T] = Future()
        self._jobs.put((future, lambda: function(*args)))
        return future

    def shutdown(self, timeout_s: float) -> bool:
        """End the thread after what was submitted; nothing more may be. Returns whether it has
        ended in that time."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, call = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del job, future, call  # they hold buffers
