"""RMS norm, with the addition before it, and the gated activation: one pass over each row.

Rounded to the tensors' dtype wherever the torch operations that they replace round.
"""

from __future__ import annotations

from torch import Tensor

from radixserve_kernels.gpu.launch import Launch, kernel, power_of_2, tl

BLOCK = 1_024  # features of the activation at a time


@kernel()
def rms_norm_kernel(
    x_ptr,
    residual_ptr,  # or None; becomes the sum
    weight_ptr,
    out_ptr,
    num_features,
    eps,
    stride_x,
    stride_residual,
    stride_out,
    block: tl.constexpr,
):
    """Grid [T]."""
    row = tl.program_id(0).to(tl.int64)
    feature = tl.arange(0, block)
    is_feature = feature < num_features
    x = tl.load(x_ptr + row * stride_x + feature, mask=is_feature, other=0.0)
    if residual_ptr is not None:
        cells = residual_ptr + row * stride_residual + feature
        residual = tl.load(cells, mask=is_feature, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(cells, x, mask=is_feature)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / num_features + eps)
    normed = (wide * scale).to(x.dtype).to(tl.float32)
    weight = tl.load(weight_ptr + feature, mask=is_feature, other=0.0).to(tl.float32)
    out = (normed * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * stride_out + feature, out, mask=is_feature)


@kernel()
def silu_and_mul_kernel(
    gate_up_ptr,  # [T, 2M]
    out_ptr,  # [T, M]
    num_features,  # M
    stride_gate_up,
    stride_out,
    block: tl.constexpr,
):
    """Grid [T, blocks of features]."""
    row = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * block + tl.arange(0, block)
    is_feature = feature < num_features
    cells = gate_up_ptr + row * stride_gate_up + feature
    gate = tl.load(cells, mask=is_feature, other=0.0)
    up = tl.load(cells + num_features, mask=is_feature, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    active = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    out = (active * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * stride_out + feature, out, mask=is_feature)


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor
) -> list[Launch]:
    """See `gpu_ops.rms_norm` and, with a residual, `gpu_ops.add_rms_norm`; `out` is written."""
    tensors = (x, weight, out) if residual is None else (x, residual, weight, out)
    assert all(one.stride(-1) == 1 for one in tensors), "features must lie dense"
    num_tokens, num_features = x.shape
    block = power_of_2(num_features)
    arguments = {
        "x_ptr": x,
        "residual_ptr": residual,
        "weight_ptr": weight,
        "out_ptr": out,
        "num_features": num_features,
        "eps": eps,
        "stride_x": x.stride(0),
        "stride_residual": 0 if residual is None else residual.stride(0),
        "stride_out": out.stride(0),
        "block": block,
    }
    num_warps = min(max(block // 512, 1), 16)  # 16 numbers a thread
    return [Launch(rms_norm_kernel, (num_tokens,), arguments, num_warps)]


def silu_and_mul(gate_up: Tensor, out: Tensor) -> list[Launch]:
    """See `gpu_ops.silu_and_mul`; `out` is written."""
    assert gate_up.stride(-1) == out.stride(-1) == 1, "features must lie dense"
    num_tokens, num_features = out.shape
    arguments = {
        "gate_up_ptr": gate_up,
        "out_ptr": out,
        "num_features": num_features,
        "stride_gate_up": gate_up.stride(0),
        "stride_out": out.stride(0),
        "block": BLOCK,
    }
    grid = (num_tokens, -(-num_features // BLOCK))
    return [Launch(silu_and_mul_kernel, grid, arguments)]
