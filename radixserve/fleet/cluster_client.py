"""`ClusterClient`: an `EngineCoreClient` over several replicas.

If a replica is lost (`_note_lost`), its requests continue on other replicas, from the prompt and
the tokens so far.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from radixserve.advice.messages import GetAdvice, GetWorth
from radixserve.advice.report import join_advice, join_worth
from radixserve.cache.stats import hit_rate
from radixserve.engine import messages
from radixserve.engine.core_client import EngineFacts
from radixserve.engine.messages import Answer, EngineMessage
from radixserve.engine.output_collector import OutputCollector
from radixserve.epochs.messages import UpdateWeights
from radixserve.errors import EngineDead, InvalidRequest, RadixServeError, fresh, request_failed
from radixserve.fleet.replica import REPORT_EVERY_S, ReplicaReport
from radixserve.fleet.replica_link import Replica, ReplicaLink
from radixserve.fleet.replica_router import ReplicaRouter
from radixserve.fleet.tree_router import MAX_LOST, WITHOUT_REPLICA_S
from radixserve.hints.hint import ANSWERS, HintAnswer
from radixserve.hints.messages import ApplyHints, GetHeld
from radixserve.output import Finish, Metrics, RequestOutput
from radixserve.reports import EngineStatus
from radixserve.request import Request

# Of one size for all replicas: the largest counts.
_LARGEST = frozenset("page_size seconds epoch is_paused load_latency_us write_ns_per_kb".split())
# Numbers of the present. All other numbers of `EngineStats` are counters since the start.
_GAUGES = _LARGEST - {"page_size"} | frozenset(
    "old_epoch_pages namespaces nodes sequences sessions watches running waiting waiting_tokens "
    "hints shared_prefixes prefetches loading_requests unsaved_requests read_bytes_per_s "
    "store_bytes loaded in_memory bytes_in_memory held_requests waiting_tensors kept kept_bytes "
    "index_bytes".split()
)
_GAUGE_PREFIXES = ("pages_", "window_pages_", "states_")


def add_stats(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The statistics of all replicas together. Numbers are added, records field by field; lists are
    joined; hit_rate is computed from the sums."""
    total: dict[str, Any] = {}
    for name in dict.fromkeys(name for stats in each for name in stats):
        values = [stats[name] for stats in each if name in stats]
        if isinstance(values[0], Mapping):
            total[name] = add_stats(values)
        elif isinstance(values[0], list):
            total[name] = [item for value in values for item in value]
        elif name in _LARGEST:
            total[name] = max(values)
        else:
            total[name] = sum(values)
    if "hit_rate" in total:
        total["hit_rate"] = hit_rate(total["reused_tokens"], total["prompted_tokens"])
    return total


def without_gauges(stats: Mapping[str, Any]) -> dict[str, Any]:
    """What the statistics of a replica add to the sum after it has gone: its counters. Gauges are 0
    and lists empty."""
    return {name: _without_gauge(name, value) for name, value in stats.items()}


def _without_gauge(name: str, value: Any) -> Any:
    if name == "last_minute":
        return dict.fromkeys(value, 0)
    if isinstance(value, Mapping):
        return without_gauges(value)
    if isinstance(value, list):
        return []
    return 0 if name in _GAUGES or name.startswith(_GAUGE_PREFIXES) else value


Links = Mapping[str, ReplicaLink]  # of replicas that report, by name


async def ask_replicas(message: EngineMessage[Any], links: Links, router: ReplicaRouter) -> Any:
    """Send an engine message to the replicas that it concerns. Returns the answer as a single
    engine would give it. Raises EngineDead without a replica."""
    match message:
        case GetHeld():
            return add_stats(await _ask_present(message, links))
        case GetAdvice():
            advices = list(filter(None, await _ask_present(message, links)))
            return join_advice(advices) if advices else None
        case GetWorth():
            worths = list(filter(None, await _ask_present(message, links)))
            return join_worth(worths) if worths else None
        case messages.LookUpPrompt(token_ids, namespace):
            return await _ask_one(message, links, router.best(token_ids, namespace))
        case messages.ClaimSessions(claims):
            for claim in claims:
                name = router.of_session(claim.name)
                await _ask_one(messages.ClaimSessions((claim,)), links, name)
        case ApplyHints(hints):
            return [await _hint(ApplyHints((hint,)), links, router) for hint in hints]
        case messages.CloseSession(name, _, reopened):
            if reopened is None:
                router.close_session(name)
            if links:
                await _ask_present(message, links)
        case messages.ResetCache() | messages.CheckCache():
            await _ask_all(message, links)
        case messages.PauseEngine() | messages.ResumeEngine() | UpdateWeights():
            raise InvalidRequest(
                "replicas cannot be paused or updated: one that starts later would have the old "
                "weights"
            )
        case _:  # dumps, snapshots and previews are those of a single replica
            return await _ask_one(message, links, None)
    return None


