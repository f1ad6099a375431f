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
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from radixserve.engine import messages
from radixserve.engine.engine import Engine
from radixserve.engine.extension import EngineExtension
from radixserve.engine.messages import (
    AbandonRequests,
    AbortRequests,
    AddRequests,
    Answer,
    EngineMessage,
)
from radixserve.engine.output_collector import OutputCollector
from radixserve.engine.output_notifier import OutputNotifier
from radixserve.errors import (
    EngineDead,
    InvalidRequest,
    fresh,
    request_failed,
)
from radixserve.output import RequestOutput
from radixserve.reports import EngineStatus

_log = logging.getLogger("radixserve")
_MANY_OUTPUTS = 8
_ADDED_AT_ONCE = 64  # requests between two steps of others
_STATS_EVERY_S = 0.25  # while it steps
_IDLE_STATS_EVERY_S = 1.0  # while it is idle and has leases, which end by time
_WARM_UP_AFTER_S = 0.1  # of the first idleness: what a caller starts meanwhile comes first
_PAUSED_STEP_S = 0.005  # of a paused engine whose extensions have work
_COLD_STEPS = 64  # of an engine that is not idle, before it warms up between steps
_FORKED = (
    "this process was forked from the one that runs the engine, and its thread did not come along: "
    "make the Runtime in the process that uses it, or start processes by multiprocessing's "
    '"spawn" instead of "fork"'
)


@dataclass(frozen=True, slots=True)
class AddExtension(EngineMessage[None]):
    """Plug an extension into the engine."""

    extension: EngineExtension


