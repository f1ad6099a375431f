"""Which attention kernels are fastest on this card: its entry of kernel_choice.json.

decode   FlashInfer's on tensor cores and on CUDA cores, and Triton's beside them
extend   FlashInfer's fa2 and fa3, and Triton's with several tiles, for many new tokens of one row
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import numpy as np
import torch
from gpu.bench import DTYPE, LLAMA, QWEN, Bench
from gpu.jobs import describe_error
from gpu.part_shared import time_graph
from harness.shapes import Shape
from harness.shared_prefix import SharedPrefix

from radixserve.attention.choice import make_backend
from radixserve.attention.cuda.flashinfer import FA3_QUERIES
from radixserve.runner.input_batch import build_forward_batch
from radixserve.schedule import ScheduledRequest
from radixserve_kernels.gpu import extend
from radixserve_kernels.gpu.kernel_choice import KernelChoice, choice_of

ROWS, CONTEXTS = (1, 8, 16, 32, 40, 64, 128, 256), (1_024, 8_192)
MOST_KEYS = 1_100_000  # of all rows
NUM_LAYERS = 4  # whose K and V no cache holds
EXTENSIONS = ((512, 0), (4_096, 0), (8_192, 0), (512, 8_192), (4_096, 28_672), (16, 8_192))
TODAY = "triton None"
TILES = ((64, 64, 4, 3), (128, 128, 8, 2))  # beside today's; queries, keys, warps, stages
LEAST_GAIN = 0.97  # a change has to bring 3 %
Kinds = dict[str, tuple[str, KernelChoice]]  # ways to compute the same: library and choice by name
Work = tuple[Any, Callable[[Any], float]]  # a pool of K and V; seconds of a backend over it


def run(bench: Bench, group: str) -> None:
    chosen = {"decode": choose_decode, "extend": choose_extend}[group](bench)
    bench.row(f"{chosen}", section="chosen", details={"choice": chosen})


def choose_decode(bench: Bench) -> dict[str, Any]:
    """FlashInfer's faster cores by query heads of a K/V head, then by rows."""
    chosen: dict[str, dict[str, str]] = {}
    for model in (LLAMA, QWEN):
        shape = replace(bench.shape(model), num_layers=NUM_LAYERS)
        group = str(shape.num_heads // shape.num_kv_heads)
        cores = {name: KernelChoice(decode={group: {"1": name}}) for name in ("tensor", "cuda")}
        kinds: Kinds = {name: ("flashinfer", one) for name, one in cores.items()}
        kinds["triton"] = "triton", KernelChoice()
        best = {}
        for num_rows in bench.pick(ROWS, (2,)):
            total = dict.fromkeys(cores, 0.0)
            for context in bench.pick(CONTEXTS, (16,)):
                if num_rows * context <= MOST_KEYS:
                    what = f"{num_rows} rows of {context:,}, group {group}"
                    work = partial(_decode, bench, shape, num_rows, context)
                    spent = race(bench, kinds, what, shape, work)
                    total = {name: total[name] + spent.get(name, inf) for name in cores}
            if min(total.values()) < inf:
                best[str(num_rows)] = min(total, key=lambda name: total[name])
        if best:
            chosen[group] = best
    return {"decode": chosen}


def choose_extend(bench: Bench) -> dict[str, Any]:
    """Whether fa3 is worth it, and Triton's tile, by their times with long queries."""
    shape = bench.shape(LLAMA)
    kinds: Kinds = {"fa2": ("flashinfer", KernelChoice(fa3=False))}
    if bench.is_cuda and torch.cuda.get_device_capability(bench.device)[0] == 9:
        kinds["fa3"] = "flashinfer", KernelChoice(fa3=True)
    for tile in (None, *TILES):
        kinds[f"triton {tile}"] = "triton", KernelChoice(extend_tile=tile)
    total = dict.fromkeys(kinds, 0.0)
    for new, before in bench.pick(EXTENSIONS, ((9, 4),)):
        work = partial(_extend, bench, shape, new, before)
        spent = race(bench, kinds, f"{new:,} after {before:,}", shape, work)
        for name in total if new >= FA3_QUERIES else ():
            total[name] += spent.get(name, inf)
    tile = min(TILES, key=lambda one: total[f"triton {one}"])
    return {
        "fa3": total.get("fa3", inf) < LEAST_GAIN * total["fa2"],
        "extend_tile": tile if total[f"triton {tile}"] < LEAST_GAIN * total[TODAY] else None,
    }


def race(
    bench: Bench, kinds: Kinds, name: str, shape: Shape, prepare: Callable[[], Work]
) -> dict[str, float]:
    """Seconds of kinds in turn over the same work, and a line of the table; a kind that fails is
    told and left out of `kinds` from then on."""
    seconds: dict[str, float] = {}
    with bench.case(name, "us"):
        kv, measure = prepare()
        for kind, (library, choice) in [*kinds.items()]:
            extend.choice_of = partial(_chosen, choice)
            try:
                backend: Any = make_backend(library, kv, shape.num_heads)
                backend.choice = choice
                backend.prepare()
                seconds[kind] = measure(backend)
            except Exception as error:
                traceback.print_exc()
                del kinds[kind]
                bench.note(f"no {kind}: {describe_error(error)}")
                bench.clock.wait()
            finally:
                extend.choice_of = choice_of
        bench.row(name, {kind: one * 1e6 for kind, one in seconds.items()}, section="us")
    return seconds


def _chosen(choice: KernelChoice, _device: object) -> KernelChoice:
    return choice


def _decode(bench: Bench, shape: Shape, num_rows: int, context: int) -> Work:
    where = {"page_size": bench.settings.page_size, "dtype": DTYPE, "device": bench.device}
    case = SharedPrefix(shape, num_rows, 0, context - 1, **where)
    return case.kv, lambda backend: time_graph(bench, backend, case, bench.pick(20, 2)).median


def _extend(bench: Bench, shape: Shape, new: int, before: int) -> Work:
    pages = np.random.default_rng(0).permutation(new + before).astype(np.int32)
    sizes = (1, 2, new + before, 1, shape.num_kv_heads, shape.head_dim)
    kv = torch.randn(sizes, device=bench.device, dtype=DTYPE)
    q = torch.randn((new, shape.num_heads, shape.head_dim), device=bench.device, dtype=DTYPE)
    row = ScheduledRequest("", np.zeros(new, np.int32), before, pages, None)
    batch = build_forward_batch([row], 1, bench.device)

    def measure(backend: Any) -> float:
        backend.plan(batch)
        return bench.clock.times(lambda: backend.attend(q, 0), bench.pick(20, 2)).median

    return kv, measure