async def _hint(message: ApplyHints, links: Links, router: ReplicaRouter) -> HintAnswer:
    (hint,) = message.hints
    if hint.verb == "demote" or hint.seconds == 0.0:  # any replica may keep what it ends
        answers = [answer for (answer,) in await _ask_present(message, links)]
        return min(answers, key=lambda own: (ANSWERS.index(own.answer), -own.tokens_covered))
    if hint.token_ids is None:
        name = router.of_session(hint.session)
    else:
        name = router.best(hint.token_ids, hint.namespace)
    (answer,) = await _ask_one(message, links, name)
    return answer


async def _ask_all(message: EngineMessage[Any], links: Links) -> list[Any]:
    return await asyncio.gather(*(_call(message, link) for link in links.values()))


async def _ask_present(message: EngineMessage[Any], links: Links) -> list[Any]:
    """The answers of all replicas but those that are lost meanwhile. Raises EngineDead without
    one."""
    calls = [_call(message, link) for link in links.values()]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    present = [answer for answer in answers if not isinstance(answer, EngineDead)]
    for answer in present:
        if isinstance(answer, BaseException):
            raise answer
    if not present:
        raise EngineDead("no replica is available")
    return present


async def _call(message: EngineMessage[Any], link: ReplicaLink) -> Any:
    """The answer of a replica. Raises EngineDead if it is lost meanwhile."""
    try:
        return await link.call(message)
    except (RadixServeError, AssertionError):  # of its engine
        raise
    except Exception as error:
        raise EngineDead(f"replica {link.name} does not answer: {error!r}") from error


async def _ask_one(message: EngineMessage[Any], links: Links, name: str | None) -> Any:
    """The answer of the replica `name`; None, or a name that is unknown: of any replica."""
    if not links:
        raise EngineDead("no replica is available")
    link = links.get(name or "") or links[min(links)]
    return await _call(message, link)


