"""Time to first token of the Llama-3-8B shapes: of cold prompts, and after a cached prefix.

One request at a time through the engine, from `add` to its first token, host and all; a request's
prompt is random but for the part that is to be cached.
"""

from __future__ import annotations

from statistics import median

import numpy as np
from gpu.bench import LLAMA, Bench, Times
from gpu.limits import prefill_s
from gpu.timed_engine import TimedEngine

TARGET = 0.7  # of the limit, cold
GAIN = 10.0  # cold over cached


def run(bench: Bench, group: str) -> None:
    """group: the backend; "" is the run's own."""
    new, cold, cached = bench.pick(
        (512, (512, 4_096, 32_768), (8_192, 32_768)), (16, (16, 64), (128,))
    )
    settings = bench.of_group(group)
    if group:
        cold, cached = cold[:2], cached[:1]
    with TimedEngine(
        bench,
        LLAMA,
        max_running_requests=8,
        max_seq_len=max(*cold, *cached) + bench.pick(1_024, 64),
        pool=bench.pick(None, 2_048),
        **settings,
    ) as engine:
        engine.first_token(engine.tokens(new))
        backend = engine.resolved_config.attention_backend
        for length in cold:
            with bench.case(name := f"{backend}, {length:,} cold"):
                times = _cold(bench, engine, length)
                limit = prefill_s(bench.shape(LLAMA), bench.ceilings, length)
                check = bench.at_least("of the limit", limit / times.median, TARGET)
                bench.row(name, _cells(times, limit, length), check)
        for length in cached:
            with bench.case(name := f"{backend}, {new:,} after {length:,} cached"):
                _measure_cached(bench, engine, name, length, new)


def _cold(bench: Bench, engine: TimedEngine, length: int) -> Times:
    """Every prompt is a new one."""
    engine.check_room(length + 1, "a prompt and its answer")
    samples = [engine.first_token(engine.tokens(length)) for _ in range(_repeats(bench, length))]
    if any(num_cached > 8 for _, num_cached in samples):  # random tokens may begin alike
        raise AssertionError(f"parts of random prompts were cached: {samples}")
    return Times.of([seconds for seconds, _ in samples])


def _measure_cached(bench: Bench, engine: TimedEngine, name: str, length: int, new: int) -> None:
    engine.check_room(2 * (length + new), "a prompt and its answers")
    prefix = engine.tokens(length)
    engine.first_token(prefix)
    prompts = [
        np.concatenate([prefix, engine.tokens(new)]) for _ in range(_repeats(bench, new) + 1)
    ]
    samples = [engine.first_token(prompt) for prompt in prompts][1:]
    times = Times.of([seconds for seconds, _ in samples])
    num_cached = median(count for _, count in samples)
    failed = "" if num_cached in (length, length + 1) else f"{num_cached:,} tokens were cached"
    cells = _cells(times, prefill_s(bench.shape(LLAMA), bench.ceilings, new, length), new)
    checks = []
    if length <= bench.pick(8_192, 128):
        gain = _cold(bench, engine, length + new).median / times.median
        cells["cold / cached"] = f"{gain:.1f} x"
        checks.append(bench.at_least("cold over cached", gain, GAIN))
    bench.row(name, cells, *checks, failed=failed)


def _repeats(bench: Bench, num_new: int) -> int:
    return int(bench.pick(3 if num_new > 8_192 else 7, 2))


def _cells(times: Times, limit: float, num_new: int) -> dict[str, float | str]:
    return {
        **times.cells("first token ms"),
        "limit ms": limit * 1e3,
        "of limit": f"{limit / times.median:.0%}",
        "tok/s": num_new / times.median,
    }
