"""Attention of many queries over one run of keys, as plain matrix products per K/V head."""

from __future__ import annotations

import torch
from torch import Tensor

from radixserve_kernels.linear import product

BLOCK_ROWS = 512  # query heads x queries in one product


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, is_causal: bool, wants_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """q [N, Hq, D]; k, v [Lk, Hkv, D]; (out [N, Hq, D], log-sum-exp of the scores [N, Hq] float32).

    With `is_causal` the last query sees all keys, the one before it all but the last, and so on;
    else every query sees every key. Scores are kept in the inputs' dtype, their softmax in float32.
    """
    num_queries, num_heads, dim = q.shape
    kv_len, num_kv_heads = k.shape[:2]
    group = num_heads // num_kv_heads
    step = min(num_queries, max(1, BLOCK_ROWS // group))
    out = torch.empty_like(q)
    lse = q.new_empty((num_queries, num_heads), dtype=torch.float32) if wants_lse else None
    queries = (q * scale).view(num_queries, num_kv_heads, group, dim)
    keys = k.transpose(0, 1).contiguous()  # [Hkv, Lk, D]
    values = v.transpose(0, 1).contiguous()  # [Hkv, Lk, D]
    for first in range(0, num_queries, step):
        last = min(first + step, num_queries)
        size = last - first
        visible = kv_len - num_queries + last if is_causal else kv_len
        for head in range(num_kv_heads):
            rows = queries[first:last, head].reshape(size * group, dim)
            scores = product(rows, keys[head, :visible])  # [size * G, visible]
            if is_causal:
                tail = scores.view(size, group, visible)[..., visible - size :]
                tail += _future(size, scores)
            heads = slice(head * group, (head + 1) * group)
            if lse is not None:
                lse[first:last, heads] = scores.float().logsumexp(-1).view(size, group)
            weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
            mixed = product(weights, values[head, :visible].t())  # [size * G, D]
            out[first:last, heads] = mixed.view(size, group, dim)
    return out, lse


def _future(size: int, like: Tensor) -> Tensor:
    """[size, 1, size] minus infinity above the diagonal, else 0."""
    mask = like.new_full((size, size), float("-inf")).triu(1)
    return mask[:, None]
