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
import torch
from gpu.bench import DTYPE, LLAMA, Bench
from gpu.clock import Times, captured
from gpu.jobs import Skip
from gpu.limits import cascade_s, decode_s, flat_s, kv_bytes, matrices_s
from gpu.stage import DecodeFigures, Stage
from harness.shared_prefix import SharedPrefix

from radixserve.attention.base import AttentionBackend
from radixserve.attention.choice import make_backend
from radixserve.attention.cuda import cascade

ATTENTION_GAIN, STEP_GAIN = 5.0, 3.0
STEP_ROWS = 64  # that the target of the step is for
OWN = 128


def run(bench: Bench, group: str) -> None:
    if (name := bench.backend_name()) not in ("flashinfer", "triton"):
        raise Skip(f"the backend {name} has no cascade in graphs")
    {"attention": measure_attention, "crossover": find_crossover, "step": measure_steps}[group](
        bench
    )


def make_case(bench: Bench, num_layers: int, num_rows: int, shared: int, own: int) -> SharedPrefix:
    shape = replace(bench.shape(LLAMA), num_layers=num_layers)
    page_size = bench.settings.page_size
    return SharedPrefix(
        shape, num_rows, shared, own, page_size=page_size, dtype=DTYPE, device=bench.device
    )


def time_attention(bench: Bench, case: SharedPrefix, repeats: int) -> tuple[Times, Times]:
    """Attention of all layers as a graph, flat and cascade, whether or not that pays."""
    found = []
    for together in (False, True):
        num_heads = case.q.shape[1]
        backend = make_backend(bench.backend_name(), case.kv, num_heads, shares=together)
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
    replay = captured(partial(_attend, graph, case), bench.device)
    return Times.of(bench.clock.samples(replay, repeats))


def _attend(graph: Any, case: SharedPrefix) -> torch.Tensor:
    for layer in range(case.num_layers):
        out: torch.Tensor = graph.attend(case.q, layer)
    return out


def always_share() -> None:
    """In this process whatever rows have in common is read together."""
    cascade.SHARE_BYTES, cascade.MERGE_TOKENS = 1, 0


def measure_attention(bench: Bench) -> None:
    always_share()
    shape = bench.shape(LLAMA)
    shared, own = bench.pick(8_192, 8_192, 64), bench.pick(OWN, OWN, 8)
    section = "attention alone, all layers"
    for num_rows in bench.pick((64, 256), (64,), (8,)):
        what = f"{bench.backend_name()}, {num_rows} rows, {shared:,} + {own}"
        with bench.case(what, section):
            case = make_case(bench, shape.num_layers, num_rows, shared, own)
            flat, cascade = time_attention(bench, case, bench.pick(20, 10, 2))
            gain = flat.median / cascade.median
            cells = {
                "flat ms": flat.ms,
                "limit ms": flat_s(shape, bench.ceilings, num_rows, shared + own) * 1e3,
                "cascade ms": cascade.ms,
                "its limit": cascade_s(shape, bench.ceilings, num_rows, shared, own) * 1e3,
                "gain": f"{gain:.1f} x",
            }
            check = bench.at_least("gain", gain, ATTENTION_GAIN)
            bench.row(what, cells, checks=(check,), section=section)


def find_crossover(bench: Bench) -> None:
    always_share()
    shape, name = bench.shape(LLAMA), bench.backend_name()
    num_layers = bench.pick(8, 8, 2)
    prefixes = bench.pick((128, 256, 512, 1_024, 2_048, 4_096, 8_192), (256, 1_024, 4_096), (8, 32))
    found: list[float] = []
    section = "flat / cascade by prefix"
    for num_rows in bench.pick((2, 4, 8, 16, 32, 64, 128, 256), (4, 16, 64), (2, 4)):
        with bench.case(f"{num_rows} rows", section):
            gains = []
            for shared in prefixes:
                case = make_case(bench, num_layers, num_rows, shared, bench.pick(OWN, OWN, 4))
                flat, cascade = time_attention(bench, case, bench.pick(10, 5, 2))
                gains.append(flat.median / cascade.median)
            told = zip(prefixes, gains, strict=True)
            cells: dict[str, Any] = {str(p): f"{gain:.2f}" for p, gain in told}
            at = crossing(prefixes, gains)
            cells["(rows - 1) x prefix"] = None if at is None else round((num_rows - 1) * at)
            if at is not None:
                found.append((num_rows - 1) * at)
            bench.row(f"{num_rows} rows", cells, section=section)
    token_bytes = kv_bytes(shape) // shape.num_layers
    if found:
        tokens = median(found)
        bench.note(
            f"{name}: together is faster from (rows - 1) x prefix = {tokens:,.0f} tokens on (the"
            f" median): SHARE_BYTES = {tokens * token_bytes / 2**20:.1f} MiB"
        )
    else:
        bench.note(f"{name}: no crossing among these prefixes")


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
    share = -low / (high - low)
    return float(places[last] * (places[last + 1] / places[last]) ** share)


def measure_steps(bench: Bench) -> None:
    sizes = bench.pick((64, 256), (64,), (4,))
    shared, own = bench.pick(8_192, 8_192, 64), bench.pick(OWN, OWN, 8)
    found: dict[tuple[int, bool], DecodeFigures] = {}
    for is_on in (False, True):
        if bench.is_dry and is_on:
            always_share()  # tiny rows would not pay
        for size, figures in _steps(bench, sizes, shared, own, is_on=is_on).items():
            found[size, is_on] = figures
    shape = bench.shape(LLAMA)
    for size in sizes:
        if not {(size, False), (size, True)} <= set(found):
            continue
        flat, cascade = found[size, False], found[size, True]
        gain = flat.step.median / cascade.step.median
        matrices = matrices_s(shape, bench.ceilings, size, size)
        limit = matrices + cascade_s(shape, bench.ceilings, size, shared, cascade.num_keys - shared)
        cells = {
            "flat ms": flat.step.ms,
            "limit ms": decode_s(shape, bench.ceilings, size, flat.num_keys) * 1e3,
            "cascade ms": cascade.step.ms,
            "its limit": limit * 1e3,
            "gain": f"{gain:.1f} x",
            "host share": f"{cascade.host_share:.1%}",
        }
        checks = (bench.at_least("gain", gain, STEP_GAIN),) if size == STEP_ROWS else ()
        what = f"{size} rows, {shared:,} + {own}"
        bench.row(what, cells, checks=checks, section="whole step")


def _steps(
    bench: Bench, sizes: Sequence[int], shared: int, own: int, *, is_on: bool
) -> dict[int, DecodeFigures]:
    with Stage(
        bench,
        LLAMA,
        max_running_requests=max(sizes),
        chunked_prefill_size=bench.pick(8_192, 8_192, 64),
        max_seq_len=shared + bench.pick(2_048, 2_048, 256),
        num_pages=-(-bench.pick(262_144, 131_072, 2_048) // bench.settings.page_size),
        cascade_attention=is_on,
    ) as stage:
        stage.check_room(shared + max(sizes) * (own + 2 * max(sizes)), "the rows")
        prefix = stage.tokens(shared)
        stage.first_token(prefix)
        found = {}
        for size in sizes:
            with bench.case(f"{size} rows, {'cascade' if is_on else 'flat'}", "whole step"):
                prompts = [np.concatenate([prefix, tail]) for tail in stage.prompts(size, own)]
                found[size] = stage.decode(prompts, bench.pick(32, 16, 3), bench.pick(6, 4, 2))
        bench.note(f"cascade_attention={is_on}: {stage.resolved_config}")
    return found
