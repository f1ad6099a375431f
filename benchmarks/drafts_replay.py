"""Which share of recorded answers each source of drafts guesses right, without a model.

    python benchmarks/drafts_replay.py --trace FILE [--limit 1200] [--most 8] [--step-ms 8]

FILE: a file of requests with texts, as `radixserve replay` reads them. Requests are replayed one
after the other through a prefix cache. Each step drafts up to --most tokens and takes those that
the recorded answer has, and one more. For the sources together, and for each alone: the share of
the answers' tokens that were drafted right, the tokens a step, the share of the drafts that were
right, the CPU time of proposing in microseconds a step and as a share of a step of --step-ms, that
of indexing in microseconds for a token of a prompt or answer, and the bytes of the index.
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
        self.tokens = self.steps = self.drafted = self.right = self.known = 0
        self.propose_s = self.index_s = 0.0

    def cells(self, step_s: float) -> list[Cell]:
        proposing_s = self.propose_s / max(1, self.steps)
        return [
            self.tokens,
            f"{self.right / max(1, self.tokens):.1%}",
            self.tokens / max(1, self.steps),
            f"{self.right / max(1, self.drafted):.1%}",
            proposing_s * 1e6,
            f"{proposing_s / step_s:.2%}",
            self.index_s / max(1, self.known) * 1e6,
        ]


def replay_request(
    recorded: TraceRequest, cache: RadixCache, sources: Sequence[DraftSource], most: int
) -> Counts:
    counts, output = Counts(), recorded.output.tolist()
    tokens = IntBuffer(recorded.prompt)
    params = SamplingParams(namespace=recorded.namespace)
    request = Request(str(recorded.index), recorded.prompt, params, 0, frozenset(), 1 << 30)
    with cache.acquire(recorded.prompt, recorded.namespace) as sequence:
        sequence.extend(recorded.prompt[sequence.length :])
        sequence.commit(sequence.length)
        tokens.append(output[0])
        counts.tokens, counts.steps = len(output), 1
        counts.known = len(recorded.prompt) + len(output)
        context = DraftContext(request, tokens.view(), len(recorded.prompt), sequence, None)
        asked = list(sources)
        while (place := tokens.size - len(recorded.prompt)) < len(output):
            began = time.thread_time()
            context.tokens = tokens.view()
            drafts: Sequence[int] = ()
            room = min(most, len(output) - place - 1)
            for source in tuple(asked) if room else ():
                found = source.draft(context, room)
                if found is None:
                    asked.remove(source)
                elif found:
                    drafts = found
                    break
            counts.propose_s += time.thread_time() - began
            pairs = zip(drafts, output[place:], strict=False)
            right = next((n for n, (a, b) in enumerate(pairs) if a != b), len(drafts))
            counts.drafted += len(drafts)
            counts.right += right
            counts.steps += 1
            sequence.extend([tokens.last, *output[place : place + right]])
            sequence.commit(sequence.length)
            tokens.extend(output[place : place + right + 1])
        began = time.thread_time()
        for source in sources:
            source.end(context)
        counts.index_s = time.thread_time() - began
    return counts


def replay(trace: Trace, names: Sequence[str], limit: int, most: int) -> tuple[Counts, int]:
    """Returns the sums over all requests, and the bytes of the index at the end."""
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
    return total, sum(source.stats().get("index_bytes", 0) for source in sources)


def main() -> None:
    arguments = parse(
        __doc__, required=["trace"], trace=Path, limit=1200, most=8, step_ms=8.0,
        json=False,
    )  # fmt: skip
    trace = read_trace(str(arguments.trace))
    rows: list[list[Cell]] = []
    for names in (
        ["tree"], ["request"], ["namespace"], ["request", "namespace"],
        ["tree", "request", "namespace"],
    ):  # fmt: skip
        counts, num_bytes = replay(trace, names, arguments.limit, arguments.most)
        rows.append([" + ".join(names), *counts.cells(arguments.step_ms / 1e3), num_bytes])
    columns = [
        "sources", "tokens", "of all", "a step", "of the drafts", "us a step", "of a step",
        "indexing, us a token", "bytes",
    ]  # fmt: skip
    print_table(arguments, columns, rows)


if __name__ == "__main__":
    main()
