"""Mixtures of experts on the compiled kernels: against float64, and row by row to the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from radixserve_kernels.cpu_experts import PackedExperts
from radixserve_kernels.cpu_ops import unsupported_reason
from radixserve_kernels.cpu_weights import PackedWeight, interleave, interleave_weights
from radixserve_kernels.experts import Routing, choose_experts
from radixserve_kernels.quantized import AnyWeight, QuantizedTensor, quantize_int8

pytestmark = pytest.mark.skipif(
    bool(unsupported_reason(torch.float32)),
    reason=unsupported_reason(torch.float32) or "they are here",
)

PLAIN = Routing(num_experts=6, top_k=2, renormalizes=True)
ROUTINGS = {
    "normalised": PLAIN,
    "sums below 1": replace(PLAIN, renormalizes=False, top_k=3),
    "all of them": replace(PLAIN, renormalizes=False, num_experts=3, top_k=3),
    "with a shared one": replace(PLAIN, renormalizes=False, has_shared=True),
    "clamped": replace(PLAIN, swiglu_alpha=1.702, swiglu_limit=0.9),
    "many": replace(PLAIN, num_experts=64, top_k=8),
    "sigmoids": replace(PLAIN, has_sigmoid=True, sum_eps=0.1, scale=1.5),
    "sigmoids, shared": replace(
        PLAIN, has_sigmoid=True, renormalizes=False, has_shared=True, has_shared_gate=False
    ),
}
HIDDEN, INNER, SHARED = 72, 40, 90


class Weights(NamedTuple):
    """In float32; the last expert is the shared one, if there is one."""

    router: Tensor  # [E, H]
    router_bias: Tensor | None
    gate: list[Tensor]  # [M, H]
    up: list[Tensor]
    down: list[Tensor]  # [H, M]
    biases: list[tuple[Tensor, Tensor, Tensor]]  # of gate, up and down, or nothing


def make_weights(routing: Routing, dtype: torch.dtype, *, has_biases: bool = False) -> Weights:
    generator = torch.Generator().manual_seed(routing.top_k)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(dtype).float()

    sizes = [INNER] * routing.num_experts + [SHARED] * routing.has_shared
    return Weights(
        router=3 * draw(routing.num_logits, HIDDEN),
        router_bias=draw(routing.num_logits) if has_biases else None,
        gate=[2 * draw(size, HIDDEN) for size in sizes],
        up=[2 * draw(size, HIDDEN) for size in sizes],
        down=[draw(HIDDEN, size) for size in sizes],
        biases=[(draw(size), draw(size), draw(HIDDEN)) for size in sizes] if has_biases else [],
    )


def in_form(weight: Tensor, form: str, dtype: torch.dtype) -> AnyWeight:
    if form == "int8":
        return quantize_int8(weight)
    if form == "int4":
        return QuantizedTensor(*to_int4(weight))
    return weight.half() if form == "float16" else weight.to(dtype)


def pack(weights: Weights, routing: Routing, dtype: torch.dtype, form: str) -> PackedExperts:
    def of_form(weight: Tensor) -> AnyWeight:
        return in_form(weight, form, dtype)

    gate_up, down = [], []
    for i, (gate, up) in enumerate(zip(weights.gate, weights.up, strict=True)):
        first = second = None
        if weights.biases:
            gate_bias, up_bias, down_bias = weights.biases[i]
            first, second = interleave(gate_bias, up_bias).to(dtype), down_bias.to(dtype)
        gate_up.append(PackedWeight(interleave_weights(of_form(gate), of_form(up)), first))
        down.append(PackedWeight(of_form(weights.down[i]), second))
    bias = None if weights.router_bias is None else weights.router_bias.to(dtype)
    return PackedExperts(PackedWeight(weights.router.to(dtype), bias), gate_up, down, routing)


def to_int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers, scales and minimums, of blocks of 32."""
    size, depth = weight.shape
    blocks = torch.nn.functional.pad(weight, (0, -depth % 32)).view(size, -1, 32)
    minimums, scales = blocks.amin(-1).half(), ((blocks.amax(-1) - blocks.amin(-1)) / 15).half()
    numbers = (blocks - minimums[..., None].float()) / scales[..., None].float().clamp(min=1e-9)
    numbers = numbers.round().clamp(0, 15).to(torch.uint8).view(size, -1)[:, :depth]
    return numbers, scales, minimums


