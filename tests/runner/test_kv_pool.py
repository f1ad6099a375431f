"""K/V of slots is copied out of the pool and into it, wherever the slots lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from radixserve.models.base import ModelInfo
from radixserve.runner.kv_pool import KVPool, _spans
from radixserve.runner.pool_sizing import PoolSize

NUM_SLOTS = 60


def make_pool(dtype: torch.dtype, head_dim: int) -> KVPool:
    """Three layers, two heads, fifteen pages of four slots, random content."""
    info = ModelInfo(
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
    pool = KVPool(info, PoolSize(NUM_SLOTS // 4), 4, torch.device("cpu"))
    pool.kv.copy_((100 * torch.randn(pool.kv.shape)).to(dtype))
    return pool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("head_dim", [8, 7])
def test_slots_are_read_and_written(dtype: torch.dtype, head_dim: int) -> None:
    """One after the other, in pieces, in any order; other slots keep their content."""
    pool, target = make_pool(dtype, head_dim), make_pool(dtype, head_dim)
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
        before[:, :, torch.from_numpy(slots[first:])] = expected[:, :, first:]
        assert torch.equal(target.kv.flatten(2, 3).view(torch.uint8), before.view(torch.uint8))


def test_slots_in_a_row_are_copied_together() -> None:
    slots = np.array([*range(10, 15), *range(3, 9), 20], np.int64)
    assert _spans(slots) == [(0, 5, 10), (5, 11, 3), (11, 12, 20)]
    assert _spans(np.arange(5, dtype=np.int64)) == [(0, 5, 0)]
    assert _spans(np.arange(0, 20, 2)) is None
