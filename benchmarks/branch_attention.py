"""Decoding over a shared prefix: attention that reads it once, and attention that reads it for
every sequence, in one process and over the same K and V.

Knows of the engine: `CpuModelRunner.backend`, the attention of a step, and `CpuModelRunner.pool`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from branch_players import DTYPE, random_prompt

from radixserve.attention.base import AttentionBackend, ForwardBatch
from radixserve.attention.choice import choose_backend, make_backend
from radixserve.config import EngineConfig
from radixserve.engine.engine import Engine
from radixserve.request import Request, SamplingParams
from radixserve.runner.cpu_runner import CpuModelRunner


class _Watch:
    """A backend that remembers the last step's batch."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend
        self.batch: ForwardBatch | None = None

    def plan(self, batch: ForwardBatch) -> None:
        self.batch = batch
        self._backend.plan(batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def backend_name() -> str:
    """The one that attention runs on here; its code is compiled now if it needs to be."""
    import torch

    return choose_backend("auto", getattr(torch, DTYPE), torch.device("cpu"))


def measure_attention(
    folder: Path, num_rows: int, num_shared: int, repeats: int
) -> dict[str, dict[str, float]]:
    """Medians in ms for "tree" and "flat": a whole step, its plan, its attention in all layers.

    Besides, under "both": the largest difference of their results, and how large these are.
    """
    num_pages = num_shared + num_rows * (4 * repeats + 16) + 64
    config = EngineConfig(dtype=DTYPE, num_pages=num_pages)
    runner = CpuModelRunner(str(folder), config)
    engine = Engine(runner, config)
    _start(engine, runner.info.vocab_size, num_rows, num_shared, 3 * repeats + 12)
    tree = runner.backend
    flat = make_backend(tree.name, runner.pool.kv, runner.info.num_heads, shares=False)
    backends = {"tree": tree, "flat": flat}
    steps: dict[str, list[float]] = {"tree": [], "flat": []}
    for at in range(repeats + 1):  # the first ones warm up
        for name, backend in backends.items():
            runner.backend = backend
            took = _ms(engine.step)
            if at:
                steps[name].append(took)
    watch = _Watch(tree)
    runner.backend = watch
    engine.step()
    assert watch.batch is not None
    assert len(watch.batch.host.start) == num_rows, "all sequences decode"
    figures, results = _attention_only(backends, watch.batch, runner, repeats)
    for name in backends:
        figures[name]["step_ms"] = median(steps[name])
    difference = np.abs(results["tree"] - results["flat"]).max()
    figures["both"] = {
        "difference": float(difference),
        "size": float(np.abs(results["flat"]).max()),
    }
    return figures


def _start(engine: Engine, vocab: int, num_rows: int, num_shared: int, num_new: int) -> None:
    """Sequences that have the prompt in common and all decode."""
    shared = random_prompt(num_shared, vocab, seed=0)
    params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
    for row in range(num_rows):
        engine.add(
            Request(
                request_id=f"row {row}",
                token_ids=np.array([*shared, vocab - 1 - row], np.int32),
                params=params,
                seed=0,
                end_ids=frozenset(),
                max_len=num_shared + 1 + num_new,
            )
        )
    decoded = 0
    while engine.stats()["decoded_tokens"] - decoded < num_rows:
        decoded = engine.stats()["decoded_tokens"]
        engine.step()


def _attention_only(
    backends: dict[str, AttentionBackend], batch: ForwardBatch, runner: CpuModelRunner, repeats: int
) -> tuple[dict[str, dict[str, float]], dict[str, np.ndarray]]:
    """(plan and attention of a step in ms, the last layer's results). Overwrites the K and V of the
    batch's new tokens."""
    import torch

    info = runner.info
    num_layers, _, _, _, num_kv_heads, dim = runner.pool.kv.shape
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(len(batch.input_ids), info.num_heads, dim, generator=draw)
    k, v = torch.randn(2, len(batch.input_ids), num_kv_heads, dim, generator=draw)
    plans: dict[str, list[float]] = {name: [] for name in backends}
    runs: dict[str, list[float]] = {name: [] for name in backends}
    results: dict[str, np.ndarray] = {}
    with torch.inference_mode():
        for at in range(repeats + 1):
            for name, backend in backends.items():
                planned = _ms(partial(backend.plan, batch))
                attend = partial(_attend, backend, num_layers, q, k, v)
                ran = _ms(attend)
                if at:
                    plans[name].append(planned)
                    runs[name].append(ran)
                else:
                    results[name] = attend().numpy().copy()
    figures = {
        name: {"attention_ms": median(runs[name]), "plan_ms": median(plans[name])}
        for name in backends
    }
    return figures, results


def _attend(backend: AttentionBackend, num_layers: int, q: Any, k: Any, v: Any) -> Any:
    """Attention in all layers; the last one's result."""
    for layer in range(num_layers):
        out = backend.run(q, k, v, layer)
    return out


def _ms(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return (time.perf_counter() - start) * 1e3
