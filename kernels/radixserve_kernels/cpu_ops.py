"""Python's side of the CPU kernels in `cpu/`: records as C sees them, and objects with an owner.

Tensors are on the CPU, contiguous unless a stride is asked for, float32 or bfloat16.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixserve_kernels.cpu_library import Unavailable, cpu_library

IndexArray = NDArray[np.int64]
CAUSAL, BEGINS, ENDS = 1, 2, 4  # flags of a job
LARGE_PAGE = 2 << 20  # bytes


def unavailable(dtype: torch.dtype) -> str:
    """Why these kernels cannot be used with tensors of `dtype` here; "" if they can."""
    if dtype not in (torch.float32, torch.bfloat16):
        return f"they compute in float32 and bfloat16, not in {dtype}"
    try:
        library = cpu_library()
    except Unavailable as reason:
        return str(reason)
    if dtype == torch.bfloat16 and not library.radixserve_bf16():
        return "this processor has no bfloat16 arithmetic"
    return ""


def describe() -> str:
    """What the compiled code uses of the processor. Raises Unavailable."""
    library = cpu_library()
    bf16 = ("none", "AVX-512", "AMX")[library.radixserve_bf16()]
    return f"vectors of {32 * library.radixserve_lanes()} bits, bfloat16: {bf16}"


def _is_bf16(dtype: torch.dtype) -> int:
    return int(dtype == torch.bfloat16)


class _Jobs(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_jobs", "num_levels", "num_tokens")),
        ("level_indptr", ctypes.c_void_p),
        ("query_indptr", ctypes.c_void_p),
        ("query_tokens", ctypes.c_void_p),
        ("first_page", ctypes.c_void_p),
        ("num_keys", ctypes.c_void_p),
        ("flags", ctypes.c_void_p),
        ("page_ids", ctypes.c_void_p),
        ("page_size", ctypes.c_int64),
    )


class _Heads(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "dim")),
        ("scale", ctypes.c_float),
    )


class _Rows(ctypes.Structure):
    _fields_ = (
        ("num_rows", ctypes.c_int64),
        ("page_size", ctypes.c_int64),
        *(
            (name, ctypes.c_void_p)
            for name in ("start", "qo_indptr", "kv_indptr", "kv_indices", "seq_lens")
        ),
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
    num_keys: IndexArray  # [J] with CAUSAL the last query sees all of them, the one before it one
    flags: IndexArray  # [J] fewer, and so on; without it every query sees all
    page_ids: NDArray[np.int32]
    page_size: int
    num_tokens: int  # of the step


@dataclass(frozen=True, slots=True)
class PlanRows:
    """A step's rows: R of them, with T new tokens; int64 arrays without gaps."""

    start: IndexArray  # [R] position of each row's first new token
    qo_indptr: IndexArray  # [R + 1] its new tokens
    kv_indptr: IndexArray  # [R + 1] its pages in kv_indices
    seq_lens: IndexArray  # [R] tokens after the step
    kv_indices: NDArray[np.int32]


class Plan:
    """A step's rows cut into `Jobs` and these into tasks, for heads of a shape.

    With `merge_tokens` rows attend together to pages that they begin with, where
    (rows - 1) x tokens > rows x merge_tokens: so many keys cost as much to read as one more job for
    a row. None: every row is on its own.
    """

    __slots__ = ("__weakref__", "_record", "_rest", "_rows", "pointer")

    def __init__(
        self,
        rows: PlanRows,
        page_size: int,
        heads: tuple[int, int, int],  # query heads, K/V heads, features of a head
        merge_tokens: int | None,
    ) -> None:
        library, self._record = cpu_library(), _Rows(page_size=page_size)
        shape = _Heads(*heads, heads[2] ** -0.5)
        self._rest = (ctypes.byref(shape), merge_tokens is not None, merge_tokens or 0)
        self._take(rows)
        self.pointer = library.radixserve_plan(ctypes.byref(self._record), *self._rest)
        _give_back(self, library.radixserve_delete_plan, self.pointer)

    def renew(self, rows: PlanRows) -> None:
        """Of another step's rows from now on, at the cost of no object's birth and death."""
        self._take(rows)
        library = cpu_library()
        library.radixserve_reset_plan(self.pointer, ctypes.byref(self._record), *self._rest)

    def _take(self, rows: PlanRows) -> None:
        self._rows = rows  # C borrows their memory
        record = self._record
        record.num_rows = len(rows.start)
        record.start, record.qo_indptr = rows.start.ctypes.data, rows.qo_indptr.ctypes.data
        record.kv_indptr, record.seq_lens = rows.kv_indptr.ctypes.data, rows.seq_lens.ctypes.data
        record.kv_indices = rows.kv_indices.ctypes.data
        cpu_library().radixserve_set_threads(torch.get_num_threads())  # tasks are cut for so many

    def jobs(self) -> Jobs:
        """A copy of the jobs, to look at."""
        record = _Jobs()
        cpu_library().radixserve_jobs(self.pointer, ctypes.byref(record))

        def array(address: int, length: int) -> IndexArray:
            borrowed = (ctypes.c_int64 * length).from_address(address)
            return np.array(borrowed, np.int64)

        query_indptr = array(record.query_indptr, record.num_jobs + 1)
        return Jobs(
            level_indptr=array(record.level_indptr, record.num_levels + 1),
            query_indptr=query_indptr,
            query_tokens=array(record.query_tokens, int(query_indptr[-1])),
            first_page=array(record.first_page, record.num_jobs),
            num_keys=array(record.num_keys, record.num_jobs),
            flags=array(record.flags, record.num_jobs),
            page_ids=self._rows.kv_indices,
            page_size=record.page_size,
            num_tokens=record.num_tokens,
        )


