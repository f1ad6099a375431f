"""K/V of slots is copied out of the pool and into it, wherever the slots lie."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from radixserve.models.base import KVShape, ModelInfo
from radixserve.runner.kv_pool import KVPool, _spans
from radixserve.runner.pool_sizing import PoolSize
from radixserve_kernels.torch_ops import as_bytes

NUM_SLOTS = 60
DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]


def make_info(dtype: torch.dtype, head_dim: int) -> ModelInfo:
    return ModelInfo(
        architecture="LlamaForCausalLM",
        is_native=True,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        hidden_size=64,
        vocab_size=10,
        max_positions=100,
        eos_ids=(),
        dtype=torch.float32,
        num_parameters=1,
        kv_dtype=dtype,
    )


def make_pool(dtype: torch.dtype, head_dim: int) -> KVPool:
    """Three layers, two heads, fifteen pages of four slots, random content."""
    info = make_info(dtype, head_dim)
    pool = KVPool(info, PoolSize(NUM_SLOTS // 4), 4, torch.device("cpu"))
    pool.kv.copy_((100 * torch.randn(pool.kv.shape)).to(dtype))
    return pool


def copy_by_torch(*pools: KVPool) -> None:
    """As on a device, where numpy reaches no memory."""
    for pool in pools:
        for layers in pool._layers_by_row:
            layers._words = None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 7])
@pytest.mark.parametrize("by_torch", [False, True])
def test_slots_are_read_and_written(dtype: torch.dtype, head_dim: int, by_torch: bool) -> None:
    """One after the other, in pieces, in any order; other slots keep their content."""
    pool, target = make_pool(dtype, head_dim), make_pool(dtype, head_dim)
    if by_torch:
        copy_by_torch(pool, target)
    rng = np.random.default_rng(0)
    row_bytes = pool.layout.row_bytes
    into = np.zeros(3 * 2 * NUM_SLOTS * row_bytes + 5, np.uint8)
    pages = rng.permutation(NUM_SLOTS // 4)[:5]
    for slots in (
        np.arange(NUM_SLOTS),
        np.arange(7, 30),
        np.concatenate([np.arange(40, 60), np.arange(3, 20)]),
        (4 * pages[:, None] + np.arange(4)).reshape(-1)[1:-2],
        rng.permutation(NUM_SLOTS),
        rng.permutation(NUM_SLOTS)[:1],
        np.arange(NUM_SLOTS)[::-3],
    ):
        slots = slots.astype(np.int64)
        kv = pool.read(slots, into)
        assert kv.shape == (3, 2, len(slots), row_bytes)
        assert np.shares_memory(kv, into)
        expected = pool.kv.flatten(2, 3)[:, :, torch.from_numpy(slots)].contiguous()
        assert kv.tobytes() == expected.view(torch.uint8).numpy().tobytes()
        before = target.kv.clone().flatten(2, 3)
        first = len(slots) // 3
        target.write(slots[first:], kv[:, :, first:])
        as_bytes(before)[:, :, torch.from_numpy(slots[first:])] = as_bytes(expected[:, :, first:])
        assert torch.equal(target.kv.flatten(2, 3).view(torch.uint8), before.view(torch.uint8))


def test_slots_in_a_row_are_copied_together() -> None:
    slots = np.array([*range(10, 15), *range(3, 9), 20], np.int64)
    assert _spans(slots) == [(0, 5, 10), (5, 11, 3), (11, 12, 20)]
    assert _spans(np.arange(5, dtype=np.int64)) == [(0, 5, 0)]
    assert _spans(np.arange(0, 20, 2)) is None


SHAPES = (KVShape(2, 7), KVShape(1, 16), KVShape(2, 7), KVShape(2, 12), KVShape(1, 16))


def make_mixed_pool(dtype: torch.dtype, page_size: int = 4) -> KVPool:
    """Five layers of three shapes, random content."""
    info = replace(make_info(dtype, 16), num_layers=5, kv_shapes=SHAPES)
    pool = KVPool(info, PoolSize(NUM_SLOTS // page_size), page_size, torch.device("cpu"))
    for kv in (pool.kv, *(apart.kv for apart in pool.others)):
        kv.copy_((100 * torch.randn(kv.shape)).to(dtype))
    return pool


def layers_of(pool: KVPool) -> list[torch.Tensor]:
    """Of each layer the bytes of K and V, [2, num_slots, row bytes]."""
    apart = {
        layer: group.kv[index] for group in pool.others for index, layer in enumerate(group.layers)
    }
    own = iter(pool.kv)
    layers = [apart[n] if n in apart else next(own) for n in range(len(SHAPES))]
    return [kv.flatten(1, 2).flatten(2).view(torch.uint8).clone() for kv in layers]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_takes_what_its_heads_need(dtype: torch.dtype) -> None:
    pool = make_mixed_pool(dtype)
    scale = 2 if dtype == torch.int8 else 0
    rows = [count * (dim * dtype.itemsize + scale) for count, dim in SHAPES]
    info = replace(make_info(dtype, 16), num_layers=5, kv_shapes=SHAPES)
    assert [kv.shape[-1] for kv in layers_of(pool)] == rows
    assert info.kv_bytes_per_token == 2 * sum(rows) == pool.layout.token_bytes
    assert pool.num_bytes == NUM_SLOTS * info.kv_bytes_per_token
    windowed = replace(info, window_layers=(1, 4), window_size=8)
    assert windowed.window_bytes_per_token == 2 * 2 * rows[1]
    divided = KVPool(windowed, PoolSize(15, 4), 4, torch.device("cpu"))
    assert divided.num_bytes == 60 * 2 * (sum(rows) - 2 * rows[1]) + 20 * 2 * 2 * rows[1]


@pytest.mark.parametrize("by_torch", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_of_several_shapes_are_read_and_written(dtype: torch.dtype, by_torch: bool) -> None:
    pool, target = make_mixed_pool(dtype), make_mixed_pool(dtype)
    if by_torch:
        copy_by_torch(pool, target)
    rng = np.random.default_rng(1)
    into = np.zeros(NUM_SLOTS * pool.layout.token_bytes + 3, np.uint8)
    for slots in (np.arange(7, 30), rng.permutation(NUM_SLOTS), np.arange(NUM_SLOTS)[::-3]):
        slots = slots.astype(np.int64)
        index = torch.from_numpy(slots)
        kv = pool.read(slots, into)
        expected = torch.cat([layer[:, index] for layer in layers_of(pool)], -1)
        assert torch.equal(torch.from_numpy(kv)[0], expected)
        first, before = len(slots) // 3, layers_of(target)
        target.write(slots[first:], kv[:, :, first:])
        for old, new, source in zip(before, layers_of(target), layers_of(pool), strict=True):
            old[:, index[first:]] = source[:, index[first:]]
            assert torch.equal(old, new)


def test_page_prefixes_of_all_shapes_are_copied() -> None:
    pool = make_mixed_pool(torch.bfloat16)
    before = layers_of(pool)
    pool.copy_page_prefixes(np.array([[0, 3, 3], [1, 5, 4]], np.int32))
    for old, new in zip(before, layers_of(pool), strict=True):
        old[:, 12:15], old[:, 20:24] = old[:, 0:3].clone(), old[:, 4:8].clone()
        assert torch.equal(old, new)


def test_large_memory_pages_keep_the_content_of_small_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not make_pool(torch.float32, 8).enlarge_next()  # a small pool stays in small pages
    monkeypatch.setattr("radixserve.runner.kv_pool._LARGE_POOL", 0)
    pool = make_pool(torch.float32, 8)
    written = torch.rand(pool.kv.shape)
    pool.kv.copy_(written)
    assert sum(iter(pool.enlarge_next, False)) == 2 * 3
    assert torch.equal(pool.kv, written)
