"""A decode step of the Llama-3-8B shapes, at many batch sizes and contexts.

Contexts are prefilled from random tokens through the engine; the steps are the engine's, graphs and
overlap included.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from gpu_bench import LLAMA, Bench
from gpu_jobs import Skip
from gpu_limits import decode_s
from gpu_profile import describe, profile_steps
from gpu_stage import DecodeFigures, Stage

TARGET, MOST_ROWS = 0.85, 64  # of the limit, up to so many rows
MOST_HOST = 0.03
ROOM = 1_024  # tokens of a sequence behind its prompt


def run(bench: Bench, group: str) -> None:
    """group: the backend; "" is the run's own."""
    contexts = bench.pick((1_024, 8_192), (1_024, 8_192), (16, 48))
    sizes = bench.pick((1, 8, 64, 256), (1, 64), (1, 4))
    if group:
        if (name := bench.backend_name()) == group:
            raise Skip(f"{name} is the run's backend already")
        if reason := bench.unsupported_reason(group):
            raise Skip(f"no {group}: {reason}")
        sizes = bench.pick((8, 64), (64,), (2,))
    settings = {"attention_backend": group} if group else {}
    with Stage(
        bench,
        LLAMA,
        max_running_requests=max(sizes),
        chunked_prefill_size=bench.pick(8_192, 8_192, 64),
        max_seq_len=contexts[-1] + bench.pick(ROOM, ROOM, 400),
        num_pages=bench.pick(None, None, 2_048),
        **settings,
    ) as stage:
        bench.note(f"{stage.resolved_config}; pool of {stage.capacity:,} tokens")
        for context, size in product(contexts, sizes):
            name = f"{stage.resolved_config.attention_backend}, batch {size}, context {context:,}"
            try:
                stage.check_room(size * (context + ROOM // 4), "rows and keys")
            except Skip as reason:
                bench.skip(name, str(reason))
                continue
            _measure(bench, stage, name, size, context)


def _measure(bench: Bench, stage: Stage, name: str, size: int, context: int) -> None:
    # Those of a smaller batch are among them, and cached by now.
    prompts = stage.prompts(size, context)
    found = stage.decode(prompts, bench.pick(32, 16, 4), bench.pick(6, 4, 2))
    limit = decode_s(bench.shape(LLAMA), bench.ceilings, size, found.num_keys)
    of_limit = limit / found.step.median
    checks = []
    if size <= MOST_ROWS:
        checks.append(bench.at_least("of the limit", of_limit, TARGET))
    checks.append(bench.at_most("host share", found.host_share, MOST_HOST))
    details: dict[str, Any] = {"context_measured": found.num_keys}
    if any(check.is_judged and not check.is_met for check in checks) or (bench.is_dry and size > 1):
        profile = details["profile"] = profile_steps(bench, stage, prompts)
        bench.note(f"{name}: {describe(profile)}")
    bench.row(name, _cells(found, limit), checks=tuple(checks), details=details)


def _cells(found: DecodeFigures, limit: float) -> dict[str, float | str | None]:
    return {
        **found.step.cells("step ms"),
        "limit ms": limit * 1e3,
        "of limit": f"{limit / found.step.median:.0%}",
        "device ms": found.device.ms,
        "host share": f"{found.host_share:.1%}",
        "launch ms": found.host_s * 1e3,
        "tok/s": found.num_rows / found.step.median,
    }