class Attender:
    """Attention over pages by a plan's jobs; owns the memory that it works in. One thread."""

    def __init__(self, dtype: torch.dtype) -> None:
        library = cpu_library()
        self._run, self._is_bf16 = library.radixserve_attend, _is_bf16(dtype)
        self._pointer = library.radixserve_attention()
        _give_back(self, library.radixserve_delete_attention, self._pointer)

    def run(self, plan: Plan, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q [T, Hq, D]; k, v [num_slots, Hkv, D], the step's own included; returns [T, Hq, D]."""
        q = q.contiguous()
        out = torch.empty_like(q)
        stride = q.shape[1] * q.shape[2]
        cpu_library().radixserve_set_threads(torch.get_num_threads())
        self._run(
            *(self._is_bf16, self._pointer, plan.pointer, q.data_ptr(), stride),
            *(k.data_ptr(), v.data_ptr(), out.data_ptr(), stride, scale),
        )
        return out


class Arena:
    """Memory for weights, many from one piece: large enough for the system's large pages, without
    which a good part of reading a weight goes into looking up where it lies."""

    def __init__(self, piece_bytes: int = 32 << 20) -> None:
        self._piece_bytes = piece_bytes
        self._piece, self._used = np.zeros(0, np.uint8), 0
        self._lock = Lock()

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Zeros, 64-byte aligned; the piece lives as long as anything taken from it."""
        rounded = -(-num_bytes // 64) * 64
        with self._lock:
            if self._used + rounded > len(self._piece):
                self._piece, self._used = fresh_memory(max(self._piece_bytes, rounded)), 0
            taken = self._piece[self._used : self._used + num_bytes]
            self._used += rounded
        return taken


def fresh_memory(num_bytes: int) -> NDArray[np.uint8]:
    """Zeros that nothing else shares a page with, in the system's large pages where it has them; at
    least 64-byte aligned.

    Not from the allocator: that may take memory that was in use before, in small pages. Raises
    MemoryError.
    """
    if sys.platform != "linux":
        fresh = np.zeros(num_bytes + 64, np.uint8)
        start = -fresh.ctypes.data % 64
        return fresh[start : start + num_bytes]
    try:
        mapped = mmap.mmap(-1, num_bytes + LARGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{num_bytes} bytes cannot be had: {error}") from error
    with contextlib.suppress(OSError):  # a kernel without large pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    fresh = np.frombuffer(mapped, np.uint8)  # which holds `mapped`
    start = -fresh.ctypes.data % LARGE_PAGE
    return fresh[start : start + num_bytes]


_arena = Arena()


class _Weight(ctypes.Structure):
    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("columns", ctypes.c_int64),
        ("depth", ctypes.c_int64),
    )


class PackedWeight:
    """A weight [N, K] in panels, with a bias [N] or None; see cpu/panels.h."""

    __slots__ = ("bias", "depth", "panels", "record", "size")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        library, weight = cpu_library(), weight.contiguous()
        self.size, self.depth = weight.shape
        self.bias = None if bias is None else bias.contiguous()
        is_bf16 = _is_bf16(weight.dtype)
        length = library.radixserve_packed_size(is_bf16, self.size, self.depth)
        memory = _arena.take(length * weight.dtype.itemsize)
        self.panels = torch.from_numpy(memory).view(weight.dtype)
        library.radixserve_pack(
            is_bf16, weight.data_ptr(), self.size, self.depth, self.panels.data_ptr()
        )
        self.record = _Weight(
            self.panels.data_ptr(), _address(self.bias), self.size, self.depth
        )  # as C takes it

    def __call__(self, x: Tensor) -> Tensor:
        """`x @ weight.T + bias`: x [M, K], returns [M, N]."""
        library, dtype = cpu_library(), self.panels.dtype
        padded = x.new_zeros((len(x), -(-self.depth // 32) * 32))
        padded[:, : self.depth] = x
        out = x.new_empty((len(x), self.size))
        library.radixserve_set_threads(torch.get_num_threads())
        library.radixserve_linear(
            *(_is_bf16(dtype), padded.data_ptr(), padded.shape[1], len(x)),
            *(ctypes.byref(self.record), out.data_ptr()),
        )
        return out


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """Rows of gate and up [M, ...] in turns of as many as a vector holds, zeros behind the last:
    [2 * (M rounded up), ...]. A panel then has both halves of the same columns."""
    lanes = cpu_library().radixserve_lanes()
    count = -(-len(gate) // lanes) * lanes
    halves = gate.new_zeros((2, count, *gate.shape[1:]))
    halves[0, : len(gate)], halves[1, : len(up)] = gate, up
    parts = halves.view(2, -1, lanes, *gate.shape[1:]).transpose(0, 1)
    return parts.reshape(-1, *gate.shape[1:])


def best_tokens(logits: Tensor) -> tuple[list[int], int]:
    """Where each row's largest value is, the first of equals; where its first NaN is if it has one.

    logits [S, V] float32. Also how many of the values found are not finite.
    """
    logits = logits.contiguous()
    num_rows, size = logits.shape
    ids = (ctypes.c_int64 * num_rows)()
    broken = cpu_library().radixserve_argmax(logits.data_ptr(), num_rows, size, ids)
    return list(ids), broken


@dataclass(frozen=True, slots=True)
class StackShape:
    """The numbers of a decoder that decide its arithmetic."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    eps: float


@dataclass(frozen=True, slots=True)
class StackLayer:
    """One layer's weights; Q = Hq * D and KV = Hkv * D features, M of the MLP, H hidden."""

    input_norm: Tensor  # [H]
    qkv: PackedWeight  # H -> Q + 2 KV
    qk_norm: Tensor | None  # [Hq + Hkv, D]
    o: PackedWeight  # Q -> H
    post_norm: Tensor  # [H]
    gate_up: PackedWeight  # H -> 2 M, interleaved
    down: PackedWeight  # M -> H


class _Shape(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                *("num_layers", "num_heads", "num_kv_heads", "head_dim"),
                *("hidden_size", "intermediate_size", "vocab_size"),
            )
        ),
        ("eps", ctypes.c_float),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input_norm", "qk_norm", "post_norm")),
        *((name, _Weight) for name in ("qkv", "o", "gate_up", "down")),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        ("num_tokens", ctypes.c_int64),
        ("num_sampled", ctypes.c_int64),
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("input_ids", "positions", "slots", "sampled"),
                *("rotations", "logits"),
            )
        ),
    )


