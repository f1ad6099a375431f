"""RMS and layer norm, with the addition before, and the gated activation: one pass over each row.

Rounded to the tensors' dtype wherever the torch operations that they replace round.
"""

from __future__ import annotations

from torch import Tensor

from radixserve_kernels.gpu.launch import KernelLaunch, kernel, power_of_2, tl, wait_for_inputs

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
    is_centered: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
):
    """Grid [T]."""
    row = tl.program_id(0).to(tl.int64)
    feature = tl.arange(0, block)
    is_feature = feature < num_features
    weight = tl.load(weight_ptr + feature, mask=is_feature, other=0.0).to(tl.float32)
    wait_for_inputs(pdl)
    x = tl.load(x_ptr + row * stride_x + feature, mask=is_feature, other=0.0)
    if residual_ptr is not None:
        cells = residual_ptr + row * stride_residual + feature
        residual = tl.load(cells, mask=is_feature, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(cells, x, mask=is_feature)
    wide = x.to(tl.float32)
    if is_centered:
        wide = tl.where(is_feature, wide - tl.sum(wide, 0) / num_features, 0.0)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / num_features + eps)
    out = (wide * scale * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * stride_out + feature, out, mask=is_feature)


@kernel()
def act_and_mul_kernel(
    gate_up_ptr,  # [T, 2M]
    out_ptr,  # [T, M]
    num_features,  # M
    stride_gate_up,
    stride_out,
    is_gelu: tl.constexpr,  # in its tanh form: x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3))
    block: tl.constexpr,
    pdl: tl.constexpr,
):
    """Grid [T, blocks of features]."""
    row = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * block + tl.arange(0, block)
    is_feature = feature < num_features
    cells = gate_up_ptr + row * stride_gate_up + feature
    wait_for_inputs(pdl)
    gate = tl.load(cells, mask=is_feature, other=0.0)
    up = tl.load(cells + num_features, mask=is_feature, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    of = wide
    if is_gelu:
        of = wide * (1.5957691216 + 0.0713548163 * wide * wide)
    active = (wide / (1.0 + tl.exp(-of))).to(gate.dtype).to(tl.float32)
    out = (active * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * stride_out + feature, out, mask=is_feature)


def rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    is_centered: bool,
    out: Tensor,
) -> list[KernelLaunch]:
    """See `gpu_ops.rms_norm` and, with a residual, `gpu_ops.add_rms_norm`; `out` is written."""
    tensors = (x, weight, out) if residual is None else (x, residual, weight, out)
    assert all(tensor.stride(-1) == 1 for tensor in tensors), "features must lie dense"
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
        "is_centered": is_centered,
        "block": block,
    }
    num_warps = min(max(block // 512, 1), 16)  # 16 numbers a thread
    return [KernelLaunch(rms_norm_kernel, (num_tokens,), arguments, num_warps)]


def act_and_mul(gate_up: Tensor, activation: str, out: Tensor) -> list[KernelLaunch]:
    """See `gpu_ops.act_and_mul`; `out` is written."""
    assert gate_up.stride(-1) == out.stride(-1) == 1, "features must lie dense"
    num_tokens, num_features = out.shape
    arguments = {
        "gate_up_ptr": gate_up,
        "out_ptr": out,
        "num_features": num_features,
        "stride_gate_up": gate_up.stride(0),
        "stride_out": out.stride(0),
        "is_gelu": activation == "gelu_tanh",
        "block": BLOCK,
    }
    grid = (num_tokens, -(-num_features // BLOCK))
    return [KernelLaunch(act_and_mul_kernel, grid, arguments)]
