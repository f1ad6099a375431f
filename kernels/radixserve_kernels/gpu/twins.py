"""What each Triton kernel computes, in torch operations: for CPU tensors, and for the tests.

Needs no Triton. Arguments are those of `radixserve_kernels.gpu_ops`, which describes them. Written
to be read: they loop over rows and synchronise where a kernel does not.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from radixserve_kernels import torch_ops
from radixserve_kernels.gpu.records import PagedKeys, Result

LOG2_E = math.log2(math.e)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None) -> Tensor:
    epsilon = torch.tensor(eps, dtype=torch.float32, device=x.device)
    return put(torch_ops.rms_norm(x, weight, epsilon), out)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    residual += x
    return rms_norm(residual, weight, eps, out), residual


def silu_and_mul(gate_up: Tensor, out: Tensor | None) -> Tensor:
    return put(torch_ops.silu_and_mul(gate_up), out)


def put(result: Tensor, out: Tensor | None) -> Tensor:
    """`result`, in `out` where there is one."""
    return result if out is None else out.copy_(result)


def rope_and_store(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos_sin: Tensor,
    k_slots: Tensor,
    v_slots: Tensor,
    num_heads: int,
    num_kv_heads: int,
    qk_norm: Tensor | None,
    eps: float,
    out: Tensor | None,
) -> Tensor:
    heads = qkv.unflatten(-1, (num_heads + 2 * num_kv_heads, -1))  # [T, Hq + 2 Hkv, D]
    qk, v = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
    if qk_norm is not None:
        qk = rms_norm(qk, qk_norm, eps, None)
    cos, sin = cos_sin[positions].chunk(2, -1)  # [T, D / 2] each
    qk = torch_ops.apply_rotary(qk.contiguous(), torch.complex(cos, sin)[:, None])
    is_kept = slots >= 0
    k_slots[slots[is_kept]] = qk[is_kept, num_heads:].to(k_slots.dtype)
    v_slots[slots[is_kept]] = v[is_kept].to(v_slots.dtype)
    return put(qk[:, :num_heads].contiguous(), out)


def copy_heads(kv: Tensor, copies: Tensor) -> None:
    """Read after read, then write after write: the pages may touch."""
    heads = [kv[:, :, source, :count].clone() for source, _, count in copies.tolist()]
    for (_, destination, count), head in zip(copies.tolist(), heads, strict=True):
        kv[:, :, destination, :count] = head


def flat_indices(
    page_table: Tensor, row_of: Tensor, num_pages: Tensor, indptr: Tensor, out: Tensor
) -> Tensor:
    starts = indptr.tolist()
    for row, (source, count) in enumerate(zip(row_of.tolist(), num_pages.tolist(), strict=True)):
        if source >= 0:
            out[starts[row] : starts[row] + count] = page_table[source, :count]
    return out


def row_slots(row: int, keys: PagedKeys) -> Tensor:
    """The slots of a row's keys in order, int64."""
    first, last = keys.kv_indptr[row : row + 2].tolist()
    pages = keys.kv_indices[first:last].long()
    size = keys.page_size
    num_keys = (len(pages) - 1) * size + int(keys.last_page_len[row]) if len(pages) else 0
    offsets = torch.arange(size, device=pages.device)
    return (pages[:, None] * size + offsets).flatten()[: max(num_keys, 0)]


