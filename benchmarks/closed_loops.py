"""Closed loops of recorded sessions: priced admission beside greedy and the rules of others.

    python benchmarks/closed_loops.py --traces DIR [--only NAMES] [--sizes SIZES] [--rates RATES]

Every session's next request is sent when it has thought about the last answer, in simulated time.
A trace of block hashes is made coarser: `UNITS` tokens become one, so that a step stands for as
many steps with the same chunk each. `--rates`: prefill tokens a second. `--rules`: parts of the
names of rules, all by default. `--max-overtake` is that of priced admission: the rules of others
hold sessions back outside of the server, where no bound counts them. Deterministic but for the
seconds that a replay takes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from harness.arguments import Names, parse
from rival_admission import AdditiveIncrease, LiveSessions, PauseResume

from radixserve.replay import CacheSpec, Serving, Trace, build_paths, parse_tokens, read_trace
from radixserve.replay.closed_loop import (
    ClientGate,
    bound_closed_loop,
    infer_closed_loop,
    replay_closed_loop,
)
from radixserve.replay.scheduled import StepModel
from radixserve.replay.trace import HashTokens

UNITS = {"agentic_code": 64, "mooncake_conversation": 64, "tau_airline": 1}
SIZES = {
    "agentic_code": "500k,1M,2M,4M,8M",
    "mooncake_conversation": "500k,1M,2M,4M,8M",
    "tau_airline": "16k,24k,32k,48k,100k",
}
RATES = {
    "agentic_code": "5k,10k,20k",
    "mooncake_conversation": "20k,40k,80k",
    "tau_airline": "5k,10k,20k",
}
FIXED = (4, 8, 16, 32, 64)  # sessions that are live, or requests that run
Gate = Callable[..., ClientGate]
Rule = tuple[str, dict[str, Any], dict[str, Any], Gate]  # name, serving, cache, gate


def coarser(trace: Trace, unit: int) -> Trace:
    """`unit` tokens become one; requests and think times stay."""
    if unit == 1:
        return trace
    assert isinstance(trace.source, HashTokens)
    return replace(
        trace,
        source=trace.source.coarser(unit),
        num_prompt=np.maximum(1, trace.num_prompt // unit),
        num_output=np.maximum(1, trace.num_output // unit),
    )


def serving(rate: float, unit: int, **settings: Any) -> Serving:
    """A step of `unit` steps at once."""
    step = StepModel()
    step = StepModel(
        fixed_s=step.fixed_s * unit,
        prefill_token_s=unit / rate,
        decode_row_s=step.decode_row_s * unit,
        kv_token_s=step.kv_token_s * unit * unit,
    )
    return Serving(step=step, **settings)


def rules(trace: Trace, size: int, max_overtake: int) -> Iterator[Rule]:
    lengths = trace.num_prompt + trace.num_output
    priced = {"admission": "priced", "max_overtake": max_overtake}
    order = {"policy": "expected-return"}
    yield "greedy", {}, {}, ClientGate
    yield "priced", priced, {**order, "use_sessions": True}, ClientGate
    yield "priced, no names", priced, order, ClientGate
    for policy in ("lpm", "fcfs"):
        for limit in FIXED:

            def live(scheduler: Any, loop: Any, limit: int = limit) -> ClientGate:
                return LiveSessions(scheduler, loop, limit)

            yield f"{policy}, {limit} live", {"order": policy}, {}, live
            settings = {"order": policy, "max_running_requests": limit}
            yield f"{policy}, {limit} running", settings, {}, ClientGate
    yield "pause .95 resume .80", {}, {}, lambda *of: PauseResume(*of, lengths, size)
    yield "AIMD", {}, {}, lambda *of: AdditiveIncrease(*of, lengths, size)
    yield "CacheTTL", {}, {"use_sessions": True}, ClientGate


def run(trace: Trace, name: str, args: Any) -> Iterator[dict[str, Any]]:
    unit = UNITS[name]
    coarse = coarser(trace, unit)
    paths = build_paths(coarse)
    for size_text in (args.sizes or SIZES[name]).split(","):
        for rate_text in (args.rates or RATES[name]).split(","):
            size, rate = parse_tokens(size_text) // unit, parse_tokens(rate_text)
            loop = infer_closed_loop(trace, Serving())
            thinks = loop.think_s[loop.think_s > 0]
            bound = bound_closed_loop(coarse, paths, loop, size, serving(rate, unit))
            for rule, settings, cache, gate in rules(coarse, size, args.max_overtake):
                if args.rules and not any(part in rule for part in args.rules.split(";")):
                    continue
                result = replay_closed_loop(
                    coarse,
                    loop,
                    CacheSpec(size, **cache),
                    serving(rate, unit, **settings),
                    lease_s=2 * float(np.median(thinks)) if rule == "CacheTTL" else None,
                    make_gate=gate,
                )
                yield {
                    "trace": name,
                    "size": size_text,
                    "rate": rate_text,
                    "rule": rule,
                    "bound_makespan_s": bound.makespan_s,
                    **result.document(),
                }


def main() -> None:
    options = {"traces": Path, "only": Names("trace", UNITS), "limit": int, "sizes": str}
    options |= {"rates": str, "rules": str, "max_overtake": 64, "json": Path}
    args = parse(__doc__, required=("traces",), **options)
    rows = []
    for name in args.only:
        trace = read_trace(str(args.traces / f"{name}.jsonl.gz"), limit=args.limit)
        for row in run(trace, name, args):
            rows.append(row)
            print(
                f"{name} {row['size']:>5} {row['rate']:>4}/s {row['rule']:22}"
                f" hit {100 * row['hit_rate']:5.1f} %  makespan {row['makespan_s']:8.0f} s"
                f" (bound {row['bound_makespan_s']:.0f})  session {row['session_mean_s']:8.1f}"
                f"  waiting {row['wait_mean_s']:8.1f}  p99 {row['session_p99_s']:8.0f}"
                f"  fair {row['fairness']:.2f}  queue {row['queue_worst_s']:.0f}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
