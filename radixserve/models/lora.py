"""`lora_layers`: an adapter's modules as the products of a native decoder's layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from radixserve.errors import ModelNotSupported
from radixserve.models.decoder_shape import DecoderShape
from radixserve.models.decoder_tensors import paired_rows
from radixserve_kernels.cpu_lora import LoraProduct

_MODULE = re.compile(r"(?:.*\.)?layers\.(\d{1,6})\.(.+)")  # as a checkpoint names it
_MAX_NAMED = 6  # modules named in an error message


class LoraModule(NamedTuple):
    """The low-rank part of a module of I inputs and O outputs: scale * b a."""

    a: Tensor  # [R, I] float32
    b: Tensor  # [O, R] float32
    scale: float


class _Part(NamedTuple):
    """A module that gives some columns of a product."""

    name: str  # in its layer
    size: int  # columns
    order: Callable[[Tensor], Tensor] = lambda rows: rows  # of rows as the checkpoint has them


class _Product(NamedTuple):
    """The modules of one product of a layer."""

    depth: int  # of its input
    parts: tuple[_Part, ...]
    reason: str  # why an adapter cannot add to it; "" if it can


def lora_layers(
    shape: DecoderShape, modules: Mapping[str, LoraModule]
) -> list[dict[str, LoraProduct]]:
    """What an adapter adds to the products of each layer, by their names in `PRODUCTS`; the rows of
    gate come before those of up.

    modules: by their names in the checkpoint. Raises ModelNotSupported naming every module that the
    decoder lacks, has in another shape, or cannot add to.
    """
    layers: list[dict[str, LoraProduct]] = [{} for _ in range(shape.num_layers)]
    wanted: dict[int, dict[str, LoraModule]] = {}
    wrong = []
    for name, module in modules.items():
        match = _MODULE.fullmatch(name)
        if match is None or int(match[1]) >= shape.num_layers:
            wrong.append(f"{name}: the model has no such layer")
            continue
        wanted.setdefault(int(match[1]), {})[match[2]] = module
    for number, own in wanted.items():
        products = _products(shape, number)
        known = {part.name for product in products.values() for part in product.parts}
        built = (product for product in products.values() if not product.reason)
        names = ", ".join(sorted(part.name for product in built for part in product.parts))
        wrong += [
            f"layers.{number}.{name}: possible are {names or 'none'}"
            for name in own
            if name not in known
        ]
        for name, product in products.items():
            given = [own.get(part.name) for part in product.parts]
            if not any(given):
                continue
            problems = [product.reason] if product.reason else _wrong_shapes(product, given)
            wrong += [f"layers.{number}: {problem}" for problem in problems]
            if not problems:
                layers[number][name] = _stacked(product, given)
    if wrong:
        more = f" and {len(wrong) - _MAX_NAMED} more" if len(wrong) > _MAX_NAMED else ""
        raise ModelNotSupported(
            f"the adapter does not fit the model: {'; '.join(wrong[:_MAX_NAMED])}{more}"
        )
    return layers


def _products(shape: DecoderShape, number: int) -> dict[str, _Product]:
    family, hidden = shape.family, shape.hidden_size
    kv_heads, head_dim = shape.heads[number]
    q, kv = shape.num_heads * head_dim, kv_heads * head_dim

    def paired(rows: Tensor) -> Tensor:
        return paired_rows(shape, number, rows)

    def fused(rows: Tensor) -> Tensor:
        return torch.cat((paired(rows[:q]), paired(rows[q : q + kv]), rows[q + kv :]))

    module, mixing, gating = family.attention_module, "", ""
    if shape.mixers[number] is not None:
        mixing = "adapters of layers with a recurrence or a convolution are not built"
    elif family.has_output_gate or shape.k_for_v[number] or shape.kv_sources[number] is not None:
        mixing = "adapters of attention with an output gate or with shared K and V are not built"
    if shape.experts[number] is not None or shape.experts_beside is not None:
        gating = "adapters of experts are not built; those of attention are"
    elif not shape.has_gated_mlp:
        gating = "adapters of an MLP without a gate are not built"
    qkv: tuple[_Part, ...] = (
        _Part(f"{module}.q_proj", q, paired),
        _Part(f"{module}.k_proj", kv, paired),
        _Part(f"{module}.v_proj", kv),
    )
    if family.has_fused_qkv:
        qkv = (_Part(f"{module}.qkv_proj", q + 2 * kv, fused),)
    gate, up, down = family.mlp_names
    inner = shape.intermediate_sizes[number]
    gate_up = tuple(_Part(name, inner) for name in (gate, up) if name is not None)
    if gate == up:
        gate_up = (_Part(up, 2 * inner),)
    return {
        "qkv": _Product(hidden, qkv, mixing),
        "o": _Product(q, (_Part(f"{module}.{family.o_name}", hidden),), mixing),
        "gate_up": _Product(hidden, gate_up, gating),
        "down": _Product(inner, (_Part(down, hidden),), gating),
    }


def _wrong_shapes(product: _Product, given: Sequence[LoraModule | None]) -> list[str]:
    wrong = []
    for part, module in zip(product.parts, given, strict=True):
        if module is None:
            continue
        rank = module.a.shape[0]
        needed = ((rank, product.depth), (part.size, rank))
        shapes = tuple(module.a.shape), tuple(module.b.shape)
        if shapes != needed:
            wrong.append(f"{part.name} has lora_A and lora_B of {shapes}, not of {needed}")
    return wrong


def _stacked(product: _Product, given: Sequence[LoraModule | None]) -> LoraProduct:
    """One product of all parts: the a below each other, and a b that is zero where a part's columns
    have the ranks of others."""
    present = [module for module in given if module is not None]
    total = sum(module.a.shape[0] for module in present)
    b = torch.zeros(sum(part.size for part in product.parts), total)
    row = rank = 0
    for part, module in zip(product.parts, given, strict=True):
        if module is not None:
            end = rank + module.a.shape[0]
            b[row : row + part.size, rank:end] = part.order(module.b * module.scale)
            rank = end
        row += part.size
    return LoraProduct(torch.cat([module.a for module in present]), b)
