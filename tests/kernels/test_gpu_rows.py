"""Kernels over token rows and pages, and their references, against what they stand for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from radixserve_kernels import gpu_ops, torch_ops
from radixserve_kernels.stored_kv import from_stored, stored_width, to_stored

both = pytest.mark.usefixtures("path")  # references, interpreted kernels, compiled ones
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def assert_rounded(out: Tensor, expected: Tensor, around: float = 0.1, num_steps: int = 2) -> None:
    """Equal up to two steps of the dtype, of a number as large as `around` at least."""
    most = num_steps * torch.finfo(out.dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=most, atol=most * around)


def norm(x: Tensor, weight: Tensor, eps: float, *, is_centered: bool = False) -> Tensor:
    x = x.double()
    x = x - x.mean(-1, keepdim=True) if is_centered else x
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 100, 1_024, 8_192])
@pytest.mark.parametrize("is_centered", [False, True])
@both
def test_rms_norm(dtype: torch.dtype, size: int, is_centered: bool) -> None:
    torch.manual_seed(0)
    x = (torch.randn(3, size + 5) * torch.tensor([[1e-3], [1.0], [100.0]])).to(dtype)[:, :size]
    weight = torch.randn(size)  # float32, beside activations of any dtype
    expected = norm(x, weight, 1e-5, is_centered=is_centered)
    out = gpu_ops.rms_norm(x, weight, 1e-5, is_centered=is_centered)
    assert_rounded(out, expected)
    assert gpu_ops.rms_norm(x, weight, 1e-5, out=x, is_centered=is_centered) is x
    assert torch.equal(x, out)
    assert gpu_ops.rms_norm(x[:0], weight, 1e-5).shape == (0, size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [3, 130, 4_096])
@both
def test_add_rms_norm(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(4, size).to(dtype), torch.randn(size).to(dtype)
    stream = torch.randn(4, size + 1).to(dtype)
    residual = stream[:, :size]
    beyond, total = stream[:, size].clone(), residual + x  # rounded to the dtype
    out, same = gpu_ops.add_rms_norm(x, residual, weight, 1e-6)
    assert same is residual
    assert torch.equal(residual, total)
    assert torch.equal(stream[:, size], beyond)
    assert_rounded(out, norm(total, weight, 1e-6))
    gpu_ops.add_rms_norm(x, residual - x, weight, 1e-6, out=x)
    assert x.shape == out.shape


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 70, 1_030, 14_336])
@both
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_act_and_mul(dtype: torch.dtype, size: int, activation: str) -> None:
    torch.manual_seed(0)
    gate_up = (4 * torch.randn(3, 2 * size + 1)).to(dtype)[:, : 2 * size]
    gate_up[0, 0] = -100.0
    gate, up = gate_up.double().chunk(2, -1)
    expected = {"silu": F.silu(gate), "gelu_tanh": F.gelu(gate, approximate="tanh")}[
        activation
    ] * up
    out = gpu_ops.act_and_mul(gate_up, activation)
    assert out.is_contiguous()
    around = 0.1 if activation == "silu" else 16.0  # 1 + tanh loses digits
    assert_rounded(out, expected, around, 4)  # a card's exp2 is off by two steps
    into = torch.full((3, 2 * size), torch.nan, dtype=dtype)[:, :size]
    assert gpu_ops.act_and_mul(gate_up, activation, into) is into
    assert torch.equal(into, out)
    assert gpu_ops.act_and_mul(gate_up[:0], activation).shape == (0, size)


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm_type", ["rms", "layer", ""])
@pytest.mark.parametrize("shape", [(3, 2, 24), (8, 8, 64), (5, 1, 2), (32, 8, 128)], ids=str)
@both
def test_rope_and_store(dtype: torch.dtype, norm_type: str, shape: tuple[int, int, int]) -> None:
    """The pool's other slots, and other heads of its own, stay as they are."""
    torch.manual_seed(0)
    num_heads, num_kv_heads, head_dim = shape
    num_all = num_heads + 2 * num_kv_heads
    qkv = torch.randn(5, num_all * head_dim + 3).to(dtype)[:, : num_all * head_dim]
    positions, slots = torch.tensor([0, 7, 2, 0, 9]), torch.tensor([4, -1, 0, 6, -1])
    angles = torch.randn(10, head_dim // 2, dtype=torch.float64)
    table = torch.cat((angles.cos(), angles.sin()), 1).float()
    pools = [torch.full((7, num_kv_heads + 1, head_dim), torch.nan, dtype=dtype) for _ in "kv"]
    k_slots, v_slots = (pool[:, 1:] for pool in pools)
    weight = torch.randn(num_heads + num_kv_heads, head_dim) if norm_type else None
    is_centered = norm_type == "layer"
    arguments = (qkv, positions, slots, table, k_slots, v_slots, num_heads, num_kv_heads, weight)
    q = gpu_ops.rope_and_store(*arguments, 1e-6, is_centered=is_centered)

    heads = qkv.unflatten(1, (num_all, head_dim))
    rotated = heads[:, :-num_kv_heads].double()
    if weight is not None:
        rotated = norm(heads[:, :-num_kv_heads], weight, 1e-6, is_centered=is_centered)
    turned = torch.view_as_complex(rotated.unflatten(-1, (-1, 2)).contiguous())
    turned = turned * torch.polar(torch.ones_like(angles), angles)[positions][:, None]
    rotated = torch.view_as_real(turned).flatten(-2)
    assert q.shape == (5, num_heads, head_dim)
    # what is rounded before it is rotated; a mean that is taken off two numbers loses digits
    around = {"": 1.0, "rms": 3.0, "layer": 40.0}[norm_type]
    assert_rounded(q, rotated[:, :num_heads], around)
    expected = [torch.full((7, num_kv_heads, head_dim), torch.nan).double() for _ in "kv"]
    expected[0][[4, 0, 6]] = rotated[[0, 2, 3], num_heads:]
    expected[1][[4, 0, 6]] = heads[[0, 2, 3], -num_kv_heads:].double()
    for found, wanted, pool in zip((k_slots, v_slots), expected, pools, strict=True):
        is_written = ~wanted.isnan()
        assert torch.equal(~found.isnan(), is_written)
        assert_rounded(found[is_written], wanted[is_written], around)
        assert pool[:, 0].isnan().all()
    assert torch.equal(v_slots[6], heads[3, -num_kv_heads:])


@both
def test_store_without_rope() -> None:
    qkv, pool = torch.randn(2, 4 * 16), torch.zeros(2, 3, 1, 16)
    places = torch.tensor([2, 0])
    q = gpu_ops.rope_and_store(qkv, places, places, None, pool[0], pool[1], 2, 1)
    assert torch.equal(q.flatten(1), qkv[:, :32])
    assert torch.equal(pool[:, places, 0], qkv[:, 32:].view(2, 2, 16).transpose(0, 1))


@both
def test_rope_and_store_of_nothing() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    pool = torch.zeros(2, 1, 4)
    out = gpu_ops.rope_and_store(
        torch.empty(0, 12), empty, empty, torch.ones(1, 4), pool, pool, 1, 1
    )
    assert out.shape == (0, 1, 4)


@both
def test_rope_equals_the_decoder_s() -> None:
    """The table's layout and the order of pairs are those of `apply_rotary`."""
    torch.manual_seed(0)
    inv_freq = 1 / 10_000 ** (torch.arange(8) / 8)
    turns = torch_ops.rotations(torch.arange(12), inv_freq, 1.5)
    table = torch.cat((turns.real, turns.imag), -1)[:, 0].contiguous()
    qkv, positions = torch.randn(3, 4 * 16), torch.tensor([11, 0, 5])
    pool = torch.zeros(1, 1, 16)
    slots = torch.full((3,), -1)
    q = gpu_ops.rope_and_store(qkv, positions, slots, table, pool, pool.clone(), 2, 1)
    expected = torch_ops.apply_rotary(qkv[:, :32].view(3, 2, 16), turns[positions])
    torch.testing.assert_close(q, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 2, 5), (16, 5, 64)], ids=str)
