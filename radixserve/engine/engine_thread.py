"""`EngineThread`: the thread that owns the engine; other threads send it messages."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from radixserve.engine.engine import Engine
from radixserve.engine.ticket import Ticket
from radixserve.engine.trace_recorder import TraceRecorder
from radixserve.errors import EngineDead, InvalidRequest, RadixServeError
from radixserve.output import RequestOutput

T = TypeVar("T")
_log = logging.getLogger("radixserve")


class EngineThread:
    """Steps the engine while there is work and answers calls between two steps.

    When the thread ends, by `close` or by a failure, every open ticket and every pending call gets
    EngineDead.
    """

    def __init__(self, engine: Engine, recorder: TraceRecorder | None = None) -> None:
        """`recorder`: records every finished request; closed with the thread."""
        self._engine = engine
        self._recorder = recorder
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._tickets: dict[str, Ticket] = {}
        # Guards `_death` and puts into the inbox. Reentrant: the garbage collector may close a
        # forgotten stream, which calls `abandon`, in the middle of another call.
        self._lock = threading.RLock()
        self._death: EngineDead | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="radixserve-engine", daemon=True)
        self._thread.start()

    # -- called from any thread ---------------------------------------------------------------

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Queue requests so that they arrive together. Returns at once; never raises.

        All of them are queued or, for instance when an id is in use, none: then every ticket
        carries the error.
        """
        with self._lock:
            if self._death is None:
                self._inbox.put(lambda: self._add(tickets))
                return
            death = self._death
        for ticket in tickets:
            ticket.fail(_fresh(death))

    def abort(self, request_ids: Sequence[str] | None) -> int:
        """End requests (all when None) with finish_reason "abort"; returns how many were open."""
        return self.call(lambda engine: self._abort(engine, request_ids))

    def abandon(self, tickets: Sequence[Ticket]) -> None:
        """Abort the requests of a caller that has left: asynchronous, never raises."""
        with self._lock:
            if self._death is None:
                self._inbox.put(lambda: self._forget(tickets))

    def post(self, function: Callable[[Engine], object]) -> None:
        """Run `function` in the engine's thread later, or never if that has ended.

        Returns at once and never raises; may be called from the garbage collector.
        """

        def run() -> None:
            try:
                if self._death is None:
                    function(self._engine)
            except Exception:
                _log.exception("a message to the engine failed")

        with self._lock:
            if self._death is None:
                self._inbox.put(run)

    def check_alive(self) -> None:
        """Raise EngineDead when the thread has ended."""
        if self._death is not None:
            raise _fresh(self._death)

    def call(self, function: Callable[[Engine], T]) -> T:
        """Run `function` in the engine's thread between two steps and return its result."""
        future: Future[T] = Future()

        def answer() -> None:
            if self._death is not None:
                future.set_exception(self._death)
                return
            try:
                future.set_result(function(self._engine))
            except Exception as error:
                future.set_exception(error)

        with self._lock:
            if self._death is not None:
                raise _fresh(self._death)
            self._inbox.put(answer)
        return future.result()

    def close(self) -> None:
        """Fail all open requests with EngineDead and stop the thread. Idempotent."""
        self._is_closing = True
        self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- in the engine's thread ---------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._read_inbox():
                for output in self._engine.step():
                    self._deliver(output)
            death = EngineDead("the Runtime was closed")
        except BaseException as error:
            _log.exception("the engine failed")
            death = EngineDead(f"the engine failed: {error!r}")
            death.__cause__ = error
        self._die(death)

    def _read_inbox(self) -> bool:
        """Process queued messages, block while there is no work; False: stop."""
        while not self._is_closing:
            is_idle = not self._engine.has_work()
            if is_idle and self._recorder is not None:
                self._recorder.flush()
            try:
                message = self._inbox.get(block=is_idle)
            except queue.Empty:
                return True
            if message is not None:
                message()
        return False

    def _die(self, death: EngineDead) -> None:
        with self._lock:
            self._death = death
        for ticket in self._tickets.values():
            ticket.fail(_fresh(death))
        self._tickets.clear()
        try:
            self._engine.fail_all(death)
        except Exception:
            _log.exception("the engine could not release its requests")
        if self._recorder is not None:
            self._recorder.close()
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return
            if message is not None:
                message()

    def _add(self, tickets: Sequence[Ticket]) -> None:
        error: RadixServeError | None = None if self._death is None else _fresh(self._death)
        for ticket in tickets:
            if error is None and ticket.request.request_id in self._tickets:
                error = InvalidRequest(f"request id {ticket.request.request_id!r} is in use")
        for ticket in tickets:
            if error is not None:
                ticket.fail(error)
                continue
            self._engine.add(ticket.request, ticket.is_stopped)
            self._tickets[ticket.request.request_id] = ticket

    def _abort(self, engine: Engine, request_ids: Sequence[str] | None) -> int:
        wanted = list(self._tickets) if request_ids is None else request_ids
        outputs = [engine.abort(request_id) for request_id in wanted]
        for output in outputs:
            if output is not None:
                self._deliver(output)
        return sum(output is not None for output in outputs)

    def _forget(self, tickets: Sequence[Ticket]) -> None:
        """Abort these tickets' requests; compared by ticket, since an id may be in use again."""
        if self._death is None:
            ids = [ticket.request.request_id for ticket in tickets]
            pairs = zip(ids, tickets, strict=True)
            self._abort(self._engine, [i for i, ticket in pairs if self._tickets.get(i) is ticket])

    def _deliver(self, output: RequestOutput) -> None:
        ticket = self._tickets[output.request_id]
        try:
            must_stop = ticket.push(output)
        except Exception as error:  # detokenisation failed: only this request ends
            _log.exception("request %s failed", output.request_id)
            ticket.fail(_broken(error))
            self._engine.abort(output.request_id)
            del self._tickets[output.request_id]
            return
        if output.finish is not None:
            del self._tickets[output.request_id]
            if self._recorder is not None:
                self._recorder.record(
                    ticket.request, ticket.token_ids, output.finish, arrived_at=ticket.made_at
                )
        elif must_stop:
            last = self._engine.finish(output.request_id, "stop")
            if last is not None:
                self._deliver(last)


def _broken(cause: Exception) -> EngineDead:
    error = EngineDead(f"the request's text could not be made: {cause!r}")
    error.__cause__ = cause
    return error


def _fresh(death: EngineDead) -> EngineDead:
    """A copy for each caller: a raised exception collects the traceback of its thread."""
    copy = EngineDead(*death.args)
    copy.__cause__ = death.__cause__
    return copy
