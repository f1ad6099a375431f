"""`LoopWaker`: wakes tasks of an asyncio loop from the engine's thread, many with one signal."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable


class LoopWaker:
    """Calls functions in a loop. A call between threads costs a system call and wakes the loop:
    all that a step has for the tasks of one loop goes with one.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, wakers: LoopWakers) -> None:
        self._loop = weakref.ref(loop)
        self._wakers = wakers
        self._calls: deque[Callable[[], None]] = deque()
        self._is_scheduled = False

    def call(self, function: Callable[[], None]) -> None:
        """Have `function` called in the loop soon. From any thread; not after the loop's end."""
        self._calls.append(function)
        if self._is_scheduled:
            return
        self._is_scheduled = True
        if not self._wakers.defer(self):
            self.wake()

    def wake(self) -> None:
        loop = self._loop()
        if loop is None:
            return
        try:
            loop.call_soon_threadsafe(self._run)
        except RuntimeError:  # the loop was closed meanwhile
            if not loop.is_closed():
                raise

    def _run(self) -> None:
        self._is_scheduled = False  # first: a call that comes now is either seen below or signalled
        while self._calls:
            self._calls.popleft()()


class LoopWakers:
    """One LoopWaker a loop. While they are held, calls wait for the release: a loop that is woken
    takes Python's lock from the engine's thread, which has a step to prepare.
    """

    def __init__(self) -> None:
        self._is_held = False
        self._deferred: deque[LoopWaker] = deque()
        self._by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWaker] = (
            weakref.WeakKeyDictionary()
        )

    def running(self) -> LoopWaker:
        """The waker of the running loop."""
        loop = asyncio.get_running_loop()
        waker = self._by_loop.get(loop)
        if waker is None:
            waker = self._by_loop[loop] = LoopWaker(loop, self)
        return waker

    def hold(self) -> None:
        self._is_held = True

    def release(self) -> None:
        """Wake the loops for which calls came meanwhile."""
        self._is_held = False
        while True:
            try:
                waker = self._deferred.popleft()
            except IndexError:  # also where another thread was faster
                return
            waker.wake()

    def defer(self, waker: LoopWaker) -> bool:
        """False where nothing is held: it is to wake its loop itself. From any thread."""
        if not self._is_held:
            return False
        self._deferred.append(waker)
        if not self._is_held:  # released meanwhile, perhaps before the waker was added
            self.release()
        return True
