"""The arguments of the kernels of attention, adapters and layers with a state, and of their
references. Needs no Triton."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

MIN_SPLIT_KEYS = 128  # a split of fewer keys is mostly overhead
LONG_ROW_KEYS = 4_096  # from here on a row among many is split for balance
EXACT_SPLIT_KEYS = 1_024  # of each split of exact results, whatever the rows are
LORA_RANKS = 16  # the rank of an adapter's product is a multiple of it, with zeros added
LORA_ENTRY = 3  # numbers of a product in an adapter's header


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


class LoraRows(NamedTuple):
    """The rows of a step that G adapters compute, by adapter.

    An adapter has a header where its weights are, int64. Its LORA_ENTRY numbers from an entry on
    are those of a product: the address of a [rank, K], that of b [N, rank], both dense and in the
    dtype of x, and the rank, a multiple of LORA_RANKS; 0: it adds nothing to that product.
    """

    headers: Tensor  # [G] int64 addresses of the adapters' headers
    indptr: Tensor  # [G + 1] int32 adapter g has order[indptr[g] : indptr[g + 1]]
    order: Tensor  # [P] int64 tokens of the step, distinct as far as indptr goes
    max_rank: int  # no product of the adapters has a larger one


class StepLora(NamedTuple):
    """The rows of a step that adapters compute."""

    tokens: LoraRows  # of all tokens
    sampled: LoraRows  # of those after which logits are computed: `order` has places among them
