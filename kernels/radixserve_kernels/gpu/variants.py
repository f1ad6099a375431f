"""The kernels at the shapes of real models: what the ahead-of-time compiler compiles.

Made by the same functions as every launch, from tensors of the meta device, which have no memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from radixserve_kernels.attention_features import AttentionFeatures
from radixserve_kernels.delta_net import DeltaNet
from radixserve_kernels.gpu import (
    argmax,
    bitmask,
    decode,
    experts,
    extend,
    lora,
    merge,
    norm,
    pages,
    recurrent,
    rope,
    sampling,
)
from radixserve_kernels.gpu.launch import Capability, KernelLaunch
from radixserve_kernels.gpu.records import AttentionOutput, KVSplit, LoraRows, PagedKeys, StateRows
from radixserve_kernels.state_space import StateSpace
from radixserve_kernels.stored_kv import FP8_CAPABILITY, dtype_name, stored_width

HEADS = (32, 8)  # query heads, key heads
OTHER_HEADS = ((8, 8), (16, 8), (40, 8), (64, 8))
NUM_TOKENS, NUM_ROWS, VOCAB_SIZE = 512, 4, 128_256
EXTENSIONS = {"long": NUM_TOKENS, "short": 16, "few": 2}  # most new tokens of a row: block sizes
PAGE_SIZES = (1, 16, 64)
DTYPES = (torch.bfloat16, torch.float16)
STORED_DTYPES = (torch.int8, torch.float8_e4m3fn)


class Variant(NamedTuple):
    """A kernel launch and the case that it covers."""

    name: str
    launch: KernelLaunch


def variants(capability: Capability, *, every: bool) -> list[Variant]:
    """One or two of each kernel, or the product of the settings."""
    dtypes = DTYPES if every else DTYPES[:1]
    head_dims = (64, 128, 256) if every else (128,)
    chosen = [*_row_variants(every), *_expert_variants(every), *_logit_variants()]
    chosen += [*_lora_variants(every), *_state_variants(every)]
    for dtype in dtypes:
        for head_dim in head_dims:
            page_sizes = PAGE_SIZES if every else PAGE_SIZES[1:2]
            for page_size in page_sizes:
                chosen += _attention_variants(dtype, head_dim, page_size, capability, every)
            chosen += _head_variants(dtype, head_dim, every)
    if every:
        for head_dim in head_dims[:2]:
            chosen += _attention_variants(torch.float32, head_dim, 16, capability, every)
        for heads in OTHER_HEADS:
            chosen += _attention_variants(torch.bfloat16, 128, 16, capability, every, heads)
    for stored in STORED_DTYPES if capability >= FP8_CAPABILITY else STORED_DTYPES[:1]:
        for head_dim in head_dims:
            kinds = torch.bfloat16, head_dim, 16, capability, every, HEADS, stored
            chosen += _attention_variants(*kinds)
            chosen += _head_variants(torch.bfloat16, head_dim, every, stored)
    return chosen


def _tensor(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


_index = partial(_tensor, dtype=torch.int32)
_float = partial(_tensor, dtype=torch.float32)
_long = partial(_tensor, dtype=torch.int64)
_double = partial(_tensor, dtype=torch.float64)


def _attention_variants(
    dtype: torch.dtype,
    head_dim: int,
    page_size: int,
    capability: Capability,
    every: bool,
    heads: tuple[int, int] = HEADS,
    stored: torch.dtype | None = None,
) -> Iterator[Variant]:
    num_heads, num_kv_heads = heads
    kind = f"{_short(dtype)} D={head_dim} P={page_size}"
    if heads != HEADS:
        kind = f"{num_heads}/{num_kv_heads} heads"
    if stored is not None:
        kind = f"{dtype_name(stored)} D={head_dim}"
    pool = _slots(num_kv_heads, head_dim, stored or dtype)
    indptr, indices, last = _index(NUM_ROWS + 1), _index(64), _index(NUM_ROWS)
    keys = PagedKeys(pool, pool, indptr, indices, last, page_size)
    q = _tensor(NUM_ROWS, num_heads, head_dim, dtype=dtype)
    for num_splits in (1, 8) if every else (8,):
        split = KVSplit(num_splits, num_splits, None)
        for launch in decode.decode(q, keys, 0.1, split, AttentionOutput(q, None)):
            yield Variant(f"{kind} splits={num_splits}", launch)
    whole, features = KVSplit(1, 1, None), AttentionFeatures(1_024, logits_soft_cap=50.0)
    for launch in decode.decode(q, keys, 0.1, whole, AttentionOutput(q, None), features):
        yield Variant(f"{kind} window, cap", launch)
    exact = KVSplit(1, 1, None, is_exact=True)
    exact_layers = (features, AttentionFeatures()) if every else (AttentionFeatures(),)
    for layer in exact_layers:
        for num_splits in (1, 8) if every else (8,):
            split = exact._replace(num_splits=num_splits)
            for launch in decode.decode(q, keys, 0.1, split, AttentionOutput(q, None), layer):
                yield Variant(f"{kind} exact splits={num_splits}", launch)
    q = _tensor(NUM_TOKENS, num_heads, head_dim, dtype=dtype)
    result, split = AttentionOutput(q, _float(NUM_TOKENS, num_heads)), whole
    for launch in extend.extend(
        q, keys, indptr, 0.1, True, NUM_TOKENS, split, result, features, capability
    ):
        yield Variant(f"{kind} window, cap", launch)
    for layer in exact_layers:
        for num_new in EXTENSIONS.values() if every else (NUM_TOKENS,):
            for launch in extend.extend(
                q, keys, indptr, 0.1, True, num_new, exact, result, layer, capability
            ):
                yield Variant(f"{kind} exact {num_new}", launch)
    for length, max_q in EXTENSIONS.items() if every else [("long", NUM_TOKENS)]:
        for causal in (True, False) if every else (True,):
            (launch,) = extend.extend(
                q, keys, indptr, 0.1, causal, max_q, split, result, capability=capability
            )
            yield Variant(f"{kind} {length}{' causal' if causal else ''}", launch)


def _slots(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    return _tensor(1_024, num_kv_heads, stored_width(head_dim, dtype), dtype=dtype)


def _head_variants(
    dtype: torch.dtype, head_dim: int, every: bool, stored: torch.dtype | None = None
) -> Iterator[Variant]:
    num_heads, num_kv_heads = HEADS
    kind = f"{_short(dtype) if stored is None else dtype_name(stored)} D={head_dim}"
    out = _tensor(NUM_TOKENS, num_heads, head_dim, dtype=dtype)
    lse = _float(NUM_TOKENS, num_heads)
    for launch in merge.merge_states(out, lse, out, lse, out, lse):
        yield Variant(kind, launch)
    num_all = num_heads + 2 * num_kv_heads
    qkv = _tensor(NUM_TOKENS, num_all * head_dim, dtype=dtype)
    pool = _slots(num_kv_heads, head_dim, stored or dtype)
    places, table = _long(NUM_TOKENS), _float(4_096, head_dim)
    norms = [_tensor(num_heads + num_kv_heads, head_dim, dtype=dtype), None]
    for qk_norm in norms if every else norms[:1]:
        launches = rope.rope_and_store(
            qkv, places, places, table, pool, pool, *HEADS, qk_norm, 1e-6, False, True, out
        )
        for launch in launches:
            yield Variant(f"{kind}{'' if qk_norm is None else ' qk_norm'}", launch)
    kv = _tensor(32, 2, 64, 16, *pool.shape[1:], dtype=pool.dtype)
    for launch in pages.copy_page_prefixes(kv, _index(4, 3)):
        yield Variant(kind, launch)


def _row_variants(every: bool) -> Iterator[Variant]:
    for dtype in DTYPES if every else DTYPES[:1]:
        for hidden in (1_024, 4_096, 8_192) if every else (4_096,):
            x, weight = _tensor(NUM_TOKENS, hidden, dtype=dtype), _tensor(hidden, dtype=dtype)
            kind = f"{_short(dtype)} n={hidden}"
            for residual in (x, None) if every else (x,):
                for launch in norm.rms_norm(x, residual, weight, 1e-6, False, x):
                    yield Variant(f"{kind}{'' if residual is None else ' add'}", launch)
        gate_up = _tensor(NUM_TOKENS, 2 * 14_336, dtype=dtype)
        for launch in norm.act_and_mul(gate_up, "silu", gate_up[:, :14_336]):
            yield Variant(f"{_short(dtype)} M=14336", launch)
    table, some = _index(256, 1_024), _index(64)
    for launch in pages.flat_indices(table, some, some, some):
        yield Variant("", launch)


def _expert_variants(every: bool) -> Iterator[Variant]:
    num_experts, inner, hidden, fan_out = 128, 768, 2_048, 8
    for dtype in (*DTYPES, torch.float32) if every else DTYPES[:1]:
        weight = _tensor(num_experts, 2 * inner, hidden, dtype=dtype)
        bias = _tensor(num_experts, 2 * inner, dtype=dtype)
        for num_tokens in (16, 512, 8_192) if every else (NUM_TOKENS,):
            kind = f"{_short(dtype)} T={num_tokens}"
            x, order = _tensor(num_tokens, hidden, dtype=dtype), _long(num_tokens * fan_out)
            out = _tensor(len(order), 2 * inner, dtype=dtype)
            for some in (bias, None) if every else (bias,):
                for launch in experts.grouped_linear(
                    x, weight, some, order, _index(num_experts + 1), out
                ):
                    yield Variant(kind, launch)
            for launch in experts.clamped_swiglu(out, 1.702, 7.0, out[:, :inner]):
                yield Variant(kind, launch)


def _lora_variants(every: bool) -> Iterator[Variant]:
    """Products of an 8B model, of a decode step and of a prefill."""
    steps = ((32, 32), (2_048, 64), (8_192, 2)) if every else ((512, 8),)
    shapes = ((4_096, 6_144), (14_336, 4_096)) if every else ((4_096, 6_144),)
    for dtype in (*DTYPES, torch.float32) if every else DTYPES[:1]:
        for (num_tokens, num_groups), (depth, size) in itertools.product(steps, shapes):
            indices = _long(num_groups), _index(num_groups + 1), _long(num_tokens)
            x = _tensor(num_tokens, depth, dtype=dtype)
            out = _tensor(num_tokens, size, dtype=dtype)
            for launch in lora.add_lora(x, LoraRows(*indices, 48), 12, out):
                yield Variant(f"{_short(dtype)} T={num_tokens} G={num_groups}", launch)


def _state_variants(every: bool) -> Iterator[Variant]:
    """Layers of Qwen 3.5, of Granite 4, Nemotron-H and Falcon-H1, and of LFM2."""
    step = _index(NUM_ROWS), _index(NUM_ROWS), _index(NUM_TOKENS)
    states = StateRows(_index(NUM_ROWS + 1), *step)
    nets: dict[str, DeltaNet | StateSpace] = {"delta net 16/32 heads": _delta_net(16, 32, 128)}
    nets["state space 1 group"] = _state_space(1, 64, 128, 64, 64 * 64)
    if every:
        nets["state space 8 groups"] = _state_space(8, 128, 128, 64, 1_024)
        nets["state space without a norm"] = _state_space(1, 24, 256, 64, 0)
    for dtype in (*DTYPES, torch.float32) if every else DTYPES[:1]:
        for name, net in nets.items():
            inputs, matrices = (_float(64, *shape) for shape in net.state_shapes)
            num_heads, _, v_dim = net.state_shapes[1]
            columns = net.num_channels + (v_dim + 2) * num_heads
            rows, out = (
                _tensor(NUM_TOKENS, size, dtype=dtype) for size in (columns, num_heads * v_dim)
            )
            for launch in recurrent.recurrence(net, rows, states, inputs, matrices, 1e-6, out):
                yield Variant(f"{_short(dtype)} {name}", launch)
        rows, out = (_tensor(NUM_TOKENS, size * 2_048, dtype=dtype) for size in (3, 1))
        inputs = _float(64, 2, 2_048)
        for launch in recurrent.short_conv(_float(3, 2_048), rows, states, inputs, out):
            yield Variant(f"{_short(dtype)} short convolution", launch)
        for launch in recurrent.sigmoid_gate(out, out, out):
            yield Variant(_short(dtype), launch)


def _delta_net(num_k: int, num_v: int, dim: int) -> DeltaNet:
    conv = _float(4, (2 * num_k + num_v) * dim)
    return DeltaNet(num_k, num_v, dim, dim, conv, _float(num_v), _float(num_v), _float(dim))


def _state_space(
    groups: int, num_heads: int, state_size: int, head_dim: int, norm_size: int
) -> StateSpace:
    channels, values = 2 * groups * state_size + num_heads * head_dim, num_heads * head_dim
    return StateSpace(
        *(groups, num_heads, state_size, head_dim),
        conv=_float(4, channels),
        conv_bias=_float(channels),
        decay=_float(num_heads),
        dt_bias=_float(num_heads),
        skip=_float(num_heads),
        norm=_float(values) if norm_size else None,
        norm_size=norm_size,
    )


def _logit_variants() -> Iterator[Variant]:
    kind = f"V={VOCAB_SIZE}"
    logits = _float(NUM_ROWS, VOCAB_SIZE)
    ids, row, flags = _long(NUM_ROWS), _float(NUM_ROWS), _tensor(NUM_ROWS, dtype=torch.bool)
    for launch in argmax.token_logprob(logits, ids, row):
        yield Variant(kind, launch)
    masks = _index(NUM_ROWS, -(-VOCAB_SIZE // 32))
    for launch in bitmask.forbid_(logits, masks, ids):
        yield Variant(kind, launch)
    exact = _double(NUM_ROWS)
    for launch in sampling.sample(logits, row, _index(NUM_ROWS), exact, row, exact, ids, flags):
        yield Variant(kind, launch)


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "fp32")
