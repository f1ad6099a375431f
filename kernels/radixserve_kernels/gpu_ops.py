"""The device operations: Triton kernels for CUDA tensors, torch references for CPU tensors.

On CUDA nothing here waits for the device or looks at what is in a tensor:
every call can be captured in a CUDA graph. All tensors of a call are on one device, which is the
current one; features lie dense (stride 1), other axes may be strided if nothing else is said.

Heads are NHD: q [T, Hq, D]. k_slots, v_slots [num_slots, Hkv, W] are a layer's K and V by slot, as
stored_kv.py has them, in int8 with the scales of a token behind its integers; in other dtypes W is
D. Page p of P tokens is slots p * P to p * P + P - 1. A row's keys are those of its pages
kv_indices[kv_indptr[r] : kv_indptr[r + 1]], the last filled up to last_page_len[r], all int32.
lse is float32, base 2: log2 of the sum of exp(score); -inf without keys, where out is zero.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from radixserve_kernels import sampling
from radixserve_kernels.attention_features import PLAIN, AttentionFeatures
from radixserve_kernels.delta_net import DeltaNet
from radixserve_kernels.gpu import records, reference
from radixserve_kernels.gpu.records import (
    LONG_ROW_KEYS,
    MIN_SPLIT_KEYS,
    AttentionOutput,
    KVSplit,
    LoraRows,
    PagedKeys,
    StateRows,
)
from radixserve_kernels.state_space import StateSpace

MIN_CAPABILITY = (8, 0)  # Ampere
PROGRAMS_PER_SM = 2  # that keep a multiprocessor's share of the memory busy
MAX_SPLITS, MAX_LONG_SPLITS = 64, 8
MAX_EXACT_BYTES = 256 << 20

cpu_launcher: Callable[[Any], None] | None = None
"""Runs the kernels' `KernelLaunch`es for CPU tensors; None: gpu/reference.py computes them."""


def triton_unsupported_reason() -> str:
    """Why the kernels cannot run on CUDA here; "" if they can."""
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        return f"the GPU's compute capability is {capability}, the kernels need {MIN_CAPABILITY}"
    return ""


def _run(x: Tensor, family: str, name: str, *arguments: Any) -> None:
    """Run `name` of gpu/<family>.py on the device of x; of gpu/reference.py for CPU tensors."""
    if not x.is_cuda and cpu_launcher is None:
        getattr(reference, name)(*arguments)
        return
    for launch in getattr(import_module(f"radixserve_kernels.gpu.{family}"), name)(*arguments):
        if x.is_cuda or cpu_launcher is None:
            launch.run()
        else:
            cpu_launcher(launch)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor | None = None,
    *,
    is_centered: bool = False,
) -> Tensor:
    """`weight * x / sqrt(mean(x^2) + eps)` of each row, in float32, cast back at the end.

    x [T, n], weight [n] of any dtype; `out` may be x. is_centered: of x less its mean, as LayerNorm
    does.
    """
    out = _like(x, out)
    _run(x, "norm", "rms_norm", x, None, weight, eps, is_centered, out)
    return out


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor | None = None,
    *,
    is_centered: bool = False,
) -> tuple[Tensor, Tensor]:
    """`residual += x`, rounded to its dtype, and its `rms_norm`: (normed, residual), both [T, n].

    `out`, for the normed rows, may be x.
    """
    out = _like(x, out)
    _run(x, "norm", "rms_norm", x, residual, weight, eps, is_centered, out)
    return out, residual


