"""Quantised safetensors: the supported schemes, and how each combines a weight's stored parts.

A weight becomes a tensor of 8 or 4 bits if that is lossless, else it is widened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from radixserve.errors import ModelNotSupported
from radixserve_kernels.quantized import BLOCK, AnyWeight, QuantizedTensor

Parts = Mapping[str, Tensor]  # ending of a stored name -> the tensor


@dataclass(frozen=True, slots=True)
class QuantizedScheme:
    """How a checkpoint stores its quantised weights."""

    name: str
    endings: tuple[str, ...]  # of the names of a weight's parts; the first has its numbers, "" too
    read: Callable[[Parts], AnyWeight]  # ValueError, KeyError or RuntimeError for broken parts
    stem: str = ""  # ends the weight's own name where the endings stand
    has_zero_biases: bool = False  # of modules that have none


def config_scheme(config: Any) -> QuantizedScheme | None:
    """The scheme of a config's `quantization_config`; None without one. Raises ModelNotSupported
    that names the scheme and those that are read."""
    quantization = getattr(config, "quantization_config", None)
    if not quantization:
        return None
    fields = quantization if isinstance(quantization, Mapping) else quantization.to_dict()
    make = SCHEMES.get(str(fields.get("quant_method")))
    if make is None:
        raise ModelNotSupported(
            _refusal(f"quantized weights of the method {fields.get('quant_method')!r}")
        )
    return make(fields)


def group_parts(names: Iterable[str], scheme: QuantizedScheme) -> dict[str, dict[str, str]]:
    """Name of each quantised weight -> ending -> name of the stored part."""
    names = frozenset(names)
    weights: dict[str, dict[str, str]] = {}
    for name in names:
        for ending in filter(name.endswith, filter(None, scheme.endings)):
            base = name.removesuffix(ending)
            weights.setdefault(base + scheme.stem, {})[ending] = name
            if "" in scheme.endings and base in names:
                weights[base][""] = base
    first = scheme.endings[0], *(ending for ending in ("",) if ending in scheme.endings)
    return {
        name: parts
        for name, parts in weights.items()
        if len(parts) > 1 and any(ending in parts for ending in first)
    }


def _refusal(what: str) -> str:
    return f"{what} cannot be read; possible are {ALLOWED}"


def _check(fields: Mapping[str, Any], name: str, allowed: tuple[Any, ...], default: Any) -> None:
    value = fields.get(name, default)
    value = value.lower() if isinstance(value, str) else value
    if value not in allowed:
        method = fields.get("quant_method")
        raise ModelNotSupported(_refusal(f"quantized weights of {method} with {name} {value!r}"))


# -- of each method, from the config's fields -----------------------------------------------------


def _fp8(fields: Mapping[str, Any]) -> QuantizedScheme:
    _check(fields, "fmt", ("e4m3", "e5m2", "float8_e4m3fn", None), None)
    block = tuple(fields.get("weight_block_size") or (128, 128))

    def read(parts: Parts) -> Tensor:
        scales = parts["_scale_inv"] if "_scale_inv" in parts else parts["_scale"]
        return _scaled(parts[""], scales, block)

    return QuantizedScheme("fp8", ("", "_scale_inv", "_scale"), read)


def _compressed_tensors(fields: Mapping[str, Any]) -> QuantizedScheme:
    groups = list((fields.get("config_groups") or {}).values())
    formats = [group["format"] for group in groups if group.get("format")]
    for name in (*formats, *(() if formats else (fields.get("format"),))):
        _check({**fields, "format": name}, "format", _COMPRESSED_FORMATS, None)
    for name in ("sparsity_config", "transform_config"):
        settings = fields.get(name) or {}
        if settings.get("format", "dense") != "dense" or settings.get("config_groups"):
            raise ModelNotSupported(_refusal(f"quantized weights with a {name}"))
    block = (128, 128)
    for group in groups:
        weights = group.get("weights") or {}
        kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
        if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)):
            raise ModelNotSupported(_refusal(f"compressed-tensors weights of {kind} {bits} bits"))
        block = tuple(weights.get("block_structure") or block)

    def read(parts: Parts) -> AnyWeight:
        if "_packed" in parts:
            return _read_packed(parts)
        numbers = parts[""]
        if numbers.dtype != torch.int8:
            return _scaled(numbers, parts["_scale"], block)
        zeros = _by_row(parts.get("_zero_point", _NO_ZEROS))
        return _grouped(numbers, zeros, _by_row(parts["_scale"]))

    endings = ("_packed", "", "_scale", "_zero_point", "_shape", "_g_idx")
    return QuantizedScheme("compressed-tensors", endings, read)


def _read_packed(parts: Parts) -> AnyWeight:
    """Packed [N, K * bits / 32]; scales [N, G]; zero points [N * bits / 32, G]."""
    depth = int(parts["_shape"][-1])
    bits = 32 * parts["_packed"].shape[-1] // depth
    numbers = _unpacked(parts["_packed"], bits)[:, :depth]
    zeros = _NO_ZEROS + (1 << (bits - 1))
    if (packed := parts.get("_zero_point")) is not None:
        zeros = _unpacked(packed.T, bits)[:, : len(numbers)].T
    both = _with_sign(numbers, zeros, bits)
    return _grouped(*both, _by_row(parts["_scale"]), parts.get("_g_idx"))


def _awq(fields: Mapping[str, Any]) -> QuantizedScheme:
    _check(fields, "bits", (4,), fields.get("w_bit", 4))
    _check(fields, "version", ("gemm",), "gemm")
    order = torch.tensor(_AWQ_ORDER)

    def columns(words: Tensor) -> Tensor:
        """[n, N / 8] int32 to [N, n]: nibbles of a word lie in another order."""
        nibbles: Tensor = _unpacked(words, 4).unflatten(-1, (-1, 8))[..., order]
        return nibbles.flatten(-2).T

    def read(parts: Parts) -> AnyWeight:
        numbers, zeros = columns(parts[".qweight"]), columns(parts[".qzeros"])
        return _grouped(numbers, zeros, parts[".scales"].T)

    return QuantizedScheme("awq", (".qweight", ".qzeros", ".scales"), read, ".weight")


def _gptq(fields: Mapping[str, Any]) -> QuantizedScheme:
    _check(fields, "bits", (4, 8), None)
    _check(fields, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    bits = int(fields["bits"])
    offset = int(fields.get("checkpoint_format", "gptq") == "gptq")  # stored as one less

    def read(parts: Parts) -> AnyWeight:
        numbers = _unpacked(parts[".qweight"].T, bits)
        zeros = _unpacked(parts[".qzeros"], bits).T.to(torch.int16) + offset
        both = _with_sign(numbers, zeros, bits)
        return _grouped(*both, parts[".scales"].T, parts.get(".g_idx"))

    endings = (".qweight", ".qzeros", ".scales", ".g_idx")
    return QuantizedScheme("gptq", endings, read, ".weight", has_zero_biases=True)


def _mxfp4(_: Mapping[str, Any]) -> QuantizedScheme:
    return MXFP4


_COMPRESSED_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
_NO_ZEROS = torch.zeros(1, 1, dtype=torch.int16)
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where a word has its columns
SCHEMES: dict[str, Callable[[Mapping[str, Any]], QuantizedScheme]] = {
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}
ALLOWED = (
    "awq (4 bits, gemm), compressed-tensors (float-quantized, int-quantized, naive-quantized and "
    "pack-quantized of 4 or 8 bits), fp8, gptq (4 or 8 bits) and mxfp4 (gpt-oss)"
)
# Tensors beside the weights that only computing in the scheme's own activations needs.
ACTIVATION_SCALES = (
    r".*[._](?:input|activation|output)_(?:scale|scale_inv|zero_point|global_scale)"
    r"|.*\.[qkv]_(?:scale|zero_point)"
)

# -- numbers, scales and zero points --------------------------------------------------------------


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """[..., n] int32 to [..., n * 32 / bits] uint8, low bits first."""
    if words.dtype != torch.int32 or bits not in (4, 8):
        raise ValueError(f"numbers of {bits} bits in {words.dtype}")
    each = words.contiguous().view(torch.uint8)
    return each if bits == 8 else torch.stack((each & 15, each >> 4), -1).flatten(-2)


def _by_row(scales: Tensor) -> Tensor:
    """[G], [1] or [N, G] as [1 or N, G]."""
    return scales.reshape(1, -1) if scales.ndim < 2 else scales


def _with_sign(numbers: Tensor, zeros: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Numbers of 8 bits as int8; those of 4 stay 0 to 15."""
    if bits == 4:
        return numbers, zeros
    return (numbers ^ 128).view(torch.int8), zeros.to(torch.int16) - 128


