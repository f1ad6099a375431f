"""Which share of recorded answers each source of drafts guesses right, without a model.

    python benchmarks/drafts_replay.py --trace FILE [--limit 1200] [--most 8]

FILE: a file of requests with texts, as `radixserve replay` reads them. Requests are replayed one
after the other through a prefix cache. Each step drafts up to --most tokens and takes those that
the recorded answer has, and one more. For each source: the share of the answers' tokens that were
drafted right, the tokens a step, the share of the drafts that were right, and microseconds a step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from harness.arguments import parse
from harness.report import Cell, print_table

from radixserve.arrays import IntBuffer
from radixserve.cache import RadixCache
from radixserve.drafts.namespace_text import NamespaceText
from radixserve.drafts.own_text import OwnText
from radixserve.drafts.source import DraftContext, DraftSource
from radixserve.drafts.tree import CachedContinuation
from radixserve.replay import read_trace
from radixserve.replay.trace import Trace, TraceRequest
from radixserve.request import Request, SamplingParams

NUM_PAGES = 1 << 20  # tokens of the cache


class Counts:
    def __init__(self) -> None:
        self.tokens = self.steps = self.drafted = self.right = 0
        self.seconds = 0.0

    def cells(self) -> list[Cell]:
        return [
            self.tokens,
            f"{self.right / max(1, self.tokens):.1%}",
            self.tokens / max(1, self.steps),
            f"{self.right / max(1, self.drafted):.1%}",
            self.seconds / max(1, self.steps) * 1e6,
        ]


def replay_request(
    recorded: TraceRequest, cache: RadixCache, sources: Sequence[DraftSource], most: int
) -> Counts:
    counts, output = Counts(), recorded.output.tolist()
    tokens = IntBuffer(recorded.prompt)
    params = SamplingParams(namespace=recorded.namespace)
    name = str(recorded.index)
    request = Request(name, recorded.prompt, params, 0, frozenset(), 1 << 30)
    with cache.acquire(recorded.prompt, recorded.namespace) as sequence:
        sequence.extend(recorded.prompt[sequence.length :])
        sequence.commit(sequence.length)
        tokens.append(output[0])
        counts.tokens, counts.steps = len(output), 1
        while (place := tokens.size - len(recorded.prompt)) < len(output):
            context = DraftContext(request, tokens.view(), len(recorded.prompt), sequence, None)
            began = time.perf_counter()
            drafts: Sequence[int] = ()
            room = min(most, len(output) - place - 1)
            for source in sources if room else ():
                drafts = source.draft(context, room)
                if drafts:
                    break
            counts.seconds += time.perf_counter() - began
            pairs = zip(drafts, output[place:], strict=False)
            right = next((n for n, (a, b) in enumerate(pairs) if a != b), len(drafts))
            counts.drafted += len(drafts)
            counts.right += right
            counts.steps += 1
            sequence.extend([tokens.last, *output[place : place + right]])
            sequence.commit(sequence.length)
            tokens.extend(output[place : place + right + 1])
        context = DraftContext(request, tokens.view(), len(recorded.prompt), sequence, None)
        began = time.perf_counter()
        for source in sources:
            source.end(context)
        counts.seconds += time.perf_counter() - began
    return counts


def replay(trace: Trace, names: Sequence[str], limit: int, most: int) -> Counts:
    cache, total = RadixCache(NUM_PAGES), Counts()
    made = {
        "tree": CachedContinuation(), "request": OwnText(), "namespace": NamespaceText(cache)
    }  # fmt: skip
    sources = [made[name] for name in names]
    for recorded in trace:
        if recorded.index >= limit:
            break
        if len(recorded.output) < 2:
            continue
        counts = replay_request(recorded, cache, sources, most)
        for name, value in vars(counts).items():
            setattr(total, name, getattr(total, name) + value)
    return total


def main() -> None:
    arguments = parse(__doc__, required=["trace"], trace=Path, limit=1200, most=8, json=False)
    trace = read_trace(str(arguments.trace))
    rows: list[list[Cell]] = []
    for names in (
        ["tree"], ["request"], ["namespace"], ["request", "namespace"],
        ["tree", "request", "namespace"],
    ):  # fmt: skip
        counts = replay(trace, names, arguments.limit, arguments.most)
        rows.append([" + ".join(names), *counts.cells()])
    columns = ["sources", "tokens", "of all", "a step", "of the drafts", "us a step"]
    print_table(arguments, columns, rows)


if __name__ == "__main__":
    main()
