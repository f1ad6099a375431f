"""Decoding over a shared prefix: attention that reads it once (tree), and attention that reads it
for every sequence (flat), in one process and in turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from harness.shapes import Shape
from harness.shared_prefix import SharedPrefix
from harness.step_loop import StepLoop

from radixserve.attention.choice import choose_backend, make_backend
from radixserve.config import EngineConfig
from radixserve.runner.cpu_runner import CpuModelRunner

OWN = 16  # tokens of a sequence after the shared ones
KINDS = {"tree": True, "flat": False}  # whether what is shared is read once
CPU = torch.device("cpu")


def backend_name(dtype: str) -> str:
    """The one that attention runs on here; its code is compiled now if it needs to be."""
    return choose_backend("auto", getattr(torch, dtype), CPU)


def measure_attention(
    folder: Path, shape: Shape, dtype: str, num_rows: int, shared: int, repeats: int
) -> dict[str, dict[str, float]]:
    """Medians in ms for "tree" and "flat": attention_ms of all layers, plan_ms, step_ms.

    Besides, under "both": the largest difference of their results, and how large these are.
    """
    figures, results = _attention_alone(shape, dtype, num_rows, shared, repeats)
    for name, spent in _steps(folder, dtype, num_rows, shared, repeats).items():
        figures[name]["step_ms"] = spent
    difference = np.abs(results["tree"] - results["flat"]).max()
    figures["both"] = {
        "difference": float(difference),
        "size": float(np.abs(results["flat"]).max()),
    }
    return figures


def _attention_alone(
    shape: Shape, dtype: str, num_rows: int, shared: int, repeats: int
) -> tuple[dict[str, dict[str, float]], dict[str, np.ndarray]]:
    """(figures, results of the last layer)."""
    torch.manual_seed(0)
    torch_dtype = getattr(torch, dtype)
    case = SharedPrefix(
        shape, num_rows, shared, OWN, page_size=1, is_contiguous=True, dtype=torch_dtype, device=CPU
    )
    name = backend_name(dtype)
    samples: dict[str, dict[str, list[float]]] = {}
    results: dict[str, np.ndarray] = {}
    backends = {
        kind: make_backend(name, case.kv, shape.num_heads, shares=shares)
        for kind, shares in KINDS.items()
    }

    def attend(backend: Any) -> torch.Tensor:
        for layer in range(case.num_layers):
            out: torch.Tensor = backend.attend(case.q, layer)
        return out

    for kind, backend in backends.items():
        backend.plan(case.batch)
        results[kind] = attend(backend).numpy().copy()
        samples[kind] = {"plan_ms": [], "attention_ms": []}
    for _ in range(repeats):
        for kind, backend in backends.items():
            samples[kind]["plan_ms"].append(_ms(partial(backend.plan, case.batch)))
            samples[kind]["attention_ms"].append(_ms(partial(attend, backend)))
    medians = {
        kind: {what: median(spent) for what, spent in found.items()}
        for kind, found in samples.items()
    }
    return medians, results


def _steps(folder: Path, dtype: str, num_rows: int, shared: int, repeats: int) -> dict[str, float]:
    """ms of a decode step of two engines that serve the same requests."""
    loops = {}
    for kind, shares in KINDS.items():
        config = EngineConfig(
            dtype=dtype,
            num_pages=shared + num_rows * (repeats + OWN + 16),
            max_running_requests=num_rows,
            cascade_attention=shares,
        )
        runner = CpuModelRunner(str(folder), config)
        loop = loops[kind] = StepLoop(runner, config, runner.info.vocab_size)
        prefix = loop.tokens(shared)
        prompts = [np.append(prefix, np.int32(row)) for row in range(num_rows)]
        loop.start_decoding(prompts, num_new=repeats + OWN)
    samples: dict[str, list[float]] = {kind: [] for kind in loops}
    for _ in range(repeats + 1):
        for kind, loop in loops.items():
            samples[kind].append(_ms(loop.step))
    return {kind: median(spent[1:]) for kind, spent in samples.items()}


def _ms(operation: Callable[[], object]) -> float:
    start = time.perf_counter()
    operation()
    return (time.perf_counter() - start) * 1e3
