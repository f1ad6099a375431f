"""Scripted sessions that do not fit: priced admission beside greedy and the best fixed settings.

    python benchmarks/bench_scripted_sessions.py [--rooms 3,6,12,30] [--thinks 0,20,200]
        [--kinds fixed,exponential,mixed] [--scale 1.0] [--limit N] [--step 600,8,20]
    python benchmarks/bench_scripted_sessions.py --engine [--running 1,2,3,4,6,8,12] [--repeats 3]
        [--model PATH] [--threads 1] [...]

24 sessions of 8 turns: 600 tokens, then 100 more a turn, 8 answered; with --mixed every second
one begins with 150 and adds 25. A room for n sessions has 1,500 n tokens. --scale multiplies these
lengths and rooms, but not the answers. Think times are fixed, exponential, or mixed (exponential;
every second session thinks nine times as long), in ms.
--limit is `max_overtake` of all; by default each admission has its own. --step: the simulated
microseconds of a step, of a prefilled token and of a decoded one.

In simulated time, in which all settings are tried: greedy with fixed max_running_requests, with a
fixed number of live sessions, and with other orders of eviction, mru and random among them; priced
with sessions known by name and found by their tokens. Last in a line: the best fixed number of
running requests, and the session times of priced admission over its, named and by tokens.

With --engine on the real one, with a tiny random model or --model: the default settings, with plain
requests and with branches, which have names, and greedy admission with a fixed number of running
requests. The best of --running is looked for once, from the best of the cell before up and down, as
long as the session time gets shorter. Each run has a new engine, and rules take turns; medians of
--repeats rounds. In brackets: seconds over those of the best fixed number. All answers must be
equal. A last line has the mean and the greatest of these ratios.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness.arguments import parse
from harness.shapes import SHAPES, save_checkpoint
from rival_admission import LiveSessions
from rival_eviction import ORDERS, replaced

from radixserve.replay import CacheSpec, Serving, Trace
from radixserve.replay.closed_loop import ClientGate, ClosedLoop, replay_closed_loop
from radixserve.replay.scheduled import StepModel
from radixserve.replay.trace import PackedTokens

SESSIONS, TURNS, OUTPUT, ROOM = 24, 8, 8, 1_500
# Of the tiny model on one core: with it the simulated figures are near the engine's.
STEP = StepModel(fixed_s=6e-4, prefill_token_s=8e-6, decode_row_s=2e-5, kv_token_s=0.0)
RUNNING, LIVE = (1, 2, 3, 4, 6, 8, 12, 16), (2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
EVICTIONS = ("arc", "lfu", "fifo", "slru", "expected-return")


def texts(*, is_mixed: bool, scale: float = 1.0, vocab: int = 4_000) -> list[list[list[int]]]:
    """[sessions][turns] the tokens that each turn adds."""
    rng = np.random.default_rng(0)
    sizes = [(150, 25) if is_mixed and number % 2 else (600, 100) for number in range(SESSIONS)]
    return [
        [
            rng.integers(300, vocab, round(scale * (more if turn else first))).tolist()
            for turn in range(TURNS)
        ]
        for first, more in sizes
    ]


def thinks(mean_s: float, kind: str, seed: int = 0) -> list[list[float]]:
    """[sessions][turns] seconds before each turn."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(SESSIONS):
        mean = mean_s * ((0.2, 1.8)[number % 2] if kind == "mixed" else 1.0)
        drawn = [mean if kind == "fixed" else mean * rng.exponential() for _ in range(TURNS - 1)]
        rows.append([0.0, *drawn])
    return rows


def scripted(added: list[list[list[int]]], pauses: list[list[float]]) -> tuple[Trace, ClosedLoop]:
    rng, packed, num_prompt = np.random.default_rng(1), PackedTokens(), []
    for turns in added:
        text: list[int] = []
        for tokens in turns:
            answer = rng.integers(300, 4_000, OUTPUT)
            text += tokens
            num_prompt.append(packed.add(np.asarray(text, np.int32), answer.astype(np.int32))[0])
            text += answer.tolist()
    count = len(num_prompt)
    requests = [list(range(first, first + TURNS)) for first in range(0, count, TURNS)]
    trace = Trace(
        name="scripted",
        source=packed,
        times=np.zeros(count),
        sessions=[f"s{index // TURNS}" for index in range(count)],
        namespaces=[""] * count,
        num_prompt=np.asarray(num_prompt),
        num_output=np.full(count, OUTPUT),
        has_times=False,
    )
    return trace, ClosedLoop(requests, np.zeros(len(added)), np.concatenate(pauses))


