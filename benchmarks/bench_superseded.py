"""Sessions that leave their past behind: hit rates with planted compactions and sub-agents.

    python benchmarks/bench_superseded.py --traces DIR [--trace agentic_code] [--sizes 1M,2M,4M,8M]
        [--sessions 300] [--every 20]

The sessions of a trace, one request after another, through a cache without a model. Planted are

    compactions   every 20th turn begins a new history: the first 4,096 tokens of the session and a
                  summary of 512; what the trace adds later follows
    sub-agents    every 20th turn calls one, under the session's name: half of these first tokens
                  and a task, four turns, then the session goes on where it was
    both          by turns

and the cache

    no sessions   is told of none
    leases        has sessions that supersede nothing
    superseded    has sessions, as they are
    by hand       supersedes nothing; each branch that a compaction leaves is deleted at once

It prints the share of prompt tokens that were found, in percent, with eviction by "lru". 64 tokens
of the trace are one of the replay.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path

import numpy as np
from harness.arguments import parse

from radixserve.arrays import IntArray
from radixserve.cache import RadixCache
from radixserve.replay import parse_tokens, read_trace
from radixserve.replay.trace import HashTokens, PackedTokens, Trace
from radixserve.retention.partings import Partings
from radixserve.retention.sessions import SessionRetention

UNIT = 64
HEAD, SUMMARY = 4_096 // UNIT, 512 // UNIT
SUB_TURNS, SUB_GROWTH = 4, 1_024 // UNIT
PLANTED = ("compactions", "sub-agents", "both")
MODES = ("no sessions", "leases", "superseded", "by hand")


@dataclass(frozen=True, slots=True)
class Turn:
    """A request of a session."""

    time: float
    session: str
    tokens: IntArray  # its prompt and answer
    num_prompt: int
    is_compacted: bool  # the first one of a new history
    is_last: bool


def plant(trace: Trace, kind: str, every: int, num_sessions: int | None) -> list[Turn]:
    """The turns of the first sessions, of all if None, with compactions, sub-agents or both, in
    order of time."""
    assert isinstance(trace.source, HashTokens | PackedTokens)
    source, by_session = trace.source.coarser(UNIT), dict[str, list[int]]()
    for index, name in enumerate(trace.sessions):
        if name is not None:
            by_session.setdefault(name, []).append(index)
    fresh = count(2**30, 1_000)  # first ids of texts that nobody else has
    turns: list[Turn] = []
    for name, indexes in islice(by_session.items(), num_sessions):
        history, dropped = np.empty(0, np.int32), 0
        for number, index in enumerate(indexes, 1):
            prompt, output = source.tokens(index)
            is_due = number % every == 0
            has_sub = is_due and (kind == "sub-agents" or (kind == "both" and number // every % 2))
            is_compacted = is_due and not has_sub and kind != "sub-agents"
            if is_compacted and len(prompt) > HEAD + SUMMARY:
                history = np.concatenate((prompt[:HEAD], text(next(fresh), SUMMARY)))
                dropped = max(0, len(prompt) - SUMMARY)
            rest = prompt[dropped:] if len(prompt) > dropped else prompt[-SUMMARY:]
            whole = np.concatenate((history, rest)) if dropped else prompt
            time, is_last = float(trace.times[index]), index == indexes[-1]
            tokens = np.concatenate((whole, output[:-1]))
            turns.append(Turn(time, name, tokens, len(whole), is_compacted, is_last))
            if has_sub and not is_last:
                gap = float(trace.times[indexes[number]]) - time
                task = np.concatenate((prompt[: HEAD // 2], text(next(fresh), SUMMARY)))
                for step in range(SUB_TURNS):
                    num_prompt = len(task)
                    task = np.concatenate((task, text(next(fresh), SUB_GROWTH)))
                    at = time + gap * (step + 1) / (SUB_TURNS + 1)
                    turns.append(Turn(at, name, task, num_prompt, False, False))
    return sorted(turns, key=lambda turn: turn.time)


def text(first: int, size: int) -> IntArray:
    return np.arange(first, first + size, dtype=np.int32)


class NothingSuperseded(Partings):
    """Sessions may come back to everything."""

    def is_left_for_good(self, prefix: int) -> bool:
        del prefix
        return False


def replay(turns: list[Turn], num_tokens: int, mode: str) -> tuple[float, int]:
    """The hit rate in percent, and the superseded tokens."""
    now, sessions = 0.0, {}
    partings = Partings() if mode == "superseded" else NothingSuperseded()
    retention = partial(SessionRetention, partings=partings)
    cache = RadixCache(num_tokens // UNIT, retention=retention, clock=lambda: now)
    found = asked = 0
    for turn in turns:
        now, session = turn.time, None
        if turn.is_compacted and mode == "by hand" and turn.session in sessions:
            sessions.pop(turn.session).close()
            cache.evict(cache.stats()["pages_closed"])
        if mode != "no sessions":
            session = sessions.get(turn.session) or cache.open_session(turn.session)
            sessions[turn.session] = session
        asked += turn.num_prompt
        if len(turn.tokens) <= cache.num_pages:
            prompt = turn.tokens[: turn.num_prompt]
            with cache.acquire(prompt, session=session) as sequence:
                found += sequence.cached_len
                sequence.extend(turn.tokens[sequence.cached_len :])
                sequence.commit(sequence.length)
        if turn.is_last and session is not None:
            sessions.pop(turn.session).close()
    cache.check()
    return 100 * found / asked, cache.stats()["superseded_tokens"] * UNIT


def main() -> None:
    options = {"traces": Path, "sizes": "1M,2M,4M,8M", "sessions": int, "every": 20}
    args = parse(__doc__, required=("traces",), trace="agentic_code", **options)
    trace = read_trace(str(args.traces / f"{args.trace}.jsonl.gz"))
    for kind in PLANTED:
        turns = plant(trace, kind, args.every, args.sessions)
        print(f"{args.trace}, {kind}: {len(turns):,} requests", flush=True)
        for size in args.sizes.split(","):
            cells = []
            for mode in MODES:
                if mode == "by hand" and kind != "compactions":
                    continue
                rate, superseded = replay(turns, parse_tokens(size), mode)
                cell = f"{mode} {rate:.2f}"
                cells.append(f"{cell} ({superseded:,} tokens)" if mode == "superseded" else cell)
            print(f"  {size:>4}  " + "  ".join(cells), flush=True)


if __name__ == "__main__":
    main()
