"""Decoding over a shared prefix, in one process and in turns: attention that reads it once (tree),
and attention that reads it for every sequence (flat). What a fork of a long branch costs:
microseconds, and bytes of K and V that are moved.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from timeit import timeit
from typing import Any

import numpy as np
import torch
from branching.work import random_prompt
from harness.processes import take_turns
from harness.shapes import Shape
from harness.shared_prefix import SharedPrefix
from harness.step_loop import StepLoop

from radixserve import Runtime, SamplingParams
from radixserve.api.branch import generate_all
from radixserve.attention.choice import choose_backend, make_backend
from radixserve.config import EngineConfig
from radixserve.runner.cpu_runner import CpuModelRunner

OWN = 16  # tokens of a sequence after the shared ones
KINDS = {"tree": True, "flat": False}  # whether what is shared is read once
CPU = torch.device("cpu")
SPARE_TOKENS = 1_024  # of the pool, beside the branch
NUM_CONTINUED = 8  # forks that go on, each another way


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
        backend = make_backend(
            backend_name(dtype), case.kv, shape.num_heads, shares=shares, is_exact=True
        )
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


def measure_forks(
    folder: Path, dtype: str, length: int, page_size: int, repeats: int
) -> dict[str, float]:
    """Forking a branch of `length` tokens whose K and V is cached, then going on from its forks."""
    pages = (length + SPARE_TOKENS) // page_size
    with Runtime(folder, dtype=dtype, page_size=page_size, num_pages=pages) as rt:
        each = rt.memory.kv_bytes_per_token
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        with rt.branch(list(random_prompt(length - 1, rt.model.vocab_size, seed=0))) as root:
            computed = root.generate(params).usage.computed_tokens
            root.truncate(length)
            before = rt.cache_stats()
            forks, samples = [], []  # kept until all are made: closing is not what is measured
            for _ in range(repeats):
                start = time.perf_counter()
                forks += root.fork()
                samples.append((time.perf_counter() - start) * 1e6)
            forked = rt.cache_stats()
            assert forked["steps"] == before["steps"], "a fork asks nothing of the engine"
            continued, forks = forks[:NUM_CONTINUED], []
            for number, fork in enumerate(continued):
                fork.extend([number])
            outs = generate_all(continued, params)
            after = rt.cache_stats()
            return {
                "page_size": page_size,
                "fork_us": median(samples),
                "computed_before": computed,
                "moved_by_forks": (forked["copied_tokens"] - before["copied_tokens"]) * each,
                "computed_after": sum(out.usage.computed_tokens for out in outs),
                "moved_after": (after["copied_tokens"] - forked["copied_tokens"]) * each,
                "bytes_per_token": each,
            }