def simulate(
    trace: Trace, loop: ClosedLoop, num_tokens: int, limit: int | None, step: StepModel = STEP
) -> dict[str, tuple[int, float]]:
    """{setting: computed tokens, mean session seconds}."""

    def run(gate: Any = ClientGate, *, policy: str = "lru", named: bool = False, **settings: Any):  # type: ignore[no-untyped-def]
        spec = CacheSpec(num_tokens, policy, use_sessions=named)
        serving = Serving(step=step, chunked_prefill_size=512, **settings)
        result = replay_closed_loop(trace, loop, spec, serving, make_gate=gate)
        return result.computed_tokens, result.mean_session_s

    by_rule = {"greedy": run(max_overtake=limit)}
    for number in RUNNING:
        by_rule[f"running {number}"] = run(max_running_requests=number, max_overtake=limit)
    for number in LIVE:
        by_rule[f"live {number}"] = run(lambda *of, number=number: LiveSessions(*of, number))
    for policy in EVICTIONS:
        by_rule[policy] = run(policy=policy, max_overtake=limit)
    for name, order in ORDERS.items():
        with replaced("fifo", order):
            by_rule[name] = run(policy="fifo", max_overtake=limit)
    priced = {"policy": "expected-return", "admission": "priced", "max_overtake": limit}
    by_rule["priced"] = run(**priced)
    by_rule["priced, named"] = run(named=True, **priced)
    return by_rule


async def converse(
    runtime: Any, added: list[list[int]], pauses: list[float], *, as_branch: bool
) -> tuple[float, list[list[int]]]:
    """One session: seconds, and its answers."""
    start, text, answers = time.perf_counter(), list[int](), []
    options = {"max_tokens": OUTPUT, "ignore_eos": True, "temperature": 0.0}
    from radixserve import SamplingParams

    branch = None
    for tokens, pause in zip(added, pauses, strict=True):
        if pause:
            await asyncio.sleep(pause)
        text += tokens
        if not as_branch:
            reply = await runtime.agenerate(text, SamplingParams(**options))
        else:
            if branch is None:
                branch = runtime.branch(text)
            else:
                branch.extend(tokens)
            reply = await branch.agenerate(SamplingParams(**options))
        answers.append(reply.token_ids)
        text += reply.token_ids
    if branch is not None:
        branch.release()
    return time.perf_counter() - start, answers


def serve(
    model: str, num_tokens: int, added: Any, pauses: Any, *, as_branch: bool, **settings: Any
) -> tuple[int, float, Any]:
    """Computed tokens, mean session seconds and answers of all sessions on a new engine."""
    from radixserve import Runtime

    with Runtime(model, num_pages=num_tokens, **settings) as runtime:

        async def everyone() -> list[Any]:
            talks = [
                converse(runtime, turns, rests, as_branch=as_branch)
                for turns, rests in zip(added, pauses, strict=True)
            ]
            return await asyncio.gather(*talks)

        runtime.generate(list(range(300, 364)))  # compiles and warms up
        runtime.flush_cache()
        before = runtime.cache_stats()
        ended = asyncio.run(everyone())
        after = runtime.cache_stats()
    names = ("prefilled_tokens", "decoded_tokens")
    computed = sum(after[name] - before[name] for name in names)
    return computed, float(np.mean([seconds for seconds, _ in ended])), [said for _, said in ended]


class EngineRuns:
    """Runs of the engine in one room and with one kind of think times."""

    def __init__(self, model: str, num_tokens: int, added: Any, pauses: Any, limit: int) -> None:
        self._workload = model, num_tokens, added, pauses
        self._limit = limit
        self._answers: Any = None
        self.runs: dict[str, list[tuple[int, float]]] = {}  # computed tokens, mean session seconds

    def run(self, rule: str, **settings: Any) -> float:
        """Mean session seconds."""
        *figures, said = serve(*self._workload, max_overtake=self._limit, **settings)
        self.runs.setdefault(rule, []).append(tuple(figures))
        self._answers = said if self._answers is None else self._answers
        assert said == self._answers, f"{rule}: other answers"
        return figures[1]

    def run_fixed(self, number: int) -> float:
        settings = {"admission": "greedy", "max_running_requests": number}
        return self.run(f"{number} running", as_branch=False, **settings)

    def best_number(self, numbers: list[int], first: int) -> int:
        """The one with the shortest session time, from `first` on while it gets shorter."""
        best, start = first, numbers.index(first)
        best_s = self.run_fixed(first)
        for others in (numbers[start + 1 :], numbers[:start][::-1]):
            for number in others:
                if (seconds := self.run_fixed(number)) >= best_s:
                    break
                best, best_s = number, seconds
            if best != first:
                break
        return best

    def medians(self, rule: str) -> tuple[int, float]:
        computed, seconds = np.median(self.runs[rule], axis=0).tolist()
        return round(computed), seconds


