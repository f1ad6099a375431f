"""`OutputNotifier`: wakes the tasks of asyncio loops for new outputs, many by one signal."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections import deque
from collections.abc import Callable

_log = logging.getLogger("radixserve")


class LoopWaker:
    """Calls functions in one loop.

    A call between threads costs a system call and wakes the loop. All calls that a step has for
    the tasks of one loop share one signal.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, notifier: OutputNotifier) -> None:
        self._loop = weakref.ref(loop)
        self._notifier = notifier
        self._calls: deque[Callable[[], None]] = deque()
        self._is_scheduled = False

    def call(self, function: Callable[[], None]) -> None:
        """Call `function` in the loop soon, unless the loop has ended. From any thread."""
        self._calls.append(function)
        if self._is_scheduled:
            return
        self._is_scheduled = True
        if not self._notifier.defer(self):
            self.wake()

    def wake(self) -> None:
        """Signal the loop. Never raises: it is called in the engine's thread."""
        loop = self._loop()
        if loop is None:
            return
        try:
            loop.call_soon_threadsafe(self._run)
        except Exception:
            if not loop.is_closed():  # else it was closed meanwhile
                self._is_scheduled = False  # the next output tries again
                _log.exception("a loop cannot be woken for new outputs")

    def _run(self) -> None:
        self._is_scheduled = False  # first: a concurrent call is either seen below or signalled
        while self._calls:
            call = self._calls.popleft()
            try:
                call()
            except Exception:  # of one reader: the others get their outputs
                _log.exception("a reader of outputs has failed")


class OutputNotifier:
    """A `LoopWaker` for each loop whose tasks read outputs.

    While the notifier is paused, signals are deferred: a loop that is woken takes Python's lock
    from the engine's thread, which has a step to prepare.
    """

    def __init__(self) -> None:
        self.is_paused = False
        self._deferred: deque[LoopWaker] = deque()
        self._by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWaker] = (
            weakref.WeakKeyDictionary()
        )

    def running(self) -> LoopWaker:
        """Returns the waker of the running loop."""
        loop = asyncio.get_running_loop()
        waker = self._by_loop.get(loop)
        if waker is None:
            waker = self._by_loop[loop] = LoopWaker(loop, self)
        return waker

    def pause(self) -> None:
        """Defer all signals until `resume`."""
        self.is_paused = True

    def resume(self) -> None:
        """Wake the loops whose signals were deferred. Idempotent."""
        self.is_paused = False
        while True:
            try:
                waker = self._deferred.popleft()
            except IndexError:  # also where another thread was faster
                return
            waker.wake()

    def defer(self, waker: LoopWaker) -> bool:
        """Keep the waker's signal for `resume`. Returns False, and keeps nothing, unless the
        notifier is paused. From any thread."""
        if not self.is_paused:
            return False
        self._deferred.append(waker)
        if not self.is_paused:  # resumed meanwhile, perhaps before the waker was added
            self.resume()
        return True
