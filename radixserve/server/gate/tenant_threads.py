"""`TenantThreads`: asyncio's thread pool, with a limit per tenant."""

from __future__ import annotations

import os
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

_NUM_THREADS = min(32, (os.cpu_count() or 1) + 4)  # as in asyncio's default executor
_THREADS_PER_TENANT = max(2, _NUM_THREADS // 4)  # so that other tenants find a free thread

# Set in the task of a request: work that the task runs in a thread counts for this tenant.
tenant_of_task: ContextVar[str | None] = ContextVar("tenant_of_task", default=None)


class TenantThreads(ThreadPoolExecutor):
    """The event loop's default executor: threads for tokenising, rendering and checking large
    requests. Chats with pictures have one of their own.

    A tenant uses at most _THREADS_PER_TENANT threads at a time; its further work waits for one of
    them. Work without a tenant is not limited.
    """

    def __init__(self) -> None:
        super().__init__(_NUM_THREADS, thread_name_prefix="radixserve-http")
        self._lock = threading.Lock()
        self._num_running: Counter[str] = Counter()  # by tenant: work that the pool has been given
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
        """Give the pool the tenant's next waiting work, if the tenant has a thread left."""
        with self._lock:
            waiting = self._waiting[tenant]
            work = None
            if waiting and self._num_running[tenant] < _THREADS_PER_TENANT:
                work = waiting.popleft()
                self._num_running[tenant] += 1
            if not waiting:
                del self._waiting[tenant]
        if work is None:
            return
        try:
            super().submit(self._run, work)
        except RuntimeError:  # the pool was shut down
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
