"""Tiny checkpoints with weights quantised as published ones are, and the same weights widened.

The layouts are those of the formats' tools: numbers are drawn, packed word by word with numpy, and
widened by their formula, (number - zero point) * scale, before anything is packed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import edit_json

Numbers = NDArray[np.int64]
Parts = dict[str, Tensor]  # ending of a module's tensor -> the tensor
GROUP = 32
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of the nibbles of a word


def pack(numbers: Numbers, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """[n, m] to int32 [n, m * bits / 32]: number order[i] of a word at bit i * bits."""
    per_word = 32 // bits
    words = np.zeros((len(numbers), -(-numbers.shape[1] // per_word)), np.int64)
    padded = np.zeros((len(numbers), words.shape[1] * per_word), np.int64)
    padded[:, : numbers.shape[1]] = numbers
    for place, column in enumerate(order or range(per_word)):
        words |= padded[:, column::per_word] << (place * bits)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def draw(
    weight: Tensor,
    bits: int,
    *,
    groups: int,
    has_zeros: bool = False,
    dtype: torch.dtype = torch.float16,
    columns: Numbers | None = None,
) -> tuple[Numbers, Tensor, Numbers, Tensor]:
    """Numbers [N, K] of 0 to 2^bits - 1, scales [N, G] of the dtype, zero points [N, G], and what
    they stand for. columns: [K], the group of each."""
    rows, depth = weight.shape
    rng = np.random.default_rng(rows * depth)
    columns = np.arange(depth) // (depth // groups) if columns is None else columns
    middle = 1 << (bits - 1)
    zeros = np.full((rows, groups), middle)
    if has_zeros:
        zeros += rng.integers(-3, 4, zeros.shape)
    highest = torch.stack([weight[:, columns == group].abs().amax(1) for group in range(groups)], 1)
    scales = (highest / (middle - 1)).to(dtype)
    each = weight / scales.float()[:, columns]
    numbers = np.clip(np.round(each.numpy()) + zeros[:, columns], 0, 2 * middle - 1)
    numbers = numbers.astype(np.int64)
    widened = torch.from_numpy(numbers - zeros[:, columns]).float() * scales.float()[:, columns]
    return numbers, scales, zeros, widened


def fp8_block(weight: Tensor, block: tuple[int, int] = (40, 24)) -> tuple[Parts, Tensor]:
    n, k = (-(-size // step) for size, step in zip(weight.shape, block, strict=True))
    scales = torch.rand(n, k) * 1e-2 + 1e-3
    spread = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    spread = spread[: weight.shape[0], : weight.shape[1]]
    numbers = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale_inv": scales}, numbers.float() * spread


def fp8_tensor(weight: Tensor) -> tuple[Parts, Tensor]:
    scale = torch.tensor(float(weight.abs().max() / 448), dtype=torch.bfloat16)
    numbers = (weight / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    extra = {"activation_scale": torch.tensor(0.5), "weight_scale_inv": scale}
    return {"weight": numbers, **extra}, numbers.float() * scale.float()


def float_channel(weight: Tensor) -> tuple[Parts, Tensor]:
    scales = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    numbers = (weight / scales.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": scales}, numbers.float() * scales.float()


def int8(weight: Tensor, *, has_zeros: bool = False) -> tuple[Parts, Tensor]:
    numbers, scales, zeros, widened = draw(
        weight, 8, groups=1, has_zeros=has_zeros, dtype=torch.bfloat16
    )
    parts = {"weight": torch.from_numpy((numbers - 128).astype(np.int8)), "weight_scale": scales}
    if has_zeros:
        parts["weight_zero_point"] = torch.from_numpy((zeros - 128).astype(np.int8))
    return parts, widened


def packed(
    weight: Tensor,
    bits: int = 4,
    *,
    group: int = GROUP,
    has_zeros: bool = False,
    is_shuffled: bool = False,
) -> tuple[Parts, Tensor]:
    rows, depth = weight.shape
    columns = np.random.default_rng(0).permutation(np.arange(depth) // group)
    numbers, scales, zeros, widened = draw(
        weight,
        bits,
        groups=depth // group,
        has_zeros=has_zeros,
        dtype=torch.bfloat16,
        columns=columns if is_shuffled else None,
    )
    parts = {
        "weight_packed": pack(numbers, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor([rows, depth]),
    }
    if has_zeros:
        parts["weight_zero_point"] = pack(zeros.T, bits).T.contiguous()
    if is_shuffled:
        parts["weight_g_idx"] = torch.from_numpy(columns.astype(np.int32))
    return parts, widened


def awq(weight: Tensor) -> tuple[Parts, Tensor]:
    groups = weight.shape[1] // GROUP
    numbers, scales, zeros, widened = draw(weight, 4, groups=groups, has_zeros=True)
    return {
        "qweight": pack(numbers.T, 4, AWQ_COLUMNS),
        "qzeros": pack(zeros.T, 4, AWQ_COLUMNS),
        "scales": scales.T.contiguous(),
    }, widened


def gptq(
    weight: Tensor,
    bits: int = 4,
    *,
    is_old: bool = True,
    has_zeros: bool = False,
    is_shuffled: bool = False,
) -> tuple[Parts, Tensor]:
    groups = weight.shape[1] // GROUP
    columns = np.arange(weight.shape[1]) // GROUP
    if is_shuffled:
        columns = np.random.default_rng(0).permutation(columns)
    numbers, scales, zeros, widened = draw(
        weight, bits, groups=groups, has_zeros=has_zeros, columns=columns
    )
    return {
        "qweight": pack(numbers, bits).T.contiguous(),
        "qzeros": pack(zeros.T - is_old, bits),
        "scales": scales.T.contiguous(),
        "g_idx": torch.from_numpy(columns.astype(np.int32)),
        "bias": torch.zeros(len(weight), dtype=torch.float16),
    }, widened


def compressed(kind: str, weights: dict[str, Any]) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups}


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
INT4 = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": GROUP}
INT8 = {"type": "int", "num_bits": 8, "strategy": "channel"}
FLOAT8 = {"type": "float", "num_bits": 8, "strategy": "channel"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}

Case = tuple[dict[str, Any], Callable[[Tensor], tuple[Parts, Tensor]], str | None]
CASES: dict[
    str, Case
] = {  # quantization_config, how a weight is stored, and the form it is read in
    "fp8, blocks": ({**FP8, "weight_block_size": [40, 24]}, fp8_block, None),
    "fp8, blocks of 128": (FP8, lambda weight: fp8_block(weight, (128, 128)), None),
    "fp8, tensors": ({**FP8, "activation_scheme": "static"}, fp8_tensor, None),
    "float-quantized": (compressed("float-quantized", FLOAT8), float_channel, None),
    "int-quantized": (compressed("int-quantized", INT8), int8, "int8"),
    "int-quantized, zero points": (
        compressed("int-quantized", INT8),
        lambda weight: int8(weight, has_zeros=True),
        None,
    ),
    "pack-quantized": (compressed("pack-quantized", INT4), packed, "int4"),
    "pack-quantized, whole rows": (
        compressed("pack-quantized", INT4),
        lambda weight: packed(weight, group=weight.shape[1]),
        "int4",
    ),
    "pack-quantized, zero points": (
        compressed("pack-quantized", INT4),
        lambda weight: packed(weight, has_zeros=True),
        "int4 (float scales)",
    ),
    "pack-quantized, order": (
        compressed("pack-quantized", INT4),
        lambda weight: packed(weight, is_shuffled=True),
        None,
    ),
    "pack-quantized, 8 bits": (
        compressed("pack-quantized", {**INT4, "num_bits": 8}),
        lambda weight: packed(weight, 8),
        "int8",
    ),
    "awq": (AWQ, awq, "int4 (float scales)"),
    "gptq": (GPTQ, gptq, "int4"),
    "gptq, zero points": (
        {**GPTQ, "sym": False},
        lambda weight: gptq(weight, has_zeros=True),
        "int4 (float scales)",
    ),
    "gptq, desc_act": (
        {**GPTQ, "desc_act": True},
        lambda weight: gptq(weight, has_zeros=True, is_shuffled=True),
        None,
    ),
    "gptq_v2": (
        {**GPTQ, "checkpoint_format": "gptq_v2"},
        lambda weight: gptq(weight, is_old=False),
        "int4",
    ),
    "gptq, 8 bits": ({**GPTQ, "bits": 8}, lambda weight: gptq(weight, 8), "int8"),
}
LEFT_OUT = r"lm_head", r"down_proj"  # endings of modules that stay as they are


def quantize(folder: Path, name: str) -> dict[str, Tensor]:
    """Rewrite a checkpoint of float32 in the scheme of a case; all its tensors, widened."""
    config, store, _ = CASES[name]
    stored: dict[str, Tensor] = {}
    widened: dict[str, Tensor] = {}
    torch.manual_seed(0)
    tensors = load_file(folder / "model.safetensors")
    for key, tensor in tensors.items():
        module, _, kind = key.rpartition(".")
        is_matrix = tensor.ndim == 2 and kind == "weight" and "embed" not in module
        if not is_matrix or module.endswith(LEFT_OUT) or "norm" in module:
            stored[key] = widened[key] = tensor
            continue
        parts, widened[key] = store(tensor)
        made = {f"{module}.{ending}": part.contiguous() for ending, part in parts.items()}
        stored |= {name: part for name, part in made.items() if name not in tensors or name == key}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    names = "ignore" if config["quant_method"] == "compressed-tensors" else "modules_to_not_convert"
    edit_json(
        folder / "config.json",
        quantization_config={**config, names: ["lm_head", "re:.*down_proj"]},
    )
    return widened
