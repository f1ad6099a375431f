"""Attention over pages by compiled kernels: a step's plan, and its run for one layer."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixserve_kernels.attention_features import PLAIN, AttentionFeatures
from radixserve_kernels.attention_metadata import AttentionMetadata, IndexArray
from radixserve_kernels.cpu_library import address, cpu_library, finalize, is_bf16

CAUSAL, BEGINS, ENDS = 1, 2, 4  # flags of a job
_KV_TYPES = {torch.bfloat16: 1, torch.int8: 2}  # where they are not the queries' own


class LayerKVRecord(ctypes.Structure):
    """K and V of a layer as C takes them."""

    _fields_ = (
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("has_window_pages", ctypes.c_int64),
        ("type", ctypes.c_int64),
    )


class _AttentionMetadata(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_rows", "page_size")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("start", "qo_indptr", "kv_indptr", "kv_indices", "seq_lens"),
                "last_seen",
            )
        ),
        ("is_new", ctypes.c_int64),
    )


class _Heads(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "dim")),
        ("scale", ctypes.c_float),
    )


class _Jobs(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_jobs", "num_levels", "num_tokens")),
        ("level_indptr", ctypes.c_void_p),
        ("query_indptr", ctypes.c_void_p),
        ("query_tokens", ctypes.c_void_p),
        ("first_page", ctypes.c_void_p),
        ("num_keys", ctypes.c_void_p),
        ("flags", ctypes.c_void_p),
        ("first_key", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("last_seen", ctypes.c_void_p),
        ("page_ids", ctypes.c_void_p),
        ("page_size", ctypes.c_int64),
    )


class FeaturesRecord(ctypes.Structure):
    """AttentionFeatures as C takes them."""

    _fields_ = (
        ("window", ctypes.c_int64),
        ("chunk", ctypes.c_int64),
        ("is_bidirectional", ctypes.c_int64),
        ("soft_cap", ctypes.c_float),
        ("sinks", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class Jobs:
    """One step's attention: job j lets some queries attend to one run of a page table.

    Jobs of one level have no token in common; levels run one after another. A token that several
    jobs serve has BEGINS in the first and ENDS in the last of them.
    """

    level_indptr: IndexArray  # [W + 1] jobs of level w: [level_indptr[w], level_indptr[w + 1])
    query_indptr: IndexArray  # [J + 1] job j has queries [query_indptr[j], query_indptr[j + 1])
    query_tokens: IndexArray  # [all queries] among the step's tokens
    first_page: IndexArray  # [J] where its pages begin in page_ids
    num_keys: IndexArray  # [J] with CAUSAL the last query sees all of them, the one before it all
    flags: IndexArray  # [J] but the last, ...; without CAUSAL every query sees all keys
    page_ids: NDArray[np.int32]
    page_size: int
    num_tokens: int  # of the step


class CpuAttentionPlan:
    """A step's rows cut into `Jobs` and these into tasks, for heads of a shape.

    With `merge_tokens` rows attend together to pages that they begin with, where
    (rows - 1) x tokens > rows x merge_tokens: so many keys cost as much to read as one more job for
    a row. None: every row is on its own.

    `is_exact`: a row's result has the bits that it has on its own. What rows share then ends at a
    multiple of 16 tokens, 32 with AMX.
    """

    __slots__ = ("__weakref__", "_last_seen", "_page_ids", "_record", "_rows", "pointer")

    def __init__(
        self,
        rows: AttentionMetadata,
        page_size: int,
        heads: tuple[int, int, int],  # query heads, K/V heads, features of a head
        merge_tokens: int | None,
        *,
        is_exact: bool = True,
    ) -> None:
        library, self._record = cpu_library(), _AttentionMetadata(page_size=page_size)
        self._rows: AttentionMetadata | None = None
        self._page_ids = np.empty(0, np.int32)  # with room after those of the rows
        self.reset(rows)
        self.pointer = library.radixserve_plan(
            ctypes.byref(self._record),
            ctypes.byref(_Heads(*heads, heads[2] ** -0.5)),
            -1 if merge_tokens is None else merge_tokens,
            is_exact,
        )
        finalize(self, library.radixserve_delete_plan, self.pointer)

    def reset(self, rows: AttentionMetadata, last_seen: IndexArray | None = None) -> None:
        """Replan for another step's rows in place. Compiled code does so when it needs the plan: it
        borrows the rows' arrays, and reads those of the same rows anew.

        last_seen: [T] the last position that each token sees in layers with `bidirectional`: not
        before its own, after the step's last one or before that of the token before it. None: its
        own.
        """
        if rows is not self._rows:
            self._borrow(rows)
        num_pages = int(rows.kv_indptr[-1])
        if num_pages > len(self._page_ids):
            self._page_ids = np.empty(num_pages + num_pages // 8 + 64, np.int32)
            self._record.kv_indices = self._page_ids.ctypes.data
        rows.copy_kv_indices(self._page_ids[:num_pages])
        self._last_seen = last_seen
        self._record.last_seen = None if last_seen is None else _address(last_seen)
        self._record.is_new = 1

    def _borrow(self, rows: AttentionMetadata) -> None:
        record, self._rows = self._record, rows
        record.num_rows = len(rows.start)
        record.start, record.qo_indptr = _address(rows.start), _address(rows.qo_indptr)
        record.kv_indptr, record.seq_lens = _address(rows.kv_indptr), _address(rows.seq_lens)

    def jobs(self) -> Jobs:
        """A copy of the jobs, for inspection."""
        record, library, rows = _Jobs(), cpu_library(), self._rows
        assert rows is not None
        library.radixserve_set_threads(torch.get_num_threads())  # tasks are cut for so many
        library.radixserve_jobs(self.pointer, ctypes.byref(record))

        def array(name: str, length: int) -> IndexArray:
            borrowed = (ctypes.c_int64 * length).from_address(getattr(record, name))
            return np.array(borrowed, np.int64)

        query_indptr = array("query_indptr", record.num_jobs + 1)
        return Jobs(
            level_indptr=array("level_indptr", record.num_levels + 1),
            query_indptr=query_indptr,
            query_tokens=array("query_tokens", int(query_indptr[-1])),
            first_page=array("first_page", record.num_jobs),
            num_keys=array("num_keys", record.num_jobs),
            flags=array("flags", record.num_jobs),
            page_ids=self._page_ids[: rows.kv_indptr[-1]].copy(),
            page_size=record.page_size,
            num_tokens=record.num_tokens,
        )


def _address(numbers: IndexArray) -> int:
    """Of writable memory; numpy's own way takes three times as long."""
    return ctypes.addressof(ctypes.c_char.from_buffer(numbers.data))


