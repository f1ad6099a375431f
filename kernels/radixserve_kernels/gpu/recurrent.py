"""Layers with a state: short convolutions, gated delta nets and Mamba-2's state spaces.

Of a sequence's tokens in a step each kernel takes one after the other, or computes each on its own,
from the state before: the bits depend neither on how a prompt is divided nor on the other rows. A
program reads the cells of a state that it writes and no others, so that a state may be written
where it was read. A delta net or a state space takes three kernels: the convolution of all
channels, the recurrence of each head, and the gate with its norm; between them lie float32 numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from radixserve_kernels.delta_net import DeltaNet
from radixserve_kernels.gpu.launch import KernelLaunch, kernel, power_of_2, tl
from radixserve_kernels.gpu.records import StateRows
from radixserve_kernels.state_space import StateSpace

BLOCK_TOKENS = 8  # of a convolution at a time
BLOCK_CHANNELS = 128  # of a convolution whose heads are not normed
BLOCK_VALUES = 32  # columns of a head's matrix in one program
BLOCK_GATED = 1_024  # values of a gate without a norm

_ROWS = ("indptr_ptr", "read_ptr", "written_ptr", "kept_ptr")  # lie anywhere in a step's upload


@kernel()
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@kernel()
def softplus(x):
    """log(1 + exp(x)) with a small relative error: log1p(e) = 2 atanh(e / (2 + e)), e <= 1."""
    e = tl.exp(-tl.abs(x))
    z = e / (2.0 + e)
    square = z * z
    series = 1.0 / 15.0 + square * (1.0 / 17.0)
    series = 1.0 / 13.0 + square * series
    series = 1.0 / 11.0 + square * series
    series = 1.0 / 9.0 + square * series
    series = 1.0 / 7.0 + square * series
    series = 1.0 / 5.0 + square * series
    series = 1.0 / 3.0 + square * series
    return tl.maximum(x, 0.0) + 2.0 * z * (1.0 + square * series)


@kernel()
def conv_inputs(
    rows_ptr,
    state_ptr,  # of the row before its tokens
    source,  # tokens of the step, those before `start` from the state
    start,
    channel,
    mask,
    read,  # -1: there is none
    num_channels,
    stride_rows,
    num_kept: tl.constexpr,
    is_short: tl.constexpr,
):
    """[n, channels] float32: what a convolution reads of these tokens, zeros where `mask` says so
    or before the sequence."""
    is_new = source >= start
    cells = rows_ptr + source.to(tl.int64)[:, None] * stride_rows + channel[None, :]
    new_mask = mask & is_new[:, None]
    new = tl.load(cells, mask=new_mask, other=0.0).to(tl.float32)
    if is_short:
        new *= tl.load(cells + 2 * num_channels, mask=new_mask, other=0.0).to(tl.float32)
    place = source - start + num_kept
    num_old = tl.where(read >= 0, num_kept, 0)
    old_mask = mask & (place >= 0)[:, None] & (place < num_old)[:, None]
    cells = state_ptr + place[:, None] * num_channels + channel[None, :]
    old = tl.load(cells, mask=old_mask, other=0.0)
    return tl.where(is_new[:, None], new, old)


@kernel(varying=("rows_ptr", *_ROWS))
def convolve_kernel(
    rows_ptr,  # [T, columns] of the layer's fused product
    weight_ptr,  # [kernel, C]
    bias_ptr,  # [C] or None
    states_ptr,  # [states, kernel - 1, C] float32
    indptr_ptr,  # [R + 1]
    read_ptr,  # [R]
    written_ptr,  # [R]
    kept_ptr,  # [T]
    out_ptr,  # [T, C]
    num_channels,
    num_normed,  # heads of q and k, which come first
    normed_width,
    other_width,
    q_scale,
    stride_rows,
    stride_out,
    kernel_size: tl.constexpr,
    is_short: tl.constexpr,  # b | c | x: out = c * convolution of b * x; else silu of it
    block: tl.constexpr,
    block_tokens: tl.constexpr,
    block_kept: tl.constexpr,  # power of two >= kernel - 1
):
    """Grid [rows, heads of q and k and blocks of the other channels]."""
    num_kept: tl.constexpr = kernel_size - 1
    row, part = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(indptr_ptr + row), tl.load(indptr_ptr + row + 1)
    read = tl.load(read_ptr + row).to(tl.int64)
    written = tl.load(written_ptr + row).to(tl.int64)
    is_normed = part < num_normed
    first = tl.where(
        is_normed,
        part * normed_width,
        num_normed * normed_width + (part - num_normed) * other_width,
    )
    width = tl.where(is_normed, normed_width, other_width)
    column = tl.arange(0, block)
    channel = first + column
    is_channel = (column < width) & (channel < num_channels)
    size = num_kept * num_channels
    state_ptr = states_ptr + read * size
    bias = tl.zeros([block], tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + channel, mask=is_channel, other=0.0)
    for begin in range(start, end, block_tokens):
        token = begin + tl.arange(0, block_tokens)
        mask = (token < end)[:, None] & is_channel[None, :]
        total = tl.zeros([block_tokens, block], tl.float32) + bias[None, :]
        for tap in tl.static_range(kernel_size):
            weight = tl.load(weight_ptr + tap * num_channels + channel, mask=is_channel, other=0.0)
            x = conv_inputs(
                rows_ptr, state_ptr, token - num_kept + tap, start, channel, mask, read,
                num_channels, stride_rows, num_kept, is_short,
            )  # fmt: skip
            total += x * weight[None, :]
        if is_short:
            cells = rows_ptr + token.to(tl.int64)[:, None] * stride_rows + channel[None, :]
            total *= tl.load(cells + num_channels, mask=mask, other=0.0).to(tl.float32)
        else:
            total *= sigmoid(total)
            if is_normed:
                scale = tl.rsqrt(tl.sum(total * total, 1) + 1e-6)
                scale = tl.where(part < num_normed // 2, scale * q_scale, scale)
                total *= scale[:, None]
        cells = out_ptr + token.to(tl.int64)[:, None] * stride_out + channel[None, :]
        tl.store(cells, total.to(out_ptr.dtype.element_ty), mask=mask)
        kept = tl.load(kept_ptr + token, mask=token < end, other=-1).to(tl.int64)
        is_kept = mask & (kept >= 0)[:, None]
        for place in tl.static_range(num_kept):
            x = conv_inputs(
                rows_ptr, state_ptr, token - num_kept + 1 + place, start, channel, is_kept,
                read, num_channels, stride_rows, num_kept, is_short,
            )  # fmt: skip
            cells = states_ptr + kept[:, None] * size + place * num_channels + channel[None, :]
            tl.store(cells, x, mask=is_kept)
    place = tl.arange(0, block_kept)
    mask = (place < tl.where(written >= 0, num_kept, 0))[:, None] & is_channel[None, :]
    x = conv_inputs(
        rows_ptr, state_ptr, end - num_kept + place, start, channel, mask, read,
        num_channels, stride_rows, num_kept, is_short,
    )  # fmt: skip
    tl.debug_barrier()  # no thread writes the state while another one has to read it
    cells = states_ptr + written * size + place[:, None] * num_channels + channel[None, :]
    tl.store(cells, x, mask=mask)


@kernel(varying=("gates_ptr", *_ROWS))
def recur_kernel(
    mixed_ptr,  # [T, C] float32: q | k | v
    gates_ptr,  # [T, Hv] b, then [T, Hv] a of a delta net; dt of a state space
    decay_ptr,  # [Hv]
    dt_bias_ptr,  # [Hv]
    skip_ptr,  # [Hv] of a state space
    states_ptr,  # [states, Hv, K, V] float32
    indptr_ptr,  # [R + 1]
    read_ptr,  # [R]
    written_ptr,  # [R]
    kept_ptr,  # [T]
    out_ptr,  # [T, Hv * V] float32
    num_heads,  # Hv
    num_key_heads,
    k_dim,
    v_dim,
    least_step,
    most_step,
    step_scale,
    stride_mixed,
    stride_gates,
    stride_out,
    is_delta: tl.constexpr,
    block_k: tl.constexpr,
    block_v: tl.constexpr,
):
    """Grid [rows, heads, blocks of V]."""
    row, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(indptr_ptr + row).to(tl.int64)
    end = tl.load(indptr_ptr + row + 1).to(tl.int64)
    read = tl.load(read_ptr + row).to(tl.int64)
    written = tl.load(written_ptr + row).to(tl.int64)
    key = tl.arange(0, block_k)
    value = tl.program_id(2) * block_v + tl.arange(0, block_v)
    is_key, is_value = key < k_dim, value < v_dim
    mask = is_key[:, None] & is_value[None, :]
    matrix = k_dim * v_dim
    cells = states_ptr + head * matrix + key[:, None] * v_dim + value[None, :]
    size = num_heads * matrix
    is_read = mask & (key < tl.where(read >= 0, k_dim, 0))[:, None]
    state = tl.load(cells + read * size, mask=is_read, other=0.0)
    tl.debug_barrier()  # no thread writes the state while another one has to read it
    q_at = head // (num_heads // num_key_heads) * k_dim + key
    k_at = q_at + num_key_heads * k_dim
    v_at = 2 * num_key_heads * k_dim + head * v_dim + value
    decay, dt_bias = tl.load(decay_ptr + head), tl.load(dt_bias_ptr + head)
    skip = 0.0
    if not is_delta:
        skip = tl.load(skip_ptr + head)
    for token in range(start, end):
        mixed = mixed_ptr + token * stride_mixed
        q = tl.load(mixed + q_at, mask=is_key, other=0.0)
        k = tl.load(mixed + k_at, mask=is_key, other=0.0)
        v = tl.load(mixed + v_at, mask=is_value, other=0.0)
        gates = gates_ptr + token * stride_gates + head
        rate = tl.load(gates).to(tl.float32)
        if is_delta:
            a = tl.load(gates + num_heads).to(tl.float32)
            state *= tl.exp(decay * softplus(a + dt_bias))
            known = tl.sum(state * k[:, None], 0)
            delta = (v - known) * sigmoid(rate)
        else:
            step = softplus(rate * step_scale + dt_bias)
            step = tl.where(step < least_step, least_step, step)  # in this order NaN stays NaN
            step = tl.where(step > most_step, most_step, step)
            state *= tl.exp(decay * step)
            delta = v * step
        state += k[:, None] * delta[None, :]
        out = tl.sum(state * q[:, None], 0)
        if not is_delta:
            out += skip * v
        tl.store(out_ptr + token * stride_out + head * v_dim + value, out, mask=is_value)
        kept = tl.load(kept_ptr + token).to(tl.int64)
        if kept >= 0:
            tl.store(cells + kept * size, state, mask=mask)
    if written >= 0:
        tl.store(cells + written * size, state, mask=mask)


@kernel(varying=("z_ptr",))
def gate_values_kernel(
    values_ptr,  # [T, n] float32
    z_ptr,  # [T, n] of the layer's fused product
    norm_ptr,  # weights of a group, or None: no norm
    out_ptr,  # [T, n]
    num_values,  # n
    group,  # values that are normed together
    stride_norm,  # between the weights of groups
    eps,
    z_scale,
    stride_values,
    stride_z,
    stride_out,
    gates_first: tl.constexpr,
    block: tl.constexpr,
):
    """Grid [T, groups]."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    value = tl.program_id(1) * group + column
    mask = (column < group) & (value < num_values)
    x = tl.load(values_ptr + token * stride_values + value, mask=mask, other=0.0)
    z = tl.load(z_ptr + token * stride_z + value, mask=mask, other=0.0).to(tl.float32) * z_scale
    gate = z * sigmoid(z)
    if gates_first:
        x *= gate
    if norm_ptr is not None:
        weights = norm_ptr + tl.program_id(1) * stride_norm
        weight = tl.load(weights + column, mask=mask, other=0.0)
        x = x * tl.rsqrt(tl.sum(x * x, 0) / group + eps) * weight
    if not gates_first:
        x *= gate
    out_cells = out_ptr + token * stride_out + value
    tl.store(out_cells, x.to(out_ptr.dtype.element_ty), mask=mask)


