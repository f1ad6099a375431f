"""`TenantThreads`: asyncio's thread pool, with a limit per tenant."""

from __future__ import annotations

import os
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

_NUM_THREADS = min(32, (os.cpu_count() or 1) + 4)  # asyncio's own number
_THREADS_OF_A_TENANT = max(2, _NUM_THREADS // 4)  # at a time: others find a free thread

# Set in the task that answers a request: the work that it gives to a thread is this tenant's.
tenant_of_task: ContextVar[str | None] = ContextVar("tenant_of_task", default=None)


class TenantThreads(ThreadPoolExecutor):
    """For `loop.set_default_executor`: tokenising, rendering and checking of large requests.

    Work beyond a tenant's threads waits for that tenant's own. Work of no tenant is not bounded.
    """

    def __init__(self) -> None:
        super().__init__(_NUM_THREADS, thread_name_prefix="radixserve-http")
        self._lock = threading.Lock()
        self._num_running: Counter[str] = Counter()  # by tenant, in the pool's own queue or running
        self._waiting: defaultdict[str, deque[_Work]] = defaultdict(deque)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        tenant = tenant_of_task.get()
        if tenant is None:
            return super().submit(fn, *args, **kwargs)
        work = _Work(tenant, lambda: fn(*args, **kwargs))
        with self._lock:
            self._waiting[tenant].append(work)
        self._start(tenant)
        return work.future

    def _start(self, tenant: str) -> None:
        """Hand on what the tenant may run now."""
        with self._lock:
            waiting = self._waiting[tenant]
            work = None
            if waiting and self._num_running[tenant] < _THREADS_OF_A_TENANT:
                work = waiting.popleft()
                self._num_running[tenant] += 1
            if not waiting:
                del self._waiting[tenant]
        if work is None:
            return
        try:
            super().submit(self._run, work)
        except RuntimeError:  # the server ends
            work.future.cancel()

    def _run(self, work: _Work) -> None:
        try:
            work.run()
        finally:
            with self._lock:
                self._num_running[work.tenant] -= 1
                if not self._num_running[work.tenant]:
                    del self._num_running[work.tenant]
            self._start(work.tenant)


class _Work:
    """A call that waits for a thread, and its result."""

    def __init__(self, tenant: str, call: Callable[[], Any]) -> None:
        self.tenant = tenant
        self.future: Future[Any] = Future()
        self._call = call

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._call()
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)
