"""`DaemonExecutor`: a thread that runs calls in turn and that never keeps a process alive."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

T = TypeVar("T")


class DaemonExecutor:
    """As a ThreadPoolExecutor of one thread. But the interpreter does not wait for the thread at
    its end: a disk that hangs may block it for ever."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._jobs = queue.SimpleQueue()
        self._abandoned: Future[Any] | None = None
        self._began: float | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Call it after all that was submitted before. Raises RuntimeError after `shutdown`."""
        if self._is_closed:
            raise RuntimeError(f"the thread {self._thread.name} was ended")
        future: Future[T] = Future()
        self._jobs.put((future, lambda: function(*args)))
        return future

    def abandon(self, future: Future[Any]) -> None:
        """Wait no longer for a call: it is not made, or, where it has begun, `is_stuck` until it
        ends."""
        if not future.cancel() and not future.done():
            self._abandoned = future

    @property
    def is_stuck(self) -> bool:
        """Whether the thread is in a call that was abandoned."""
        return self._abandoned is not None and not self._abandoned.done()

    @property
    def busy_s(self) -> float:
        """Seconds since the call began that the thread is in; 0 where it is in none."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def shutdown(self, timeout_s: float) -> bool:
        """End the thread after what was submitted; nothing more may be. Returns whether it has
        ended in that time."""
        self._is_closed = True
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, call = job
            if not future.set_running_or_notify_cancel():
                continue
            self._began = time.monotonic()
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            self._began = None
            del job, future, call  # they hold buffers


def within(seconds: float, future: Future[T]) -> Future[T]:
    """Returns a future with the outcome of another one, or with TimeoutError after some seconds."""
    bounded: Future[T] = Future()

    def note_late() -> None:
        with contextlib.suppress(InvalidStateError):
            bounded.set_exception(TimeoutError(f"the store has not answered for {seconds:g} s"))

    timer = threading.Timer(seconds, note_late)
    timer.daemon = True

    def note_done(future: Future[T]) -> None:
        timer.cancel()
        with contextlib.suppress(InvalidStateError):
            pass_on(future, bounded)

    timer.start()
    future.add_done_callback(note_done)
    return bounded


def pass_on(done: Future[T], other: Future[T]) -> None:
    """Give a future the outcome of one that has ended."""
    if done.cancelled():
        other.set_exception(TimeoutError("the call was given up"))
    elif (error := done.exception()) is not None:
        other.set_exception(error)
    else:
        other.set_result(done.result())