class EngineThread:
    """Steps the engine while there is work and carries out messages between two steps.

    When the thread ends, by `close` or by a failure, every open request and every pending call gets
    EngineDead.
    """

    def __init__(
        self,
        engine: Engine,
        notifier: OutputNotifier | None = None,
    ) -> None:
        """`notifier`: paused while outputs are delivered and the next step is prepared."""
        self._engine = engine
        self._notifier = notifier or OutputNotifier()
        # Messages with the future of their answer, or None to stop the thread.
        self._inbox: queue.SimpleQueue[tuple[EngineMessage[Any], Future[Any] | None] | None] = (
            queue.SimpleQueue()
        )
        self._submissions = itertools.count()
        self._submitted: dict[
            int, Sequence[OutputCollector]
        ] = {}  # by submission, until it is added
        self._collectors: dict[str, OutputCollector] = {}  # by request id; the engine's thread only
        # Those of them that the engine gets before the next steps: see `_hand_over`.
        self._arriving: dict[str, OutputCollector] = {}
        # Guards `_death` and puts into the inbox. Reentrant: the garbage collector may close a
        # forgotten stream, which calls `abandon`, in the middle of another call.
        self._lock = threading.RLock()
        self._death: EngineDead | None = None
        self._is_closing = self._is_forked = False
        self._num_unread = [0, 0]  # requests in the inbox and their tokens, under the lock
        self._is_idle = True
        self._is_warm = False  # whether the engine has nothing left to warm up
        self._num_steps = 0  # until it is warm
        self._stepped_at = self._stats_at = time.monotonic()
        self._stats = engine.stats()  # as of `_stats_at`
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
        self._count_unread(collectors, 1)
        if not self.post(AddRequests(number, tuple(collector.request for collector in collectors))):
            self._refuse(self._submitted.pop(number))

    def abort(self, request_ids: Sequence[str] | None) -> int:
        """End requests (all when None) with finish_reason "abort"; returns how many were open."""
        ids = None if request_ids is None else tuple(request_ids)
        return self.call(AbortRequests(ids))

    def abandon(self, collectors: Sequence[OutputCollector]) -> None:
        """End requests that no caller waits for: returns at once, never raises."""
        if collectors:
            self.post(AbandonRequests(collectors[0].submission))

    def post(self, message: EngineMessage[Any]) -> bool:
        """Send `message`, to be carried out between two steps. Returns False if the thread has
        ended. Returns at once and never raises; may be called from the garbage collector.
        """
        with self._lock:
            if self._death is None:
                self._inbox.put((message, None))
            return self._death is None

    def status(self) -> EngineStatus:
        """Returns the load of the engine and of its inbox. Does not wait for the thread."""
        with self._lock:
            depths, (requests, tokens) = self._engine.queue_depths(), self._num_unread
        return EngineStatus(
            is_alive=self._death is None and self._thread.is_alive(),
            is_idle=self._is_idle and not requests,
            stepped_at=time.monotonic() if self._is_idle else self._stepped_at,
            running=depths["running"],
            waiting=depths["waiting"] + requests,
            waiting_tokens=depths["waiting_tokens"] + tokens,
            stats=self._stats,
        )

    def check_alive(self) -> None:
        """Raise EngineDead when the thread has ended."""
        if self._death is not None:
            raise fresh(self._death)

    def call(self, message: EngineMessage[Answer]) -> Answer:
        """Send `message`, wait until it is carried out between two steps, and return its answer.
        Raises EngineDead, and what the engine raises."""
        return self.ask(message).result()

    def ask(self, message: EngineMessage[Answer]) -> Future[Answer]:
        """Send `message`, to be carried out between two steps. The future gets its answer."""
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
        """Mark this copy in a forked process: every call gets EngineDead. Requests and models
        belong to the parent process."""
        self._is_forked, self._death = True, EngineDead(_FORKED)
        self._lock = threading.RLock()  # another thread may have locked the old one
        self._inbox, self._submitted = queue.SimpleQueue(), {}

    # -- in the engine's thread ---------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._read_inbox():
                self._step()
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
        """Run one step and deliver its outputs.

        A method of its own, so that no frame of the waiting thread refers to outputs or errors.
        Tasks that read many outputs would delay the preparation of the next step: they are woken
        while that step is computed.
        """
        outputs = self._engine.begin_step()
        if self._notifier.is_paused:
            self._notifier.resume()
        outputs += self._engine.end_step()
        if len(outputs) >= _MANY_OUTPUTS:
            self._notifier.pause()
        for output in outputs:
            self._deliver(output)
        if self._engine.is_paused:
            time.sleep(_PAUSED_STEP_S)
        self._is_idle = False
        self._stepped_at = now = time.monotonic()
        if now - self._stats_at > _STATS_EVERY_S:
            self._stats, self._stats_at = self._engine.stats(), now
        if not self._is_warm:
            self._num_steps += 1
            if self._num_steps > _COLD_STEPS:
                self._is_warm = not self._engine.warm_up()

    def _read_inbox(self) -> bool:
        """Process all waiting messages; block while there is no work. False when closing."""
        if self._arriving:
            self._hand_over(list(self._arriving))
        while not self._is_closing:
            may_rest = not self._collectors or self._engine.is_paused
            is_idle, timeout = may_rest and not self._engine.has_work(), None
            if not is_idle and self._inbox.empty():
                return True
            if is_idle:
                self._rest()
                timeout = self._engine.idle_timeout
                if timeout is None and self._stats["leases"]:
                    timeout = _IDLE_STATS_EVERY_S
                if not self._is_warm:
                    timeout = _WARM_UP_AFTER_S
            try:
                item = self._inbox.get(block=is_idle, timeout=timeout)
            except queue.Empty:
                while not self._is_warm and self._inbox.empty():
                    self._is_warm = not self._engine.warm_up()
                continue
            if item is not None:
                self._carry_out(*item)
        return False

    def _rest(self) -> None:
        """Wake readers and refresh the statistics, before waiting for requests."""
        self._notifier.resume()
        self._stats, self._stepped_at = self._engine.stats(), time.monotonic()
        self._is_idle = True
        self._engine.rest()

    def _die(self, death: EngineDead) -> None:
        with self._lock:
            self._death = death
        self._notifier.resume()
        self._refuse(list(self._collectors.values()))
        self._collectors.clear()
        try:
            self._engine.fail_all(death)
        except Exception:
            _log.exception("the engine could not free its requests")
        self._engine.close()
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

    def _carry_out(self, message: EngineMessage[Any], reply: Future[Any] | None) -> None:
        """Process one message. An error is passed to the caller, or logged without one.

        An error while requests are added or ended is raised and ends the thread, so that no caller
        waits for ever.
        """
        if isinstance(message, AddRequests):
            self._add(message)
            return None
        if isinstance(message, AbandonRequests):
            self._abort(
                [
                    request_id
                    for request_id, collector in self._collectors.items()
                    if collector.submission == message.submission
                ]
            )
            return None
        if reply is not None and not reply.set_running_or_notify_cancel():
            return None  # its caller has left
        try:
            answer = self._answer(message)
        except Exception as error:
            if reply is not None:
                return reply.set_exception(error)
            return _log.exception("a message to the engine failed")
        if isinstance(answer, Future):
            answer.add_done_callback(partial(_reply, reply))
        elif reply is not None:
            reply.set_result(answer)
        return None

    def _answer(self, message: EngineMessage[Any]) -> Any:
        if isinstance(message, AbortRequests):
            ids = message.request_ids
            return self._abort(list(self._collectors) if ids is None else ids)
        return answer_message(self._engine, message)

    def _add(self, message: AddRequests) -> None:
        """Register all requests or none."""
        collectors = self._submitted.pop(message.submission)
        self._stepped_at, self._is_idle = time.monotonic(), False
        for request in message.requests:
            if request.request_id in self._collectors:
                error = InvalidRequest(f"request id {request.request_id!r} is in use")
                self._count_unread(collectors, -1)
                for collector in collectors:
                    collector.fail(error)
                return
        arriving = {collector.request.request_id: collector for collector in collectors}
        self._collectors |= arriving
        self._arriving |= arriving
        self._hand_over(list(arriving))

    def _hand_over(self, names: Sequence[str]) -> None:
        """Give the engine requests of `_arriving`: all of them if it has no others; else a few, so
        that many do not delay the tokens of others. The rest follows before the next steps."""
        has_others = len(self._collectors) > len(self._arriving)
        for name in names[: _ADDED_AT_ONCE if has_others else None]:
            collector = self._arriving[name]
            request = collector.request
            if collector.is_stopped is not None:  # made here: a function cannot be sent to replicas
                request = replace(request, is_stopped=collector.is_stopped)
            try:
                self._engine.add(request)
            finally:
                del self._arriving[name]
                self._count_unread([collector], -1)

    def _count_unread(self, collectors: Sequence[OutputCollector], sign: int) -> None:
        num_tokens = sum(len(collector.request.token_ids) for collector in collectors)
        with self._lock:
            self._num_unread[0] += sign * len(collectors)
            self._num_unread[1] += sign * num_tokens

    def _refuse(self, collectors: Sequence[OutputCollector]) -> None:
        """Fail these collectors with EngineDead: the thread has ended, or is about to."""
        assert self._death is not None
        for collector in collectors:
            collector.fail(fresh(self._death))

    def _abort(self, request_ids: Sequence[str]) -> int:
        """Returns how many of the requests were open. Readers of many are woken once, at the end:
        each signal would hand Python's lock to them."""
        num_open, was_paused = 0, self._notifier.is_paused
        self._notifier.pause()
        for late_output in self._engine.take_late_outputs():  # their tokens are before the end
            self._deliver(late_output)
        for request_id in request_ids:
            arriving = self._arriving.pop(request_id, None)
            if arriving is None:
                output = self._engine.abort(request_id)
            else:
                self._count_unread([arriving], -1)
                output = arriving.aborted()
            if output is not None:
                num_open += 1
                self._deliver(output)
        if not was_paused:
            self._notifier.resume()
        return num_open

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
            done = collector.request, collector.token_ids, output.finish
            self._engine.extensions.on_finish(*done, collector.made_at)
        elif must_stop:
            last = self._engine.finish(output.request_id, "stop")
            if last is not None:
                self._deliver(last)


