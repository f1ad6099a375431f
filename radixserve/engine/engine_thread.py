"""`EngineThread`: the thread that owns the engine; other threads send it messages."""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from radixserve.engine.engine import Engine
from radixserve.engine.message_handler import handle_message
from radixserve.engine.messages import (
    AbandonRequests,
    AbortRequests,
    AddRequests,
    Answer,
    Message,
)
from radixserve.engine.output_collector import OutputCollector
from radixserve.engine.trace_recorder import TraceRecorder
from radixserve.errors import (
    EngineDead,
    InvalidRequest,
    RadixServeError,
    fresh,
    request_failed,
)
from radixserve.output import EngineStatus, RequestOutput

_log = logging.getLogger("radixserve")
_MANY_OUTPUTS = 8
_STATS_EVERY_S = 0.25  # while it steps
_FORKED = (
    "this process was forked from the one that runs the engine, and its thread did not come along: "
    "make the Runtime in the process that uses it, or start processes by multiprocessing's "
    '"spawn" instead of "fork"'
)


class Readers(Protocol):
    """What wakes the tasks that read the outputs."""

    def hold(self) -> None:
        """Wake none until the release."""
        ...

    def release(self) -> None:
        """Wake those whose outputs came meanwhile. Can be called again."""
        ...


class EngineThread:
    """Steps the engine while there is work and carries out messages between two steps.

    When the thread ends, by `close` or by a failure, every open request and every pending call gets
    EngineDead.
    """

    def __init__(
        self,
        engine: Engine,
        recorder: TraceRecorder | None = None,
        readers: Readers | None = None,
    ) -> None:
        """`recorder`: records every finished request; closed with the thread."""
        self._engine = engine
        self._recorder = recorder
        self._readers = readers
        if readers is not None:
            engine.call_before_wait(readers.release)
        # Messages with where their answer goes; None where it is time to stop.
        self._inbox: queue.SimpleQueue[tuple[Message[Any], Future[Any] | None] | None] = (
            queue.SimpleQueue()
        )
        self._submissions = itertools.count()
        self._submitted: dict[
            int, Sequence[OutputCollector]
        ] = {}  # by submission, until it is added
        self._collectors: dict[str, OutputCollector] = {}  # by request id; the engine's thread only
        # Guards `_death` and puts into the inbox. Reentrant: the garbage collector may close a
        # forgotten stream, which calls `abandon`, in the middle of another call.
        self._lock = threading.RLock()
        self._death: EngineDead | None = None
        self._is_closing = self._is_forked = False
        self._num_unread = [0, 0]  # requests in the inbox and their tokens, under the lock
        self._status = EngineStatus(True, True, time.monotonic(), 0, 0, 0, engine.stats())
        self._stats_at = 0.0
        self._thread = threading.Thread(target=self._run, name="radixserve-engine", daemon=True)
        self._thread.start()
        _threads.add(self)

    # -- called from any thread ---------------------------------------------------------------

    def submit(self, collectors: Sequence[OutputCollector]) -> None:
        """Queue requests so that they arrive together. Returns at once; never raises.

        All of them are queued or, for instance when an id is in use, none: then every collector
        carries the error.
        """
        number = next(self._submissions)
        for collector in collectors:
            collector.submission = number
        self._submitted[number] = collectors
        with self._lock:
            self._count_unread(collectors, 1)
        if not self.post(AddRequests(number, tuple(collector.request for collector in collectors))):
            self._refuse(self._submitted.pop(number))

    def abort(self, request_ids: Sequence[str] | None) -> int:
        """End requests (all when None) with finish_reason "abort"; returns how many were open."""
        ids = None if request_ids is None else tuple(request_ids)
        return self.call(AbortRequests(ids))

    def abandon(self, collectors: Sequence[OutputCollector]) -> None:
        """End requests whose caller has left: returns at once, never raises."""
        if collectors:
            self.post(AbandonRequests(collectors[0].submission))

    def post(self, message: Message[Any]) -> bool:
        """Have `message` carried out soon; False where the thread has ended.

        Returns at once and never raises; may be called from the garbage collector.
        """
        with self._lock:
            if self._death is None:
                self._inbox.put((message, None))
            return self._death is None

    def status(self) -> EngineStatus:
        """What the thread last said, and what it has not read yet. Does not wait for it."""
        with self._lock:
            status, (requests, tokens) = self._status, self._num_unread
            is_alive = self._death is None and self._thread.is_alive()
        return status._replace(
            is_alive=is_alive,
            waiting=status.waiting + requests,
            waiting_tokens=status.waiting_tokens + tokens,
        )

    def check_alive(self) -> None:
        """Raise EngineDead when the thread has ended."""
        if self._death is not None:
            raise fresh(self._death)

    def call(self, message: Message[Answer]) -> Answer:
        """Have `message` carried out between two steps and return its answer."""
        return self.ask(message).result()

    def ask(self, message: Message[Answer]) -> Future[Answer]:
        """Have `message` carried out between two steps; its answer comes in the future."""
        reply: Future[Answer] = Future()
        with self._lock:
            if self._death is not None:
                raise fresh(self._death)
            self._inbox.put((message, reply))
        return reply

    def close(self) -> None:
        """End everything that is open with EngineDead and stop the thread. Can be called again."""
        if self.is_forked:
            return
        self._is_closing = True
        self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- in a process that was forked ----------------------------------------------------------

    @property
    def is_forked(self) -> bool:
        """Whether this is the copy in a forked process, where no thread runs."""
        return self._is_forked

    def note_fork(self) -> None:
        """In the forked process: every call gets EngineDead. What was held is the parent's."""
        self._is_forked, self._death = True, EngineDead(_FORKED)
        self._lock = threading.RLock()  # another thread may have held the old one
        self._inbox, self._submitted = queue.SimpleQueue(), {}

    # -- in the engine's thread ---------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._read_inbox():
                self._step()
                self._note_status(is_idle=False)
            death = EngineDead("the Runtime was closed")
        except EngineDead as error:
            _log.error("the engine ends: %s", error)
            death = error
        except BaseException as error:
            _log.exception("the engine failed")
            death = EngineDead(f"the engine failed: {error!r}")
            death.__cause__ = error
        self._die(death)

    def _step(self) -> None:
        """A frame of its own: while the thread waits it holds no output, and no error of one.

        Those that read many outputs would keep this thread from preparing the next step: they are
        woken when that computes.
        """
        outputs = self._engine.step()
        self._wake_readers()  # where the step did not wait
        if self._readers is not None and len(outputs) >= _MANY_OUTPUTS:
            self._readers.hold()
        for output in outputs:
            self._deliver(output)

    def _wake_readers(self) -> None:
        if self._readers is not None:
            self._readers.release()

    def _read_inbox(self) -> bool:
        """Carry out what waits, block while there is no work; False when it is time to stop."""
        while not self._is_closing:
            is_idle = not self._engine.has_work()
            if is_idle:
                self._wake_readers()
                self._note_status(is_idle=True)
                if self._recorder is not None:
                    self._recorder.flush()
            try:
                item = self._inbox.get(block=is_idle)
            except queue.Empty:
                return True
            if item is not None:
                self._carry_out(*item)
        return False

    def _die(self, death: EngineDead) -> None:
        with self._lock:
            self._death = death
        self._wake_readers()
        self._refuse(list(self._collectors.values()))
        self._collectors.clear()
        try:
            self._engine.fail_all(death)
        except Exception:
            _log.exception("the engine could not free its requests")
        if self._recorder is not None:
            self._recorder.close()
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return
            if item is None:
                continue
            message, reply = item
            if reply is not None:
                if reply.set_running_or_notify_cancel():
                    reply.set_exception(death)
            elif isinstance(message, AddRequests):
                self._refuse(self._submitted.pop(message.submission))

    def _carry_out(self, message: Message[Any], reply: Future[Any] | None) -> None:
        """An error goes to the caller; one without a caller is logged.

        Where requests cannot be added or ended it ends the thread: nothing is to hang.
        """
        if isinstance(message, AddRequests):
            self._add(message)
            return None
        if isinstance(message, AbandonRequests):
            number = message.submission
            self._abort([name for name, t in self._collectors.items() if t.submission == number])
            return None
        if reply is not None and not reply.set_running_or_notify_cancel():
            return None  # its caller has left
        try:
            answer = self._answer(message)
        except Exception as error:
            if reply is not None:
                return reply.set_exception(error)
            return _log.exception("a message to the engine failed")
        if reply is not None:
            reply.set_result(answer)
        return None

    def _answer(self, message: Message[Any]) -> Any:
        if isinstance(message, AbortRequests):
            ids = message.request_ids
            return self._abort(list(self._collectors) if ids is None else ids)
        return handle_message(self._engine, message)

    def _add(self, message: AddRequests) -> None:
        collectors = self._submitted.pop(message.submission)
        try:
            self._add_all(collectors, message)
        finally:
            with self._lock:
                self._count_unread(collectors, -1)
                self._note_status(is_idle=False)

    def _add_all(self, collectors: Sequence[OutputCollector], message: AddRequests) -> None:
        error: RadixServeError | None = None
        for request in message.requests:
            if request.request_id in self._collectors:
                error = InvalidRequest(f"request id {request.request_id!r} is in use")
        if error is not None:
            for collector in collectors:
                collector.fail(error)
            return
        pairs = list(zip(collectors, message.requests, strict=True))
        for collector, request in pairs:  # all of them before one can fail: `_die` answers these
            self._collectors[request.request_id] = collector
        for collector, request in pairs:
            self._engine.add(request, collector.is_stopped)

    def _note_status(self, *, is_idle: bool) -> None:
        now, stats = time.monotonic(), self._status.stats
        if is_idle or now - self._stats_at > _STATS_EVERY_S:
            stats, self._stats_at = self._engine.stats(), now
        counts = self._engine.queue_stats()
        running, waiting, tokens = counts["running"], counts["waiting"], counts["waiting_tokens"]
        self._status = EngineStatus(True, is_idle, now, running, waiting, tokens, stats)

    def _count_unread(self, collectors: Sequence[OutputCollector], sign: int) -> None:
        self._num_unread[0] += sign * len(collectors)
        self._num_unread[1] += sign * sum(
            len(collector.request.token_ids) for collector in collectors
        )

    def _refuse(self, collectors: Sequence[OutputCollector]) -> None:
        """The thread has ended, or is about to."""
        assert self._death is not None
        for collector in collectors:
            collector.fail(fresh(self._death))

    def _abort(self, request_ids: Sequence[str]) -> int:
        outputs = [self._engine.abort(request_id) for request_id in request_ids]
        for output in outputs:
            if output is not None:
                self._deliver(output)
        return sum(output is not None for output in outputs)

    def _deliver(self, output: RequestOutput) -> None:
        collector = self._collectors[output.request_id]
        try:
            must_stop = collector.push(output)
        except Exception as error:  # its text cannot be made: only this request suffers
            _log.exception("request %s failed", output.request_id)
            collector.fail(
                request_failed(f"the request's text could not be made: {error!r}", error)
            )
            self._engine.abort(output.request_id)
            del self._collectors[output.request_id]
            return
        if output.finish is not None:
            del self._collectors[output.request_id]
            if self._recorder is not None:
                done = collector.request, collector.token_ids, output.finish
                self._recorder.record(*done, arrived_at=collector.made_at)
        elif must_stop:
            last = self._engine.finish(output.request_id, "stop")
            if last is not None:
                self._deliver(last)


_threads: weakref.WeakSet[EngineThread] = weakref.WeakSet()


def _note_fork() -> None:
    for thread in list(_threads):
        thread.note_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)
