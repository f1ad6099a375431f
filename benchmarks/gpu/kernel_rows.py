"""Cases of the kernels over token rows, pages and logits."""

from __future__ import annotations

import math
from itertools import product

import torch
from gpu import kernel_truth as truth
from gpu.bench import Bench
from gpu.kernel_tally import EXACT, NAMES, ROUNDED, TWICE, Tally, same
from torch import Tensor

from radixserve_kernels import gpu_ops

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SECTION = "rows, pages, logits"
EPS = 1e-5
SLACK = 1e-4  # of sums and random numbers, within which another token may be drawn
PARAMS = (  # temperature, top_k, top_p, min_p
    (1.0, 0, 1.0, 0.0),
    (0.7, 20, 0.95, 0.0),
    (1.3, 0, 0.5, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 0, 1.0, 0.1),
    (2.0, 3, 0.3, 0.01),
    (0.6, 0, 1.0, 0.0),
    (1.0, 4_000, 0.99, 0.0),
)


def check_rows(bench: Bench) -> None:
    tally, pick = Tally(bench, SECTION), bench.pick
    sizes = pick((100, 1_024, 4_096, 8_192), (100, 4_096), (100,))
    for dtype, rows, size in product(DTYPES, pick((1, 3, 257), (1, 257), (3,)), sizes):
        case = f"{NAMES[dtype]} {rows} x {size}", ROUNDED[dtype]
        tally.case("rms_norm", *case, _norm_error, dtype, rows, size)
        tally.case("add_rms_norm", *case, _add_norm_error, dtype, rows, size)
    sizes = pick((70, 3_072, 14_336), (70, 14_336), (70,))
    for dtype, rows, size in product(DTYPES, pick((1, 130), (130,), (3,)), sizes):
        case = f"{NAMES[dtype]} {rows} x {size}", ROUNDED[dtype]
        tally.case("silu_and_mul", *case, _activation_error, dtype, rows, size)
    shapes = pick(((32, 8, 128), (16, 8, 128), (5, 1, 64)), ((32, 8, 128),), ((4, 2, 16),))
    for dtype, shape, has_norm, rows in product(DTYPES, shapes, (False, True), (1, 70)):
        what = f"{NAMES[dtype]} {shape} {rows} rows{' qk_norm' if has_norm else ''}"
        allowed = ROUNDED[dtype] * (TWICE if has_norm else 1)
        tally.case("rope_and_store", what, allowed, _rotation_error, dtype, shape, rows, has_norm)
    for dtype, page_size in product(DTYPES, (1, 16, 64)):
        what = f"{NAMES[dtype]} pages of {page_size}"
        tally.case("copy_page_prefixes", what, EXACT, _copy_error, dtype, page_size)
    for width in pick((5, 2_500, 70_000), (2_500,), (50,)):
        tally.case("flat_indices", f"60 rows of up to {width} pages", EXACT, _index_error, width)
    tally.tell()


def check_draws(bench: Bench) -> None:
    tally = Tally(bench, SECTION)
    vocabularies = bench.pick((128_256, 151_936, 4_099), (128_256,), (300,))
    for vocab in vocabularies:
        tally.case("argmax", f"{vocab:,} tokens", EXACT, _argmax_error, vocab)
        tally.case("token_logprob", f"{vocab:,} tokens", 1e-4, _logprob_error, vocab)
    for vocab, ties in product(vocabularies, (False, True)):
        what = f"{vocab:,} tokens{' with ties' if ties else ''}"
        tally.case("sample", what, EXACT, _draw_error, vocab, ties)
    tally.tell()


def poisoned(*shape: int, like: Tensor) -> Tensor:
    return like.new_full(shape, math.nan)