def _reply(reply: Future[Any] | None, answer: Future[Any]) -> None:
    """Pass on an answer that an extension's thread has made."""
    error = answer.exception()
    if reply is None:
        if error is not None:
            _log.error("a message to the engine failed: %r", error)
    elif error is not None:
        reply.set_exception(error)
    else:
        reply.set_result(answer.result())


_threads: weakref.WeakSet[EngineThread] = weakref.WeakSet()


def _note_fork() -> None:
    for thread in list(_threads):
        thread.note_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def answer_message(engine: Engine, message: EngineMessage[Any]) -> Any:
    """Carry out a message that does not add or end requests, and return its answer, or a future of
    it. `EngineThread` processes the others, which concern their callers too. Raises what the engine
    raises."""
    return engine.extensions.answer(message, _answer_of_engine(engine, message))


def _answer_of_engine(engine: Engine, message: EngineMessage[Any]) -> Any:
    """None for a message that only extensions know."""
    match message:
        case messages.LookUpPrompt(token_ids, namespace, compare_namespaces):
            return engine.lookup(token_ids, namespace, compare_namespaces=compare_namespaces)
        case messages.GetStats():
            return engine.stats()
        case messages.DumpTree(max_nodes, namespace):
            return engine.tree(max_nodes, namespace)
        case messages.PreviewEviction(count):
            return engine.eviction_preview(count)
        case messages.TakeSnapshot(view):
            return engine.snapshot(view)
        case messages.TakeEvents(with_snapshot):
            return engine.take_events(with_snapshot=with_snapshot)
        case messages.ResetCache(namespace):
            return engine.reset_cache(namespace)
        case messages.PauseEngine():
            return engine.pause()
        case messages.ResumeEngine():
            return engine.resume()
        case AddExtension(extension):
            return engine.extend(extension)
        case messages.ListPrefixes(namespace):
            return engine.prefixes(namespace)
        case messages.CheckCache():
            return engine.check()
        case messages.ClaimSessions(claims):
            for claim in claims:
                engine.claim(claim.name, claim.tokens, claim.namespace)
        case messages.CloseSession(name, successors, reopened):
            for claim in successors:
                engine.claim(claim.name, claim.tokens, claim.namespace)
            engine.close_session(name)
            if reopened is not None:
                engine.claim(name, reopened.tokens, reopened.namespace)
    return None
