"""Adapters in the engine: which of them are in memory, and the requests that wait for one.

An adapter that was loaded lies in memory, in the runner, while there is room for it. The least
recently used ones leave; one with open requests never does. A request whose adapter is not in
memory is held until a thread has read it again. While requests are held, later ones with adapters
wait behind them, so that the first finds room.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

from radixserve.adapters.table import Adapter, AdapterInfo, AdapterTable
from radixserve.checks import shown
from radixserve.daemon_call import call_in_thread
from radixserve.engine.engine import Engine
from radixserve.engine.extension import EngineExtension
from radixserve.engine.messages import EngineMessage
from radixserve.errors import EngineDead, InvalidRequest, request_failed
from radixserve.request import Request
from radixserve.scheduler.extension import SchedulerExtension, SchedulerParts

_WAIT_S = 0.005  # for an adapter that is being read, where there is nothing else to do


@dataclass(frozen=True, slots=True)
class InstallAdapter(EngineMessage[None]):
    """Let requests name an adapter that was read. `weights`: what the runner packed. `replaces`:
    also where another adapter has the name, which open requests keep; it is dropped after them."""

    info: AdapterInfo
    weights: Any
    replaces: bool = False


@dataclass(frozen=True, slots=True)
class UnloadAdapter(EngineMessage[None]):
    """Take an adapter's name from new requests. Answers when the open ones have ended, and the
    adapter's K/V was dropped."""

    name: str


class _Reading(NamedTuple):
    """An adapter that is read again."""

    adapter: Adapter
    weights: Future[Any]


class AdapterExtension(EngineExtension):
    """Loads and unloads. It plugs `_Residency`, which the engine calls in each step, in when the
    first adapter comes."""

    name = "adapters"

    def __init__(
        self, engine: Engine, table: AdapterTable, read: Callable[[Adapter], Any], max_bytes: int
    ) -> None:
        """read(adapter): what the runner packs of its folder, see `read_again`. It is called in
        another thread. max_bytes: of all adapters in memory."""
        self._engine, self._table = engine, table
        self._residency = _Residency(engine, table, read, max_bytes)
        self._is_plugged_in = False

    def answer(self, message: EngineMessage[Any], answer: Any) -> Any:
        if isinstance(message, InstallAdapter):
            self._install(message)
        elif isinstance(message, UnloadAdapter):
            return self._residency.retire(self._table.remove(message.name))
        return answer

    def _install(self, message: InstallAdapter) -> None:
        residency = self._residency
        if message.info.num_bytes > residency.max_bytes:
            raise InvalidRequest(
                f"the adapter {shown(message.info.name)} takes {message.info.num_bytes} bytes, "
                f"adapter_memory is {residency.max_bytes}"
            )
        old = self._table.named.get(message.info.name)
        adapter = self._table.add(message.info, replaces=message.replaces)
        if not self._is_plugged_in:
            self._is_plugged_in = True
            self._engine.scheduler.plug_in(residency.open_requests)
            self._engine.extend(residency, is_first=True)
        if residency.make_room(adapter):
            residency.put(adapter, message.weights)
        if old is not None:
            residency.retire(old)

    def stats(self) -> dict[str, Any]:
        residency = self._residency
        return {
            "loaded": len(self._table.named),
            "in_memory": len(residency.resident),
            "bytes_in_memory": residency.num_bytes,
            "read_again": residency.num_read,
            "held_requests": residency.num_held,
        }


class _OpenRequests(SchedulerExtension):
    """Knows the scheduler's requests."""

    def attach(self, parts: SchedulerParts) -> None:
        self._requests = parts.requests

    def numbers(self) -> set[int]:
        """Of the adapters that requests have. O(requests)."""
        return numbers_of(state.request for state in self._requests.values())


def numbers_of(requests: Any) -> set[int]:
    """The numbers of the adapters of requests."""
    return {request.adapter.number for request in requests if request.adapter is not None}


