"""Closed loops of recorded sessions: priced admission beside greedy and the rules of others.

    python benchmarks/closed_loops.py --traces DIR [--only NAMES] [--sizes SIZES] [--rates RATES]
        [--rules RULES] [--sessions N] [--max-overtake N] [--json FILE] [--jobs N] [--picture FILE]

Every session's next request is sent when it has thought about the last answer, in simulated time.
A trace is made coarser: `UNITS` tokens become one, so that a step stands for as many steps with
the same chunk each.
`--sessions`: the first so many of each trace, 0 for all, by default `SESSIONS`.
`--rates`: prefill tokens a second. `--rules`: parts of the names of rules, all by default.
`--max-overtake` is that of priced admission, by default its own: the rules of others hold sessions
back outside of the server, where no bound counts them.

Fixed numbers are tried from `FIRST` on, up and down, as long as makespan, mean or 99th percentile
of session time get better. A limit that greedy admission never reached is not run again. With
`--json` the file keeps each setting that has finished, and it is not run again: delete the lines of
a rule whose code has changed. With `--jobs` cells run in so many processes. `--picture` draws the
mean session times of all rows that are known, by the size of the cache.
Deterministic but for the seconds that a replay takes.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from harness.arguments import Names, parse
from rival_admission import AdditiveIncrease, LiveSessions, PauseResume

from radixserve.arrays import IntArray
from radixserve.replay import CacheSpec, Serving, Trace, build_paths, parse_tokens, read_trace
from radixserve.replay.closed_loop import (
    ClientGate,
    ClosedLoop,
    bound_closed_loop,
    infer_closed_loop,
    replay_closed_loop,
)
from radixserve.replay.paths import PathTable
from radixserve.replay.scheduled import StepModel
from radixserve.replay.trace import HashTokens, PackedTokens

UNITS = {"agentic_code": 64, "mooncake_conversation": 64, "tau_airline": 4}
SESSIONS = {"agentic_code": 150, "mooncake_conversation": 3_000, "tau_airline": 200}
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
FIRST = 16
LINES = {  # of the picture: names of rules, the best of which is drawn
    "greedy": "greedy",
    "priced": "priced",
    "lpm, best fixed number": "lpm*",
    "pause .95 resume .80": "pause*",
    "AIMD": "AIMD",
    "CacheTTL": "CacheTTL",
}
FIGURES = ("makespan_s", "session_mean_s", "session_p99_s")
Row = dict[str, Any]
_WORKLOADS: dict[str, Workload] = {}  # the processes of `--jobs` find them here


class PreparedTokens:
    """The tokens of each request, made once for all replays."""

    def __init__(self, tokens: list[tuple[IntArray, IntArray]]) -> None:
        self._tokens = tokens

    def tokens(self, index: int) -> tuple[IntArray, IntArray]:
        return self._tokens[index]


@dataclass(frozen=True)
class Workload:
    """A trace in coarse tokens, and its closed loop."""

    name: str
    trace: Trace
    loop: ClosedLoop
    paths: PathTable

    @property
    def unit(self) -> int:
        return UNITS[self.name]


@dataclass(frozen=True)
class Rule:
    name: str
    serving: dict[str, Any]
    cache: dict[str, Any]
    gate: Callable[..., ClientGate] = ClientGate


def load(name: str, folder: Path, num_sessions: int | None) -> Workload:
    whole = read_trace(str(folder / f"{name}.jsonl.gz"))
    num_sessions = SESSIONS[name] if num_sessions is None else num_sessions
    loop = infer_closed_loop(whole, Serving())
    if num_sessions and num_sessions < len(loop.sessions):
        kept = np.sort(np.concatenate(loop.sessions[:num_sessions]))
        loop = ClosedLoop(
            [np.searchsorted(kept, requests).tolist() for requests in loop.sessions[:num_sessions]],
            loop.starts[:num_sessions],
            loop.think_s[kept],
        )
    else:
        kept = np.arange(len(whole))
    unit = UNITS[name]
    assert isinstance(whole.source, HashTokens | PackedTokens)
    source = whole.source if unit == 1 else whole.source.coarser(unit)
    trace = replace(
        whole,
        source=PreparedTokens([source.tokens(index) for index in kept.tolist()]),
        times=whole.times[kept],
        sessions=[whole.sessions[index] for index in kept.tolist()],
        namespaces=[whole.namespaces[index] for index in kept.tolist()],
        num_prompt=np.maximum(1, whole.num_prompt[kept] // unit),
        num_output=np.maximum(1, whole.num_output[kept] // unit),
    )
    return Workload(name, trace, loop, build_paths(trace))


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


def live(policy: str, limit: int) -> Rule:
    def gate(*of: Any) -> ClientGate:
        return LiveSessions(*of, limit)

    return Rule(f"{policy}, {limit} live", {"order": policy}, {}, gate)


def running(policy: str, limit: int) -> Rule:
    settings = {"order": policy, "max_running_requests": limit}
    return Rule(f"{policy}, {limit} running", settings, {})


def own_rules(max_overtake: int | None) -> list[Rule]:
    priced = {"admission": "priced", "max_overtake": max_overtake}
    order = {"policy": "expected-return"}
    return [
        Rule("greedy", {}, {}),
        Rule("priced", priced, {**order, "use_sessions": True}),
        Rule("priced, no names", priced, order),
    ]


def others(trace: Trace, size: int) -> list[Rule]:
    lengths = trace.num_prompt + trace.num_output
    return [
        Rule("pause .95 resume .80", {}, {}, lambda *of: PauseResume(*of, lengths, size)),
        Rule("AIMD", {}, {}, lambda *of: AdditiveIncrease(*of, lengths, size)),
        Rule("CacheTTL", {}, {"use_sessions": True}),
    ]


class Cell:
    """A trace, a size and a rate: every rule runs at most once."""

    def __init__(self, work: Workload, size: str, rate: str, known: dict[str, Row]) -> None:
        self.work, self.size_text, self.rate_text, self.known = work, size, rate, known
        self.size = parse_tokens(size) // work.unit
        self._bound_s: float | None = None

    def run(self, rule: Rule) -> Row:
        if rule.name in self.known:
            return self.known[rule.name]
        work, rate = self.work, parse_tokens(self.rate_text)
        thinks = work.loop.think_s[work.loop.think_s > 0]
        result = replay_closed_loop(
            work.trace,
            work.loop,
            CacheSpec(self.size, **rule.cache),
            serving(rate, work.unit, **rule.serving),
            lease_s=2 * float(np.median(thinks)) if rule.name == "CacheTTL" else None,
            make_gate=rule.gate,
        )
        return self.note(rule.name, {**result.document(), "max_running": result.max_running})

    def note(self, name: str, figures: Row) -> Row:
        row = {
            **figures,
            "trace": self.work.name,
            "sessions": len(self.work.loop.sessions),
            "size": self.size_text,
            "rate": self.rate_text,
            "rule": name,
            "bound_makespan_s": self.bound_s,
        }
        self.known[name] = row
        return row

    @property
    def bound_s(self) -> float:
        if self._bound_s is None:
            for row in self.known.values():
                self._bound_s = row["bound_makespan_s"]
                return row["bound_makespan_s"]
            work = self.work
            costs = serving(parse_tokens(self.rate_text), work.unit)
            bound = bound_closed_loop(work.trace, work.paths, work.loop, self.size, costs)
            self._bound_s = bound.makespan_s
        return self._bound_s

    def search(self, make: Callable[[int], Rule]) -> Iterator[Row]:
        """The rule with fixed numbers, from FIRST on while they get better."""
        first = FIXED.index(FIRST)
        yield (row := self.limited(make(FIRST)))
        for numbers in (FIXED[first + 1 :], FIXED[first - 1 :: -1]):
            best = {figure: row[figure] for figure in FIGURES}
            for number in numbers:
                other = self.limited(make(number))
                yield other
                if all(other[figure] >= best[figure] for figure in FIGURES):
                    break
                best = {figure: min(best[figure], other[figure]) for figure in FIGURES}

    def limited(self, rule: Rule) -> Row:
        """Run it, unless the limit cannot be reached."""
        limit = rule.serving.get("max_running_requests")
        order = rule.serving["order"]
        free = self.known.get("greedy" if order == "lpm" else f"{order}, {FIXED[-1]} running")
        if rule.name not in self.known and limit and free and limit > free["max_running"]:
            return self.note(rule.name, {**free, "seconds": 0.0})
        return self.run(rule)


def rows_of(cell: Cell, wanted: Callable[[str], bool], max_overtake: int | None) -> Iterator[Row]:
    for rule in own_rules(max_overtake):
        if wanted(rule.name):
            yield cell.run(rule)
    for policy in ("lpm", "fcfs"):
        for name, make in (("live", live), ("running", running)):
            if wanted(f"{policy}, {name}"):
                if name == "running":
                    cell.run(own_rules(None)[0] if policy == "lpm" else running(policy, FIXED[-1]))
                yield from cell.search(partial(make, policy))
    for rule in others(cell.work.trace, cell.size):
        if wanted(rule.name):
            yield cell.run(rule)


def text(row: Row) -> str:
    return (
        f"{row['trace']:12} {row['size']:>5} {row['rate']:>4}/s {row['rule']:22}"
        f" hit {100 * row['hit_rate']:5.1f} %  makespan {row['makespan_s']:8.0f} s"
        f" (bound {row['bound_makespan_s']:.0f})  session {row['session_mean_s']:8.1f}"
        f"  waiting {row['wait_mean_s']:8.1f}  p99 {row['session_p99_s']:8.0f}"
        f"  fair {row['fairness']:.2f}  queue {row['queue_worst_s']:.0f}"
    )


def run_cell(
    name: str, known: list[Row], args: Any, cell_of: tuple[str, str]
) -> tuple[list[str], list[Row]]:
    """The lines of a cell, and all rows that are known of it."""
    (size, rate), work = cell_of, _WORKLOADS[name]
    key = (work.name, len(work.loop.sessions), size, rate)
    mine = {row["rule"]: row for row in known if _key(row) == key}
    parts = args.rules.split(";") if args.rules else [""]
    cell = Cell(work, size, rate, mine)
    rows = rows_of(cell, lambda name: any(part in name for part in parts), args.max_overtake)
    lines = {row["rule"]: text(row) for row in rows}
    return list(lines.values()), list(cell.known.values())


def _key(row: Row) -> tuple[Any, ...]:
    return row["trace"], row["sessions"], row["size"], row["rate"]


def draw(rows: list[Row], path: Path) -> None:
    """Mean session time by the size of the cache: a row of panels for each trace, one for each
    rate. Of the fixed numbers under lpm the best one in each cell."""
    from matplotlib.figure import Figure

    names = [name for name in UNITS if any(row["trace"] == name for row in rows)]
    figure = Figure(figsize=(12, 3 * len(names)), layout="constrained")
    panels = figure.subplots(len(names), 3, squeeze=False)
    for name, line in zip(names, panels, strict=True):
        for rate, panel in zip(RATES[name].split(","), line, strict=True):
            for label, pattern in LINES.items():
                seconds = dict.fromkeys(SIZES[name].split(","), np.nan)
                for row in rows:
                    is_here = (row["trace"], row["rate"]) == (name, rate)
                    if is_here and fnmatch(row["rule"], pattern):
                        size = row["size"]
                        seconds[size] = float(np.fmin(seconds[size], row["session_mean_s"]))
                panel.plot(list(seconds), list(seconds.values()), "o-", label=label)
            panel.set(yscale="log", xlabel="tokens", title=f"{name}, {rate} tokens/s")
        line[0].set_ylabel("mean session time, s")
    panels[0, 0].legend()
    figure.savefig(path, dpi=100)


def main() -> None:
    options = {"traces": Path, "only": Names("trace", UNITS), "sessions": int, "sizes": str}
    options |= {"rates": str, "rules": str, "max_overtake": int, "json": Path, "jobs": 1}
    options["picture"] = Path
    args = parse(__doc__, required=("traces",), **options)
    known: list[Row] = []
    if args.json and args.json.exists():
        known = json.loads(args.json.read_text())
    for name in args.only:
        _WORKLOADS[name] = load(name, args.traces, args.sessions)
        sizes, rates = (
            (args.sizes or SIZES[name]).split(","),
            (args.rates or RATES[name]).split(","),
        )
        cells = [(size, rate) for size in sizes for rate in rates]
        with multiprocessing.get_context("fork").Pool(args.jobs) as pool:
            for lines, rows in pool.imap(partial(run_cell, name, known, args), cells):
                print("\n".join(lines), flush=True)
                new = {_key(rows[0])} if rows else set()
                known = [row for row in known if _key(row) not in new] + rows
                if args.json:
                    args.json.write_text(json.dumps(known, indent=1))
    if args.picture:
        draw(known, args.picture)


if __name__ == "__main__":
    main()
