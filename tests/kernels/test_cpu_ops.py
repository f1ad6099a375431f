"""The compiled kernels' products against torch's, over odd shapes, and row by row to the bit."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from radixserve_kernels import cpu_ops, processor
from radixserve_kernels.attention_metadata import AttentionMetadata
from radixserve_kernels.cpu_attention import CpuAttentionPlan
from radixserve_kernels.cpu_library import cpu_library
from radixserve_kernels.cpu_ops import unsupported_reason
from radixserve_kernels.cpu_weights import LARGE_PAGE, Arena, PackedWeight, fresh_memory, interleave

AT_EXIT = """
import atexit
ended = []
atexit.register(lambda: print("ended:", ended))
import numpy as np, torch
from radixserve_kernels import cpu_attention
from radixserve_kernels.attention_metadata import AttentionMetadata
library = cpu_attention.cpu_library()
for name in ("radixserve_delete_plan", "radixserve_delete_attention"):
    setattr(library, name, lambda *_, name=name: ended.append(name))
one, ends = np.array([0]), np.array([0, 1])
rows = AttentionMetadata(one, ends, ends, ends[1:], [np.zeros(1, np.int32)])
plans = [cpu_attention.CpuAttentionPlan(rows, 1, (1, 1, 8), None) for _ in range(2)]
attention = cpu_attention.PagedAttention(torch.float32)
plans.pop()
"""
SIZES = [1, 5, 15, 16, 17, 31, 32, 33, 100, 688]
SHAPES = [
    *itertools.product([1, 5, 13, 33, 100], [1, 15, 33, 100], [1, 17, 31, 100]),
    *((m, n, k) for m, n, k in zip(SIZES, SIZES[3:] + SIZES[:3], SIZES[::-1], strict=True)),
    (688, 688, 100),
    (17, 100, 1000),
    (70, 33, 1000),
    (600, 33, 400),
    (300, 33, 2047),  # depths that are multiplied in parts, and one that just is not
    (300, 70, 2048),
    (26, 4200, 2311),  # more panels than are kept from one part to the next
]
SHAPES_OF = {rows: [shape for shape in SHAPES if shape[0] == rows] for rows, _, _ in SHAPES}
COUNTS = [*range(1, 9), *(11, 12, 13, 16, 17, 23, 24, 25, 31, 32, 33, 47, 48, 63, 64, 65, 100, 201)]

needs_kernels = pytest.mark.skipif(
    bool(unsupported_reason(torch.float32)),
    reason=unsupported_reason(torch.float32) or "they are here",
)
pytestmark = needs_kernels


def operands(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, K], weight [N, K], bias [N]."""
    generator = torch.Generator().manual_seed(m + 1000 * n + 100_000 * k)
    sizes = ((m, k), (n, k), (n,))
    x, weight, bias = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    return x, weight, bias


@functools.cache
def exact_product(m: int, n: int, k: int, dtype: torch.dtype) -> Tensor:
    """Without the bias: the same at each level."""
    x, weight, _ = operands(m, n, k, dtype)
    return F.linear(x.double(), weight.double())


def check_product(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, weight, bias = operands(m, n, k, dtype)
    for some_bias in (None, bias):
        out = PackedWeight(weight, some_bias)(x)
        assert (out.dtype, out.shape) == (dtype, (m, n))
        exact = exact_product(m, n, k, dtype)
        exact = exact if some_bias is None else exact + some_bias.double()
        if dtype == torch.float32:  # one long sum: its error grows as it does
            tolerance, atol = 2e-6, 2.5e-7 * (k + 16)
        else:
            tolerance, atol = 5e-3, 5e-3 * (k**0.5 + 1)
        torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=atol)


@pytest.mark.usefixtures("cpu_level")
@pytest.mark.parametrize("num_rows", SHAPES_OF)
def test_products_in_float32(num_rows: int) -> None:
    for shape in SHAPES_OF[num_rows]:
        check_product(*shape, torch.float32)


