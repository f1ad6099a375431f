"""Rows of paged keys for the attention kernels' tests, and attention from its definition."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from radixserve_kernels.attention_features import PLAIN, AttentionFeatures

SPARE_PAGES = 3
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@dataclass(frozen=True)
class PagedCase:
    """Rows of `lens` keys; all slots that are none of theirs hold NaN."""

    k_slots: Tensor  # [num_slots, Hkv, D]
    v_slots: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    last_page_len: Tensor
    page_size: int
    slots: list[list[int]]  # of each row's keys

    @property
    def keys(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int]:
        """As `decode` takes them."""
        rows = (self.kv_indptr, self.kv_indices, self.last_page_len)
        return (self.k_slots, self.v_slots, *rows, self.page_size)


def make_case(
    lens: Sequence[int], num_kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype
) -> PagedCase:
    num_pages = [-(-length // page_size) for length in lens]
    total = sum(num_pages) + SPARE_PAGES
    pages = torch.randperm(total)[: sum(num_pages)].to(torch.int32)
    indptr = torch.tensor([0, *num_pages]).cumsum(0).to(torch.int32)
    last = torch.tensor([(length - 1) % page_size + 1 if length else 0 for length in lens])
    slots = []
    for row, length in enumerate(lens):
        own = pages[indptr[row] : indptr[row + 1]].tolist()
        slots.append([own[i // page_size] * page_size + i % page_size for i in range(length)])
    pools = []
    for _ in range(2):  # heads of a pool twice as wide: slots and heads are strided
        pool = torch.full((total * page_size, 2 * num_kv_heads, head_dim), torch.nan).to(dtype)
        some = [slot for row in slots for slot in row]
        pool[some, :num_kv_heads] = torch.randn(len(some), num_kv_heads, head_dim).to(dtype)
        pools.append(pool[:, :num_kv_heads])
    return PagedCase(*pools, indptr, pages, last.to(torch.int32), page_size, slots)


def attention(
    case: PagedCase,
    q: Tensor,
    qo_indptr: Sequence[int],
    scale: float,
    *,
    causal: bool,
    features: AttentionFeatures = PLAIN,
) -> tuple[Tensor, Tensor]:
    """From its definition, query by query, in float64: out and lse (base 2)."""
    cap = features.logits_soft_cap
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    group = q.shape[1] // case.k_slots.shape[1]
    for row, slots in enumerate(case.slots):
        start, end = qo_indptr[row], qo_indptr[row + 1]
        for token in range(start, end):
            place = len(slots) - (end - token)
            window, chunk = features.span
            first = max(
                place + 1 - window if window else 0, place // chunk * chunk if chunk else 0, 0
            )
            seen = slots[first : place + 1] if causal else slots
            if seen:
                keys, values = (  # [keys, Hq, D]
                    pool[seen].cpu().double().repeat_interleave(group, 1)
                    for pool in (case.k_slots, case.v_slots)
                )
                scores = (keys * q[token].double()).sum(-1) * scale
                scores = scores if cap is None else cap * (scores / cap).tanh()
                out[token] = (torch.softmax(scores, 0)[..., None] * values).sum(0)
                lse[token] = scores.logsumexp(0) / math.log(2)
    return out, lse


def assert_near(
    out: Tensor, lse: Tensor, expected: tuple[Tensor, Tensor], lse_tolerance: float = 1e-5
) -> None:
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double(), expected[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), expected[1], rtol=lse_tolerance, atol=lse_tolerance)