def act_and_mul(gate_up: Tensor, activation: str = "silu", out: Tensor | None = None) -> Tensor:
    """activation(first half) * second half of the last axis: [T, 2M] -> [T, M].

    activation: of decoder_layer.py's ACTIVATIONS.
    """
    if out is None:
        out = gate_up.new_empty((len(gate_up), gate_up.shape[1] // 2))
    _run(gate_up, "norm", "act_and_mul", gate_up, activation, out)
    return out


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2, rounded once."""
    return torch.relu(x).square_()


def clamped_swiglu(
    gate_up: Tensor, alpha: float, limit: float, out: Tensor | None = None
) -> Tensor:
    """(up + 1) * gate * sigmoid(alpha * gate), gate clamped above, up on both sides by `limit`:
    [T, 2M], gate first, -> [T, M]."""
    if out is None:
        out = gate_up.new_empty((len(gate_up), gate_up.shape[1] // 2))
    _run(gate_up, "experts", "clamped_swiglu", gate_up, alpha, limit, out)
    return out


def sigmoid_gate(x: Tensor, gate: Tensor, out: Tensor | None = None) -> Tensor:
    """`x * sigmoid(gate)`, in float32, cast back at the end: [T, n] all. `out` may be x."""
    out = _like(x, out)
    _run(x, "recurrent", "sigmoid_gate", x, gate, out)
    return out


def short_conv(
    weights: Tensor, rows: Tensor, states: StateRows, inputs: Tensor, out: Tensor | None = None
) -> Tensor:
    """`c * convolution of b * x` over the tokens of each row: [T, C].

    rows [T, 3 C]: b, c and x of each token. weights [kernel, C] float32: the last is that of the
    token itself. inputs [states, kernel - 1, C] float32: of each sequence the products b * x of the
    last tokens, the oldest first; read and written as `states` says.
    """
    if out is None:
        out = rows.new_empty((len(rows), weights.shape[1]))
    _run(rows, "recurrent", "short_conv", weights, rows, states, inputs, out)
    return out


def recurrence(
    net: DeltaNet | StateSpace,
    rows: Tensor,
    states: StateRows,
    inputs: Tensor,
    matrices: Tensor,
    eps: float,
    out: Tensor | None = None,
) -> Tensor:
    """What the output product of a layer multiplies, [T, Hv * V]: see `run_delta_net` and
    `run_state_space`.

    rows: of each token what `net` says that the layer's fused product gives. inputs
    [states, kernel - 1, C] and matrices [states, Hv, K, V] float32, as `net.state_shapes` has them;
    read and written as `states` says. A row's bits depend neither on others nor on how its tokens
    are divided into steps.
    """
    if out is None:
        out = rows.new_empty((len(rows), matrices.shape[1] * matrices.shape[3]))
    _run(rows, "recurrent", "recurrence", net, rows, states, inputs, matrices, eps, out)
    return out


def sort_by_expert(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Pairs t * k + i of ids [T, k], by expert: order [T * k] int64, and indptr [E + 1] int32:
    those of expert e are order[indptr[e] : indptr[e + 1]]."""
    experts, order = ids.flatten().sort(stable=True)
    bounds = torch.arange(num_experts + 1, device=ids.device)
    return order, torch.searchsorted(experts, bounds, out_int32=True)


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    order: Tensor,
    indptr: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """`x[p // k] @ weight[e].T + bias[e]` of each pair p and its expert e: [P, N].

    x [R, K], where P = k * R; weight [E, N, K], bias [E, N]; order, indptr: see `sort_by_expert`.
    """
    if out is None:
        out = x.new_empty((len(order), weight.shape[1]))
    _run(x, "experts", "grouped_linear", x, weight, bias, order, indptr, out)
    return out


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias`, x [T, K], weight [N, K], bias [N]: [T, N]. A row's bits do not depend
    on the number of rows: whatever that is, as many k are summed at a time."""
    order = torch.arange(len(x), device=x.device)
    indptr = torch.zeros(2, dtype=torch.int32, device=x.device)
    indptr[1:] = len(x)
    biases = None if bias is None else bias[None]
    return grouped_linear(x, weight[None], biases, order, indptr)


def add_lora(x: Tensor, rows: LoraRows, entry: int, out: Tensor) -> Tensor:
    """`out[t] += b (a x[t])` of each token t that an adapter computes, with that adapter's a and b:
    x [T, K], out [T, N]. a x is rounded to the dtype of x, as a product of its own would be.

    entry: of the product in the adapters' headers, see `LoraRows`. A row's bits do not depend on
    the others.
    """
    _run(x, "lora", "add_lora", x, rows, entry, out)
    return out


def rope_and_store(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos_sin: Tensor | None,
    k_slots: Tensor,
    v_slots: Tensor,
    num_heads: int,
    num_kv_heads: int,
    qk_norm: Tensor | None = None,
    eps: float = 1e-6,
    out: Tensor | None = None,
    *,
    is_centered: bool = False,
    scales_last: bool = True,
) -> Tensor:
    """Split qkv, normalise and rotate q and k, store k and v; returns q [T, Hq, D].

    qkv [T, (Hq + 2 Hkv) * D]: q's heads, then k's, then v's. positions, slots [T] int64; a slot of
    -1 stores nothing, slots are distinct otherwise. cos_sin [max_pos, D] float32: the cosines of
    the D/2 pairs (features 2i and 2i + 1 of a head), then the sines; None: nothing is rotated.
    qk_norm [Hq + Hkv, D]: `rms_norm` of each head before it is rotated, with is_centered as there.
    What is stored has the pool's form, in int8 with `scales_last` as `to_stored` has it.
    """
    inputs = (qkv, positions, slots, cos_sin, k_slots, v_slots)
    if out is None:
        head_dim = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
        out = qkv.new_empty((len(qkv), num_heads, head_dim))
    heads = (num_heads, num_kv_heads)
    more = (qk_norm, eps, is_centered, scales_last, out)
    _run(qkv, "rope", "rope_and_store", *inputs, *heads, *more)
    return out


def copy_page_prefixes(kv: Tensor, copies: Tensor) -> None:
    """Copy the first tokens of pages to other pages, in all layers.

    kv [L, 2, num_pages, P, Hkv, D] contiguous; copies [n, 3] int32 on the device: source page,
    destination page, tokens (0: nothing). No page is written twice, or both written and read.
    """
    _run(kv, "pages", "copy_page_prefixes", kv, copies)


def flat_indices(page_table: Tensor, row_of: Tensor, indptr: Tensor, out: Tensor) -> Tensor:
    """out[indptr[r] + j] = page_table[row_of[r], j] for each j up to indptr[r + 1] - indptr[r].

    page_table [rows, max_pages], row_of [R] (-1: its part of out stays), indptr [R + 1], out [N]:
    int32 all.
    """
    _run(out, "pages", "flat_indices", page_table, row_of, indptr, out)
    return out


def copy_ranges(values: Tensor, first: Tensor, indptr: Tensor, out: Tensor, most: int) -> Tensor:
    """out[indptr[r] + j] = values[first[r] + j] for each j up to indptr[r + 1] - indptr[r], at most
    `most`.

    values [M], first [R], indptr [R + 1], out [N]: int32 all.
    """
    _run(out, "pages", "copy_ranges", values, first, indptr, out, most)
    return out


def compile_attention(
    k_slots: Tensor,
    v_slots: Tensor,
    num_heads: int,
    page_size: int,
    features: frozenset[str] = frozenset(),
    dtype: torch.dtype | None = None,
    *,
    is_exact: bool = False,
) -> None:
    """Compile whatever `decode`, `extend` and `merge_states` may launch over a CUDA pool.

    dtype: of queries, None: that of the pool. features: of AttentionFeatures, those that any layer
    uses. is_exact: with that flag only.
    """
    from radixserve_kernels.gpu import warm_up

    slots = k_slots, v_slots
    warm_up.compile_attention(*slots, num_heads, page_size, features, dtype, is_exact=is_exact)


def choose_splits(num_rows: int, num_kv_heads: int, max_keys: int, num_sms: int) -> tuple[int, int]:
    """num_splits and fixed_splits for `decode`, such that it fills `num_sms` multiprocessors.

    max_keys: of the longest row; under a captured graph, of the longest that may come.
    """
    fixed_splits = choose_num_splits(num_rows, num_kv_heads, max_keys, num_sms)
    return max(fixed_splits, min(-(-max_keys // LONG_ROW_KEYS), MAX_LONG_SPLITS)), fixed_splits


def choose_num_splits(num_rows: int, num_kv_heads: int, max_keys: int, num_sms: int) -> int:
    """Splits of the keys of rows of similar lengths; for `extend` num_rows is that of its tiles."""
    wanted = -(-num_sms * PROGRAMS_PER_SM // max(num_rows * num_kv_heads, 1))
    return max(1, min(wanted, max_keys // MIN_SPLIT_KEYS, MAX_SPLITS))


def choose_exact_splits(
    num_programs: int,
    num_kv_heads: int,
    max_keys: int,
    num_sms: int,
    num_outputs: int,
) -> int:
    """num_splits for `decode` and `extend` with is_exact: that of max_keys where the programs
    (rows, or tiles) leave multiprocessors idle, else 1; the results are the same.

    num_outputs: numbers of the output, float32 in each split's states, which take at most
    MAX_EXACT_BYTES.
    """
    num_splits = -(-max_keys // records.EXACT_SPLIT_KEYS)
    is_small = 4 * num_outputs * num_splits <= MAX_EXACT_BYTES
    is_idle = choose_num_splits(num_programs, num_kv_heads, max_keys, num_sms) > 1
    return max(num_splits, 1) if is_small and is_idle else 1


def workspace_size(num_tokens: int, num_heads: int, head_dim: int, num_splits: int) -> int:
    """float32 numbers that `decode` (of num_tokens rows) or `extend` need to split keys."""
    return num_tokens * num_heads * num_splits * (head_dim + 1) if num_splits > 1 else 0


def decode(
    q: Tensor,
    k_slots: Tensor,
    v_slots: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    last_page_len: Tensor,
    page_size: int,
    scale: float | None = None,
    num_splits: int = 1,
    workspace: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    fixed_splits: int | None = None,
    features: AttentionFeatures = PLAIN,
    *,
    is_exact: bool = False,
) -> Tensor:
    """Attention of one query a row over all its keys: q [R, Hq, D] -> [R, Hq, D].

    scale: of the scores, 1 / sqrt(D) by default. The keys of a row are cut into fixed_splits splits
    (num_splits by default) that run in parallel and are merged afterwards, but none is below
    MIN_SPLIT_KEYS keys; rows whose splits exceed LONG_ROW_KEYS have more, at most num_splits: see
    `choose_splits`. `workspace` [>= workspace_size(...)] float32 holds the split outputs, allocated
    if None. lse [R, Hq] is filled where given. features: window, chunk and soft cap, by a key's
    place among its row's; sinks are left to `add_sinks`. is_exact: a query's bits depend on its own
    keys alone, and are those of `extend`. Splits have EXACT_SPLIT_KEYS keys then, from position 0
    on; num_splits is 1, or at least that of the longest row, see `choose_exact_splits`.
    """
    keys = PagedKeys(k_slots, v_slots, kv_indptr, kv_indices, last_page_len, page_size)
    result = AttentionOutput(_like(q, out), lse)
    split = KVSplit(num_splits, fixed_splits or num_splits, workspace, is_exact)
    _run(q, "decode", "decode", q, keys, _scale(q, scale), split, result, features)
    return result.out


def extend(
    q: Tensor,
    k_slots: Tensor,
    v_slots: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    last_page_len: Tensor,
    page_size: int,
    scale: float | None = None,
    causal: bool = True,
    max_q: int | None = None,
    num_splits: int = 1,
    workspace: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    features: AttentionFeatures = PLAIN,
    *,
    is_exact: bool = False,
) -> Tensor:
    """Attention of the new tokens of rows, whose keys are in the pool already: [T, Hq, D].

    q [T, Hq, D]: row r's queries, of which there may be none, are those from qo_indptr[r] (0 for
    the first row) to qo_indptr[r + 1], int32 [R + 1]: the last tokens of its sequence. Causally,
    query i of n sees all its row's keys but the last n - 1 - i. With causal=False all queries see
    all keys, and n may be larger than their number. max_q: most queries of a row, T if None; it
    picks the block size only. num_splits, workspace, lse [T, Hq], features, is_exact: as in
    `decode`; windows, chunks and is_exact with causal only.
    """
    keys = PagedKeys(k_slots, v_slots, kv_indptr, kv_indices, last_page_len, page_size)
    result = AttentionOutput(_like(q, out), lse)
    split = KVSplit(num_splits, num_splits, workspace, is_exact)
    most = len(q) if max_q is None else max_q
    arguments = (q, keys, qo_indptr, _scale(q, scale), causal, most, split, result, features)
    _run(q, "extend", "extend", *arguments)
    return result.out


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Attention with one score more a head, which has no value: in the memory of out [T, Hq, D].

    lse [T, Hq], base 2, without them; sinks [Hq] float32.
    """
    share = torch.sigmoid(lse * math.log(2) - sinks)  # of the keys in the sum of weights
    return out.copy_(out * share[..., None])


def _like(x: Tensor, out: Tensor | None) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out


def _scale(q: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def merge_states(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys: (out [T, H, D], lse [T, H]).

    Where lse_a or lse_b is -inf, that part of out_a or out_b is ignored, whatever it holds. `out`
    and `lse` may be those of a or b.
    """
    out, lse = _like(out_a, out), _like(lse_a, lse)
    _run(out_a, "merge", "merge_states", out_a, lse_a, out_b, lse_b, out, lse)
    return out, lse


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The first maximum of each row and whether it is finite: int64 [S], bool [S].

    logits [S, V] float32. A row with a NaN or without a finite maximum gets token 0 and False.
    """
    if not logits.is_cuda and cpu_launcher is None:
        return sampling.argmax(logits)
    num_rows = logits.shape[0]
    token_ids = logits.new_empty(num_rows, dtype=torch.int64)
    finite = logits.new_empty(num_rows, dtype=torch.bool)
    row_max = logits.new_empty(num_rows)
    _run(logits, "argmax", "argmax", logits, row_max, token_ids, finite)
    return token_ids, finite


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    finite: Tensor | None = None,
) -> Tensor:
    """Sample a token a row: temperature, min_p, top_k, top_p, inverse distribution; int64 [S].

    logits [S, V] float32; temperature [S] float32 (0: the argmax); top_k [S] int32 (0, or
    V and more: all); top_p [S] float64 (1: all); min_p [S] float32 (0: all); uniform [S] float64 in
    (0, 1). Tokens that tie with the last one kept are kept too. `finite` [S] bool is filled as by
    `argmax`; where it is False the token is 0.
    """
    params = (temperature, top_k, top_p, min_p, uniform)
    token_ids = logits.new_empty(len(logits), dtype=torch.int64)
    finite = logits.new_empty(len(logits), dtype=torch.bool) if finite is None else finite
    _run(logits, "sampling", "sample", logits, *params, token_ids, finite)
    return token_ids


def forbid_(logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
    """Give logits [S, V] float32, in place, -inf where mask i forbids a token of row rows[i].

    bitmask [m, words] int32, words >= V / 32: bit t % 32 of word t // 32 allows token t; rows [m]
    int64, distinct.
    """
    assert bitmask.shape[1] * 32 >= logits.shape[1], "a mask is shorter than the vocabulary"
    _run(logits, "bitmask", "forbid_", logits, bitmask, rows)


def token_logprob(logits: Tensor, token_ids: Tensor) -> Tensor:
    """The log-probability of a token a row: logits [S, V] float32, ids [S] int64 -> float32 [S]."""
    out = logits.new_empty(len(logits))
    _run(logits, "argmax", "token_logprob", logits, token_ids, out)
    return out
