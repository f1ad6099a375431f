"""Sessions beside prompts that are sent once: priced admission beside greedy, in simulated time.

    python benchmarks/bench_one_off_prompts.py [--rooms 9000,20000] [--loads 60x400,120x600,160x800]
        [--head 0] [--json]

12 sessions without names have 16 turns: 600 tokens, then 100 more a turn, 8 answered. They begin
within 3.3 s and think for half a second (exponential). For 10 s prompts come that nobody sends
again: a load of 60x400 is 60 a second, 400 tokens long in the mean (exponential), 16 answered; all
of them begin with the same --head tokens. Hit rates are of the sessions' prompts, times the
sessions' means.
"""

from __future__ import annotations

import numpy as np
from harness.arguments import parse
from harness.report import Cell, print_table

from radixserve.replay import CacheSpec, Serving, Trace
from radixserve.replay.closed_loop import ClosedLoop, replay_closed_loop
from radixserve.replay.scheduled import StepModel
from radixserve.replay.trace import PackedTokens

SESSIONS, TURNS, THINK_S, SPAN_S = 12, 16, 0.5, 10.0
STEP = StepModel(fixed_s=6e-4, prefill_token_s=2e-5, decode_row_s=2e-5, kv_token_s=0.0)
RULES = {"greedy": "lru", "priced": "expected-return"}  # orders of eviction by admission


def closed_loop(per_second: int, mean_tokens: int, head_tokens: int) -> tuple[Trace, ClosedLoop]:
    """The sessions' requests come first."""
    rng, packed = np.random.default_rng(0), PackedTokens()
    num_prompt: list[int] = []
    num_output: list[int] = []

    def add(prompt: list[int], num_answered: int) -> list[int]:
        answer = rng.integers(0, 1000, num_answered)
        added = packed.add(np.asarray(prompt, np.int32), answer.astype(np.int32))
        num_prompt.append(added[0])
        num_output.append(num_answered)
        return answer.tolist()

    for _ in range(SESSIONS):
        text = rng.integers(0, 1000, 600).tolist()
        for _ in range(TURNS):
            text += [*add(text, 8), *rng.integers(0, 1000, 100).tolist()]
    num_turns, num_once = SESSIONS * TURNS, round(per_second * SPAN_S)
    head = rng.integers(0, 1000, head_tokens).tolist()
    for _ in range(num_once):
        size = int(rng.exponential(mean_tokens)) + 20
        add(head + rng.integers(0, 1000, size).tolist(), 16)
    count = num_turns + num_once
    pauses = np.zeros(count)
    pauses[:num_turns] = rng.exponential(THINK_S, num_turns)
    pauses[0:num_turns:TURNS] = 0.0
    begun = rng.uniform(0, SPAN_S / 3, SESSIONS), np.sort(rng.uniform(0, SPAN_S, num_once))
    turns = [list(range(first, first + TURNS)) for first in range(0, num_turns, TURNS)]
    trace = Trace(
        name="one-off prompts",
        source=packed,
        times=np.zeros(count),
        sessions=[None] * count,
        namespaces=[""] * count,
        num_prompt=np.asarray(num_prompt),
        num_output=np.asarray(num_output),
        has_times=False,
    )
    requests = [*turns, *([number] for number in range(num_turns, count))]
    return trace, ClosedLoop(requests, np.concatenate(begun), pauses)


def main() -> None:
    loads = ["60x400", "120x600", "160x800"]
    args = parse(__doc__, rooms=[9_000, 20_000], loads=loads, head=0, json=False)
    num_turns = SESSIONS * TURNS
    rows: list[list[Cell]] = []
    for load in args.loads:
        per_second, mean_tokens = map(int, load.split("x"))
        trace, loop = closed_loop(per_second, mean_tokens, args.head)
        for room in args.rooms:
            row: list[Cell] = [load, room]
            for admission, policy in RULES.items():
                serving = Serving(step=STEP, chunked_prefill_size=512, admission=admission)
                result = replay_closed_loop(trace, loop, CacheSpec(room, policy), serving)
                share = result.hits[:num_turns].sum() / trace.num_prompt[:num_turns].sum()
                row += [f"{share:.1%}", round(float(result.session_s[:SESSIONS].mean()), 1)]
            rows.append(row)
    columns = ("load", "room", *(f"{rule}, {of}" for rule in RULES for of in ("hits", "seconds")))
    print_table(args, columns, rows)


if __name__ == "__main__":
    main()
