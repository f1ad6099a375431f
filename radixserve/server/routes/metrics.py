"""GET /metrics: gauges, counters and histograms for Prometheus, under our names and vLLM's.

To publish another number of `Runtime.cache_stats`, add a row to `_GAUGES` or `_COUNTERS`. Numbers
of the server itself are in `_Figures._of_server`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from fastapi import APIRouter
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from radixserve.server.gate.state import AppState, check_admin, server_of

router = APIRouter()
_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PARTS = ("schedule", "prepare", "forward", "sample", "commit", "overlapped")
_OWNERS = ("free", "tree", "locked", "private", "leased", "retained", "pinned")
# Of layers with windows and of recurrent layers, 0 without them: name, owners, help.
_OTHER_MEMORY = (
    ("window_pages", ("free", "used"), "pages of layers with windows, by owner"),
    ("states", ("free", "tree", "private"), "states of recurrent layers, by owner"),
)
# Each row: our name, vLLM's name, key of Runtime.cache_stats, help.
_GAUGES = (
    ("running_requests", "num_requests_running", "running", "requests that take part in steps"),
    ("waiting_requests", "num_requests_waiting", "waiting", "requests that wait to be admitted"),
    ("waiting_tokens", None, "waiting_tokens", "tokens of the waiting requests"),
)
_COUNTERS = (
    ("prompt_tokens", "prompt_tokens", "prompted_tokens", "tokens of prompts"),
    ("cached_tokens", "prompt_tokens_cached", "reused_tokens", "of these, found in the cache"),
    ("computed_tokens", None, "computed_tokens", "of these, computed"),
    ("prefix_cache_queries", "prefix_cache_queries", "prompted_tokens", "tokens looked for"),
    ("prefix_cache_hits", "prefix_cache_hits", "reused_tokens", "of these, found"),
    ("recomputed_tokens", None, "recomputed_tokens", "computed again after a preemption"),
    ("generation_tokens", "generation_tokens", "generated_tokens", "tokens of answers"),
    (
        "draft_tokens",
        "spec_decode_num_draft_tokens",
        "drafted_tokens",
        "guessed tokens that steps verified",
    ),
    (
        "accepted_draft_tokens",
        "spec_decode_num_accepted_tokens",
        "accepted_draft_tokens",
        "of these, right ones: as many steps saved",
    ),
    ("evicted_tokens", None, "evicted_tokens", "tokens dropped from the cache"),
    ("superseded_tokens", None, "superseded_tokens", "that sessions have left behind"),
    ("evicted_window_pages", None, "evicted_window_pages", "dropped, their tokens not"),
    ("evicted_checkpoints", None, "evicted_checkpoints", "states dropped, their tokens not"),
    ("preemptions", "num_preemptions", "preemptions", "running requests put back into the queue"),
    ("prefetched_tokens", None, "prefetched_tokens", "computed by hints, in no prompt's counts"),
    ("shared_tokens", None, "shared_tokens", "copied from prefixes that another tenant shares"),
    ("broken_pins", None, "broken_pins", "unlocked for a request before their time was over"),
    ("aborted_requests", None, "aborted", "requests that were ended from outside"),
    ("failed_requests", None, "failed", "requests that ended with an error"),
    ("steps", None, "steps", "forward passes"),
)
# Of drafts by their source: ours, key of its "drafts", help.
_DRAFT_COUNTERS = (
    ("source_draft_tokens", "drafted_tokens", "guessed tokens that steps verified, by source"),
    ("source_accepted_draft_tokens", "accepted_tokens", "of these, right ones"),
)
# Of an engine with a kv_store: ours, key of its "kv_store", help.
_STORE_COUNTERS = (
    ("store_loaded_tokens", "loaded_tokens", "tokens whose K/V was read from the kv_store"),
    ("store_written_tokens", "written_tokens", "tokens whose K/V was written to it"),
    ("store_unwritten_tokens", "unwritten_tokens", "not written: the disk was slow or refused"),
    ("store_skipped_tokens", "skipped_tokens", "not written: evicted, and not worth it before"),
    ("store_returned_tokens", "returned_tokens", "computed again after they had been evicted"),
    ("store_failed_reads", "failed_reads", "files that were damaged, gone or late"),
    ("store_failed_writes", "failed_writes", "files that could not be written"),
    ("store_refused_files", "refused_files", "that were damaged or not what their names say"),
    ("store_pauses", "pauses", "in which a store that had failed several times was left alone"),
)
# The same of its gauges, with the unit of ours in that of its "kv_store".
_STORE_GAUGES = (
    ("store_bytes", "store_bytes", 1.0, "of files"),
    ("store_loading_requests", "loading_requests", 1.0, "that wait for their stored prefix"),
    ("store_is_paused", "is_paused", 1.0, "1 while it is left alone or late"),
    ("store_read_bytes_per_second", "read_bytes_per_s", 1.0, "as measured"),
    ("store_load_latency_seconds", "load_latency_us", 1e-6, "of a load beside its bytes"),
)
# Of a model that takes pictures: ours, key of its "pictures", help.
_PICTURE_COUNTERS = (
    ("encoded_pictures", "encoded", "pictures that the vision tower encoded"),
    ("picture_encode_seconds", "encode_s", "in which it encoded"),
)
_PICTURE_GAUGES = (
    ("picture_waiting_requests", "held_requests", "that wait until their pictures are encoded"),
    ("picture_embedding_bytes", "kept_bytes", "of the embeddings that are kept"),
)
_NOTHING_EVICTED = {"evicted_window_pages": 0, "evicted_checkpoints": 0}  # without such layers
_HISTOGRAMS = (
    ("time_to_first_token_seconds", "ttft", "from arrival to the first token"),
    ("inter_token_latency_seconds", "inter_token", "between tokens, a request's mean for each"),
    ("e2e_request_latency_seconds", "total", "from arrival to the end"),
    ("request_queue_time_seconds", "queue", "from arrival to admission"),
    ("request_prefill_time_seconds", "prefill", "from admission to the first token"),
    ("request_decode_time_seconds", "decode", "from the first token to the end"),
    ("request_prompt_tokens", "prompt_tokens", "tokens of a prompt"),
    ("request_generation_tokens", "generated_tokens", "tokens of an answer"),
    ("request_max_num_generation_tokens", "most_generated_tokens", "of a prompt's longest answer"),
)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """All metrics, of all tenants together. With keys, needs an admin key."""
    check_admin(request)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(server_of(request)))
    return Response(generate_latest(registry), media_type=_TYPE)


class _Figures(Collector):
    """Collects the metrics from the engine's last reported status, without waiting for the
    engine."""

    def __init__(self, server: AppState) -> None:
        self._server = server
        self._labels = [server.model_name]

    def collect(self) -> Iterator[Metric]:
        status = self._server.runtime.status()
        stats = {**_NOTHING_EVICTED, **status.stats}
        stats |= {"running": status.running, "waiting": status.waiting}
        stats["waiting_tokens"] = status.waiting_tokens
        for ours, vllms, key, text in _GAUGES:
            yield from self._gauges(ours, vllms, text, float(stats[key]))
        text = "engines that serve, those that only end their requests included"
        yield from self._gauges("replicas", None, text, float(stats.get("replicas", 1)))
        num_pages = max(1, stats["pages_total"])  # 0 while there is no replica
        used = (stats["pages_locked"] + stats["pages_private"]) / num_pages
        text = "share of pages that requests use now, 0 to 1"
        yield from self._gauges("kv_cache_usage", "kv_cache_usage_perc", text, used)
        for name, owners, text in (("pages", _OWNERS, "pages by owner"), *_OTHER_MEMORY):
            family = GaugeMetricFamily(f"radixserve:{name}", text, labels=["owner"])
            for owner in owners:
                family.add_metric([owner], stats.get(f"{name}_{owner}", 0))
            yield family
        for ours, vllms, key, text in _COUNTERS:
            yield from self._counters(ours, vllms, text, float(stats[key]))
        for name, key, text in _DRAFT_COUNTERS:
            by_source = {source: each[key] for source, each in stats.get("drafts", {}).items()}
            yield from self._by_label(name, "source", Counter(by_source), text)
        if (advice := stats.get("advice")) is not None:
            text = "computed prompt tokens by reason: see docs/advice.md"
            counts = Counter(advice["computed"])
            yield from self._by_label("computed_tokens_by_reason", "reason", counts, text)
            text = "evicted, and computed again within a minute"
            regretted = float(advice["regretted_tokens"])
            yield from self._counters("regretted_tokens", None, text, regretted)
            text = "of computing prompts that caching saved, by the measured cost of a token"
            yield from self._counters("saved_seconds", None, text, stats["worth"]["saved_s"])
        ended = float(len(stats["ended_extensions"]))
        text = "extensions of the engine, such as the store, that have failed"
        yield from self._gauges("ended_extensions", None, text, ended)
        if (store := stats.get("kv_store")) is not None:
            for name, key, text in _STORE_COUNTERS:
                yield from self._counters(name, None, text, float(store[key]))
            for name, key, scale, text in _STORE_GAUGES:
                yield from self._gauges(name, None, text, store[key] * scale)
        if (pictures := stats.get("pictures")) is not None:
            for name, key, text in _PICTURE_COUNTERS:
                yield from self._counters(name, None, text, float(pictures[key]))
            for name, key, text in _PICTURE_GAUGES:
                yield from self._gauges(name, None, text, float(pictures[key]))
            text = "pictures of requests that needed no encoding, by what was found"
            reused = Counter(pictures["reused"])
            yield from self._by_label("reused_pictures", "source", reused, text)
        size = stats["page_size"]
        retained, lost = stats["pages_retained"] * size, stats["retained_evicted_pages"] * size
        yield from self._gauges("retained_tokens", None, "kept by hints now", float(retained))
        text = "evicted while a hint retained them"
        yield from self._counters("retained_evicted_tokens", None, text, float(lost))
        prompted = max(1, stats["prompted_tokens"])
        share = stats["reused_tokens"] / prompted
        yield from self._gauges("hit_rate", None, "share of prompt tokens found cached", share)
        seconds = CounterMetricFamily(
            "radixserve:step_seconds", "seconds of steps by part", labels=["part"]
        )
        for part in _PARTS:
            seconds.add_metric([part], stats[f"{part}_s"])
        yield seconds
        yield from self._of_server()

    def _of_server(self) -> Iterator[Metric]:
        server, counters = self._server, self._server.counters
        for name, key, text in _HISTOGRAMS:
            counted = counters.histograms[key]
            for full, labels, values in self._names(name, name):
                family = HistogramMetricFamily(full, text, labels=labels)
                family.add_metric(values, buckets=counted.buckets(), sum_value=counted.total)
                yield family
        yield from self._by_label("requests", "finish_reason", counters.finished, "completions")
        success = CounterMetricFamily(
            "vllm:request_success", "completions", labels=["model_name", "finished_reason"]
        )
        for reason, count in counters.finished.items():
            success.add_metric([*self._labels, reason], count)
        yield success
        hints = CounterMetricFamily(
            "radixserve:hints", "hints by verb and answer", labels=["verb", "answer"]
        )
        for pair, num_hints in counters.hints.items():
            hints.add_metric(pair, num_hints)
        yield hints
        yield from self._by_label(
            "rejections", "reason", counters.rejected, "refused requests and failed streams"
        )
        if (pictures := server.pictures) is not None:
            text = "pictures that were refused before their request began"
            counts = pictures.table.num_refused()
            yield from self._by_label("refused_pictures", "reason", counts, text)
        yield from self._by_label("responses", "status", counters.statuses, "HTTP answers")
        for name, count, text in (
            ("clients_gone", counters.clients_gone, "requests whose client left before the end"),
            ("billing_headers", server.num_billing_headers, "headers taken out of system prompts"),
            ("conversation_hits", counters.conversation_hits, "chats continued by their exact ids"),
        ):
            yield CounterMetricFamily(f"radixserve:{name}", text, value=count)
        for name, value, text in (
            ("conversations", len(server.conversations), "conversations remembered"),
            ("sessions", len(server.sessions), "sessions open"),
            ("branches", len(server.branches), "branches that clients hold"),
            ("stored_responses", len(server.responses), "responses stored"),
            ("in_flight_requests", len(server.in_flight), "HTTP requests being answered"),
        ):
            yield GaugeMetricFamily(f"radixserve:{name}", text, value=value)

    def _names(self, ours: str, vllms: str | None) -> Iterator[tuple[str, list[str], list[str]]]:
        """(full name, names of labels, their values) of our metric and, if it exists, of vLLM's."""
        yield f"radixserve:{ours}", [], []
        if vllms is not None:
            yield f"vllm:{vllms}", ["model_name"], self._labels

    def _gauges(self, ours: str, vllms: str | None, text: str, value: float) -> Iterator[Metric]:
        for name, labels, values in self._names(ours, vllms):
            family = GaugeMetricFamily(name, text, labels=labels)
            family.add_metric(values, value)
            yield family

    def _counters(self, ours: str, vllms: str | None, text: str, value: float) -> Iterator[Metric]:
        for name, labels, values in self._names(ours, vllms):
            family = CounterMetricFamily(name, text, labels=labels)
            family.add_metric(values, value)
            yield family

    def _by_label(
        self, name: str, label: str, counts: Counter[str], text: str
    ) -> Sequence[CounterMetricFamily]:
        family = CounterMetricFamily(f"radixserve:{name}", text, labels=[label])
        for value, count in sorted(counts.items()):
            family.add_metric([value], count)
        return [family]