class OpenRequest:
    """A caller's request that has not ended, on whichever replica it runs.

    Its collector has the tokens so far, from all replicas on which it ran.
    """

    def __init__(self, collector: OutputCollector) -> None:
        self.collector = collector
        self.id = ""  # its id on the replica; each replica gets another one
        self.replica: str | None = None  # the replica's name; None while it waits for one
        self.session = collector.request.session  # "" after that was closed
        self.num_lost = 0  # replicas that were lost while it ran there
        self.lost_at = time.monotonic()  # when it arrived or last left a replica
        self._has_moved = False  # whether its tokens come from several replicas
        self._placed_s = 0.0  # its age when it was sent to its present replica
        self._first_token_s: float | None = None  # its age at its first token
        self._is_resumed = False  # whether it had tokens when it was sent to its present replica
        self._num_repeated = 0  # tokens to drop, since its caller already has them
        self._has_stopped = False  # a stop string was found; the replica has not ended it yet

    @property
    def request_id(self) -> str:
        """The caller's id of the request."""
        return self.collector.request.request_id

    def rest(self) -> Request:
        """The request to send to a replica: for the tokens that its caller does not have yet."""
        known = self.collector.token_ids
        self._placed_s, self._is_resumed = self.collector.age_s, bool(known)
        request = replace(
            self.collector.request, request_id=self.id, grammar=None, session=self.session
        )
        if not known or request.beams is not None:
            return request
        if request.logprob_targets is not None:  # the last output has the whole prompt's scores
            self._num_repeated = len(known)
            return request
        ids = np.concatenate([request.token_ids, np.array(known, np.int32)])
        return replace(request, token_ids=ids, num_resumed_tokens=len(known))

    def note_lost(self) -> None:
        """Its replica was lost: count it."""
        self.note_moved()
        self.num_lost += 1

    def note_moved(self) -> None:
        """It leaves its replica, and waits for another one from now on."""
        self.replica, self._has_moved = None, True
        self.lost_at = time.monotonic()

    def push(self, output: RequestOutput) -> None:
        """Pass a replica's output on to the caller."""
        num_dropped = len(output.token_ids) if self._has_stopped else self._num_repeated
        if num_dropped and output.token_ids:
            self._num_repeated = max(0, self._num_repeated - len(output.token_ids))
            output = output._replace(
                token_ids=output.token_ids[num_dropped:],
                logprobs=output.logprobs[num_dropped:],
                top_logprobs=output.top_logprobs[num_dropped:],
            )
        if output.token_ids and self._first_token_s is None:
            self._first_token_s = self.collector.age_s
        if output.finish is not None:
            output = output._replace(finish=self._whole(output, output.finish))
        self._has_stopped |= self.collector.push(output)

    def _whole(self, output: RequestOutput, finish: Finish) -> Finish:
        """The end of an answer as if a single engine had generated it. Its queue time is unknown if
        its first token came from another replica."""
        usage, metrics = finish.usage, finish.metrics
        if self._has_moved and self.collector.request.beams is None:
            usage = usage.with_answer(len(self.collector.token_ids) + len(output.token_ids))
        queue_s, ttft_s = metrics.queue_s, metrics.ttft_s
        if self._is_resumed:
            queue_s, ttft_s = None, self._first_token_s
        else:
            queue_s = None if queue_s is None else self._placed_s + queue_s
            ttft_s = None if ttft_s is None else self._placed_s + ttft_s
        metrics = Metrics(queue_s, ttft_s, self.collector.age_s)
        return replace(finish, usage=usage, metrics=metrics)


_log = logging.getLogger("radixserve")
SILENCE_S = 10 * REPORT_EVERY_S  # a replica without a report for so long counts as lost
DRAIN_S = 20.0  # time for the requests of a removed replica to end