def measure(cell: EngineRuns, numbers: list[int], first: int, repeats: int) -> int:
    """Runs all rules; returns the best fixed number."""
    best = cell.best_number(numbers, first)
    for index in range(repeats):
        cell.run("priced", as_branch=False)
        cell.run("branches", as_branch=True)
        if index:
            cell.run_fixed(best)
    return best


def main() -> None:
    options = {"rooms": [3, 6, 12, 30], "thinks": [0, 20, 200], "limit": int}
    options |= {"step": [600.0, 8.0, 20.0], "running": [1, 2, 3, 4, 6, 8, 12], "repeats": 3}
    args = parse(
        __doc__, kinds="fixed,exponential,mixed", engine=False, model="", scale=1.0, mixed=False,
        threads=1, **options,
    )  # fmt: skip
    added = texts(is_mixed=args.mixed, scale=args.scale)
    fixed_s, prefill_token_s, decode_row_s = (1e-6 * part for part in args.step)
    step = StepModel(fixed_s, prefill_token_s, decode_row_s, kv_token_s=0.0)
    if args.engine:
        import torch

        torch.set_num_threads(args.threads)
    best, ratios = args.running[len(args.running) // 3], list[tuple[float, ...]]()
    with tempfile.TemporaryDirectory(prefix="bench-scripted-") as name:
        model = args.model or name
        if args.engine and not args.model:
            save_checkpoint(SHAPES["tiny"], "float32", Path(name))
        for room in args.rooms:
            for think in args.thinks:
                for kind in args.kinds.split(",") if think else ("fixed",):
                    pauses, num_tokens = thinks(think / 1e3, kind), round(args.scale * room * ROOM)
                    label = f"room {room:2} think {think:3} {kind:11}"
                    if args.engine:
                        cell = EngineRuns(model, num_tokens, added, pauses, args.limit)
                        best = measure(cell, args.running, best, args.repeats)
                        ratios.append(_print_measured(label, cell, best))
                    else:
                        by_rule = simulate(*scripted(added, pauses), num_tokens, args.limit, step)
                        ratios.append(_print_simulated(label, by_rule))
    for rule, of_rule in zip(("named", "by tokens"), zip(*ratios, strict=True), strict=True):
        mean = float(np.exp(np.mean(np.log(of_rule))))
        print(f"{rule}, over the best fixed number: {mean:.2f}, at most {max(of_rule):.2f}")


def _print_simulated(label: str, by_rule: dict[str, tuple[int, float]]) -> tuple[float, ...]:
    """Returns the ratios to the best fixed number of running requests: named, by tokens."""
    greedy, priced = by_rule["greedy"], by_rule["priced, named"]
    rivals = {name: figures for name, figures in by_rule.items() if "priced" not in name}
    fastest = min(rivals, key=lambda name: rivals[name][1])
    number = min((name for name in rivals if "running" in name), key=lambda name: rivals[name][1])
    ratios = tuple(by_rule[name][1] / rivals[number][1] for name in ("priced, named", "priced"))
    print(
        f"{label} greedy {greedy[0]:7,} {greedy[1]:.3f} s"
        f"  priced {priced[0]:7,} {priced[1]:.3f} s, by tokens {by_rule['priced'][0]:7,}"
        f" {by_rule['priced'][1]:.3f} s  ({priced[0] / greedy[0]:.2f}, {priced[1] / greedy[1]:.2f})"
        f"  best: {fastest} {rivals[fastest][0]:,} {rivals[fastest][1]:.3f} s"
        f" ({priced[1] / rivals[fastest][1]:.2f})"
        f"  {number} {rivals[number][1]:.3f} s ({ratios[0]:.2f}, {ratios[1]:.2f})",
        flush=True,
    )
    return ratios


def _print_measured(label: str, cell: EngineRuns, best: int) -> tuple[float, ...]:
    """Returns the ratios to the best fixed number of running requests: named, by tokens."""
    best_tokens, best_s = cell.medians(f"{best} running")
    texts, ratios = [f"{best} running {best_tokens:7,} {best_s:.3f} s"], list[float]()
    for rule in ("branches", "priced"):
        computed, seconds = cell.medians(rule)
        ratios.append(seconds / best_s)
        texts.append(f"{rule} {computed:7,} {seconds:.3f} s ({ratios[-1]:.2f})")
    print(label, "  ".join(texts), flush=True)
    return tuple(ratios)


if __name__ == "__main__":
    main()
