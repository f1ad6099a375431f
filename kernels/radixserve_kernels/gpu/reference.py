"""The reference of each Triton kernel in torch operations: for CPU tensors, and for the tests.

Needs no Triton. A function takes the arguments of its namesake that makes the launches, outputs
included; `radixserve_kernels.gpu_ops` describes them. Written to be read: they loop over rows and
synchronise where a kernel does not.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from radixserve_kernels import sampling, torch_ops
from radixserve_kernels.attention_features import AttentionFeatures
from radixserve_kernels.delta_net import DeltaNet, run_delta_net
from radixserve_kernels.gpu.records import (
    LORA_ENTRY,
    AttentionOutput,
    KVSplit,
    LoraRows,
    PagedKeys,
    StateRows,
)
from radixserve_kernels.state_space import StateSpace, run_state_space
from radixserve_kernels.stored_kv import from_stored, to_stored

LOG2_E = math.log2(math.e)


def rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    is_centered: bool,
    out: Tensor,
) -> None:
    if residual is not None:
        residual += x
        x = residual
    out.copy_(_rms_norm(x, weight, eps, is_centered))


def _rms_norm(x: Tensor, weight: Tensor, eps: float, is_centered: bool) -> Tensor:
    epsilon = torch.tensor(eps, dtype=torch.float32, device=x.device)
    return torch_ops.rms_norm(x, weight, epsilon, is_centered=is_centered)


def act_and_mul(gate_up: Tensor, activation: str, out: Tensor) -> None:
    out.copy_(torch_ops.act_and_mul(gate_up, activation))


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float, out: Tensor) -> None:
    gate, up = gate_up.float().chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    out.copy_((up + 1) * gate * (alpha * gate).sigmoid())


def sigmoid_gate(x: Tensor, gate: Tensor, out: Tensor) -> None:
    out.copy_(x.float() / gate.float().neg().exp_().add_(1))


def short_conv(
    weights: Tensor, rows: Tensor, states: StateRows, inputs: Tensor, out: Tensor
) -> None:
    def run(row: Tensor, before: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        b, c, x = row[0].float().chunk(3)
        whole = torch.cat((before[0], (b * x)[None]))
        total = torch.zeros_like(b)
        for past, weight in zip(whole, weights, strict=True):
            total += past * weight
        return (c * total)[None], [whole[1:]]

    _run_tokens(run, rows, states, [inputs], out)


def recurrence(
    net: DeltaNet | StateSpace,
    rows: Tensor,
    states: StateRows,
    inputs: Tensor,
    matrices: Tensor,
    eps: float,
    out: Tensor,
) -> None:
    def run(row: Tensor, before: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        if isinstance(net, DeltaNet):
            result, *after = run_delta_net(net, row, before[0], before[1], eps)
        else:
            result, *after = run_state_space(net, row, before[0], before[1], eps)
        return result, after

    _run_tokens(run, rows, states, [inputs, matrices], out)


def _run_tokens(
    run: Callable[[Tensor, list[Tensor]], tuple[Tensor, list[Tensor]]],
    rows: Tensor,
    states: StateRows,
    tensors: list[Tensor],
    out: Tensor,
) -> None:
    """Token by token, so that bits do not depend on how many a row has. tensors: all states."""

    def store(after: list[Tensor], state_id: int) -> None:
        for tensor, state in zip(tensors, after, strict=True):
            tensor[state_id] = state

    kept = states.kept.tolist()
    bounds = itertools.pairwise(states.indptr.tolist())
    for (start, end), read, written in zip(
        bounds, states.read.tolist(), states.written.tolist(), strict=True
    ):
        before = [
            torch.zeros_like(tensor[0]) if read < 0 else tensor[read].clone() for tensor in tensors
        ]
        for token in range(start, end):
            out[token : token + 1], before = run(rows[token : token + 1], before)
            if kept[token] >= 0:
                store(before, kept[token])
        if written >= 0:
            store(before, written)


def grouped_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, order: Tensor, indptr: Tensor, out: Tensor
) -> None:
    fan_out = len(order) // max(len(x), 1)
    for expert, (first, end) in enumerate(itertools.pairwise(indptr.tolist())):
        expert_bias = None if bias is None else bias[expert]
        for pair in order[first:end].tolist():  # one by one: the same bits among any others
            out[pair] = F.linear(x[pair // fan_out], weight[expert], expert_bias)


def add_lora(x: Tensor, rows: LoraRows, entry: int, out: Tensor) -> None:
    indptr, order = rows.indptr.tolist(), rows.order.tolist()
    for group, (first, end) in enumerate(itertools.pairwise(indptr)):
        if first == end:
            continue
        header = _at(int(rows.headers[group]) + 8 * entry, (LORA_ENTRY,), torch.int64)
        a_address, b_address, rank = header.tolist()
        if not rank:
            continue
        a = _at(a_address, (rank, x.shape[1]), x.dtype)
        b = _at(b_address, (out.shape[1], rank), x.dtype)
        for token in order[first:end]:  # one by one: the same bits among any others
            more = F.linear(F.linear(x[token], a).float(), b.float())
            out[token] = (out[token].float() + more).to(out.dtype)


def _at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The numbers at an address of the host's memory, which whoever gave it owns."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = (ctypes.c_uint8 * num_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def rope_and_store(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos_sin: Tensor | None,
    k_slots: Tensor,
    v_slots: Tensor,
    num_heads: int,
    num_kv_heads: int,
    qk_norm: Tensor | None,
    eps: float,
    is_centered: bool,
    scales_last: bool,
    out: Tensor,
) -> None:
    heads = qkv.unflatten(-1, (num_heads + 2 * num_kv_heads, -1))  # [T, Hq + 2 Hkv, D]
    qk, v = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
    if qk_norm is not None:
        qk = _rms_norm(qk, qk_norm, eps, is_centered)
    if cos_sin is not None:
        cos, sin = cos_sin[positions].chunk(2, -1)  # [T, D / 2] each
        qk = torch_ops.apply_rotary(qk.contiguous(), torch.complex(cos, sin)[:, None])
    is_kept = slots >= 0
    for x, cache in ((qk[is_kept, num_heads:], k_slots), (v[is_kept], v_slots)):
        stored = to_stored(x, cache.dtype, scales_last=scales_last)
        torch_ops.as_bytes(cache)[slots[is_kept]] = torch_ops.as_bytes(stored)
    out.copy_(qk[:, :num_heads])


def copy_page_prefixes(kv: Tensor, copies: Tensor) -> None:
    """All reads before all writes: the pages may overlap."""
    read = [kv[:, :, source, :count].clone() for source, _, count in copies.tolist()]
    for (_, destination, count), tokens in zip(copies.tolist(), read, strict=True):
        kv[:, :, destination, :count] = tokens


def flat_indices(page_table: Tensor, row_of: Tensor, indptr: Tensor, out: Tensor) -> None:
    for source, (start, end) in zip(
        row_of.tolist(), itertools.pairwise(indptr.tolist()), strict=True
    ):
        if source >= 0:
            out[start:end] = page_table[source, : end - start]


def copy_ranges(values: Tensor, first: Tensor, indptr: Tensor, out: Tensor, most: int) -> None:
    for source, (start, end) in zip(
        first.tolist(), itertools.pairwise(indptr.tolist()), strict=True
    ):
        assert end - start <= most
        out[start:end] = values[source : source + end - start]


def row_slots(row: int, keys: PagedKeys) -> Tensor:
    """The slots of a row's keys in order, int64."""
    first, last = keys.kv_indptr[row : row + 2].tolist()
    pages = keys.kv_indices[first:last].long()
    size = keys.page_size
    num_keys = (len(pages) - 1) * size + int(keys.last_page_len[row]) if len(pages) else 0
    offsets = torch.arange(size, device=pages.device)
    return (pages[:, None] * size + offsets).flatten()[: max(num_keys, 0)]


