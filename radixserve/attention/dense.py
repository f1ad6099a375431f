"""Attention of many queries over one run of keys."""

from __future__ import annotations

import torch
from torch import Tensor

from radixserve_kernels.linear import product
from radixserve_kernels.torch_ops import attention_with_lse, merge_attention

BLOCK_ROWS = 512  # query heads x queries in one product


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, is_causal: bool, wants_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """q [N, Hq, D]; k, v [Lk, Hkv, D]; (out [N, Hq, D], log-sum-exp of the scores [N, Hq] float32).

    With `is_causal` the last query sees all keys, the one before it all but the last, and so on;
    else every query sees every key. In float32 these are products per K/V head; in bfloat16 torch's
    fused attention, which keeps scores in float32, is more than twice as fast.
    """
    if q.dtype == torch.bfloat16:
        return _attend_fused(q, k, v, scale, is_causal=is_causal)
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


def _attend_fused(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """`attend` in two parts: keys that every query sees, and causally the queries' own ones."""
    if not is_causal:
        return attend_all(q, k, v, scale)
    num_queries, num_heads, _ = q.shape
    num_past = len(k) - num_queries
    group = num_heads // k.shape[1]
    keys, values = (x[num_past:].transpose(0, 1).repeat_interleave(group, 0)[None] for x in (k, v))
    query = q.transpose(0, 1)[None]  # [1, Hq, N, D]
    own, own_lse = attention_with_lse(query, keys, values, None, scale, is_causal=True)
    out, lse = own[0].transpose(0, 1), own_lse[0].t()
    if not num_past:
        return out, lse
    other, other_lse = attend_all(q, k[:num_past], v[:num_past], scale)
    return merge_attention(out, lse, other, other_lse), torch.logaddexp(lse, other_lse)


def attend_all(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Every query sees every key, in one operation: see `attend`."""
    num_queries, num_heads, dim = q.shape
    num_kv_heads = k.shape[1]
    folded = (num_kv_heads, num_queries, num_heads // num_kv_heads)
    query = q.reshape(num_queries, num_kv_heads, -1, dim).transpose(0, 1).flatten(1, 2)
    keys, values = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    out, lse = attention_with_lse(query[None], keys, values, None, scale)
    out = out.reshape(*folded, dim).transpose(0, 1).flatten(1, 2)
    return out, lse.reshape(folded).transpose(0, 1).flatten(1)


def _future(size: int, like: Tensor) -> Tensor:
    """[size, 1, size] minus infinity above the diagonal, else 0."""
    mask = like.new_full((size, size), float("-inf")).triu(1)
    return mask[:, None]
