"""Rows over one long shared prefix: read together (cascade) against every row on its own (flat).

attention   that of all layers alone, as a graph, over a pool of random K and V
step        decode steps of the engine; the prefix is computed once and found in the cache
crossover   from how many tokens on together is faster, (rows - 1) x prefix: SHARE_BYTES of
            radixserve/attention/cuda/cascade.py over the bytes of a token in a layer
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from gpu.bench import DTYPE, LLAMA, Bench, Times
from gpu.jobs import Skip
from gpu.limits import cascade_s, decode_s, flat_s, kv_bytes, matrices_s
from gpu.timed_engine import DecodeFigures, TimedEngine
from harness.shared_prefix import SharedPrefix

from radixserve.attention.base import AttentionBackend
from radixserve.attention.choice import make_backend
from radixserve.attention.cuda import cascade
from radixserve.runner.cuda_graph import GraphCapturer

ATTENTION_GAIN, STEP_GAIN = 5.0, 3.0
STEP_ROWS = 64  # that the target of the step is for
OWN = 128


def run(bench: Bench, group: str) -> None:
    if (name := bench.backend_name()) not in ("flashinfer", "triton"):
        raise Skip(f"the backend {name} has no cascade in graphs")
    kinds = {"attention": measure_attention, "crossover": find_crossover, "step": measure_steps}
    kinds[group](bench)


def time_attention(
    bench: Bench, num_layers: int, num_rows: int, shared: int, own: int, repeats: int
) -> tuple[Times, Times]:
    """Attention of all layers as a graph, flat and cascade, whether or not that pays."""
    shape = replace(bench.shape(LLAMA), num_layers=num_layers)
    where = {"page_size": bench.settings.page_size, "dtype": DTYPE, "device": bench.device}
    case = SharedPrefix(shape, num_rows, shared, own, **where)
    found = []
    for together in (False, True):
        backend = make_backend(bench.backend_name(), case.kv, shape.num_heads, shares=together)
        if together and not backend.shared_levels(case.batch):
            raise RuntimeError("the backend finds nothing to read together")
        found.append(time_graph(bench, backend, case, repeats, num_levels=int(together)))
    return found[0], found[1]


def time_graph(
    bench: Bench, backend: AttentionBackend, case: SharedPrefix, repeats: int, num_levels: int = 0
) -> Times:
    """Attention of all layers as a graph."""
    backend.prepare()
    graph = backend.make_graph_backend(case.num_rows, case.num_row_pages, num_levels)
    graph.plan(case.batch)
    attend = partial(case.attend, graph)
    replay = GraphCapturer(bench.device).capture(attend) if bench.is_cuda else attend
    return bench.clock.times(replay, repeats)


def always_share() -> None:
    """In this process whatever rows have in common is read together."""
    cascade.SHARE_BYTES, cascade.MERGE_TOKENS = 1, 0


def _cells(flat: Times, flat_limit: float, cascade: Times, limit: float) -> dict[str, Any]:
    return {
        "flat ms": flat.ms,
        "limit ms": flat_limit * 1e3,
        "cascade ms": cascade.ms,
        "its limit": limit * 1e3,
        "gain": f"{flat.median / cascade.median:.1f} x",
    }


def measure_attention(bench: Bench) -> None:
    always_share()
    shape, ceilings = bench.shape(LLAMA), bench.ceilings
    shared, own = bench.pick((8_192, OWN), (64, 8))
    for num_rows in bench.pick((64, 256), (8,)):
        what = f"{bench.backend_name()}, {num_rows} rows, {shared:,} + {own}"
        section = "attention alone, all layers"
        with bench.case(what, section):
            sizes = shape.num_layers, num_rows, shared, own
            flat, cascade = time_attention(bench, *sizes, bench.pick(20, 2))
            flat_limit = flat_s(shape, ceilings, num_rows, shared + own)
            limit = cascade_s(shape, ceilings, num_rows, shared, own)
            cells = _cells(flat, flat_limit, cascade, limit)
            check = bench.at_least("gain", flat.median / cascade.median, ATTENTION_GAIN)
            bench.row(what, cells, check, section=section)


def find_crossover(bench: Bench) -> None:
    always_share()
    shape, name = bench.shape(LLAMA), bench.backend_name()
    prefixes = bench.pick((128, 256, 512, 1_024, 2_048, 4_096, 8_192), (8, 32))
    found: list[float] = []
    section = "flat / cascade by prefix"
    for num_rows in bench.pick((2, 4, 8, 16, 32, 64, 128, 256), (2, 4)):
        with bench.case(f"{num_rows} rows", section):
            gains = []
            for shared in prefixes:
                num_layers, own, repeats = bench.pick((8, OWN, 10), (2, 4, 2))
                times = time_attention(bench, num_layers, num_rows, shared, own, repeats)
                gains.append(times[0].median / times[1].median)
            cells: dict[str, Any] = {
                str(prefix): f"{gain:.2f}" for prefix, gain in zip(prefixes, gains, strict=True)
            }
            at = crossing(prefixes, gains)
            cells["(rows - 1) x prefix"] = None if at is None else round((num_rows - 1) * at)
            found += [] if at is None else [(num_rows - 1) * at]
            bench.row(f"{num_rows} rows", cells, section=section)
    told = "no crossing among these prefixes"
    if found:
        size = median(found) * kv_bytes(shape) / shape.num_layers / 2**20
        told = (
            f"together is faster from (rows - 1) x prefix = {median(found):,.0f} tokens on (the"
            f" median): SHARE_BYTES = {size:.1f} MiB"
        )
    bench.note(f"{name}: {told}")


def crossing(places: Sequence[int], gains: Sequence[float]) -> float | None:
    """Where the gain passes 1 for good, between two places on a logarithmic scale; the first place
    if it is larger everywhere, None if it is not at the last one."""
    below = [at for at, gain in enumerate(gains) if gain < 1]
    if not below:
        return float(places[0])
    last = below[-1]
    if last == len(gains) - 1:
        return None
    low, high = math.log(gains[last]), math.log(gains[last + 1])
    return float(places[last] * (places[last + 1] / places[last]) ** (-low / (high - low)))


def measure_steps(bench: Bench) -> None:
    sizes, shared, own = bench.pick(((64, 256), 8_192, OWN), ((4,), 64, 8))
    flats = _steps(bench, sizes, shared, own, is_on=False)
    cascades = _steps(bench, sizes, shared, own, is_on=True)
    shape, ceilings = bench.shape(LLAMA), bench.ceilings
    for size in sorted({*flats} & {*cascades}):
        flat, cascade = flats[size], cascades[size]
        limit = matrices_s(shape, ceilings, size, size)
        limit += cascade_s(shape, ceilings, size, shared, cascade.num_keys - shared)
        flat_limit = decode_s(shape, ceilings, size, flat.num_keys)
        cells = _cells(flat.step, flat_limit, cascade.step, limit)
        cells["host share"] = f"{cascade.host_share:.1%}"
        gain = bench.at_least("gain", flat.step.median / cascade.step.median, STEP_GAIN)
        checks = [gain] if size == STEP_ROWS else []
        bench.row(f"{size} rows, {shared:,} + {own}", cells, *checks, section="whole step")


def _steps(
    bench: Bench, sizes: Sequence[int], shared: int, own: int, *, is_on: bool
) -> dict[int, DecodeFigures]:
    if bench.is_dry and is_on:
        always_share()  # tiny rows would not pay
    with TimedEngine(
        bench,
        LLAMA,
        max_running_requests=max(sizes),
        max_seq_len=shared + bench.pick(2_048, 256),
        pool=bench.pick(262_144, 2_048),
        cascade_attention=is_on,
    ) as engine:
        engine.check_room(shared + max(sizes) * (own + 2 * max(sizes)), "the rows")
        prefix = engine.tokens(shared)
        engine.first_token(prefix)
        found = {}
        for size in sizes:
            with bench.case(f"{size} rows, {'cascade' if is_on else 'flat'}", "whole step"):
                prompts = [np.concatenate([prefix, tail]) for tail in engine.prompts(size, own)]
                found[size] = engine.decode(prompts, *bench.pick((32, 6), (3, 2)))
    return found