def decode(
    q: Tensor,
    keys: PagedKeys,
    scale: float,
    split: KVSplit,
    result: AttentionOutput,
    features: AttentionFeatures,
) -> None:
    extend(q, keys, torch.arange(len(q) + 1), scale, True, 1, split, result, features)


def extend(
    q: Tensor,
    keys: PagedKeys,
    qo_indptr: Tensor,
    scale: float,
    causal: bool,
    max_q: int,
    split: KVSplit,
    result: AttentionOutput,
    features: AttentionFeatures,
) -> None:
    """Row by row in float32; exact: query by query."""
    if split.is_exact and max_q > 1:
        assert causal, "exact results are of causal attention"
        _extend_by_query(q, keys, qo_indptr, scale, split, result, features)
        return
    out, lse = result
    for row, (start, end) in enumerate(itertools.pairwise(qo_indptr.tolist())):
        slots = row_slots(row, keys)
        k, v = (
            from_stored(rows.index_select(0, slots), torch.float32, scales_last=True)
            for rows in (keys.k_slots, keys.v_slots)
        )  # [n, Hkv, D]
        num_new, num_keys = end - start, len(slots)
        heads = q[start:end].float().unflatten(1, (k.shape[1], -1))  # [N, Hkv, G, D]
        scores = torch.einsum("nhgd,khd->hgnk", heads, k) * scale
        if (cap := features.logits_soft_cap) is not None:
            scores = cap * (scores / cap).tanh()
        if causal:
            position = torch.arange(num_keys, device=q.device)
            last = torch.arange(num_new, device=q.device) + num_keys - num_new
            window, chunk = features.span
            is_hidden = position > last[:, None]
            if window:
                is_hidden |= position <= last[:, None] - window
            if chunk:
                is_hidden |= position < last[:, None] // chunk * chunk
            scores.masked_fill_(is_hidden, -torch.inf)
        log_sum = scores.logsumexp(-1)  # [Hkv, G, N]
        weights = (scores - log_sum[..., None]).exp().nan_to_num(0.0)  # a query without keys: 0
        acc = torch.einsum("hgnk,khd->nhgd", weights, v)
        out[start:end] = acc.flatten(1, 2).to(out.dtype)
        if lse is not None:
            lse[start:end] = log_sum.permute(2, 0, 1).flatten(1) * LOG2_E