class _DecodeSteps(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_rows", "num_steps", "page_size", "num_end_ids")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("token_ids", "start", "first_page", "page_ids", "end_ids"),
                *("rotations", "logits", "hurry", "drawn"),
            )
        ),
        ("plan_seconds", ctypes.c_double),
        ("draw_seconds", ctypes.c_double),
    )


class Hurry:
    """Ends several decode steps behind the present one, from any thread and at any time."""

    __slots__ = ("_flag",)

    def __init__(self) -> None:
        self._flag = ctypes.c_int32()

    def set(self) -> None:
        """Until `clear`, only one step at a time."""
        self._flag.value = 1

    def clear(self) -> None:
        self._flag.value = 0

    @property
    def address(self) -> int:
        return ctypes.addressof(self._flag)


@dataclass(frozen=True, slots=True)
class StepRows:
    """R rows of one token each, and their pages up to the last step's; arrays without gaps."""

    token_ids: IndexArray  # [R]
    start: IndexArray  # [R] its position
    first_page: IndexArray  # [R] where the row's pages begin in page_ids
    page_ids: NDArray[np.int32]


class StepsDone(NamedTuple):
    """What came of several decode steps; n of them count."""

    drawn: IndexArray  # [n, R]
    logits: Tensor  # [R, V] float32 of the last one computed, whether it counts or not
    plan_seconds: float
    draw_seconds: float