@kernel()
def sigmoid_gate_kernel(
    x_ptr,  # [T, n]
    gate_ptr,  # [T, n]
    out_ptr,  # [T, n]
    num_features,  # n
    stride_x,
    stride_gate,
    stride_out,
    block: tl.constexpr,
):
    """Grid [T, blocks of features]."""
    token = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * block + tl.arange(0, block)
    mask = feature < num_features
    x = tl.load(x_ptr + token * stride_x + feature, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * stride_gate + feature, mask=mask, other=0.0).to(tl.float32)
    out = (x * sigmoid(gate)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * stride_out + feature, out, mask=mask)


def short_conv(
    weights: Tensor, rows: Tensor, states: StateRows, inputs: Tensor, out: Tensor
) -> list[KernelLaunch]:
    """See `gpu_ops.short_conv`; `out` is written."""
    return [_convolve(weights, None, rows, states, inputs, out, is_short=True)]


def recurrence(
    net: DeltaNet | StateSpace,
    rows: Tensor,
    states: StateRows,
    inputs: Tensor,
    matrices: Tensor,
    eps: float,
    out: Tensor,
) -> list[KernelLaunch]:
    """See `gpu_ops.recurrence`; `out` is written."""
    is_delta = isinstance(net, DeltaNet)
    num_heads, k_dim, v_dim = matrices.shape[1:]
    channels, values = net.num_channels, num_heads * v_dim
    mixed = rows.new_empty((len(rows), channels), dtype=torch.float32)
    recurred = rows.new_empty((len(rows), values), dtype=torch.float32)
    bias, skip, limits, scale = None, None, (0.0, float("inf")), 1.0
    heads, num_key_heads = (0, 0, 1.0), 0
    if isinstance(net, DeltaNet):
        num_key_heads = net.num_k_heads
        heads = 2 * num_key_heads, k_dim, k_dim**-0.5
        norm: Tensor | None = net.norm
        group, stride_norm, gates_first, z_scale = v_dim, 0, False, 1.0
    else:
        num_key_heads, bias, skip = net.num_groups, net.conv_bias, net.skip
        limits, scale, z_scale = net.step_limits, net.step_scale, net.z_scale
        norm, gates_first = net.norm, net.gates_first
        group = stride_norm = net.norm_size or BLOCK_GATED
    gates = rows[:, channels + values :]
    assert matrices.is_contiguous(), "states must lie dense"
    block_v = min(power_of_2(v_dim), BLOCK_VALUES)
    recur = {
        "mixed_ptr": mixed,
        "gates_ptr": gates,
        "decay_ptr": net.decay,
        "dt_bias_ptr": net.dt_bias,
        "skip_ptr": skip,
        "states_ptr": matrices,
        **_pointers(states),
        "out_ptr": recurred,
        "num_heads": num_heads,
        "num_key_heads": num_key_heads,
        "k_dim": k_dim,
        "v_dim": v_dim,
        "least_step": float(limits[0]),
        "most_step": float(limits[1]),
        "step_scale": float(scale),
        "stride_mixed": mixed.stride(0),
        "stride_gates": gates.stride(0),
        "stride_out": recurred.stride(0),
        "is_delta": is_delta,
        "block_k": power_of_2(k_dim),
        "block_v": block_v,
    }
    gate = {
        "norm_ptr": norm,
        "group": group,
        "stride_norm": stride_norm,
        "eps": eps,
        "z_scale": float(z_scale),
        "gates_first": gates_first,
    }
    num_rows, z = len(states.read), rows[:, channels : channels + values]
    return [
        _convolve(net.conv, bias, rows, states, inputs, mixed, heads=heads, other_width=v_dim),
        KernelLaunch(recur_kernel, (num_rows, num_heads, -(-v_dim // block_v)), recur),
        _gate_values(recurred, z, out, gate),
    ]


def _gate_values(values: Tensor, z: Tensor, out: Tensor, settings: dict[str, Any]) -> KernelLaunch:
    """`settings`: the arguments of the kernel that belong to the layer."""
    group, num_values = settings["group"], values.shape[1]
    block = power_of_2(group)
    arguments = {
        "values_ptr": values,
        "z_ptr": z,
        "out_ptr": out,
        "num_values": num_values,
        "stride_values": values.stride(0),
        "stride_z": z.stride(0),
        "stride_out": out.stride(0),
        "block": block,
        **settings,
    }
    num_warps = min(max(block // 512, 1), 16)
    grid = len(values), -(-num_values // group)
    return KernelLaunch(gate_values_kernel, grid, arguments, num_warps)


def _convolve(
    weights: Tensor,
    bias: Tensor | None,
    rows: Tensor,
    states: StateRows,
    inputs: Tensor,
    out: Tensor,
    *,
    heads: tuple[int, int, float] = (0, 0, 1.0),
    other_width: int = 0,
    is_short: bool = False,
) -> KernelLaunch:
    """heads: of q and k together, which are normed, their width, and what q is multiplied with.
    other_width: channels of a value head, where there are such heads."""
    num_normed, normed_width, q_scale = heads
    kernel_size, channels = weights.shape
    assert rows.stride(1) == out.stride(1) == 1, "features must lie dense"
    assert inputs.is_contiguous(), "states must lie dense"
    assert weights.is_contiguous(), "features must lie dense"
    width = other_width if num_normed else BLOCK_CHANNELS
    others = channels - num_normed * normed_width
    arguments = {
        "rows_ptr": rows,
        "weight_ptr": weights,
        "bias_ptr": bias,
        "states_ptr": inputs,
        **_pointers(states),
        "out_ptr": out,
        "num_channels": channels,
        "num_normed": num_normed,
        "normed_width": normed_width,
        "other_width": width,
        "q_scale": float(q_scale),
        "stride_rows": rows.stride(0),
        "stride_out": out.stride(0),
        "kernel_size": kernel_size,
        "is_short": is_short,
        "block": power_of_2(max(normed_width, width)),
        "block_tokens": BLOCK_TOKENS,
        "block_kept": power_of_2(kernel_size - 1),
    }
    grid = (len(states.read), num_normed + -(-others // width))
    return KernelLaunch(convolve_kernel, grid, arguments)


def _pointers(states: StateRows) -> dict[str, Tensor]:
    return {
        "indptr_ptr": states.indptr,
        "read_ptr": states.read,
        "written_ptr": states.written,
        "kept_ptr": states.kept,
    }


def sigmoid_gate(x: Tensor, gate: Tensor, out: Tensor) -> list[KernelLaunch]:
    """See `gpu_ops.sigmoid_gate`; `out` is written."""
    assert x.stride(1) == gate.stride(1) == out.stride(1) == 1, "features must lie dense"
    arguments = {
        "x_ptr": x,
        "gate_ptr": gate,
        "out_ptr": out,
        "num_features": x.shape[1],
        "stride_x": x.stride(0),
        "stride_gate": gate.stride(0),
        "stride_out": out.stride(0),
        "block": BLOCK_GATED,
    }
    grid = (len(x), -(-x.shape[1] // BLOCK_GATED))
    return [KernelLaunch(sigmoid_gate_kernel, grid, arguments)]
