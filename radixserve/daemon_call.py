"""`call_in_thread`: a call that never keeps the process alive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def call_in_thread(
    name: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> Future[T]:
    """Returns what `function` returns, from a daemon thread of that name."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