class ClusterClient:
    """An `EngineCoreClient` over a changing set of replicas. Owned by the thread of its loop."""

    def __init__(
        self, router: ReplicaRouter, *, silence_s: float = SILENCE_S, drain_s: float = DRAIN_S
    ) -> None:
        """`silence_s`: a replica without a report for so long counts as lost. `drain_s`: requests
        that have not ended so long after their replica was removed move to another one."""
        self._router = router
        self._silence_s, self._drain_s = silence_s, drain_s
        self._frontend = uuid.uuid4().hex  # names this process to the replicas
        self._numbers = itertools.count()
        self._replicas: dict[str, Replica] = {}
        self._draining: dict[str, Replica] = {}  # removed replicas that still have open requests
        self._open: dict[str, OpenRequest] = {}  # by the id that replicas know
        self._waiting: dict[str, OpenRequest] = {}  # those of `_open` that wait for a replica
        self._ids: set[str] = set()  # the callers' ids of open requests
        self._facts: Future[EngineFacts] = Future()
        # Counters of removed replicas; the other replicas. One value, since other threads read it.
        self._counted: tuple[dict[str, Any], tuple[Replica, ...]] = {}, ()
        self._reported_at = time.monotonic()  # the last report of any replica
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
        """Replace the set of replicas. A replica whose name is known keeps its connection."""
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
        """The status of all replicas together, by their last reports."""
        past, replicas = self._counted
        statuses = [replica.status for replica in replicas if replica.status is not None]
        stats = add_stats([past, *(replica.stats for replica in replicas)])
        waiting = list(self._waiting.values())
        return EngineStatus(
            is_alive=self._death is None and not self.is_forked,
            is_idle=not self._open,
            stepped_at=time.monotonic() if statuses else self._reported_at,
            running=sum(status.running for status in statuses),
            waiting=sum(status.waiting for status in statuses) + len(waiting),
            waiting_tokens=sum(status.waiting_tokens for status in statuses)
            + sum(len(request.collector.request.token_ids) for request in waiting),
            stats={**stats, "replicas": len(statuses)},
        )

    def check_alive(self) -> None:
        if self._death is not None or self.is_forked:
            raise self._dead()

    def post(self, message: EngineMessage[Any]) -> bool:
        return self._post(lambda: self._loop.create_task(self._answer(message)))

    def call(self, message: EngineMessage[Answer]) -> Answer:
        return self.ask(message).result()

    def ask(self, message: EngineMessage[Answer]) -> Future[Answer]:
        self.check_alive()
        return asyncio.run_coroutine_threadsafe(self._answer_or_die(message), self._loop)

    def close(self) -> None:
        if self.is_forked:
            return
        self._post(self._die, EngineDead("the Runtime was closed"))
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _post(self, function: Callable[..., object], *args: Any) -> bool:
        """Call `function` in the event loop. Returns False if the client is closed or forked."""
        if self._death is not None or self.is_forked:
            return False
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop was closed meanwhile
            return False
        return True

    def _dead(self) -> EngineDead:
        if self.is_forked:
            return EngineDead(
                "this process was forked from the one that is connected to the replicas"
            )
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
        for request in list(self._open.values()):
            self._close(request)
            request.collector.fail(fresh(death))
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

    def _place(self, request: OpenRequest) -> None:
        """Choose a replica for the rest of the request and send it there; without a replica, the
        request waits."""
        self._open.pop(request.id, None)
        request.id = f"{self._frontend} {next(self._numbers)}"
        self._open[request.id] = request
        rest = request.rest()
        request.replica = self._router.choose(rest)
        if request.replica is None:
            self._waiting[request.id] = request
            return
        self._replicas[request.replica].submit(rest)

    def _place_waiting(self) -> None:
        waiting = list(self._waiting.values())
        self._waiting.clear()
        for request in waiting:
            self._place(request)

    async def _watch_waiting(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            now = time.monotonic()
            for request in list(self._waiting.values()):
                if now - request.lost_at > WITHOUT_REPLICA_S:
                    self._close(request)
                    request.collector.fail(
                        EngineDead(f"no replica for {WITHOUT_REPLICA_S:.0f} seconds")
                    )

    def _close(self, request: OpenRequest) -> None:
        """Forget a request that has ended."""
        self._open.pop(request.id, None)
        self._waiting.pop(request.id, None)
        self._ids.discard(request.request_id)

    def _abandon(self, collectors: Sequence[OutputCollector]) -> None:
        abandoned = set(map(id, collectors))
        for request in [
            request for request in self._open.values() if id(request.collector) in abandoned
        ]:
            self._abort(request)

    def _abort(self, request: OpenRequest) -> None:
        """End a request with the tokens so far, at once; its replica ends it when the message
        arrives."""
        replica = self._replicas.get(request.replica or "")
        self._close(request)
        if replica is not None:
            replica.end(request.id)
        self._push(request, request.collector.aborted())

    def _push(self, request: OpenRequest, output: RequestOutput) -> None:
        try:
            request.push(output)
        except Exception as error:  # its text cannot be decoded: end this request only
            _log.exception("request %s failed", request.request_id)
            request.collector.fail(
                request_failed(f"the request's text could not be decoded: {error!r}")
            )
            if request.id in self._open:
                self._abort(request)

    # -- in the loop: replicas ----------------------------------------------------------------

    def _set_replicas(self, links: Sequence[ReplicaLink]) -> None:
        names = {link.name for link in links}
        gone = [self._replicas.pop(name) for name in list(self._replicas) if name not in names]
        for replica in gone:  # before their requests are placed again
            self._router.remove(replica.link.name)
        for replica in gone:
            self._drain(replica)
        for link in links:
            if link.name not in self._replicas:
                replica = self._replicas[link.name] = Replica(link)
                self._count(replica)
                replica.task = self._loop.create_task(self._follow(replica))

    def _count(self, replica: Replica) -> None:
        """Count a new replica's statistics. One that has come back while it drained keeps those of
        its earlier record."""
        past, replicas = self._counted
        known = self._draining.get(replica.link.name)
        if known is not None:
            replica.stats = without_gauges(known.stats)
            replicas = tuple(other for other in replicas if other is not known)
        self._counted = past, (*replicas, replica)
        if known is not None:
            self._end_drain(known)

    def _drain(self, replica: Replica) -> None:
        """Send no more requests to a removed replica. Those that run there have `drain_s` seconds
        to end; those that were not sent yet move to others."""
        self._draining[replica.link.name] = replica
        for request in replica.remove():
            if request.request_id in self._open:
                self._place(self._open[request.request_id])
        self._check_drain(replica)
        self._loop.call_later(self._drain_s, self._end_drain, replica)

    def _check_drain(self, replica: Replica) -> None:
        """Drop a removed replica when none of its requests is open."""
        if not any(request.replica == replica.link.name for request in self._open.values()):
            self._end_drain(replica)

    def _end_drain(self, replica: Replica) -> None:
        """Drop a removed replica; its open requests move to others."""
        name = replica.link.name
        if self._draining.get(name) is not replica:
            return
        del self._draining[name]
        past, replicas = self._counted
        if replica in replicas:
            past = add_stats([past, without_gauges(replica.stats)])
            self._counted = past, tuple(other for other in replicas if other is not replica)
        assert replica.task is not None
        replica.task.cancel()
        for request in [request for request in self._open.values() if request.replica == name]:
            request.note_moved()
            self._place(request)

    async def _follow(self, replica: Replica) -> None:
        """Read a replica's reports until it is removed. Connects again after each loss."""
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
        """Take in a replica's reports until they end, or none comes for `silence_s` seconds."""
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
        """Take in a report: its outputs, and for the router its load and cache events."""
        self._reported_at = time.monotonic()
        name = replica.link.name
        if self._draining.get(name) is replica:
            replica.note_report(report.status, lacks_events=False)
            self._note_outputs(name, report)
            self._check_drain(replica)
        if self._replicas.get(name) is not replica:
            return  # it was removed
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
        request = self._open.get(output.request_id)
        if request is None or request.replica != name:  # it has ended or moved
            return
        finish = output.finish
        if finish is not None:
            if isinstance(finish.error, EngineDead):  # the replica is about to be lost
                return
            self._close(request)
        self._push(request, output)

    def _note_lost(self, replica: Replica) -> None:
        """A replica was lost: send its requests to others, except those that have lost MAX_LOST
        replicas, which fail."""
        name = replica.link.name
        replica.note_lost()
        replica.stats = without_gauges(replica.stats)
        self._router.remove(name)
        for request in [request for request in self._open.values() if request.replica == name]:
            request.note_lost()
            if request.num_lost < MAX_LOST:
                self._place(request)
                continue
            self._close(request)
            request.collector.fail(request_failed(f"{MAX_LOST} replicas were lost while it ran"))

    async def _answer_or_die(self, message: EngineMessage[Any]) -> Any:
        """The answer to a message. Raises EngineDead if the client is closed meanwhile."""
        try:
            return await self._answer(message)
        except asyncio.CancelledError:
            if self._death is None:
                raise
            raise self._dead() from None

    async def _answer(self, message: EngineMessage[Any]) -> Any:
        if isinstance(message, messages.GetStats):
            return await self._ask_stats(message)
        if isinstance(message, messages.CloseSession) and message.reopened is None:
            for request in self._open.values():  # those that move do not open it again
                if request.session == message.name:
                    request.session = ""
        if not isinstance(message, messages.AbortRequests):
            replicas = self._replicas.items()
            links = {name: replica.link for name, replica in replicas if replica.status is not None}
            return await ask_replicas(message, links, self._router)
        ids = message.request_ids
        requests = [
            request for request in self._open.values() if ids is None or request.request_id in ids
        ]
        for request in requests:
            self._abort(request)
        return len(requests)

    async def _ask_stats(self, message: messages.GetStats) -> dict[str, Any]:
        """The statistics of all replicas together: of those that do not answer, by their last
        report."""
        past, replicas = self._counted
        present = [replica for replica in replicas if replica.status is not None]
        calls = [replica.link.call(message) for replica in present]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        known = {replica: replica.stats for replica in replicas}
        known |= {
            replica: answer
            for replica, answer in zip(present, answers, strict=True)
            if not isinstance(answer, BaseException)
        }
        return add_stats([past, *known.values()])
