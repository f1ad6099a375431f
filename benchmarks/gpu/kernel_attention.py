"""Cases of the attention kernels: rows over a pool, and the kernels called directly.

Every cell of a pool that no row has to read holds NaN, and so does every output beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product

import numpy as np
import torch
from gpu import kernel_truth as truth
from gpu.bench import Bench
from gpu.kernel_tally import ATTENTION, LSE, NAMES, Tally
from torch import Tensor

from radixserve.schedule import ScheduledRequest
from radixserve_kernels import gpu_ops

SPARE_PAGES = 3
LAYER = 1  # of two
DIRECT = "attention kernels (Triton)"
Lengths = Sequence[tuple[int, int]]  # of each row: tokens before the step, new ones
Heads = tuple[int, int, int]  # query heads, key heads, features


@dataclass(frozen=True)
class Paged:
    """Rows over a pool [2, 2, pages, P, Hkv, D]; what none of them reads is NaN."""

    kv: Tensor
    rows: list[ScheduledRequest]
    slots: list[list[int]]  # of each row's keys, the new ones last
    page_size: int

    @property
    def pools(self) -> tuple[Tensor, Tensor]:
        """K and V of the layer by slot."""
        shape = (-1, *self.kv.shape[-2:])
        return self.kv[LAYER, 0].view(shape), self.kv[LAYER, 1].view(shape)

    def index(self) -> tuple[Tensor, Tensor, Tensor]:
        """kv_indptr, kv_indices, last_page_len of all rows, on the device."""
        counts = [len(row.page_ids) for row in self.rows]
        last = [(len(s) - 1) % self.page_size + 1 if s else 0 for s in self.slots]
        flat = np.concatenate([row.page_ids for row in self.rows])
        arrays = ([0, *accumulate(counts)], flat.tolist(), last)
        return tuple(  # type: ignore[return-value]
            torch.tensor(one, dtype=torch.int32, device=self.kv.device) for one in arrays
        )


def make_rows(
    bench: Bench,
    lengths: Lengths,
    heads: Heads,
    page_size: int,
    dtype: torch.dtype,
    shared: Sequence[tuple[Sequence[int], int]] = (),
) -> Paged:
    """`shared`: rows, and how many tokens (of whole pages) they begin with in common."""
    generator = np.random.default_rng(len(lengths) + page_size)
    counts = [-(-(start + new) // page_size) for start, new in lengths]
    ids = generator.permutation(sum(counts) + SPARE_PAGES).astype(np.int32)
    bounds = [0, *accumulate(counts)]
    tables = [ids[a:b].copy() for a, b in pairwise(bounds)]
    for members, num_tokens in shared:
        assert num_tokens % page_size == 0, "whole pages are shared"
        for row in members[1:]:
            tables[row][: num_tokens // page_size] = tables[members[0]][: num_tokens // page_size]
    slots = []
    for table, (start, new) in zip(tables, lengths, strict=True):
        cells = table[:, None].astype(np.int64) * page_size + np.arange(page_size)
        slots.append(cells.ravel()[: start + new].tolist())
    shape = (2, 2, len(ids), page_size, heads[1], heads[2])
    kv = torch.full(shape, math.nan, dtype=dtype, device=bench.device)
    used = torch.tensor(sorted({slot for row in slots for slot in row}), device=bench.device)
    for pool in (kv[LAYER, 0], kv[LAYER, 1]):
        flat = pool.view(-1, *heads[1:])
        values = torch.randn(len(used), *heads[1:], device=bench.device)
        flat[used] = values.to(dtype)
    rows = [
        ScheduledRequest(f"r{at}", np.ones(max(new, 1), np.int32), start, table, None)
        for at, (table, (start, new)) in enumerate(zip(tables, lengths, strict=True))
    ]
    return Paged(kv, rows, slots, page_size)


def queries(bench: Bench, count: int, heads: Heads, dtype: torch.dtype) -> Tensor:
    """Those of a qkv: strided tokens."""
    wide = torch.randn(count, heads[0] + 2 * heads[1], heads[2], device=bench.device)
    return wide.to(dtype)[:, : heads[0]]


def check_direct(
    bench: Bench, dtype: torch.dtype, page_size: int, heads: Sequence[Heads], label: str = ""
) -> None:
    """The kernels decode, extend and merge_states, called directly."""
    tally, kind = Tally(bench, DIRECT), f"{NAMES[dtype]} pages of {page_size}{label}"
    all_splits = bench.pick(((1, 1), (8, 8), (8, 2)), ((1, 1), (8, 2)), ((1, 1), (3, 2)))
    for shape, splits in product(heads, all_splits):
        what = f"{shape} splits {splits}"
        tally.case(f"decode, {kind}", what, 1.0, _decode_error, dtype, page_size, shape, splits)
    for shape, causal, (name, new), splits in product(
        heads, (True, False), _extensions(bench).items(), bench.pick((1, 3), (1, 3), (1,))
    ):
        what = f"{shape} {name}{' causal' if causal else ''} splits {splits}"
        args = (dtype, page_size, shape, new, splits, causal)
        tally.case(f"extend, {kind}", what, 1.0, _extend_error, *args)
    for shape in heads if page_size == 16 else ():
        kernel = f"merge_states, {NAMES[dtype]}{label}"
        tally.case(kernel, str(shape), 1.0, _merge_error, dtype, shape)
    tally.tell()


def _extensions(bench: Bench) -> dict[str, list[tuple[int, int]]]:
    """Tokens before and new ones of each row, for each block size of the kernel."""
    long = [(9, 300), (0, 64), (1_000, 1), (700, 130)]
    few = [(300, 2), (0, 1), (64, 2)]
    return bench.pick(
        {"long": long, "short": [(5, 16), (900, 9), (0, 3)], "few": few},
        {"long": long, "few": few},
        {"short": [(5, 16), (20, 9), (0, 3)]},
    )


def share_of_allowed(
    dtype: torch.dtype, out: Tensor, lse: Tensor | None, expected: tuple[Tensor, Tensor]
) -> float:
    """Over what is allowed, of the result and of its lse."""
    found = truth.error(out, expected[0]) / ATTENTION[dtype]
    if lse is None:
        return found
    return max(found, truth.lse_error(lse, expected[1]) / LSE[dtype])


def _decode_error(
    bench: Bench, dtype: torch.dtype, page_size: int, heads: Heads, splits: tuple[int, int]
) -> float:
    lengths = bench.pick(
        [1, 0, 17, 128, 129, 1_000, 64, 5_003], [1, 0, 17, 129, 1_000], [1, 0, 17, 40]
    )
    case = make_rows(bench, [(n, 0) for n in lengths], heads, page_size, dtype)
    count = len(case.rows)
    q = queries(bench, count, heads, dtype)
    out, lse = torch.full_like(q, math.nan), q.new_full(q.shape[:2], math.nan, dtype=torch.float32)
    size = gpu_ops.workspace_size(count, heads[0], heads[2], splits[0])
    gpu_ops.decode(
        q,
        *case.pools,
        *case.index(),
        page_size,
        num_splits=splits[0],
        workspace=lse.new_full((size,), math.nan),
        out=out,
        lse=lse,
        fixed_splits=splits[1],
    )
    scale = heads[2] ** -0.5
    expected = truth.attention(q, *case.pools, case.slots, [1] * count, scale, causal=False)
    return share_of_allowed(dtype, out, lse, expected)


def _extend_error(
    bench: Bench,
    dtype: torch.dtype,
    page_size: int,
    heads: Heads,
    new: Lengths,
    num_splits: int,
    causal: bool,
) -> float:
    case = make_rows(bench, new, heads, page_size, dtype)
    counts = [count for _, count in new]
    q = queries(bench, sum(counts), heads, dtype)
    out, lse = torch.full_like(q, math.nan), q.new_full(q.shape[:2], math.nan, dtype=torch.float32)
    size = gpu_ops.workspace_size(len(q), heads[0], heads[2], num_splits)
    qo_indptr = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=bench.device)
    gpu_ops.extend(
        q,
        *case.pools,
        qo_indptr,
        *case.index(),
        page_size,
        causal=causal,
        max_q=max(counts),
        num_splits=num_splits,
        workspace=lse.new_full((size,), math.nan),
        out=out,
        lse=lse,
    )
    scale = heads[2] ** -0.5
    expected = truth.attention(q, *case.pools, case.slots, counts, scale, causal=causal)
    return share_of_allowed(dtype, out, lse, expected)


def _merge_error(bench: Bench, dtype: torch.dtype, heads: Heads) -> float:
    """Two halves of each row's keys; a half that is empty holds NaN."""
    case = make_rows(bench, [(n, 0) for n in (8, 3, 0, 40)], heads, 4, dtype)
    q = queries(bench, 4, heads, dtype)
    scale, cuts = heads[2] ** -0.5, (4, 0, 0, 40)
    parts: list[Tensor] = []
    for half in (0, 1):
        slots = [
            row[:cut] if half == 0 else row[cut:] for row, cut in zip(case.slots, cuts, strict=True)
        ]
        out, lse = truth.attention(q, *case.pools, slots, [1] * 4, scale, causal=False)
        out = out.masked_fill((lse == -math.inf)[..., None], math.nan)
        parts += [out.to(dtype).to(bench.device), lse.float().to(bench.device)]
    out, lse = torch.full_like(parts[0], math.nan), torch.full_like(parts[1], math.nan)
    gpu_ops.merge_states(*parts, out, lse)
    expected = truth.attention(q, *case.pools, case.slots, [1] * 4, scale, causal=False)
    return share_of_allowed(dtype, out, lse, expected)