def _strided(bench: Bench, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Rows of random numbers with others between them."""
    wide = torch.randn(rows, columns + 8, device=bench.device) * 2
    return wide.to(dtype)[:, :columns]


def _norm_error(bench: Bench, dtype: torch.dtype, rows: int, size: int) -> float:
    x = _strided(bench, rows, size, dtype)
    weight = torch.randn(size, device=bench.device).to(dtype)
    out = gpu_ops.rms_norm(x, weight, EPS, out=poisoned(*x.shape, like=x))
    return truth.error(out, truth.rms_norm(x, weight, EPS))


def _add_norm_error(bench: Bench, dtype: torch.dtype, rows: int, size: int) -> float:
    x, residual = (_strided(bench, rows, size, dtype) for _ in range(2))
    weight = torch.randn(size, device=bench.device).to(dtype)
    total = residual + x
    out, _ = gpu_ops.add_rms_norm(x, residual, weight, EPS, out=poisoned(*x.shape, like=x))
    return max(same(residual, total), truth.error(out, truth.rms_norm(total, weight, EPS)))


def _activation_error(bench: Bench, dtype: torch.dtype, rows: int, size: int) -> float:
    x = _strided(bench, rows, 2 * size, dtype)
    out = gpu_ops.silu_and_mul(x, poisoned(rows, size, like=x))
    return truth.error(out, truth.silu_and_mul(x))


def _rotation_error(
    bench: Bench, dtype: torch.dtype, shape: tuple[int, int, int], rows: int, has_norm: bool
) -> float:
    """The error of q, of the stored cells, and of the cells that have to stay as they are."""
    num_heads, num_kv_heads, dim = shape
    num_all, device = num_heads + 2 * num_kv_heads, bench.device
    qkv = _strided(bench, rows, num_all * dim, dtype)
    positions = torch.randint(0, 500, (rows,), device=device)
    slots = torch.randperm(rows + 9, device=device)[:rows]
    slots[::3] = -1
    angles = torch.rand(500, dim // 2, device=device) * 6
    table = torch.cat((angles.cos(), angles.sin()), 1)
    weight = torch.randn(num_heads + num_kv_heads, dim, device=device).to(dtype)
    pools = [poisoned(rows + 9, num_kv_heads + 1, dim, like=qkv) for _ in range(2)]
    k_slots, v_slots = (pool[:, 1:] for pool in pools)
    q = gpu_ops.rope_and_store(
        qkv,
        positions,
        slots,
        table,
        k_slots,
        v_slots,
        num_heads,
        num_kv_heads,
        weight if has_norm else None,
        EPS,
        poisoned(rows, num_heads, dim, like=qkv),
    )
    heads = qkv.unflatten(1, (num_all, dim))
    turned = heads[:, :-num_kv_heads]
    if has_norm:
        turned = truth.rms_norm(turned, weight, EPS)
    turned = truth.rotate(turned, positions, table)
    errors = [truth.error(q, turned[:, :num_heads])]
    kept = (slots >= 0).cpu()
    places = slots.cpu()[kept]
    for pool, wanted in zip(
        pools, (turned[:, num_heads:], truth.double(heads[:, -num_kv_heads:])), strict=True
    ):
        found = pool.cpu()
        if len(places):
            errors.append(truth.error(found[places, 1:], wanted[kept]))
        rest = torch.ones(len(found), dtype=torch.bool)
        rest[places] = False
        stays = bool(found[rest].isnan().all()) and bool(found[:, 0].isnan().all())
        errors.append(0.0 if stays else math.inf)
    return max(errors)


def _copy_error(bench: Bench, dtype: torch.dtype, page_size: int) -> float:
    kv = torch.randn(3, 2, 9, page_size, 2, 64, device=bench.device).to(dtype)
    kv[:, :, 4] = math.nan
    heads = [(0, 1, page_size), (0, 6, (page_size + 1) // 2), (4, 3, 1), (5, 2, 0)]
    expected = kv.clone()
    for source, target, count in heads:
        expected[:, :, target, :count] = kv[:, :, source, :count]
    gpu_ops.copy_page_prefixes(kv, torch.tensor(heads, dtype=torch.int32, device=bench.device))
    return same(kv, expected)


def _index_error(bench: Bench, width: int) -> float:
    make = {"dtype": torch.int32, "device": bench.device}
    table = torch.randint(0, 99, (40, width), **make)
    row_of = torch.randint(-1, 40, (60,), **make)
    counts = torch.randint(0, width + 1, (60,), **make)
    indptr = torch.cat((counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)))
    out = torch.full((int(indptr[-1]) + 7,), -7, **make)
    expected = out.clone()
    for row, (source, count) in enumerate(zip(row_of, counts, strict=True)):
        if source >= 0:
            expected[indptr[row] : indptr[row + 1]] = table[source, :count]
    return same(gpu_ops.flat_indices(table, row_of, counts, indptr, out), expected)


def _argmax_error(bench: Bench, vocab: int) -> float:
    logits = torch.randn(9, vocab, device=bench.device).round(decimals=1)  # ties
    logits[1, 7], logits[2], logits[3, 5] = math.nan, -math.inf, math.inf
    ids, finite = gpu_ops.argmax(logits)
    flags = torch.ones(9, dtype=torch.bool)
    flags[1:4] = False
    wanted = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1).cpu()
    wanted[1:4] = 0
    return max(same(finite, flags), same(ids, wanted))


def _logprob_error(bench: Bench, vocab: int) -> float:
    logits = 8 * torch.randn(6, vocab, device=bench.device)
    logits[2, 1:] = -math.inf
    ids = torch.randint(0, vocab, (6,), device=bench.device)
    ids[2] = 0
    wanted = truth.double(logits).log_softmax(-1).gather(1, ids.cpu()[:, None])[:, 0]
    found = gpu_ops.token_logprob(logits, ids)
    return float((truth.double(found) - wanted).abs().nan_to_num(math.inf).max())


def _draw_error(bench: Bench, vocab: int, ties: bool) -> float:
    """inf where a token is none that may be drawn; the last two rows are greedy and broken."""
    logits = 3 * torch.randn(len(PARAMS) + 2, vocab, device=bench.device)
    logits = logits.round() if ties else logits
    count = len(PARAMS)
    columns = [*zip(*PARAMS, strict=True)]
    make = {"device": bench.device}
    temperature = torch.tensor([*columns[0], 0.0, 1.0], **make)
    top_k = torch.tensor([*columns[1], 0, 0], dtype=torch.int32, **make)
    top_p = torch.tensor([*columns[2], 1.0, 1.0], dtype=torch.float64, **make)
    min_p = torch.tensor([*columns[3], 0.0, 0.0], **make)
    uniform = torch.rand(count + 2, dtype=torch.float64).clamp(1e-9, 1 - 1e-9)
    logits[count + 1, 3] = math.nan
    finite = torch.zeros(count + 2, dtype=torch.bool, **make)
    params = (temperature, top_k, top_p, min_p, uniform.to(bench.device))
    tokens = gpu_ops.sample(logits, *params, finite).tolist()
    wrong = finite.tolist() != [True] * (count + 1) + [False] or tokens[count + 1] != 0
    first_best = int((logits[count] == logits[count].max()).int().argmax())
    wrong |= tokens[count] != first_best
    for row, one in enumerate(PARAMS):
        allowed = truth.drawable(logits[row], one, float(uniform[row]), SLACK)
        wrong |= tokens[row] not in allowed
    return math.inf if wrong else 0.0
