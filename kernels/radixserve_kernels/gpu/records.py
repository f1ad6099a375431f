"""The arguments of the kernels of attention and of layers with a state, and of their references.
Needs no Triton."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

MIN_SPLIT_KEYS = 128  # a split of fewer keys is mostly overhead
LONG_ROW_KEYS = 4_096  # from here on a row among many is split for balance
EXACT_SPLIT_KEYS = 1_024  # of each split of exact results, whatever the rows are


class PagedKeys(NamedTuple):
    """Where each row's keys and values lie: see `radixserve_kernels.gpu_ops`."""

    k_slots: Tensor  # [num_slots, Hkv, W]
    v_slots: Tensor  # [num_slots, Hkv, W]
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


class StateRows(NamedTuple):
    """Which states the R rows of a step read and write, int32 where the states are. No state that
    one row writes is read by another one."""

    indptr: Tensor  # [R + 1] row r has the tokens indptr[r] to indptr[r + 1] of the step's T
    read: Tensor  # [R] the state before the first of them; -1: zeros, its sequence begins
    written: Tensor  # [R] the state after the last of them goes there; -1: nowhere
    kept: Tensor  # [T] the state after this token goes there, too; -1: nowhere
