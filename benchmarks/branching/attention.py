"""Decoding over a shared prefix: attention that reads it once (tree), and attention that reads it
for every sequence (flat), in one process and in turns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from timeit import timeit
from typing import Any

import numpy as np
import torch
from harness.processes import take_turns
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
) -> tuple[dict[str, dict[str, float]], float]:
    """Medians in ms for "tree" and "flat": attention_ms of all layers, plan_ms, step_ms; and the
    largest difference of their results over the largest result."""
    torch.manual_seed(0)
    torch_dtype = getattr(torch, dtype)
    case = SharedPrefix(
        shape, num_rows, shared, OWN, page_size=1, is_contiguous=True, dtype=torch_dtype, device=CPU
    )
    operations: dict[tuple[str, str], Callable[[], Any]] = {}
    results = {}
    for kind, shares in KINDS.items():
        backend = make_backend(backend_name(dtype), case.kv, shape.num_heads, shares=shares)
        operations[kind, "plan_ms"] = partial(backend.plan, case.batch)
        operations[kind, "attention_ms"] = partial(case.attend, backend)
        backend.plan(case.batch)
        results[kind] = case.attend(backend).numpy().copy()
    for kind, shares in KINDS.items():
        loop = _decoding(folder, dtype, num_rows, shared, repeats, shares=shares)
        operations[kind, "step_ms"] = loop.step
        loop.step()
    timers = {key: lambda _, call=call: timeit(call, number=1) for key, call in operations.items()}
    spent = take_turns(timers, repeats)
    figures = {
        kind: {what: median(each) * 1e3 for (of, what), each in spent.items() if of == kind}
        for kind in KINDS
    }
    difference = np.abs(results["tree"] - results["flat"]).max() / np.abs(results["flat"]).max()
    return figures, float(difference)


def _decoding(
    folder: Path, dtype: str, num_rows: int, shared: int, repeats: int, *, shares: bool
) -> StepLoop:
    """An engine whose next `repeats` steps decode the same requests over one prefix."""
    config = EngineConfig(
        dtype=dtype,
        num_pages=shared + num_rows * (repeats + OWN + 16),
        max_running_requests=num_rows,
        cascade_attention=shares,
    )
    runner = CpuModelRunner(str(folder), config)
    loop = StepLoop(runner, config, runner.info.vocab_size)
    prefix = loop.tokens(shared)
    prompts = [np.append(prefix, np.int32(row)) for row in range(num_rows)]
    loop.start_decoding(prompts, num_new=repeats + OWN)
    return loop