def _scaled(numbers: Tensor, scales: Tensor, block: tuple[int, ...]) -> Tensor:
    """float32: numbers [..., N, K] by scales of all, of rows [N], or of blocks [..., n, k]."""
    scales = scales.float()
    if scales.numel() == 1:
        return numbers.float() * scales.reshape(())
    scales = scales.reshape(*scales.shape, *(1,) * (numbers.ndim - scales.ndim))
    for axis in (-2, -1):
        size = numbers.shape[axis]
        if scales.shape[axis] not in (1, size):
            scales = scales.repeat_interleave(block[axis], axis).narrow(axis, 0, size)
    return numbers.float() * scales


def _grouped(
    numbers: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor | None = None
) -> AnyWeight:
    """(numbers - zeros) * scales; numbers [N, K] int8, or uint8 of 4 bits; the others [N, G], or
    [1, G] for all rows; groups [K]: of each column, where they are not equally long runs."""
    rows, depth = numbers.shape
    count = scales.shape[1]
    if depth % count:
        raise ValueError(f"{count} groups of {depth} numbers")
    scales, zeros = scales.expand(rows, count), zeros.to(torch.int16).expand(rows, count)
    runs = torch.arange(depth) // (depth // count)
    if groups is None or torch.equal(groups.long(), runs):
        groups = runs
        if count == 1 or depth // count % BLOCK == 0:
            blocks = torch.arange(-(-depth // BLOCK)) * BLOCK  # where each begins
            form = _exact_form(numbers, scales[:, runs[blocks]], zeros[:, runs[blocks]])
            if form is not None:
                return form
    groups = groups.long()
    return (numbers.to(torch.int16) - zeros[:, groups]).float() * scales.float()[:, groups]


def _exact_form(numbers: Tensor, scales: Tensor, zeros: Tensor) -> QuantizedTensor | None:
    """In our 8 or 4 bits, scales and zeros [N, blocks]; None where a number would be rounded."""
    wide = scales.float()
    half = scales.half()
    is_half = bool((half.float() == wide).all())
    if numbers.dtype == torch.int8:
        is_exact = is_half and not zeros.any()
        return QuantizedTensor(numbers.contiguous(), half.contiguous()) if is_exact else None
    minimums = -(zeros * wide)
    if is_half and torch.equal((low := minimums.half()).float(), minimums):
        return QuantizedTensor(numbers.contiguous(), half.contiguous(), low)
    return QuantizedTensor(numbers.contiguous(), wide.contiguous(), minimums)


# -- MXFP4: 4 bits, a power of two for each 32 weights (OCP Microscaling formats, 1.0) ------------

_MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # then the same, negative
_MXFP4_BIAS = 127  # of exponents


def _widen_mxfp4(parts: Parts) -> Tensor:
    """bfloat16 [E, K, N], exactly, of blocks [E, N, K / 32, 16] and scales [E, N, K / 32], uint8.

    Of a byte the low four bits come first. A scale of 255 is NaN.
    """
    blocks, scales = parts["_blocks"], parts["_scales"]
    if not _is_mxfp4(blocks, scales):
        return blocks  # of another shape than the weight's, which is named
    values = torch.tensor(
        [*_MXFP4_VALUES, *(-value for value in _MXFP4_VALUES)], dtype=torch.bfloat16
    )
    pairs = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)  # [E, N, K / 32, 32]
    factors = torch.ldexp(torch.ones(scales.shape), scales.int() - _MXFP4_BIAS).bfloat16()
    factors[scales == 255] = torch.nan
    return (values[pairs.int()] * factors[..., None]).flatten(-2).transpose(1, 2)


def _is_mxfp4(blocks: Tensor, scales: Tensor) -> bool:
    """Whether both have the dtype and the shape of a weight."""
    return (
        blocks.dtype == scales.dtype == torch.uint8
        and blocks.shape[-1:] == (16,)
        and blocks.shape[:-1] == scales.shape
        and scales.ndim == 3
    )


MXFP4 = QuantizedScheme("mxfp4", ("_blocks", "_scales"), _widen_mxfp4)
