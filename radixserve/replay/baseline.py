"""`compare_off`: traces through the scheduler with a cache and with none, a row for each trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from radixserve.replay.caches import CacheSpec, none_if_nan
from radixserve.replay.paths import PathTable, build_paths
from radixserve.replay.report import Finding, format_tokens
from radixserve.replay.scheduled import ScheduledResult, Serving, replay_scheduled
from radixserve.replay.shared_prefixes import shared_prefixes
from radixserve.replay.study import Watch, unwatched
from radixserve.replay.trace import Trace
from radixserve.replay.workloads import PREFIX


def compare_off(
    trace: Trace,
    specs: Callable[[PathTable], Sequence[CacheSpec]],
    serving: Serving,
    *,
    lease_s: float | None = None,
    watch: Watch = unwatched,
) -> dict[str, Any]:
    """Replay a trace with a cache and with none in the same memory. Returns a JSON document.

    specs    returns caches for the trace's paths; the largest of the first one's kind is used
    lease_s  of the cache's sessions, in seconds of the trace; None: the cache's default
    """
    with watch("reading", len(trace)) as step:
        paths = build_paths(trace, on_request=step)
    first, *others = specs(paths)
    kind = first.label, first.page_size
    spec = first
    for other in others:
        if (other.label, other.page_size) == kind and other.cache_tokens > spec.cache_tokens:
            spec = other
    document: dict[str, Any] = {
        "trace": trace.name,
        "requests": len(trace),
        "prompt_tokens": trace.prompt_tokens,
        "ideal_hit_rate": paths.reusable_tokens / trace.prompt_tokens,
        "cache_tokens": spec.cache_tokens,
        "cache": spec.label,
        "prefixes": asdict(shared_prefixes(trace, paths)),
    }
    for name, one in (("on", spec), ("off", _off(spec))):
        with watch(f"{trace.name}, {name}", len(trace)) as step:
            result = replay_scheduled(trace, paths, one, serving, lease_s=lease_s, on_request=step)
        document[name] = _result(result)
    return document


def _off(spec: CacheSpec) -> CacheSpec:
    return replace(spec, index="off", policy="lru", use_sessions=False, states=None, windows=None)


def _result(result: ScheduledResult) -> dict[str, Any]:
    return {
        "hit_rate": result.hit_rate,
        "computed_tokens": result.computed_tokens,
        "ttft_mean_s": none_if_nan(result.mean_ttft_s),
        "ttft_p50_s": none_if_nan(result.ttft_at(50)),
        "ttft_p95_s": none_if_nan(result.ttft_at(95)),
    }


def _milliseconds(seconds: float | None) -> str:
    return "nan ms" if seconds is None else f"{1000 * seconds:.0f} ms"


def baseline_finding(documents: Sequence[dict[str, Any]]) -> Finding:
    """The documents of `compare_off` as a table."""
    heads = ("trace", "prompt", "shared", "blocks", "hit %", "computed", "off", "TTFT", "off")
    rows = []
    for row in documents:
        on, off, shared = row["on"], row["off"], row["prefixes"]
        rows.append(
            (
                row["trace"].removeprefix(PREFIX),
                f"{row['prompt_tokens'] / row['requests']:.0f}",
                f"{shared['mean_shared_prefix']:.0f}",
                f"{shared['shared_blocks']:,}",
                f"{100 * on['hit_rate']:.2f}",
                format_tokens(on["computed_tokens"]),
                format_tokens(off["computed_tokens"]),
                _milliseconds(on["ttft_mean_s"]),
                _milliseconds(off["ttft_mean_s"]),
            )
        )
    lines = [
        "prompt, shared: mean tokens of a prompt, and of the prefix that another one has, too",
        f"blocks: different ones of {documents[0]['prefixes']['block_size']} tokens, with all "
        "before them, in two prompts or more",
        "off: without a cache; TTFT: mean time to first token, by the step costs",
    ]
    return Finding("with a cache and with none", heads, rows, lines)