class PagedAttention:
    """Attention over pages by a plan's jobs; owns its scratch memory. One thread."""

    def __init__(self, dtype: torch.dtype) -> None:
        """dtype: of queries and of the output."""
        self._library = library = cpu_library(dtype)
        self._run, self._is_bf16 = library.radixserve_attend, is_bf16(dtype)
        self._dtype = dtype
        self._pointer = library.radixserve_attention()
        finalize(self, library.radixserve_delete_attention, self._pointer)

    def run(
        self,
        plan: CpuAttentionPlan,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        features: AttentionFeatures = PLAIN,
        page_ids: NDArray[np.int32] | None = None,
    ) -> Tensor:
        """q [T, Hq, D]; k, v [num_slots, Hkv, W], the step's own included; returns [T, Hq, D].

        page_ids: of k and v, in the places of the planned rows' kv_indices, where they differ.
        """
        q = q.contiguous()
        out = torch.empty_like(q)
        stride = q.shape[1] * q.shape[2]
        self._library.radixserve_set_threads(torch.get_num_threads())
        record = None if features is PLAIN else ctypes.byref(features_record(features))
        kv = LayerKVRecord(k.data_ptr(), v.data_ptr(), type=kv_type(k.dtype, self._dtype))
        self._run(
            *(self._is_bf16, self._pointer, plan.pointer, q.data_ptr(), stride, ctypes.byref(kv)),
            *(out.data_ptr(), stride, scale, record),
            None if page_ids is None else page_ids.ctypes.data,
        )
        return out


def kv_type(stored: torch.dtype, dtype: torch.dtype) -> int:
    """The dtype of stored K and V as C takes it, for queries of `dtype`: KvType of stored_kv.h."""
    return 0 if stored == dtype else _KV_TYPES[stored]


def features_record(features: AttentionFeatures) -> FeaturesRecord:
    """Borrows the sinks."""
    window, chunk = features.span
    cap, sinks = features.logits_soft_cap or 0.0, address(features.sinks)
    return FeaturesRecord(window, chunk, bool(features.bidirectional), cap, sinks)