@both
def test_copies_of_pages(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """A page may be read twice; NaN is copied too."""
    torch.manual_seed(0)
    page_size = shape[0]
    kv = torch.randn(2, 2, 7, *shape).to(dtype)
    kv[:, :, 4] = torch.nan
    copies = [(0, 1, page_size), (0, 6, min(2, page_size)), (4, 3, 1), (5, 2, 0)]
    expected = kv.clone()
    for source, destination, count in copies:
        expected[:, :, destination, :count] = kv[:, :, source, :count]
    gpu_ops.copy_page_prefixes(kv, torch.tensor(copies, dtype=torch.int32))
    torch.testing.assert_close(kv, expected, rtol=0, atol=0, equal_nan=True)
    gpu_ops.copy_page_prefixes(kv, torch.empty((0, 3), dtype=torch.int32))
    torch.testing.assert_close(kv, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("width", [5, 2_500, 70_000])
@both
def test_flat_indices(width: int) -> None:
    table = torch.randint(0, 99, (3, width + 4), dtype=torch.int32)[:, :width]
    row_of, counts = [2, 0, -1, 2, 1], [3, 0, 4, width, 1]
    starts = torch.tensor([0, 3, 3, 7, 7 + width, 8 + width], dtype=torch.int32)
    out = torch.full((width + 10,), -7, dtype=torch.int32)
    expected = out.clone()
    for row, (source, count) in enumerate(zip(row_of, counts, strict=True)):
        if source >= 0:
            expected[starts[row] : starts[row] + count] = table[source, :count]
    rows = torch.tensor(row_of, dtype=torch.int32)
    assert gpu_ops.flat_indices(table, rows, starts, out) is out
    assert torch.equal(out, expected)
    nothing = torch.empty(0, dtype=torch.int32)
    gpu_ops.flat_indices(table, nothing, starts[:1], out)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("most", [5, 2_500])
@both
def test_copied_ranges(most: int) -> None:
    values = torch.randint(0, 99, (most + 20,), dtype=torch.int32)
    first = torch.tensor([20, 0, 7, 7], dtype=torch.int32)
    starts = torch.tensor([0, most, most, most + 3, most + 4], dtype=torch.int32)
    out = torch.full((most + 6,), -7, dtype=torch.int32)
    expected = torch.cat([values[20:], values[7:10], values[7:8], out[-2:]])
    assert gpu_ops.copy_ranges(values, first, starts, out, most) is out
    assert torch.equal(out, expected)


@pytest.mark.parametrize("scales_last", [True, False])
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 24), (torch.bfloat16, 16)])
@both
def test_what_is_stored_in_8_bits(
    dtype: torch.dtype, dim: int, stored: torch.dtype, scales_last: bool
) -> None:
    """The bits of `to_stored`, numbers of any size; padding stores nothing."""
    torch.manual_seed(0)
    x = (torch.randn(6, 8, dim) * torch.logspace(-9, 6, 6)[:, None, None]).to(dtype)
    x[2, 5, 3], x[3, 7, 0] = torch.nan, torch.inf
    pool = torch.zeros(2, 9, 2, stored_width(dim, stored)).to(stored)
    slots, places = torch.tensor([1, 0, 8, 7, -1, 3]), torch.arange(6)
    gpu_ops.rope_and_store(x.flatten(1), places, slots, None, *pool, 4, 2, scales_last=scales_last)
    kept = slots >= 0
    for rows, new in zip(pool, x[:, 4:].chunk(2, 1), strict=True):
        expected = torch.zeros_like(rows)
        fresh = to_stored(new[kept], stored, scales_last=scales_last)
        torch_ops.as_bytes(expected)[slots[kept]] = torch_ops.as_bytes(fresh)
        read, wanted = (
            from_stored(stored, torch.float32, scales_last=scales_last)
            for stored in (rows, expected)
        )
        torch.testing.assert_close(read, wanted, rtol=0, atol=0, equal_nan=True)
