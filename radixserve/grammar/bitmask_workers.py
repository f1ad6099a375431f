"""`BitmaskWorkers`: threads that compute the masks of a step; a slow mask does not delay others.

A parser releases the GIL. It cannot be stopped: a row that takes too long occupies its thread until
it ends, and its request fails.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

MASK_TIMEOUT_S = 0.5  # most time for a mask, which usually takes 20 microseconds
_CHUNK = 8  # masks per thread: fewer do not justify another thread
_NAME = "radixserve-mask"


class BitmaskTasks:
    """The masks of one step, as tasks for the workers."""

    def __init__(self, works: Sequence[Callable[[], object]]) -> None:
        self._works = works
        self.waiting = deque(range(len(works)))
        self._is_done = [False] * len(works)
        self._num_left = len(works)
        self._lock = threading.Lock()
        self.all_done = threading.Event()
        if not works:
            self.all_done.set()

    def run(self) -> None:
        """Compute one row after the other until none waits. Called in a worker."""
        while True:
            try:
                row = self.waiting.popleft()
            except IndexError:
                return
            self._works[row]()
            with self._lock:
                self._is_done[row] = True
                self._num_left -= 1
                if not self._num_left:
                    self.all_done.set()

    def finish(self) -> list[int]:
        """Wait for all rows. Returns those that take longer than MASK_TIMEOUT_S; they still run."""
        if self.all_done.wait(MASK_TIMEOUT_S):
            return []
        while self.waiting:  # for a thread, while slow rows occupy all of them
            threading.Thread(target=self.run, name=_NAME, daemon=True).start()
            if self.all_done.wait(MASK_TIMEOUT_S):
                return []
        self.all_done.wait(MASK_TIMEOUT_S)
        return [row for row, is_done in enumerate(self._is_done) if not is_done]


class BitmaskWorkers:
    """A pool of threads that compute masks."""

    def __init__(self, num_threads: int | None = None) -> None:
        self._num_threads = num_threads or min(16, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(2 * self._num_threads, _NAME)

    def start(self, works: Sequence[Callable[[], object]]) -> BitmaskTasks:
        """Start the work of each row, which must not raise. Returns the tasks to wait for."""
        batch = BitmaskTasks(works)
        for _ in range(min(self._num_threads, -(-len(works) // _CHUNK))):
            self._pool.submit(batch.run)
        return batch