@pytest.mark.usefixtures("cpu_level")
@pytest.mark.parametrize("num_rows", SHAPES_OF)
def test_products_in_bfloat16(num_rows: int) -> None:
    for shape in SHAPES_OF[num_rows]:
        check_product(*shape, torch.bfloat16)


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads(dtype: torch.dtype) -> None:
    if reason := unsupported_reason(dtype):
        pytest.skip(reason)
    x, weight, bias = operands(300, 333, 257, dtype)
    packed = PackedWeight(weight, bias)
    out = packed(x)
    torch.set_num_threads(1)
    assert torch.equal(packed(x), out)
    check_product(300, 333, 257, dtype)


@pytest.mark.usefixtures("cpu_level")
@pytest.mark.parametrize("num_rows", SHAPES_OF)
def test_weights_in_float16_are_widened(num_rows: int) -> None:
    """To the bits of the same weights in float32."""
    for shape in SHAPES_OF[num_rows]:
        x, weight, bias = operands(*shape, torch.float32)
        packed = PackedWeight(weight.half(), bias)
        assert packed.num_bytes < PackedWeight(weight, bias).num_bytes
        assert torch.equal(packed(x), PackedWeight(weight.half().float(), bias)(x)), shape


def check_rows(n: int, k: int, dtype: torch.dtype, counts: Sequence[int] = COUNTS) -> None:
    """Each product row has the same bits computed alone and with any number of other rows."""
    x, weight, bias = operands(max(counts), n, k, dtype)
    packed = PackedWeight(weight, bias)
    alone, together = torch.cat([packed(row[None]) for row in x]), packed(x)
    assert torch.equal(alone, together)
    for count in counts:
        assert torch.equal(packed(x[:count]), alone[:count]), f"{count} rows"
        assert torch.equal(packed(x[-count:]), alone[-count:]), f"{count} rows"
    x[1::2] = torch.nan
    out = packed(x)
    assert torch.equal(out[::2], together[::2])
    assert out[1::2].isnan().all()


@pytest.mark.usefixtures("cpu_level")
@pytest.mark.parametrize(
    ("n", "k"), [(33, 40), (100, 688), (31, 1000), (200, 17), (65, 2305), (4200, 2048)]
)
def test_a_row_does_not_depend_on_others(n: int, k: int) -> None:
    check_rows(n, k, torch.float32, COUNTS if n < 1000 else COUNTS[:20])


@pytest.mark.usefixtures("cpu_level")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_for_each_number_of_rows(dtype: torch.dtype) -> None:
    check_rows(130, 300, dtype, range(1, 97))


def test_what_is_not_finite_stays_in_its_row_and_column() -> None:
    x, weight, _ = operands(70, 50, 77, torch.float32)
    expected = PackedWeight(weight)(x)
    x[3, 5], x[40, 76], weight[20, 33] = torch.inf, -torch.inf, torch.nan
    out = PackedWeight(weight)(x)
    spoilt = torch.zeros(70, 50, dtype=torch.bool)
    spoilt[[3, 40]], spoilt[:, 20] = True, True
    assert not out[spoilt].isfinite().any()
    assert torch.equal(out[~spoilt], expected[~spoilt])


@pytest.mark.usefixtures("cpu_level")
@pytest.mark.parametrize(("n", "k"), [(33, 40), (100, 688), (31, 1000), (200, 17), (65, 2305)])
def test_a_row_does_not_depend_on_others_in_bfloat16(n: int, k: int) -> None:
    check_rows(n, k, torch.bfloat16)


def test_what_lies_behind_a_weight_is_not_seen() -> None:
    """Weights and inputs that are parts of wider tensors full of NaN."""
    x, weight, _ = operands(7, 19, 23, torch.float32)
    wide_x, wide = torch.full((9, 50), torch.nan), torch.full((40, 50), torch.nan)
    wide_x[:7, :23], wide[:19, :23] = x, weight
    out = PackedWeight(wide[:19, :23])(wide_x[:7, :23])
    torch.testing.assert_close(out, x @ weight.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [1, 15, 16, 17, 100])
