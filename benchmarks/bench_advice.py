"""What following the traffic costs, and how near its curve is to the exact one.

    python benchmarks/bench_advice.py --traces DIR [--trace tau_airline,...] [--limit N]
    python benchmarks/bench_advice.py --model tiny [--workloads chat,agents]

The first form passes each request of recorded traces to an `AdviceExtension`, for a pool of a
fifth of the distinct tokens, and prints

    error    the largest difference, in points, of the live hit rate and the exact one of an LRU
             cache, over 9 sizes between the longest request and all distinct tokens
    ns       of processor time in the extension, for each prompt token
    MiB      of memory that Python's objects of the extension take at most

The second form generates the turns of made workloads, and prints the extension's part of the time
in percent: of the engine's time in steps, and of its host's part alone (all but the model).
"""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import numpy as np
from harness.arguments import Names, parse

from radixserve import Runtime, SamplingParams
from radixserve.advice.extension import AdviceExtension
from radixserve.cache import RadixCache
from radixserve.output import Finish, Metrics, Usage
from radixserve.replay import Trace, build_paths, read_trace
from radixserve.replay.sizing import LruCurve
from radixserve.replay.workloads import WORKLOADS, make_turns
from radixserve.request import Request

TRACES = ("mooncake_conversation", "agentic_code", "tau_airline", "bbh_fewshot")
MODELS = {"tiny": "random:tiny-llama", "smollm2": "smollm2", "demo": "demo"}
SCALES = {"agents": 0.02, "code": 0.03, "summaries": 0.03}  # so that 511 tokens are enough
_PARAMS = SamplingParams(max_tokens=1)
_TIMES = Metrics(0.0, 0.0, 0.0)


def follow(trace: Trace, extension: AdviceExtension, reusable: list[int]) -> float:
    """Pass a trace to an extension. Returns the processor time in it."""
    spent = 0.0
    for request in trace:
        prompt, output = request.prompt, request.output.tolist()
        given = Request(
            f"{request.index}", prompt, _PARAMS, 0, frozenset(), len(prompt) + len(output) + 1
        )
        cached = reusable[request.index]
        usage = Usage(len(prompt), cached, len(prompt) - cached, len(output))
        finish = Finish("length", usage, _TIMES, None)
        start = time.thread_time()
        extension.hold(given, 0.0, lambda _: None)
        extension.on_finish(given, output, finish, 0.0)
        spent += time.thread_time() - start
    return spent


def compare(trace: Trace) -> str:
    """A row for a recorded trace."""
    paths = build_paths(trace)
    offline, reusable = LruCurve(trace, paths), paths.reusable.tolist()
    pool = max(trace.longest, paths.distinct_tokens // 5)
    extension = AdviceExtension(RadixCache(pool, 1), 1)
    spent = follow(trace, extension, reusable)
    sizes = np.geomspace(trace.longest, max(2 * trace.longest, paths.distinct_tokens), 9)
    rates = [(extension.point(size)["hit_rate"], offline.total(int(size))) for size in sizes]
    error = max(abs(live - exact / trace.prompt_tokens) for live, exact in rates)
    cache = RadixCache(pool, 1)  # not of the extension
    tracemalloc.start()
    follow(trace, AdviceExtension(cache, 1), reusable)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    nanoseconds = 1e9 * spent / trace.prompt_tokens
    return f"{trace.name:24} {100 * error:6.2f} {nanoseconds:7.1f} {most / 2**20:6.1f}"


class TimedAdvice(AdviceExtension):
    """Counts its own seconds."""

    spent = 0.0

    def hold(self, *args: object, **options: object) -> bool:
        start = time.perf_counter()
        is_held = super().hold(*args, **options)  # type: ignore[arg-type]
        self.spent += time.perf_counter() - start
        return is_held

    def on_finish(self, *args: object, **options: object) -> None:
        start = time.perf_counter()
        super().on_finish(*args, **options)  # type: ignore[arg-type]
        self.spent += time.perf_counter() - start


def serve(model: str, name: str) -> str:
    """A row for a workload that an engine serves, 16 requests at a time."""
    turns = make_turns(name, 200, scale=SCALES.get(name, 0.1), tokens=(3, 288))
    with Runtime(MODELS[model], device="cpu", advice=False) as runtime:
        advice = TimedAdvice(RadixCache(runtime.memory.pool_tokens, 1), 1)
        runtime.extend(advice)
        prompts: list[list[int]] = []
        for first in range(0, len(turns), 16):
            batch = turns[first : first + 16]
            texts = [
                [
                    *(
                        prompts[turn.parent]
                        if turn.parent is not None and turn.parent < first
                        else ()
                    ),
                    *turn.text.tolist(),
                ]
                for turn in batch
            ]
            params = [SamplingParams(max_tokens=turn.num_output, ignore_eos=True) for turn in batch]
            answers = runtime.generate(texts, params)
            prompts += [[*text, *out.token_ids] for text, out in zip(texts, answers, strict=True)]
        stats = runtime.cache_stats()
    steps = stats["prefill_s"] + stats["decode_s"]
    host = steps - stats["forward_s"]
    return f"{name:24} {100 * advice.spent / steps:6.2f} {100 * advice.spent / host:6.2f}"


def main() -> None:
    args = parse(
        __doc__,
        traces=Path,
        trace=Names("trace", TRACES),
        limit=int,
        model=("", *MODELS),
        workloads=Names("workload", tuple(WORKLOADS), ("chat", "multi-turn", "agents")),
    )
    if args.model:
        print(f"{'workload':24} {'steps %':>6} {'host %':>6}")
        for name in args.workloads:
            print(serve(args.model, name), flush=True)
        return
    print(f"{'trace':24} {'error':>6} {'ns':>7} {'MiB':>6}")
    for name in args.trace:
        trace = read_trace(args.traces / f"{name}.jsonl.gz", limit=args.limit)
        print(compare(trace), flush=True)


if __name__ == "__main__":
    main()