def attend(
    q: Tensor, keys: PagedKeys, qo_indptr: Tensor, scale: float, causal: bool, result: Result
) -> Tensor:
    """`extend`, row by row in float32; `decode` with one query a row and no mask."""
    out, lse = result
    for row, (start, end) in enumerate(itertools.pairwise(qo_indptr.tolist())):
        slots = row_slots(row, keys)
        k, v = keys.k_slots[slots].float(), keys.v_slots[slots].float()  # [n, Hkv, D]
        num_new, num_keys = end - start, len(slots)
        heads = q[start:end].float().unflatten(1, (k.shape[1], -1))  # [N, Hkv, G, D]
        scores = torch.einsum("nhgd,khd->hgnk", heads, k) * scale
        if causal:
            place = torch.arange(num_keys, device=q.device)
            last = torch.arange(num_new, device=q.device) + num_keys - num_new
            scores.masked_fill_(place > last[:, None], -torch.inf)
        log_sum = scores.logsumexp(-1)  # [Hkv, G, N]
        weights = (scores - log_sum[..., None]).exp().nan_to_num(0.0)  # a query without keys: 0
        mixed = torch.einsum("hgnk,khd->nhgd", weights, v)
        out[start:end] = mixed.flatten(1, 2).to(out.dtype)
        if lse is not None:
            lse[start:end] = log_sum.permute(2, 0, 1).flatten(1) * LOG2_E
    return out


def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    best = torch.maximum(lse_a, lse_b)
    best = best.masked_fill(best == -torch.inf, 0.0)
    share_a, share_b = torch.exp2(lse_a - best), torch.exp2(lse_b - best)  # [T, H]
    total = share_a + share_b
    mixed = torch.zeros_like(out, dtype=torch.float32)
    for part, share in ((out_a, share_a), (out_b, share_b)):
        some = share[..., None]  # where it is zero, the part may hold anything
        mixed += torch.where(some > 0, part.float() * some, 0.0)
    out.copy_(torch.where(total[..., None] > 0, mixed / total[..., None], 0.0))
    lse.copy_(best + total.log2())
    return out, lse


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    best, token_ids = logits.max(-1)  # a NaN is the largest
    finite = best.isfinite()
    first = (logits == best[:, None]).int().argmax(-1)
    return torch.where(finite, first, torch.zeros_like(token_ids)), finite


def token_logprob(logits: Tensor, token_ids: Tensor) -> Tensor:
    return logits.gather(1, token_ids[:, None])[:, 0] - logits.logsumexp(-1)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    finite: Tensor | None,
) -> Tensor:
    best_ids, is_finite = argmax(logits)
    if finite is not None:
        finite.copy_(is_finite)
    safe = torch.where(is_finite[:, None], logits, 0.0)
    is_greedy = temperature <= 0
    heat = torch.where(is_greedy, 1.0, temperature)[:, None]
    scaled = (safe - safe.amax(-1, keepdim=True)) / heat
    scaled = scaled.masked_fill(scaled < min_p.log()[:, None], -torch.inf)
    scaled = _keep_top_k(scaled, top_k.long())
    scaled = _keep_top_p(scaled, top_p.double())
    drawn = _invert(scaled.softmax(-1), uniform.double())
    return torch.where(is_greedy | ~is_finite, best_ids, drawn)


def _keep_top_k(scaled: Tensor, top_k: Tensor) -> Tensor:
    vocab_size = scaled.shape[1]
    is_off = (top_k <= 0) | (top_k >= vocab_size)
    place = torch.where(is_off, vocab_size, top_k) - 1
    ordered = scaled.sort(-1, descending=True).values
    floor = ordered.gather(1, place[:, None])
    return torch.where(is_off[:, None] | (scaled >= floor), scaled, -torch.inf)


def _keep_top_p(scaled: Tensor, top_p: Tensor) -> Tensor:
    wanted = top_p[:, None]
    probs = scaled.softmax(-1)
    ordered = probs.sort(-1, descending=True).values
    num_kept = (ordered.double().cumsum(-1) < wanted).sum(-1, keepdim=True) + 1
    floor = ordered.gather(1, num_kept.clamp(max=probs.shape[1]) - 1)
    return torch.where((wanted >= 1) | (probs >= floor), scaled, -torch.inf)


def _invert(probs: Tensor, uniform: Tensor) -> Tensor:
    """The first token up to which more than `uniform` of the row's probability lies."""
    mass = probs.double().cumsum(-1)
    total = mass[:, -1:]
    point = torch.minimum(uniform[:, None] * total, torch.nextafter(total, total.new_zeros(())))
    return torch.searchsorted(mass, point, right=True)[:, 0]