def exact(weights: Weights, routing: Routing, x: Tensor) -> Tensor:
    """In float64, one token after the other."""
    x, out = x.double(), torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    logits = x @ weights.router.double().T
    if weights.router_bias is not None:
        logits += weights.router_bias
    ids, shares = choose_experts(logits, routing)
    for token, row in enumerate(x):
        for e, share in zip(ids[token].tolist(), shares[token].tolist(), strict=True):
            gate, up = weights.gate[e].double() @ row, weights.up[e].double() @ row
            if weights.biases:
                gate, up = gate + weights.biases[e][0], up + weights.biases[e][1]
            inner = gate * gate.sigmoid() * up
            if limit := routing.swiglu_limit:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                inner = (up + 1) * gate * (gate * routing.swiglu_alpha).sigmoid()
            down = weights.down[e].double() @ inner
            out[token] += share * (down + weights.biases[e][2] if weights.biases else down)
    return out


def draw_rows(count: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count)).to(dtype)


@pytest.mark.pairs
@pytest.mark.usefixtures("cpu_level")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROUTINGS)
def test_experts(name: str, dtype: torch.dtype) -> None:
    routing = ROUTINGS[name]
    weights = make_weights(routing, dtype, has_biases=name in ("clamped", "with a shared one"))
    packed = pack(weights, routing, dtype, "dense")
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    for count in (0, 1, 3, 40, 133):
        x = draw_rows(count, dtype)
        logits = x.float() @ weights.router.T
        sure = is_sure(logits[:, : routing.num_experts], routing.top_k)
        difference = packed(x).double() - exact(weights, routing, x)
        assert difference.shape == (count, HIDDEN)
        assert sure.sum() >= count // 2
        assert (difference[sure].abs() <= tolerance * (1 + count)).all()


def is_sure(logits: Tensor, top_k: int) -> Tensor:
    """Rows whose choice does not hang on rounding."""
    if logits.shape[1] == top_k:
        return torch.ones(len(logits), dtype=torch.bool)
    ordered = logits.sort(-1, descending=True).values
    return ordered[:, top_k - 1] - ordered[:, top_k] > 0.05


@pytest.mark.parametrize("form", ["float16", "int8", "int4"])
def test_experts_in_other_forms(form: str) -> None:
    """As the same weights, widened; float16 to the bit, others with activations in 8 bits."""
    routing = ROUTINGS["with a shared one"]
    weights = make_weights(routing, torch.float32)
    packed = pack(weights, routing, torch.float32, form)
    x = draw_rows(50, torch.float32)
    widened = [[widen(in_form(one, form, x.dtype)) for one in some] for some in weights[2:5]]
    weights = Weights(weights.router, None, *widened, [])
    right, got = exact(weights, routing, x), packed(x).double()
    assert (got - right).norm() < (1e-6 if form == "float16" else 0.02) * right.norm()
    if form == "float16":
        assert torch.equal(pack(weights, routing, torch.float32, "dense")(x), packed(x))


def widen(weight: AnyWeight) -> Tensor:
    return weight.float() if isinstance(weight, Tensor) else weight.dequantize()


@pytest.mark.pairs
@pytest.mark.usefixtures("cpu_level", "num_threads")
@pytest.mark.parametrize("form", ["dense", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_others(dtype: torch.dtype, form: str) -> None:
    routing = ROUTINGS["with a shared one"]
    packed = pack(make_weights(routing, dtype), routing, dtype, form)
    x = draw_rows(230, dtype)
    whole = packed(x)
    for first, last in ((0, 1), (7, 9), (20, 33), (100, 229)):
        assert torch.equal(packed(x[first:last]), whole[first:last])
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = packed(x)
    torch.set_num_threads(before)
    assert torch.equal(alone, whole)


def test_equal_logits_choose_the_first() -> None:
    weights = make_weights(PLAIN, torch.float32)
    weights = weights._replace(router=torch.zeros_like(weights.router))
    x = draw_rows(4, torch.float32)
    first = Routing(num_experts=2, top_k=2, renormalizes=True)
    only = Weights(weights.router[:2], None, *(some[:2] for some in weights[2:5]), [])
    expected = pack(only, first, torch.float32, "dense")(x)
    assert torch.equal(pack(weights, PLAIN, torch.float32, "dense")(x), expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_seen(value: float) -> None:
    x = draw_rows(5, torch.float32)
    for name in ("normalised", "clamped", "with a shared one"):
        packed = pack(
            make_weights(ROUTINGS[name], torch.float32), ROUTINGS[name], torch.float32, "dense"
        )
        right = packed(x)
        broken = x.clone()
        broken[2, 3] = value
        got = packed(broken)
        assert not got[2].isfinite().any()
        assert torch.equal(got[[0, 1, 3, 4]], right[[0, 1, 3, 4]])
