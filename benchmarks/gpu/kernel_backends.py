"""Cases of the attention backends: steps of every kind, and one-token rows inside of graphs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from gpu import kernel_truth as truth
from gpu.bench import Bench
from gpu.clock import captured
from gpu.kernel_attention import LAYER, Heads, Lengths, Paged, make_rows, queries, share_of_allowed
from gpu.kernel_tally import NAMES, Tally

from radixserve.attention.choice import make_backend
from radixserve.runner.input_batch import build_forward_batch

SHARED = 64  # tokens that rows of the cases have in common: whole pages of every size
STEPS: dict[str, tuple[Lengths, Sequence[tuple[Sequence[int], int]]]] = {
    "decodes": ([(5, 1), (400, 1), (0, 1), (63, 1), (64, 1)], ()),
    "prefills": ([(0, 33), (0, 2), (0, 200), (64, 64)], ()),
    "mixed": ([(3, 7), (130, 1), (0, 9), (0, 1), (200, 150), (31, 1)], ()),
    "shared decodes": ([(70, 1), (64, 1), (199, 1), (300, 1)], [((0, 1, 2, 3), SHARED)]),
    "shared mixed": (
        [(64, 150), (70, 1), (0, 20), (64, 2), (90, 1)],
        [((0, 1, 3, 4), SHARED)],
    ),
    "two levels": (
        [(140, 1), (192, 5), (150, 1), (66, 1), (64, 9), (5, 1)],
        [((0, 1, 2, 3, 4), SHARED), ((0, 1, 2), 2 * SHARED)],
    ),
}
NUM_GRAPH_ROWS = 12


def check_backend(
    bench: Bench, name: str, dtype: torch.dtype, page_size: int, heads: Heads
) -> None:
    """Steps of every kind outside of graphs, and one-token rows inside of them."""
    tally, kind = Tally(bench, f"backend {name}"), f"{NAMES[dtype]} pages of {page_size}"
    for what, (lengths, shared) in STEPS.items():
        case = make_rows(bench, lengths, heads, page_size, dtype, shared)
        tally.case(f"steps, {kind}", what, 1.0, _step_error, name, case, heads)
    for num_levels in (0, 1):
        what, args = f"{num_levels} shared levels", (name, dtype, page_size, heads, num_levels)
        tally.case(f"graphs, {kind}", what, 1.0, _graph_error, *args)
    tally.tell()


def _step_error(bench: Bench, name: str, case: Paged, heads: Heads) -> float:
    dtype = case.kv.dtype
    counts = [len(row.token_ids) for row in case.rows]
    q = queries(bench, sum(counts), heads, dtype).contiguous()
    backend = make_backend(name, case.kv, heads[0])
    backend.prepare()
    backend.plan(build_forward_batch(case.rows, case.page_size, bench.device))
    out = backend.attend(q, LAYER)
    scale = heads[2] ** -0.5
    expected = truth.attention(q, *case.pools, case.slots, counts, scale, causal=True)
    return share_of_allowed(dtype, out, None, expected)


def _graph_error(
    bench: Bench, name: str, dtype: torch.dtype, page_size: int, heads: Heads, num_levels: int
) -> float:
    """Captured once, replayed with other rows and other numbers of them."""
    lengths = [(64 + 29 * at, 1) for at in range(NUM_GRAPH_ROWS)]
    case = make_rows(bench, lengths, heads, page_size, dtype, [(tuple(range(1, 7)), SHARED)])
    backend = make_backend(name, case.kv, heads[0])
    backend.prepare()
    most = sum(len(row.page_ids) for row in case.rows) + NUM_GRAPH_ROWS
    graph = backend.capture_backend(NUM_GRAPH_ROWS, most, num_levels)
    all_q = queries(bench, NUM_GRAPH_ROWS, heads, dtype).contiguous()
    q = all_q.clone()
    replay, out = captured(lambda: graph.attend(q, LAYER), bench.device)
    errors = []
    for some in (range(NUM_GRAPH_ROWS), range(1, 7), (0,), (3, 4, 5, 6, 7), range(5, 12)):
        members = list(some)
        rows = [case.rows[at] for at in members]
        graph.plan(build_forward_batch(rows, page_size, bench.device))
        q.fill_(math.nan)
        q[: len(rows)] = all_q[members]
        out.fill_(math.nan)
        replay()
        slots = [case.slots[at] for at in members]
        wanted = truth.attention(
            q[: len(rows)], *case.pools, slots, [1] * len(rows), heads[2] ** -0.5, causal=True
        )
        errors.append(share_of_allowed(dtype, out[: len(rows)], None, wanted))
    return max(errors)