def _extend_by_query(
    q: Tensor,
    keys: PagedKeys,
    qo_indptr: Tensor,
    scale: float,
    split: KVSplit,
    result: AttentionOutput,
    features: AttentionFeatures,
) -> None:
    """Each new token as a decode of the row that ends there."""
    size = keys.page_size
    for row, (start, end) in enumerate(itertools.pairwise(qo_indptr.tolist())):
        first, last = keys.kv_indptr[row : row + 2].tolist()
        num_keys = (last - first - 1) * size + int(keys.last_page_len[row])
        for token in range(start, end):
            length = num_keys - (end - 1 - token)
            own = keys._replace(
                kv_indptr=torch.tensor([0, -(-length // size)]),
                kv_indices=keys.kv_indices[first:last],
                last_page_len=torch.tensor([(length - 1) % size + 1]),
            )
            state = None if result.lse is None else result.lse[token : token + 1]
            out = AttentionOutput(result.out[token : token + 1], state)
            decode(q[token : token + 1], own, scale, split, out, features)


def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor
) -> None:
    m_i = torch.maximum(lse_a, lse_b)
    m_i = m_i.masked_fill(m_i == -torch.inf, 0.0)
    weights = torch.exp2(lse_a - m_i), torch.exp2(lse_b - m_i)  # [T, H]
    l_i = weights[0] + weights[1]
    acc = torch.zeros_like(out, dtype=torch.float32)
    for state, weight in zip((out_a, out_b), weights, strict=True):
        wide = weight[..., None]  # where it is zero, the state may hold anything
        acc += torch.where(wide > 0, state.float() * wide, 0.0)
    out.copy_(torch.where(l_i[..., None] > 0, acc / l_i[..., None], 0.0))
    lse.copy_(m_i + l_i.log2())


def argmax(logits: Tensor, _row_max: Tensor, out: Tensor, finite: Tensor) -> None:
    token_ids, is_finite = sampling.argmax(logits)
    out.copy_(token_ids)
    finite.copy_(is_finite)


def forbid_(logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
    token = torch.arange(logits.shape[1], device=logits.device)
    is_forbidden = (bitmask[:, token // 32] >> (token % 32).to(torch.int32)) & 1 == 0
    logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill(is_forbidden, -torch.inf))


def token_logprob(logits: Tensor, token_ids: Tensor, out: Tensor) -> None:
    out.copy_(logits.gather(1, token_ids[:, None])[:, 0] - logits.logsumexp(-1))


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    out: Tensor,
    finite: Tensor,
) -> None:
    token_ids, is_finite = sampling.sample(logits, temperature, top_k, top_p, min_p, uniform)
    out.copy_(token_ids)
    finite.copy_(is_finite)