class DecoderStack:
    """All layers of a Llama-like decoder in one call, from token ids to logits. One thread."""

    def __init__(
        self,
        shape: StackShape,
        layers: Sequence[StackLayer],
        embedding: Tensor,  # [V, H]
        norm: Tensor,  # [H]
        head: PackedWeight,  # H -> V
    ) -> None:
        library = cpu_library()
        self._is_bf16, self._vocab_size = _is_bf16(embedding.dtype), shape.vocab_size
        self._kept: tuple[Any, ...] = (layers, embedding, norm, head)  # C borrows their memory
        self._run = library.radixserve_run
        self._decode_steps = library.radixserve_decode_steps
        self._set_threads = library.radixserve_set_threads
        record = _Shape(*(getattr(shape, field[0]) for field in _Shape._fields_))
        pointers = (_Layer * len(layers))(*map(_layer_record, layers))
        self._pointer = library.radixserve_decoder(
            *(self._is_bf16, ctypes.byref(record), pointers, embedding.data_ptr()),
            *(norm.data_ptr(), ctypes.byref(head.record)),
        )
        _give_back(self, library.radixserve_delete_decoder, self._pointer)

    def run(
        self,
        input_ids: Tensor,  # [T] int64
        positions: Tensor,  # [T] int64
        slots: Tensor,  # [T] int64
        sampled: Tensor,  # [S] int64, ascending
        rotations: Tensor,  # [n, D/2] complex64, of every position
        plan: Plan,
        kv: Tensor,  # [L, 2, num_pages, P, Hkv, D]
    ) -> Tensor:
        """Logits [S, V] float32 behind the tokens `sampled`; writes the new tokens' slots of kv."""
        size = (len(sampled), self._vocab_size)
        logits = torch.empty(size, dtype=torch.float32, device="cpu")  # whatever is the default
        step = _Step(
            *(len(input_ids), len(sampled), input_ids.data_ptr(), positions.data_ptr()),
            *(slots.data_ptr(), sampled.data_ptr(), rotations.data_ptr(), logits.data_ptr()),
        )
        self._set_threads(torch.get_num_threads())
        self._run(self._pointer, ctypes.byref(step), plan.pointer, kv.data_ptr(), kv.stride(0))
        return logits

    def decode_steps(
        self,
        rows: StepRows,
        num_steps: int,
        end_ids: IndexArray,
        hurry: Hurry,
        rotations: Tensor,  # [n, D/2] complex64, of every position
        merge_tokens: int | None,  # see Plan
        kv: Tensor,  # [L, 2, num_pages, P, Hkv, D]
    ) -> StepsDone:
        """Up to `num_steps` steps of the same rows, each row's best token going into the next one.

        Fewer count where a step draws one of `end_ids` or there is a `hurry` behind it: that is the
        last one then. Or where the best logit of some row is not finite: then those before that
        step, perhaps none.
        """
        num_rows = len(rows.start)
        logits = torch.empty((num_rows, self._vocab_size), dtype=torch.float32, device="cpu")
        drawn = np.empty((num_steps, num_rows), np.int64)
        record = _DecodeSteps(
            num_rows=num_rows,
            num_steps=num_steps,
            page_size=kv.shape[3],
            num_end_ids=len(end_ids),
            token_ids=rows.token_ids.ctypes.data,
            start=rows.start.ctypes.data,
            first_page=rows.first_page.ctypes.data,
            page_ids=rows.page_ids.ctypes.data,
            end_ids=end_ids.ctypes.data,
            rotations=rotations.data_ptr(),
            logits=logits.data_ptr(),
            hurry=hurry.address,
            drawn=drawn.ctypes.data,
        )
        self._set_threads(torch.get_num_threads())
        num_done = self._decode_steps(
            *(self._is_bf16, self._pointer, ctypes.byref(record), merge_tokens is not None),
            *(merge_tokens or 0, kv.data_ptr(), kv.stride(0)),
        )
        return StepsDone(drawn[:num_done], logits, record.plan_seconds, record.draw_seconds)


def _layer_record(layer: StackLayer) -> _Layer:
    norms = map(_address, (layer.input_norm, layer.qk_norm, layer.post_norm))
    weights = (layer.qkv, layer.o, layer.gate_up, layer.down)
    return _Layer(*norms, *(weight.record for weight in weights))


def _give_back(owner: object, end: Callable[..., None], *arguments: Any) -> None:
    """Call `end` when `owner` is gone, but not at the end of the process: the engine's thread may
    be computing with it then."""
    weakref.finalize(owner, end, *arguments).atexit = False


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
