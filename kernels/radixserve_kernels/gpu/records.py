"""The arguments of the attention kernels and of their references. Needs no Triton."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

MIN_SPLIT_KEYS = 128  # a split of fewer keys is mostly overhead
LONG_ROW_KEYS = 4_096  # from here on a row among many is split for balance
EXACT_SPLIT_KEYS = 1_024  # of each split of exact results, whatever the rows are


class PagedKeys(NamedTuple):
    """Where each row's keys and values lie: see `radixserve_kernels.gpu_ops`."""

    k_slots: Tensor  # [num_slots, Hkv, D]
    v_slots: Tensor  # [num_slots, Hkv, D]
    kv_indptr: Tensor  # [R + 1] int32
    kv_indices: Tensor  # [total pages] int32
    last_page_len: Tensor  # [R] int32
    page_size: int


class KVSplit(NamedTuple):
    """How the keys of rows are split: see `gpu_ops.decode`."""

    num_splits: int
    fixed_splits: int
    workspace: Tensor | None
    is_exact: bool = False  # EXACT_SPLIT_KEYS a split and one block size, from position 0 on


class AttentionOutput(NamedTuple):
    """What attention writes."""

    out: Tensor  # [T, Hq, D]
    lse: Tensor | None  # [T, Hq] float32
