"""Products of weights in 8 and 4 bits: against exact integers, and row by row to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixserve_kernels.cpu_library import cpu_library
from radixserve_kernels.cpu_ops import unsupported_reason
from radixserve_kernels.cpu_weights import PackedWeight, interleave_weights
from radixserve_kernels.quantized import FORMS, QuantizedTensor, concat_rows, quantize_int8, to_int8

needs_kernels = pytest.mark.skipif(
    bool(unsupported_reason(torch.float32)),
    reason=unsupported_reason(torch.float32) or "they are here",
)
pytestmark = needs_kernels
on_all_levels = pytest.mark.usefixtures("cpu_level")

SHAPES = [(1, 1), (5, 31), (16, 32), (17, 33), (40, 64), (100, 300), (49, 70), (130, 576)]
FAR = 1e-6  # of the sum of magnitudes: float32 sums of blocks


def random_weight(form: str, n: int, k: int) -> QuantizedTensor:
    """Any numbers that a file may hold, the lowest included."""
    rng = np.random.default_rng(n + 1000 * k)
    blocks = -(-k // 32)
    dtype = np.float32 if form.endswith("(float scales)") else np.float16
    scales = torch.from_numpy((rng.random((n, blocks)) * 0.01).astype(dtype))
    if form == "int8":
        numbers = torch.from_numpy(rng.integers(-128, 128, (n, k), np.int8))
        return QuantizedTensor(numbers, scales)
    numbers = torch.from_numpy(rng.integers(0, 16, (n, k), np.uint8))
    minimums = torch.from_numpy((rng.random((n, blocks)) * -0.08).astype(dtype))
    return QuantizedTensor(numbers, scales, minimums)


def in_blocks(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """[n, k] to [n, blocks, 32], zeros after the last."""
    padded = np.zeros((len(x), -(-x.shape[1] // 32) * 32), x.dtype)
    padded[:, : x.shape[1]] = x
    return padded.reshape(len(x), -1, 32)


def reference(x: Tensor, weight: QuantizedTensor, bits: int) -> tuple[NDArray, NDArray]:
    """The product with activations in 8 or 16 bits, sums exact; and the sum of magnitudes."""
    blocks = in_blocks(x.float().numpy())
    far = np.abs(blocks).argmax(-1, keepdims=True)
    largest = -np.take_along_axis(blocks, far, -1)  # becomes -limit
    is_signed_pairs = weight.minimums is None and cpu_library().radixserve_integer_dot() == 1
    is_split = cpu_library().radixserve_integer_dot() >= 3  # into two parts of 8 bits
    highest = 127 if bits == 8 else 32639 if is_split else 32767
    limit = np.float32(highest if bits == 16 or is_signed_pairs else 128)
    inverse = np.zeros_like(largest)
    np.divide(limit, largest, where=np.abs(largest) > 1e-30, out=inverse)
    scaled = blocks.astype(np.float64) * inverse  # is not rounded before it becomes an integer
    numbers = np.minimum(np.rint(scaled), highest).astype(np.int64)
    scales = (largest / limit)[..., 0].astype(np.float64)  # [M, blocks]
    w = in_blocks(weight.numbers.numpy()).astype(np.int64)
    sums = np.einsum("mbk,nbk->mnb", numbers, w)  # whole numbers
    w_scales = weight.scales.double().numpy()
    terms = sums * scales[:, None] * w_scales
    if weight.minimums is not None:
        low = weight.minimums.double().numpy()
        terms = np.stack((terms, (numbers.sum(-1) * scales)[:, None] * low))
        return terms.sum((0, -1)), np.abs(terms).sum((0, -1))
    return terms.sum(-1), np.abs(terms).sum(-1)


@pytest.mark.pairs
@on_all_levels
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_sums_are_exact(form: str, n: int, k: int, bits: int) -> None:
    weight = random_weight(form, n, k)
    x = torch.randn(19, k, generator=torch.Generator().manual_seed(k))
    x[3] = 0
    x[5] = 1e-42  # too small to be told from 0
    x[7, ::2] = 127.0  # with an odd scale, every number the highest
    expected, size = reference(x, weight, bits)
    packed = PackedWeight(weight)
    if bits == 16:
        packed.round_finely()
    out = packed(x).double().numpy()
    expected[5] = 0
    assert (np.abs(out - expected) <= FAR * (size + 1)).all()


@on_all_levels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_a_row_does_not_depend_on_others(form: str, dtype: torch.dtype) -> None:
    x = torch.randn(300, 330, generator=torch.Generator().manual_seed(1)).to(dtype)
    packed = PackedWeight(random_weight(form, 130, 330), torch.randn(130).to(dtype))
    alone = torch.cat([packed(row[None]) for row in x])
    for count in (*range(1, 20), 31, 200, 255, 256, 257, 300):
        assert torch.equal(packed(x[:count]), alone[:count]), f"{count} rows"
        assert torch.equal(packed(x[-count:]), alone[-count:]), f"{count} rows"


@on_all_levels
@pytest.mark.parametrize("form", FORMS)
def test_rows_in_16_bits_are_close(form: str) -> None:
    weight = random_weight(form, 130, 330)
    x = torch.randn(300, 330, generator=torch.Generator().manual_seed(5))
    x[3], x[5, 32:64] = 0, 0
    coarse, fine = PackedWeight(weight), PackedWeight(weight)
    fine.round_finely()
    exact = x.double() @ weight.dequantize().double().T
    size = x.double().abs() @ weight.dequantize().double().abs().T
    out = fine(x)
    errors = [((product - exact).abs() / (size + 1e-9)).max() for product in (coarse(x), out)]
    assert errors[1] < errors[0] / 50
    assert not out[3].any()
    alone = torch.cat([fine(row[None]) for row in x[:20]])
    for count in (1, 2, 3, 7, 20, 129, 300):
        assert torch.equal(fine(x[:count])[:20], alone[:count]), f"{count} rows"
    x[4, 65] = torch.nan
    assert not fine(x)[4].isfinite().any()
    assert torch.equal(fine(x)[5:], out[5:])


@on_all_levels
@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("form", FORMS)
def test_threads_change_no_bit(form: str) -> None:
    x = torch.randn(200, 576, generator=torch.Generator().manual_seed(2))
    packed = PackedWeight(random_weight(form, 700, 576))
    fine = PackedWeight(random_weight(form, 700, 576))
    fine.round_finely()
    out, fine_out = packed(x), fine(x)
    torch.set_num_threads(1)
    assert torch.equal(packed(x), out)
    assert torch.equal(fine(x), fine_out)


@on_all_levels
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_finite_is_seen_in_its_row(form: str, value: float) -> None:
    x = torch.randn(20, 70, generator=torch.Generator().manual_seed(3))
    packed = PackedWeight(random_weight(form, 33, 70))
    expected = packed(x)
    x[4, 65] = value
    out = packed(x)
    assert not out[4].isfinite().any()
    others = torch.arange(20) != 4
    assert torch.equal(out[others], expected[others])


@on_all_levels
def test_parts_of_different_forms_lie_side_by_side() -> None:
    parts = [random_weight(form, n, 96) for form, n in zip(FORMS, (40, 33, 50), strict=True)]
    parts += [random_weight("int8", 16, 96)]
    biases = [torch.randn(part.shape[0]) for part in parts]
    x = torch.randn(9, 96)
    packed = PackedWeight.of_parts(list(zip(parts, biases, strict=True)))
    separate = [PackedWeight(part, b)(x) for part, b in zip(parts, biases, strict=True)]
    assert torch.equal(packed(x), torch.cat(separate, 1))
    same = PackedWeight(concat_rows([parts[0], parts[3]]))(x)
    assert torch.equal(same[:, 40:], PackedWeight(parts[3])(x))


def test_gate_and_up_of_different_forms_become_8_bits() -> None:
    gate, up = random_weight("int4", 40, 64), random_weight("int8", 40, 64)
    both = interleave_weights(gate, up)
    assert isinstance(both, QuantizedTensor)
    assert both.form == "int8"
    kept = interleave_weights(gate, gate)
    assert isinstance(kept, QuantizedTensor)
    assert kept.form == "int4"


class TestQuantizeInt8:
    def test_the_nearest_of_255_numbers(self) -> None:
        weight = torch.randn(33, 100, generator=torch.Generator().manual_seed(4))
        found = quantize_int8(weight)
        step = found.scales.float().repeat_interleave(32, 1)[:, :100]
        error = (found.dequantize() - weight).abs()
        assert (error <= 0.502 * step).all()  # half a step, and the rounding of the scale
        assert to_int8(found) is found

    def test_what_is_in_8_bits_already_stays(self) -> None:
        weight = quantize_int8(torch.randn(8, 64))
        assert torch.equal(quantize_int8(weight.dequantize()).numbers, weight.numbers)

    @pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e9])
    def test_numbers_that_have_no_8_bits_are_refused(self, value: float) -> None:
        weight = torch.ones(3, 40)
        weight[1, 33] = value
        with pytest.raises(ValueError, match="not finite or too large"):
            quantize_int8(weight)
