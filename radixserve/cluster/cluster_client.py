"""`ClusterClient`: an `EngineCoreClient` as `EngineThread` is one, over several replicas.

Requests outlive their replica: another one continues them from the prompt and the tokens so far.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from radixserve.cluster.message_handler import handle_message
from radixserve.cluster.open_request import OpenRequest
from radixserve.cluster.replica import REPORT_EVERY_S, ReplicaReport
from radixserve.cluster.replica_link import Replica, ReplicaLink
from radixserve.cluster.router import Router
from radixserve.cluster.stats import add_stats
from radixserve.engine import messages
from radixserve.engine.core_client import EngineFacts
from radixserve.engine.messages import Answer, Message
from radixserve.engine.output_collector import OutputCollector
from radixserve.errors import EngineDead, InvalidRequest, fresh, request_failed
from radixserve.output import EngineStatus, Finish, Metrics, RequestOutput, Usage
from radixserve.routing.limits import MAX_LOST, WITHOUT_REPLICA_S

_log = logging.getLogger("radixserve")
SILENCE_S = 10 * REPORT_EVERY_S  # a replica that says nothing for so long hangs
DRAIN_S = 20.0  # that requests have to end where a replica is taken away


class ClusterClient:
    """An `EngineCoreClient` over replicas that come and go. Its event loop's thread owns it."""

    def __init__(
        self, router: Router, *, silence_s: float = SILENCE_S, drain_s: float = DRAIN_S
    ) -> None:
        """`silence_s`: a replica that says nothing for so long is taken for lost. `drain_s`: what
        has not ended so long after its replica was taken away goes on elsewhere."""
        self._router = router
        self._silence_s, self._drain_s = silence_s, drain_s
        self._frontend = uuid.uuid4().hex  # names this process to the replicas
        self._numbers = itertools.count()
        self._replicas: dict[str, Replica] = {}
        self._draining: dict[str, Replica] = {}  # taken away, but not all of their requests ended
        self._open: dict[str, OpenRequest] = {}  # by the id that replicas know
        self._waiting: dict[str, OpenRequest] = {}  # of these, without a replica
        self._ids: set[str] = set()  # of open requests, as their callers know them
        self._facts: Future[EngineFacts] = Future()
        self._stats: dict[str, Any] = {}  # the last ones, for the time without a replica
        self._death: EngineDead | None = None
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="radixserve-cluster", daemon=True)
        self._thread.start()

    # -- called from any thread ---------------------------------------------------------------

    @property
    def is_forked(self) -> bool:
        return os.getpid() != self._pid

    def facts(self, timeout: float) -> EngineFacts:
        """Facts of the first replica that reports. Raises TimeoutError after `timeout` seconds."""
        return self._facts.result(timeout)

    def set_replicas(self, links: Iterable[ReplicaLink]) -> None:
        """Replace the replicas by these; the names tell which are new."""
        self._post(self._set_replicas, list(links))

    def submit(self, collectors: Sequence[OutputCollector]) -> None:
        if not self._post(self._submit, collectors):
            for collector in collectors:
                collector.fail(self._dead())

    def abort(self, request_ids: Sequence[str] | None) -> int:
        ids = None if request_ids is None else tuple(request_ids)
        return self.call(messages.AbortRequests(ids))

    def abandon(self, collectors: Sequence[OutputCollector]) -> None:
        self._post(self._abandon, collectors)

    def status(self) -> EngineStatus:
        """The status of all replicas together; stats are the sums of their last reports."""
        followed = [*self._replicas.values(), *self._draining.values()]
        found = [one.status for one in followed if one.status is not None]
        if found:
            self._stats = add_stats([one.stats for one in found])
        waiting = list(self._waiting.values())
        return EngineStatus(
            is_alive=self._death is None and not self.is_forked,
            is_idle=not self._open,
            stepped_at=time.monotonic() if found else 0.0,
            running=sum(one.running for one in found),
            waiting=sum(one.waiting for one in found) + len(waiting),
            waiting_tokens=sum(one.waiting_tokens for one in found)
            + sum(len(one.collector.request.token_ids) for one in waiting),
            stats={**self._stats, "replicas": len(found)},
        )

    def check_alive(self) -> None:
        if self._death is not None or self.is_forked:
            raise self._dead()

    def post(self, message: Message[Any]) -> bool:
        return self._post(lambda: self._loop.create_task(self._answer(message)))

    def call(self, message: Message[Answer]) -> Answer:
        return self.ask(message).result()

    def ask(self, message: Message[Answer]) -> Future[Answer]:
        self.check_alive()
        return asyncio.run_coroutine_threadsafe(self._answer(message), self._loop)

    def close(self) -> None:
        if self.is_forked:
            return
        self._post(self._die, EngineDead("the Runtime was closed"))
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _post(self, function: Callable[..., object], *args: Any) -> bool:
        """False where the thread has ended."""
        if self._death is not None or self.is_forked:
            return False
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop was closed meanwhile
            return False
        return True

    def _dead(self) -> EngineDead:
        if self.is_forked:
            return EngineDead("this process was forked from the one that speaks to the replicas")
        return fresh(self._death or EngineDead("the Runtime was closed"))

    # -- in the loop: requests ----------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.create_task(self._watch_waiting())
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _die(self, death: EngineDead) -> None:
        self._death = death
        for one in list(self._open.values()):
            self._close(one)
            one.collector.fail(fresh(death))
        self._loop.stop()

    def _submit(self, collectors: Sequence[OutputCollector]) -> None:
        if self._death is not None:
            for collector in collectors:
                collector.fail(self._dead())
            return
        for collector in collectors:
            if collector.request.request_id in self._ids:
                error = InvalidRequest(f"request id {collector.request.request_id!r} is in use")
                for other in collectors:
                    other.fail(error)
                return
        for collector in collectors:
            self._ids.add(collector.request.request_id)
            self._place(OpenRequest(collector))

    def _place(self, one: OpenRequest) -> None:
        """Choose a replica for what is left of it."""
        self._open.pop(one.id, None)
        one.id = f"{self._frontend} {next(self._numbers)}"
        self._open[one.id] = one
        request = one.rest()
        one.replica = self._router.choose(request)
        if one.replica is None:
            self._waiting[one.id] = one
            return
        self._replicas[one.replica].submit(request)

    def _place_waiting(self) -> None:
        waiting = list(self._waiting.values())
        self._waiting.clear()
        for one in waiting:
            self._place(one)

    async def _watch_waiting(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            now = time.monotonic()
            for one in list(self._waiting.values()):
                if now - one.lost_at > WITHOUT_REPLICA_S:
                    self._close(one)
                    one.collector.fail(
                        EngineDead(f"no replica for {WITHOUT_REPLICA_S:.0f} seconds")
                    )

    def _close(self, one: OpenRequest) -> None:
        """It has ended."""
        self._open.pop(one.id, None)
        self._waiting.pop(one.id, None)
        self._ids.discard(one.request_id)

    def _abandon(self, collectors: Sequence[OutputCollector]) -> None:
        left = set(map(id, collectors))
        for one in [one for one in self._open.values() if id(one.collector) in left]:
            self._abort(one)

    def _abort(self, one: OpenRequest) -> None:
        """Its caller gets what there is; a replica ends it when it reads so."""
        replica = self._replicas.get(one.replica or "")
        self._close(one)
        if replica is not None:
            replica.end(one.id)
        collector = one.collector
        usage = Usage(0, 0, 0, len(collector.token_ids))
        metrics = Metrics(None, None, time.time() - collector.made_at)
        finish = Finish("abort", usage, metrics, None)
        self._push(one, RequestOutput(one.id, (), (), (), finish))

    def _push(self, one: OpenRequest, output: RequestOutput) -> None:
        try:
            one.push(output)
        except Exception as error:  # its text cannot be made: only this request suffers
            _log.exception("request %s failed", one.request_id)
            one.collector.fail(request_failed(f"the request's text could not be made: {error!r}"))
            if one.id in self._open:
                self._abort(one)

    # -- in the loop: replicas ----------------------------------------------------------------

    def _set_replicas(self, links: Sequence[ReplicaLink]) -> None:
        names = {link.name for link in links}
        gone = [self._replicas.pop(name) for name in list(self._replicas) if name not in names]
        for replica in gone:  # what one had must not go to another
            self._router.remove(replica.link.name)
        for replica in gone:
            self._drain(replica)
        for link in links:
            if link.name not in self._replicas:
                if link.name in self._draining:
                    self._end_drain(self._draining[link.name])
                replica = self._replicas[link.name] = Replica(link)
                replica.task = self._loop.create_task(self._follow(replica))

    def _drain(self, replica: Replica) -> None:
        """It is not chosen any more; what runs there may end there."""
        self._draining[replica.link.name] = replica
        for request in replica.remove():
            if request.request_id in self._open:
                self._place(self._open[request.request_id])
        self._check_drain(replica)
        self._loop.call_later(self._drain_s, self._end_drain, replica)

    def _check_drain(self, replica: Replica) -> None:
        """End it unless there is something to wait for."""
        if not any(one.replica == replica.link.name for one in self._open.values()):
            self._end_drain(replica)

    def _end_drain(self, replica: Replica) -> None:
        """What has not ended goes on elsewhere."""
        name = replica.link.name
        if self._draining.get(name) is not replica:
            return
        del self._draining[name]
        assert replica.task is not None
        replica.task.cancel()
        for one in [one for one in self._open.values() if one.replica == name]:
            one.note_moved()
            self._place(one)

    async def _follow(self, replica: Replica) -> None:
        """Read its reports as long as there is such a replica."""
        while True:
            replica.stream = next(self._numbers)
            parts = self._read(replica), replica.send(self._frontend)
            tasks = {self._loop.create_task(part) for part in parts}
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
            if replica.status is not None:
                why = [repr(task.exception() or "its reports ended") for task in done]
                _log.warning("replica %s is lost: %s", replica.link.name, ", ".join(why))
            self._note_lost(replica)
            if self._draining.get(replica.link.name) is replica:
                self._end_drain(replica)
            await asyncio.sleep(1.0)

    async def _read(self, replica: Replica) -> None:
        facts = None if self._facts.done() else await replica.link.facts()
        async with contextlib.aclosing(
            replica.link.reports(self._frontend, replica.stream)
        ) as reports:
            while True:
                async with asyncio.timeout(self._silence_s):
                    report = await anext(reports, None)
                if report is None or not report.status.is_alive:
                    return
                self._note(replica, report)
                if facts is not None and not self._facts.done():
                    self._facts.set_result(facts)

    def _note(self, replica: Replica, report: ReplicaReport) -> None:
        name = replica.link.name
        if self._draining.get(name) is replica:
            self._note_outputs(name, report)
            self._check_drain(replica)
        if self._replicas.get(name) is not replica:
            return  # taken away
        if replica.status is None:
            self._router.add(name)
        self._router.update(name, report)
        lacks_events = bool(report.events) and self._router.needs_snapshot(name)
        replica.note_report(report.status, lacks_events=lacks_events)
        self._note_outputs(name, report)
        if self._waiting:
            self._place_waiting()

    def _note_outputs(self, name: str, report: ReplicaReport) -> None:
        for output in report.outputs:
            self._note_output(name, output)
        for request_id, error in report.failures:
            failed = self._open.get(request_id)
            if failed is not None and failed.replica == name and not isinstance(error, EngineDead):
                self._close(failed)
                failed.collector.fail(error)

    def _note_output(self, name: str, output: RequestOutput) -> None:
        one = self._open.get(output.request_id)
        if one is None or one.replica != name:  # it has ended, or goes on elsewhere
            return
        finish = output.finish
        if finish is not None:
            if isinstance(finish.error, EngineDead):  # the replica is about to be lost
                return
            self._close(one)
        self._push(one, output)

    def _note_lost(self, replica: Replica) -> None:
        """Its requests go on elsewhere."""
        name = replica.link.name
        replica.note_lost()
        self._router.remove(name)
        for one in [one for one in self._open.values() if one.replica == name]:
            one.note_lost()
            if one.num_lost < MAX_LOST:
                self._place(one)
                continue
            self._close(one)
            one.collector.fail(request_failed(f"{MAX_LOST} replicas were lost while it ran"))

    async def _answer(self, message: Message[Any]) -> Any:
        if not isinstance(message, messages.AbortRequests):
            links = {key: one.link for key, one in self._replicas.items() if one.status is not None}
            return await handle_message(message, links, self._router)
        ids = message.request_ids
        found = [one for one in self._open.values() if ids is None or one.request_id in ids]
        for one in found:
            self._abort(one)
        return len(found)
