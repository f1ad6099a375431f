"""`losses_over_time`: why prompt tokens are computed, with an LRU cache of a given size."""

from __future__ import annotations

from dataclasses import asdict
from typing import NamedTuple

import numpy as np

from radixserve.advice.extension import AdviceExtension
from radixserve.cache import RadixCache
from radixserve.output import Finish, Metrics, Usage
from radixserve.replay.direct import serve
from radixserve.replay.trace import Floats, Ints, Trace
from radixserve.request import Request, SamplingParams

_TIMES = Metrics(None, None, 0.0)


class Losses(NamedTuple):
    """Prompt tokens by time: found in the cache, and computed for each reason."""

    edges: Floats  # [n + 1] seconds since the trace began; numbers of requests if it has no times
    prompts: Ints  # [n] tokens
    computed: dict[str, Ints]  # by reason, see `ComputedTokens`: [n] tokens


def losses_over_time(trace: Trace, cache_tokens: int, num_steps: int = 40) -> Losses:
    """Replay a trace, one request after another. Requests that do not fit are left out."""
    cache, now = RadixCache(cache_tokens, 1), 0.0
    extension = AdviceExtension(cache, 1, clock=lambda: now)
    times = trace.times if trace.has_times else np.arange(len(trace), dtype=np.float64)
    edges = np.linspace(times[0], max(times[-1], times[0] + 1e-9), num_steps + 1)
    steps = np.clip(np.searchsorted(edges, times, "right") - 1, 0, num_steps - 1)
    prompts = np.zeros(num_steps, np.int64)
    before = asdict(extension.computed)
    computed = {name: np.zeros(num_steps, np.int64) for name in before}
    for request in trace:
        now, prompt = float(times[request.index]), request.prompt
        params = SamplingParams(max_tokens=1, namespace=request.namespace)
        size = len(prompt) + len(request.output) + 1
        asked = Request(f"{request.index}", prompt, params, 0, frozenset(), size)
        extension.hold(asked, 0.0, lambda _: None)
        cached = serve(cache, request, None)
        num_cached, num_computed = (0, 0) if cached is None else (cached, len(prompt) - cached)
        usage = Usage(len(prompt), num_cached, num_computed, len(request.output))
        output = [] if cached is None else request.output.tolist()
        extension.on_finish(asked, output, Finish("length", usage, _TIMES, None), 0.0)
        step, after = steps[request.index], asdict(extension.computed)
        prompts[step] += num_cached + num_computed
        for name, count in after.items():
            computed[name][step] += count - before[name]
        before = after
    return Losses(edges, prompts, computed)
