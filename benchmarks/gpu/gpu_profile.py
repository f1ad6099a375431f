"""Where a step's time went, kernel by kernel: for figures that miss their target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpu_bench import Bench
from gpu_stage import Stage
from torch.profiler import ProfilerActivity, profile

from radixserve.arrays import IntArray

NUM_STEPS, NUM_LINES, NUM_TOLD = 3, 12, 4


def describe(profile: Any) -> str:
    """The longest in a line."""
    if isinstance(profile, str):
        return f"no profile, {profile}"
    longest = list(profile.items())[:NUM_TOLD]
    return "ms by kernel: " + ", ".join(f"{name[:36]} {ms:.3g}" for name, ms in longest)


def profile_steps(bench: Bench, stage: Stage, prompts: Sequence[IntArray]) -> Any:
    """Milliseconds a decode step by kernel, the longest first; or why it cannot be told."""
    try:
        return _profiled(bench, stage, prompts)
    except Exception as error:  # the figures are there already
        stage.abort_all()
        return f"{type(error).__name__}: {error}"


def _profiled(bench: Bench, stage: Stage, prompts: Sequence[IntArray]) -> dict[str, float]:
    stage.start(prompts, 16 * NUM_STEPS)
    activity = ProfilerActivity.CPU if bench.is_dry else ProfilerActivity.CUDA
    with profile(activities=[activity]) as record:
        for _ in range(NUM_STEPS):
            stage.step()
        bench.clock.wait()
    spent: dict[str, float] = {}
    for one in record.key_averages():
        total = one.self_cpu_time_total if bench.is_dry else one.self_device_time_total
        if total:
            spent[one.key[:80]] = total / 1e3 / NUM_STEPS
    stage.abort_all()
    longest = sorted(spent.items(), key=lambda item: -item[1])
    return {name: round(ms, 4) for name, ms in longest[:NUM_LINES]}