class _Residency(EngineExtension):
    """Which adapters are in memory. The engine's thread makes all calls."""

    name = "adapters in memory"

    def __init__(
        self, engine: Engine, table: AdapterTable, read: Callable[[Adapter], Any], max_bytes: int
    ) -> None:
        self.max_bytes = max_bytes
        self.resident: dict[int, Adapter] = {}  # by number, the last used at the end
        self.open_requests = _OpenRequests()
        self.num_read = 0
        self._engine, self._table, self._read = engine, table, read
        self._held: dict[str, tuple[Request, Callable[[int], None]]] = {}  # in their order
        self._reading: _Reading | None = None
        self._retiring: list[tuple[Adapter, Future[None]]] = []

    @property
    def num_bytes(self) -> int:
        return sum(adapter.info.num_bytes for adapter in self.resident.values())

    @property
    def num_held(self) -> int:
        return len(self._held)

    # -- of the engine ------------------------------------------------------------------------

    def hold(self, request: Request, queued_at: float, release: Callable[[int], None]) -> bool:
        del queued_at
        if request.adapter is None:
            return False
        if not self._held and request.adapter.number in self.resident:
            self._touch(request.adapter.number)
            return False
        self._held[request.request_id] = request, release
        return True

    def let_go(self, request_id: str) -> None:
        self._held.pop(request_id, None)

    def before_step(self, *, may_wait: bool) -> None:
        if self._held:
            self._release_held(may_wait=may_wait)

    def after_step(self, *, is_idle: bool) -> None:
        del is_idle
        if self._retiring:
            in_use = self._in_use(with_own=True)
            for adapter, future in list(self._retiring):
                if adapter.number not in in_use:
                    self._retiring.remove((adapter, future))
                    self._drop(adapter)
                    future.set_result(None)

    @property
    def has_work(self) -> bool:
        return bool(self._held or self._retiring)

    def check(self) -> None:
        assert self.num_bytes <= self.max_bytes, "adapters take more memory than they may"

    def close(self, timeout_s: float) -> None:
        del timeout_s
        for _, future in self._retiring:
            future.set_exception(EngineDead("the engine has ended"))
        self._retiring.clear()

    # -- memory -------------------------------------------------------------------------------

    def put(self, adapter: Adapter, weights: Any) -> None:
        """Keep it in memory, where there is room."""
        self._engine.runner.put_adapter(adapter.number, weights)
        self.resident[adapter.number] = adapter

    def make_room(self, adapter: Adapter) -> bool:
        """Drop the least recently used adapters without open requests until there is room for this
        one. False, and none is dropped, if that is not enough."""
        if adapter.number in self.resident:
            return False
        in_use, free, victims = self._in_use(), self.max_bytes - self.num_bytes, []
        for number, other in self.resident.items():
            if free >= adapter.info.num_bytes:
                break
            if number not in in_use:
                victims.append(number)
                free += other.info.num_bytes
        if free < adapter.info.num_bytes:
            return False
        for number in victims:
            self._forget(number)
        return True

    def retire(self, adapter: Adapter) -> Future[None]:
        """Drop its K/V and its memory once no request has it."""
        future: Future[None] = Future()
        self._retiring.append((adapter, future))
        self.after_step(is_idle=False)
        return future

    def _drop(self, adapter: Adapter) -> None:
        named = self._table.named.get(adapter.info.name)
        if named is not None and named.number == adapter.number:
            return  # it was loaded again meanwhile
        if adapter.number in self.resident:
            self._forget(adapter.number)
        for namespace in self._engine.cache.namespaces():
            if namespace.adapter == adapter.key:
                self._engine.reset_cache(str(namespace))

    def _forget(self, number: int) -> None:
        del self.resident[number]
        self._engine.runner.put_adapter(number, None)

    def _touch(self, number: int) -> None:
        self.resident[number] = self.resident.pop(number)

    def _in_use(self, *, with_own: bool = False) -> set[int]:
        """The numbers of the adapters of open requests; with_own: of those held here, too."""
        held = self._engine.extensions.held_requests()
        others = [request for request in held if with_own or request.request_id not in self._held]
        return self.open_requests.numbers() | numbers_of(others)

    # -- held requests ------------------------------------------------------------------------

    def _release_held(self, *, may_wait: bool) -> None:
        """Let requests go in their order, as far as their adapters are in memory."""
        while self._held:
            request, release = next(iter(self._held.values()))
            assert request.adapter is not None
            number = request.adapter.number
            if number not in self.resident and not self._bring(number, may_wait=may_wait):
                return
            if self._held.pop(request.request_id, None) is not None:  # else it has failed
                self._touch(number)
                release(0)

    def _bring(self, number: int, *, may_wait: bool) -> bool:
        """Read an adapter again, and put it in memory. False while that is not done."""
        adapter, reading = self._table.numbered[number], self._reading
        if reading is None:
            if not self.make_room(adapter):
                return False
            weights = call_in_thread("radixserve-adapter", self._read, adapter)
            reading = self._reading = _Reading(adapter, weights)
        with contextlib.suppress(TimeoutError, Exception):
            reading.weights.result(_WAIT_S if may_wait else 0.0)
        if not reading.weights.done():
            return False
        self._reading = None
        if (cause := reading.weights.exception()) is not None:
            self._fail_held(reading.adapter, cause)
        elif self.make_room(reading.adapter):  # else another one was loaded meanwhile
            self.put(reading.adapter, reading.weights.result())
            self.num_read += 1
        return number in self.resident

    def _fail_held(self, adapter: Adapter, cause: BaseException) -> None:
        message = f"the adapter {shown(adapter.info.name)} cannot be read again: {cause}"
        for request, _ in list(self._held.values()):
            if request.adapter is not None and request.adapter.number == adapter.number:
                self._engine.fail(request.request_id, request_failed(message, cause))
