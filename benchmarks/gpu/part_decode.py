"""A decode step of the Llama-3-8B shapes, at many batch sizes and contexts.

Contexts are prefilled from random tokens through the engine; the steps are the engine's, graphs and
overlap included. Steps that miss a target are profiled once all are timed: a profiler may slow down
whatever follows it.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpu.bench import LLAMA, Bench
from gpu.limits import decode_s
from gpu.timed_engine import TimedEngine
from torch.profiler import ProfilerActivity, profile

from radixserve.arrays import IntArray

TARGET, MOST_ROWS = 0.85, 64  # of the limit, up to so many rows
MOST_HOST = 0.03
SIZES = {1_024: (1, 8, 64, 256), 8_192: (1, 8, 32, 64)}  # rows by context; 32 fit 80 GB at 8,192
OTHERS = {1_024: (8, 64), 8_192: (8, 32)}  # of a backend that is not the run's own
ROOM = 1_024  # tokens of a sequence after its prompt
NUM_PROFILED, NUM_KERNELS, NUM_NOTED = 3, 12, 4  # steps profiled; kernels kept, and noted


def run(bench: Bench, group: str) -> None:
    """group: the backend; "" is the run's own."""
    settings = bench.of_group(group)
    sizes = bench.pick(OTHERS, {16: (2,), 48: (2,)}) if group else bench.pick(
        SIZES, {16: (1, 4), 48: (1, 4)}
    )  # fmt: skip
    with TimedEngine(
        bench,
        LLAMA,
        max_running_requests=max(max(some) for some in sizes.values()),
        max_seq_len=max(sizes) + bench.pick(ROOM, 400),
        pool=bench.pick(None, 2_048),
        **settings,
    ) as engine:
        missed: dict[str, list[IntArray]] = {}
        for context, size in [(one, size) for one, some in sizes.items() for size in some]:
            name = f"{engine.resolved_config.attention_backend}, batch {size}, context {context:,}"
            with bench.case(name):
                engine.check_room(size * (context + ROOM // 4), "rows and keys")
                if not _measure(bench, engine, name, size, context):
                    missed[name] = engine.prompts(size, context)
        for name, prompts in missed.items():
            with bench.case(f"{name}, profile"):
                kernels = profile_steps(bench, engine, prompts)
                longest = list(kernels.items())[:NUM_NOTED]
                told = ", ".join(f"{kernel[:36]} {ms:.3g}" for kernel, ms in longest)
                bench.note(f"{name}: ms by kernel: {told}")
                bench.row(f"{name}, profile", section="profiles", details={"profile": kernels})


def _measure(bench: Bench, engine: TimedEngine, name: str, size: int, context: int) -> bool:
    """Whether all targets are met; in a dry run those of one row are."""
    # Those of a smaller batch are among them, and cached by now.
    prompts = engine.prompts(size, context)
    decoded = engine.decode(prompts, *bench.pick((32, 6), (4, 2)))
    limit = decode_s(bench.shape(LLAMA), bench.ceilings, size, decoded.num_keys)
    of_limit = limit / decoded.step.median
    checks = [bench.at_least("of the limit", of_limit, TARGET)] if size <= MOST_ROWS else []
    checks.append(bench.at_most("host share", decoded.host_share, MOST_HOST))
    cells = {
        **decoded.step.cells("step ms"),
        "limit ms": limit * 1e3,
        "of limit": f"{of_limit:.0%}",
        "device ms": decoded.device.ms,
        "host share": f"{decoded.host_share:.1%}",
        "launch ms": decoded.host_s * 1e3,
        "tok/s": decoded.num_rows / decoded.step.median,
    }
    bench.row(name, cells, *checks, details={"context_measured": decoded.num_keys})
    return size == 1 if bench.is_dry else all(check.is_met for check in checks)


def profile_steps(
    bench: Bench, engine: TimedEngine, prompts: Sequence[IntArray]
) -> dict[str, float]:
    """Milliseconds a decode step by kernel, the longest first."""
    engine.start(prompts, 16 * NUM_PROFILED)
    activity = ProfilerActivity.CPU if bench.is_dry else ProfilerActivity.CUDA
    spent: dict[str, float] = {}
    try:
        with profile(activities=[activity]) as record:
            for _ in range(NUM_PROFILED):
                engine.step()
            bench.clock.wait()
        for one in record.key_averages():
            total = one.self_cpu_time_total if bench.is_dry else one.self_device_time_total
            if total:
                spent[one.key[:80]] = round(total / 1e3 / NUM_PROFILED, 4)
    except RuntimeError as error:  # no profiler here; the figures are there already
        bench.note(f"no profile, {error}")
    engine.abort_all()
    return dict(sorted(spent.items(), key=lambda item: -item[1])[:NUM_KERNELS])
