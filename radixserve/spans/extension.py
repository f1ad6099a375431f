"""`SpanExtension`: sends OpenTelemetry spans of ended requests to an OTLP collector.

    generate MODEL                 the request, below the caller's span
      queue                        from its arrival to its admission
      load                         of that, the time in which it waited for stored K/V or an adapter
      prefill                      to its first token
      decode                       to its end

Attributes are those of the GenAI convention, and radixserve.* for what it lacks. The engine's
thread only queues what has ended: a thread makes the spans, another one sends them.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from radixserve.engine.extension import EngineExtension
from radixserve.output import Finish
from radixserve.request import Request

_MOST_QUEUED = 4096  # ended requests; more are dropped and counted
_NS = 1_000_000_000
_FORMAT = TraceContextTextMapPropagator()


class _Ended(NamedTuple):
    """A request that has ended."""

    request: Request
    num_output: int
    finish: Finish
    arrived_at: float  # in seconds since 1970
    load: tuple[float, float] | None  # seconds after its arrival in which it waited for stored K/V
    tier: str | None  # that its K/V was loaded from


class SpanExtension(EngineExtension):
    """See the module. `endpoint`: the URL of an OTLP collector over HTTP, such as
    http://localhost:4318/v1/traces. `tier_of`: where a request's K/V was loaded from, by its id."""

    name = "spans"

    def __init__(
        self,
        endpoint: str,
        model: str,
        tier_of: Callable[[str], str | None] = lambda _: None,
    ) -> None:
        self._model, self._tier_of = model, tier_of
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: "radixserve"}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("radixserve")
        self._arrived: dict[str, float] = {}  # open requests: time.monotonic()
        self._loads: dict[str, tuple[float, float]] = {}
        self._ended: queue.Queue[_Ended | None] = queue.Queue(_MOST_QUEUED)
        self._num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="radixserve-spans", daemon=True)
        self._thread.start()

    # -- the engine's thread ------------------------------------------------------------------

    def hold(
        self,
        request: Request,
        queued_at: float,  # noqa: ARG002
        release: Callable[[int], None],  # noqa: ARG002
    ) -> bool:
        """Notes when a request arrives; holds none back."""
        self._arrived[request.request_id] = time.monotonic()
        return False

    def on_held(self, request: Request, held_s: float) -> None:
        """A request has waited for so long, until now, for its stored K/V or its adapter."""
        arrived = self._arrived.get(request.request_id)
        if arrived is not None:
            end = time.monotonic() - arrived
            start, _ = self._loads.get(request.request_id, (max(0.0, end - held_s), end))
            self._loads[request.request_id] = start, end

    def on_finish(
        self, request: Request, output_ids: Sequence[int], finish: Finish, arrived_at: float
    ) -> None:
        self._arrived.pop(request.request_id, None)
        load = self._loads.pop(request.request_id, None)
        if request.is_prefetch:
            return
        tier = self._tier_of(request.request_id)
        try:
            self._ended.put_nowait(_Ended(request, len(output_ids), finish, arrived_at, load, tier))
        except queue.Full:
            self._num_dropped += 1

    def stats(self) -> dict[str, Any]:
        return {"dropped": self._num_dropped}

    def close(self, timeout_s: float) -> None:
        with contextlib.suppress(queue.Full):
            self._ended.put_nowait(None)
        self._thread.join(timeout_s)
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()  # it sends what is left, and a collector may not answer
        closing.join(timeout_s)

    # -- the thread of the spans --------------------------------------------------------------

    def _run(self) -> None:
        while (ended := self._ended.get()) is not None:
            self._write(ended)

    def _write(self, ended: _Ended) -> None:
        request, finish, began = ended.request, ended.finish, ended.arrived_at
        times = finish.metrics
        parent = _FORMAT.extract(request.trace_headers) if request.trace_headers else None
        attributes = {**request_attributes(ended.request, self._model), **result_attributes(ended)}
        root = self._tracer.start_span(
            f"generate {self._model}",
            parent,
            SpanKind.SERVER,
            attributes,
            start_time=_nanoseconds(began),
        )
        if finish.error is not None:
            root.set_status(Status(StatusCode.ERROR, str(finish.error)[:256]))
        inside = trace.set_span_in_context(root)
        usage, miss = finish.usage, finish.miss
        admitted = times.total_s if times.queue_s is None else times.queue_s
        self._child("queue", inside, began, 0.0, admitted)
        if ended.load is not None:
            loaded = {"radixserve.loaded_tokens": usage.loaded_tokens}
            self._child("load", inside, began, *ended.load, loaded)
        if times.queue_s is not None:
            first = times.total_s if times.ttft_s is None else times.ttft_s
            counts = {
                "radixserve.cached_tokens": usage.cached_tokens,
                "radixserve.computed_tokens": usage.computed_tokens,
            }
            if miss is not None:
                counts["radixserve.miss.position"] = miss.position
            self._child("prefill", inside, began, times.queue_s, first, counts)
        if times.ttft_s is not None:
            tokens = {"radixserve.generated_tokens": ended.num_output}
            self._child("decode", inside, began, times.ttft_s, times.total_s, tokens)
        root.end(_nanoseconds(began + times.total_s))

    def _child(
        self,
        name: str,
        inside: Any,
        began: float,
        start: float,
        end: float,
        attributes: dict[str, int] | None = None,
    ) -> None:
        """A span from `start` to `end`, in seconds after `began`."""
        span = self._tracer.start_span(
            name, inside, attributes=attributes, start_time=_nanoseconds(began + start)
        )
        span.end(_nanoseconds(began + max(start, end)))


def request_attributes(request: Request, model: str) -> dict[str, Any]:
    """What was asked for, without any text."""
    params = request.params
    known = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "radixserve",
        "gen_ai.request.model": model,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.conversation.id": request.session or None,
        "radixserve.tenant": request.namespace.tenant or None,
    }
    return {name: value for name, value in known.items() if value is not None}


def result_attributes(ended: _Ended) -> dict[str, Any]:
    """What came of it: counts, the tier that had its prefix, and why not more was found."""
    finish = ended.finish
    usage, miss = finish.usage, finish.miss
    tier = "none"
    if usage.loaded_tokens:
        tier = ended.tier or "store"
    elif usage.cached_tokens:
        tier = "pool"
    attributes = {
        "gen_ai.response.id": ended.request.request_id,
        "gen_ai.response.finish_reasons": [finish.reason],
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "radixserve.cached_tokens": usage.cached_tokens,
        "radixserve.loaded_tokens": usage.loaded_tokens,
        "radixserve.computed_tokens": usage.computed_tokens,
        "radixserve.tier": tier,
    }
    if miss is not None:
        attributes["radixserve.miss.reason"] = miss.reason
    return attributes


def _nanoseconds(seconds: float) -> int:
    return int(seconds * _NS)