def test_interleave(count: int) -> None:
    lanes = cpu_library().radixserve_lanes()
    gate, up = torch.randn(2, count, 3)
    woven = interleave(gate, up)
    padded = -(-count // lanes) * lanes
    assert woven.shape == (2 * padded, 3)
    turns = woven.view(-1, 2, lanes, 3)
    for half, original in ((turns[:, 0], gate), (turns[:, 1], up)):
        flat = half.reshape(-1, 3)
        assert torch.equal(flat[:count], original)
        assert not flat[count:].any()
    assert torch.equal(interleave(gate[:, 0], up[:, 0]), woven[:, 0])


def test_what_is_in_use_at_the_end_of_the_process_is_kept() -> None:
    """The engine's thread may be computing with it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.stdout == "ended: ['radixserve_delete_plan']\n", done.stderr


def test_a_plan_is_cut_for_the_threads_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    library = cpu_library()
    monkeypatch.setattr(library, "radixserve_set_threads", told.append)
    one, ends = np.array([0]), np.array([0, 1])
    rows = AttentionMetadata(one, ends, ends, ends[1:], [np.zeros(1, np.int32)])
    CpuAttentionPlan(rows, 1, (1, 1, 8), None).jobs()
    assert told == [torch.get_num_threads()]


def test_a_plan_that_was_reset_is_that_of_the_new_rows() -> None:
    def rows_of(*lengths: int) -> AttentionMetadata:
        ends, one_each = np.cumsum([0, *lengths]), np.arange(len(lengths) + 1)
        pages = np.arange(ends[-1], dtype=np.int32)
        return AttentionMetadata(np.array(lengths) - 1, one_each, ends, np.array(lengths), [pages])

    plan = CpuAttentionPlan(rows_of(7), 1, (4, 2, 8), 24)
    for lengths in ((3, 9, 1), (200, 150), (1,)):
        rows = rows_of(*lengths)
        plan.reset(rows)
        reset, fresh = plan.jobs(), CpuAttentionPlan(rows, 1, (4, 2, 8), 24).jobs()
        for name in ("level_indptr", "query_indptr", "query_tokens", "first_page", "num_keys"):
            assert getattr(reset, name).tolist() == getattr(fresh, name).tolist(), name
        assert reset.flags.tolist() == fresh.flags.tolist()
        assert reset.num_tokens == len(lengths)


def test_rows_that_were_written_over_are_planned_anew() -> None:
    start, qo_indptr, kv_indptr = np.array([4]), np.array([0, 1]), np.array([0, 5])
    seq_lens = np.array([5])
    pages = np.arange(10, dtype=np.int32)
    rows = AttentionMetadata(start, qo_indptr, kv_indptr, seq_lens, [pages[:5]])
    plan = CpuAttentionPlan(rows, 1, (4, 2, 8), 24)
    assert plan.jobs().num_keys.tolist() == [5]
    start += 1
    seq_lens += 1
    kv_indptr[1] += 1
    rows.take_page_tables([pages[4:]])
    plan.reset(rows)
    assert plan.jobs().num_keys.tolist() == [6]
    assert plan.jobs().page_ids.tolist() == [4, 5, 6, 7, 8, 9]


def test_weights_lie_side_by_side() -> None:
    arena = Arena(piece_bytes=1024)
    taken = [arena.take(size) for size in (100, 64, 1, 700, 300, 5000, 24)]
    for number, memory in enumerate(taken):
        assert memory.ctypes.data % 64 == 0
        assert not memory.any()
        memory[:] = number + 1
    assert [set(memory.tolist()) for memory in taken] == [{n + 1} for n in range(7)]
    addresses = [memory.ctypes.data for memory in taken]
    assert [b - a for a, b in itertools.pairwise(addresses[:4])] == [128, 64, 64]  # one piece
    assert taken[0].base is taken[3].base
    assert taken[4].base is not taken[3].base  # it was full


def test_fresh_memory_is_nobody_elses() -> None:
    first, second = fresh_memory(5000), fresh_memory(3 << 20)
    for memory, size in ((first, 5000), (second, 3 << 20)):
        assert memory.ctypes.data % 64 == 0
        assert len(memory) == size
        assert not memory.any()
        memory[:] = 255
    if sys.platform == "linux":  # large pages begin at multiples of their size
        assert [memory.ctypes.data % LARGE_PAGE for memory in (first, second)] == [0, 0]
    third = fresh_memory(5000)
    assert not third.any()
    assert (first == 255).all()
    with pytest.raises((MemoryError, ValueError)):
        fresh_memory(1 << 60)


def test_what_the_kernels_say_of_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "float16" in unsupported_reason(torch.float16)
    assert cpu_ops.describe().startswith("vectors of ")

    class Processor:
        def __init__(self, lanes: int, bf16: int, integers: int) -> None:
            self.radixserve_lanes, self.radixserve_bf16 = lambda: lanes, lambda: bf16
            self.radixserve_integer_dot = lambda: integers

    narrow = "NEON" if processor.IS_ARM else "vectors of 128 bits"
    for lanes, bf16, integers, told in (
        (4, 0, 0, f"128 bits, bfloat16: {narrow} widened to float32, 8 and 4 bits: {narrow}"),
        (4, 0, 3, f"128 bits, bfloat16: {narrow} widened to float32, 8 and 4 bits: SDOT"),
        (4, 3, 4, "128 bits, bfloat16: BFMMLA, 8 and 4 bits: SMMLA"),
        (8, 0, 1, "256 bits, bfloat16: AVX2 widened to float32, 8 and 4 bits: AVX2"),
        (8, 0, 2, "256 bits, bfloat16: AVX2 widened to float32, 8 and 4 bits: VNNI"),
        (16, 0, 1, "512 bits, bfloat16: AVX-512 widened to float32, 8 and 4 bits: AVX-512"),
        (16, 1, 2, "512 bits, bfloat16: AVX-512 BF16, 8 and 4 bits: VNNI"),
        (16, 2, 2, "512 bits, bfloat16: AMX, 8 and 4 bits: VNNI"),
    ):
        library = Processor(lanes, bf16, integers)
        monkeypatch.setattr(cpu_ops, "cpu_library", lambda _=None, it=library: it)
        assert cpu_ops.describe().startswith(f"vectors of {told}")
        assert unsupported_reason(torch.bfloat16) == ""


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 100, 4_099])
def test_masks_over_logits(columns: int) -> None:
    if reason := cpu_ops.unsupported_reason(torch.float32):
        pytest.skip(reason)
    rng = np.random.default_rng(columns)
    words = -(-columns // 32) + 1  # a mask may be longer than a row
    logits = torch.from_numpy(rng.standard_normal((8, columns)).astype(np.float32)).round(
        decimals=1
    )
    logits[6, columns // 2] = torch.nan
    share = np.array([0.0, 0.02, 0.5, 0.98, 1.0, 1.0, 0.7])
    bits = rng.random((7, words * 32)) < share[:, None]
    bitmask = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    mask_of = np.array([0, 1, 2, -1, 3, 4, 5, 6])
    wanted = logits.clone()
    for row, mask in enumerate(mask_of.tolist()):
        if mask >= 0:
            wanted[row, ~torch.from_numpy(bits[mask, :columns])] = -torch.inf
    found = cpu_ops.copy_allowed(logits, bitmask, mask_of)
    assert torch.equal(found.nan_to_num(9), wanted.nan_to_num(9))
    ids, num_broken = cpu_ops.argmax_allowed(logits, bitmask, mask_of)
    best = wanted.numpy().argmax(-1)
    top = wanted.numpy()[np.arange(8), best]
    assert num_broken == (~np.isfinite(top)).sum()
    assert ids == [-1 if value == -np.inf else at for at, value in zip(best, top, strict=True)]


@pytest.mark.parametrize("columns", [1, 5, 16, 17, 100, 4_099])
def test_argmax_is_that_of_numpy(columns: int) -> None:
    if reason := cpu_ops.unsupported_reason(torch.float32):
        pytest.skip(reason)
    generator = torch.Generator().manual_seed(columns)
    plain = torch.randn(7, columns, generator=generator)
    odd = plain.clone()
    odd[0, 0] = odd[0, -1] = odd[2, columns // 2] = torch.nan
    odd[1] = -torch.inf
    odd[3, -1] = torch.inf
    odd[4] = 0
    for logits in (plain, plain.round(), odd, torch.full_like(plain, -torch.inf)):
        values = logits.numpy()
        expected = values.argmax(-1)
        found, num_broken = cpu_ops.argmax(logits)
        assert found == expected.tolist()
        assert num_broken == (~np.isfinite(values[np.arange(7), expected])).sum()


@pytest.mark.parametrize("columns", [1, 31, 256, 300, 4_099])
@pytest.mark.parametrize("temperature", [1e-5, 0.7, 1.0, 100.0])
def test_draws_invert_the_distribution_of_what_is_allowed(columns: int, temperature: float) -> None:
    if reason := cpu_ops.unsupported_reason(torch.float32):
        pytest.skip(reason)
    rng = np.random.default_rng(columns)
    num_rows = 64
    logits = torch.from_numpy(3 * rng.standard_normal((num_rows, columns)).astype(np.float32))
    logits[:, rng.random(columns) < 0.1] = -torch.inf
    logits[:, rng.integers(columns)] = 1.0
    shares = np.array([0.01, 0.5, 1.0])
    bits = rng.random((3, -(-columns // 32) * 32)) < shares[:, None]
    bits[:, rng.integers(columns)] = True
    mask_of = rng.integers(-1, 3, num_rows)
    uniform = rng.random(num_rows)
    values = logits.double().numpy()
    values[~np.where(mask_of[:, None] < 0, True, bits[mask_of])[:, :columns]] = -np.inf
    top = values.max(1, keepdims=True)
    with np.errstate(invalid="ignore"):
        weights = np.where(values > -np.inf, np.exp((values - top) / temperature), 0)
    mass = weights.cumsum(1)
    point = uniform[:, None] * mass[:, -1:]
    bitmask = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    heat = np.full(num_rows, temperature, np.float32)
    ids, num_broken = cpu_ops.sample(logits, bitmask, mask_of, heat, uniform)
    is_possible = top[:, 0] > -np.inf
    assert num_broken == (~is_possible).sum()
    rows = np.flatnonzero(is_possible)
    chosen = np.array(ids)[rows]
    assert (weights[rows, chosen] > 0).all()
    slack = 1e-5 * mass[rows, -1]
    assert (mass[rows, chosen] > point[rows, 0] - slack).all()
    before = mass[rows, chosen] - weights[rows, chosen]
    assert (before <= point[rows, 0] + slack).all()


def test_draws_at_temperature_zero_and_without_a_finite_best_logit() -> None:
    if reason := cpu_ops.unsupported_reason(torch.float32):
        pytest.skip(reason)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 700, generator=generator)
    logits[1, 300] = torch.nan
    logits[2, 500] = torch.inf
    logits[3] = -torch.inf
    bitmask = np.zeros((1, 22), np.int32)
    mask_of = np.array([-1, -1, -1, -1, 0, -1])
    heat = np.array([0, 1, 1, 1, 1, 1], np.float32)
    ids, num_broken = cpu_ops.sample(logits, bitmask, mask_of, heat, np.full(6, 1 - 2.0**-53))
    assert ids[0] == int(logits[0].argmax())
    assert ids[1:3] == [300, 500]
    assert ids[4] == -1
    assert ids[5] == 699, "the last one of all"
    assert num_broken == 4
