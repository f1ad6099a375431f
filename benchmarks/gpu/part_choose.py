"""Which attention kernels are fastest on this card: its entry of kernel_choice.json.

decode   FlashInfer's on tensor cores and on CUDA cores, and Triton's beside them
extend   FlashInfer's fa2 and fa3, and Triton's with several tiles, for many new tokens of one row
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from gpu.bench import DTYPE, LLAMA, QWEN, Bench
from gpu.clock import Times
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
TILES = (None, (64, 64, 4, 3), (128, 128, 8, 2))  # today's; queries, keys, warps, stages
LEAST_GAIN = 0.97  # a change has to bring 3 %


class Kind(NamedTuple):
    """A way to compute the same."""

    name: str
    library: str
    choice: KernelChoice


def run(bench: Bench, group: str) -> None:
    chosen = {"decode": choose_decode, "extend": choose_extend}[group](bench)
    bench.row(f"{chosen}", section="chosen", details={"choice": chosen})


def choose_decode(bench: Bench) -> dict[str, Any]:
    """FlashInfer's faster cores by query heads of a K/V head, then by rows."""
    chosen: dict[str, dict[str, str]] = {}
    for model in (LLAMA, QWEN):
        shape = replace(bench.shape(model), num_layers=NUM_LAYERS)
        group = str(shape.num_heads // shape.num_kv_heads)
        choices = {name: KernelChoice(decode={group: {"1": name}}) for name in ("tensor", "cuda")}
        race = Race(bench, [Kind(name, "flashinfer", one) for name, one in choices.items()])
        best = {}
        for num_rows in bench.pick(ROWS, ROWS[::3], (2,)):
            spent = [
                race.times(f"{num_rows} rows of {context:,}, group {group}", shape, one)
                for context in bench.pick(CONTEXTS, CONTEXTS[:1], (16,))
                if num_rows * context <= MOST_KEYS
                for one in [partial(_decode, bench, shape, num_rows, context)]
            ]
            total = {name: sum(one.get(name, np.inf) for one in spent) for name in choices}
            if min(total.values()) < np.inf:
                best[str(num_rows)] = min(total, key=lambda name: total[name])
        if best:
            chosen[group] = best
    return {"decode": chosen}


def choose_extend(bench: Bench) -> dict[str, Any]:
    """Whether fa3 is worth it, and Triton's tile, by their times with long queries."""
    shape = bench.shape(LLAMA)
    kinds = [Kind(f"fa{2 + fa3}", "flashinfer", KernelChoice(fa3=fa3)) for fa3 in (False, True)]
    if bench.is_dry or torch.cuda.get_device_capability(bench.device)[0] != 9:
        kinds.pop()
    kinds += [Kind(f"triton {one}", "triton", KernelChoice(extend_tile=one)) for one in TILES]
    race, total = Race(bench, kinds), dict.fromkeys((kind.name for kind in kinds), 0.0)
    for new, before in bench.pick(EXTENSIONS, EXTENSIONS[:3], ((9, 4),)):
        measure = partial(_extend, bench, shape, new, before)
        spent = race.times(f"{new:,} after {before:,}", shape, measure)
        for name in total if new >= FA3_QUERIES else ():
            total[name] += spent.get(name, np.inf)
    today = total[f"triton {None}"]
    tile = min(TILES[1:], key=lambda one: total[f"triton {one}"])
    return {
        "fa3": total.get("fa3", np.inf) < LEAST_GAIN * total.get("fa2", 0.0),
        "extend_tile": tile if total[f"triton {tile}"] < LEAST_GAIN * today else None,
    }


class Race:
    """Kinds in turn over the same work; one that fails is told and left out from then on."""

    def __init__(self, bench: Bench, kinds: Iterable[Kind]) -> None:
        self._bench = bench
        self._kinds = [*kinds]
        if all(kind.library != "triton" for kind in self._kinds):
            self._kinds.append(Kind("triton", "triton", KernelChoice()))

    def times(
        self, name: str, shape: Shape, prepare: Callable[[], tuple[Any, Any]]
    ) -> dict[str, float]:
        """Seconds by kind, and a line of the table. `prepare` returns a pool of K and V, and what
        measures a backend over it."""
        found: dict[str, float] = {}
        with self._bench.case(name, "us"):
            kv, measure = prepare()
            for kind in list(self._kinds):
                extend.choice_of = lambda _, kind=kind: kind.choice
                try:
                    backend: Any = make_backend(kind.library, kv, shape.num_heads)
                    backend.choice = kind.choice
                    backend.prepare()
                    found[kind.name] = measure(backend).median
                except Exception as error:
                    traceback.print_exc()
                    self._kinds.remove(kind)
                    self._bench.note(f"no {kind.name}: {describe_error(error)}")
                    self._bench.clock.wait()
                finally:
                    extend.choice_of = choice_of
            cells = {kind: seconds * 1e6 for kind, seconds in found.items()}
            self._bench.row(name, cells, section="us")
        return found


def _decode(bench: Bench, shape: Shape, num_rows: int, context: int) -> tuple[Any, Any]:
    size, kinds = bench.settings.page_size, {"dtype": DTYPE, "device": bench.device}
    case = SharedPrefix(shape, num_rows, 0, context - 1, page_size=size, **kinds)
    repeats = bench.pick(20, 10, 2)
    return case.kv, lambda backend: time_graph(bench, backend, case, repeats)


def _extend(bench: Bench, shape: Shape, new: int, before: int) -> tuple[Any, Any]:
    pages = np.random.default_rng(0).permutation(new + before).astype(np.int32)
    sizes = (1, 2, new + before, 1, shape.num_kv_heads, shape.head_dim)
    kv = torch.randn(sizes, device=bench.device, dtype=DTYPE)
    q = torch.randn((new, shape.num_heads, shape.head_dim), device=bench.device, dtype=DTYPE)
    row = ScheduledRequest("", np.zeros(new, np.int32), before, pages, None)
    batch = build_forward_batch([row], 1, bench.device)

    def measure(backend: Any) -> Times:
        backend.plan(batch)
        repeats = bench.pick(20, 10, 2)
        return Times.of(bench.clock.samples(lambda: backend.attend(q, 0), repeats))

    return kv, measure
