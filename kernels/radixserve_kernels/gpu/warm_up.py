"""What attention over a pool may launch, compiled before the first step: none stalls for it later.

The number of rows and keys decides which kernels a step takes: how many queries a tile holds,
whether keys are split, whether rows share pages. A profile run meets few of these cases.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from radixserve_kernels.attention_features import AttentionFeatures
from radixserve_kernels.gpu import decode, extend, merge
from radixserve_kernels.gpu.launch import KernelLaunch
from radixserve_kernels.gpu.records import AttentionOutput, KVSplit, PagedKeys
from radixserve_kernels.stored_kv import stored_head_dim

TILES = (16, 64, 128)  # queries x query heads of a K/V head, see `extend_blocks`


def compile_attention(
    k_slots: Tensor,
    v_slots: Tensor,
    num_heads: int,
    page_size: int,
    features: frozenset[str] = frozenset(),
    dtype: torch.dtype | None = None,
    *,
    is_exact: bool = False,
) -> int:
    """Compile every variant for the pool's device, side by side; how many there are.

    features: of AttentionFeatures, those that any layer uses. dtype: of queries, None: the pool's.
    """
    launches = attention_launches(
        k_slots, v_slots, num_heads, page_size, features, dtype, is_exact=is_exact
    )
    variants = {launch.variant: launch for launch in launches}

    def compile_one(launch: KernelLaunch) -> None:
        with torch.cuda.device(k_slots.device):
            launch.compile()

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, variants.values()))
    return len(variants)


def attention_launches(
    k_slots: Tensor,
    v_slots: Tensor,
    num_heads: int,
    page_size: int,
    features: frozenset[str] = frozenset(),
    dtype: torch.dtype | None = None,
    *,
    is_exact: bool = False,
) -> Iterator[KernelLaunch]:
    """Launches of every kind over a layer's slots [num_slots, Hkv, W]; not to be run."""
    num_kv_heads, width = k_slots.shape[1:]
    head_dim = stored_head_dim(width, k_slots.dtype)
    group = num_heads // num_kv_heads
    index = torch.zeros(4, dtype=torch.int32, device=k_slots.device)
    keys = PagedKeys(k_slots, v_slots, index[:3], index, index[:2], page_size)
    q = k_slots.new_empty((2, num_heads, head_dim), dtype=dtype)
    lse = q.new_empty((2, num_heads), dtype=torch.float32)
    for num_splits in (1, 2):
        split = KVSplit(num_splits, num_splits, None, is_exact)
        for result in (AttentionOutput(q, None), AttentionOutput(q, lse)):
            for layer in kinds_of_layers(features):
                yield from decode.decode(q, keys, 1.0, split, result, layer)
                for max_q in sorted({max(rows // group, 1) for rows in TILES}):
                    can_share = layer.span == (0, 0) and not is_exact
                    for causal in (True, False) if can_share else (True,):
                        yield from extend.extend(
                            q, keys, index, 1.0, causal, max_q, split, result, layer
                        )
    yield from merge.merge_states(q, lse, q, lse, q, lse)


def kinds_of_layers(features: frozenset[str]) -> list[AttentionFeatures]:
    """One for each kernel that layers with these features, or without them, take."""
    spans = {"sliding_window", "attention_chunk_size"}
    windows = (None,) if features.isdisjoint(spans) else (None, 128)
    caps = (None, 50.0) if "logits_soft_cap" in features else (None,)
    return [
        AttentionFeatures(sliding_window=window, logits_soft_cap=cap)
        for window, cap in itertools.product(windows, caps)
    ]
