"""FlashInfer on the CPU: the same calls, computed from exactly the arrays that they are given.

Every call is bound to the recorded signature first. What FlashInfer's source demands of its
arguments, and what would be wrong without being noticed, is asserted: arrays on the side of the bus
where they belong, a plan before each run and in memory that no other plan has overwritten since,
what a graph may not change. A test records a graph and replays it: then nothing of Python runs but
what the kernels would do with the memory as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from radixserve.attention.cuda.flashinfer_calls import Library
from radixserve.attention.cuda.metadata import PlanUploader
from tests.attention.signatures import recorded

NO_KEYS = -5e4  # FlashInfer's logarithm of nothing
GROUPS = (1, 2, 3, 4, 6, 8)  # of the decode kernel on CUDA cores
SIGNATURES = recorded()
Lists = tuple[list[int], list[int]]
Module = tuple[str, bool, bool]  # "decode", "fa2" or "fa3"; of a window; of a soft cap


@dataclass
class Fake:
    """A FlashInfer of its own: what was called, and the memory of its plans."""

    calls: list[str] = field(default_factory=list)
    arguments: list[dict[str, Any]] = field(default_factory=list)
    plans: dict[int, tuple[Any, Lists]] = field(default_factory=dict)  # by int workspace
    modules: set[Module] = field(default_factory=set)  # that plans would load
    recording: list[Callable[[], None]] | None = None

    @property
    def library(self) -> Library:
        return Library(
            decode_wrapper=lambda *args, **kwargs: FakeDecode(self, args, kwargs),
            prefill_wrapper=lambda *args, **kwargs: FakePrefill(self, args, kwargs),
            fast_decode_plan=self._fast_decode_plan,
            merge_state_in_place=self._merge_state_in_place,
        )

    def bind(self, name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """All arguments by name, defaults filled in; TypeError where the real one raises it."""
        self.calls.append(name)
        bound = SIGNATURES[name].bind(*args, **kwargs)
        bound.apply_defaults()
        self.arguments.append(dict(bound.arguments))
        return dict(bound.arguments)

    def launch(self, kernel: Callable[[], None]) -> None:
        kernel()
        if self.recording is not None:
            self.recording.append(kernel)

    def _fast_decode_plan(self, *args: Any, **kwargs: Any) -> None:
        bound = self.bind("fast_decode_plan", *args, **kwargs)
        bound.pop("self").plan_fast(bound)

    def _merge_state_in_place(self, *args: Any, **kwargs: Any) -> None:
        bound = self.bind("merge_state_in_place", *args, **kwargs)
        v, s, other, s_other = (bound[name] for name in ("v", "s", "v_other", "s_other"))
        assert v.shape == other.shape
        assert v.dtype == other.dtype
        assert s.shape == s_other.shape == v.shape[:2]
        assert s.dtype == s_other.dtype == torch.float32
        assert all(x.is_contiguous() for x in (v, s, other, s_other))

        def kernel() -> None:
            most = torch.maximum(s, s_other)
            a, b = torch.exp2(s - most), torch.exp2(s_other - most)
            share = (a / (a + b))[..., None]
            v.copy_((v.float() * share + other.float() * (1 - share)).to(v.dtype))
            s.copy_(torch.log2(a + b) + most)

        self.launch(kernel)


class FakeWrapper:
    kernel: str

    def __init__(self, fake: Fake, bound: dict[str, Any], num_requests: int | None) -> None:
        self._fake = fake
        self._is_graph = bound["use_cuda_graph"]
        assert bound["kv_layout"] == "NHD"
        assert bound["backend"] == "fa2" or (bound["backend"] == "fa3" and not self._is_graph)
        assert bound["float_workspace_buffer"].dtype == torch.uint8
        self._num_requests = num_requests
        self._int_workspace = torch.empty(8)
        self._planned: dict[str, Any] = {}
        self._indptr = self._indices = self._last_page_len = self._qo_indptr = torch.empty(0)

    def reset_workspace_buffer(self, *args: Any, **kwargs: Any) -> None:
        name = "decode" if isinstance(self, FakeDecode) else "prefill"
        bound = self._fake.bind(f"{name}.reset_workspace_buffer", self, *args, **kwargs)
        self._int_workspace = bound["int_workspace_buffer"]

    def _keep(self, bound: dict[str, Any], qo_indptr: Tensor, kv_indptr: Tensor) -> None:
        """What a plan leaves: on the host for Python, in the int workspace for the kernel."""
        assert bound["pos_encoding_mode"] == "NONE"
        assert bound["window_left"] >= -1
        assert bound["logits_soft_cap"] >= 0
        assert bound["fixed_split_size"] is None
        assert not bound["disable_split_kv"]
        assert bound["kv_data_type"] in (bound["q_data_type"], torch.float8_e4m3fn)
        if self._is_graph:
            assert len(kv_indptr) - 1 == self._num_requests, "the batch size is fixed"
            before = self._planned or bound
            for name in ("window_left", "logits_soft_cap", "sm_scale"):
                assert bound[name] == before[name], "a launch in a graph keeps its arguments"
        has_window, has_cap = bound["window_left"] != -1, bound["logits_soft_cap"] > 0
        self._fake.modules.add((self.kernel, has_window, has_cap))
        self._planned = bound
        lists = qo_indptr.tolist(), kv_indptr.tolist()
        self._fake.plans[id(self._int_workspace)] = self, lists

    def _run(self, name: str, args: Any, kwargs: Any, *, is_causal: bool) -> Any:
        bound = self._fake.bind(f"{name}.run", self, *args, **kwargs)
        q, (k, v), out, lse = (bound[one] for one in ("q", "paged_kv_cache", "out", "lse"))
        plan = self._planned
        assert plan, "run before plan"
        shape = (len(k), plan["page_size"], plan["num_kv_heads"], q.shape[2])
        assert k.shape == v.shape == shape
        assert k.stride() == v.stride()
        assert q.dtype == plan["q_data_type"]
        assert k.dtype == v.dtype == plan["kv_data_type"]
        assert q.shape[1] == plan["num_qo_heads"]
        assert q.stride(-1) == 1
        assert out is not None, "always given"
        assert out.shape == q.shape
        assert out.dtype == q.dtype
        assert out.is_contiguous()
        assert bound["return_lse"] == (lse is not None)
        if lse is not None:
            assert lse.shape == q.shape[:2]
            assert lse.dtype == torch.float32
            assert lse.is_contiguous()
        scale = plan["sm_scale"] * bound["q_scale"]
        memory = (self._qo_indptr, self._indptr, self._indices, self._last_page_len)
        workspace, page_size = self._int_workspace, plan["page_size"]

        def kernel() -> None:
            owner, lists = self._fake.plans[id(workspace)]
            assert owner is self, "another plan lies in the int workspace"
            assert lists == (memory[0].tolist(), memory[1].tolist()), "not what was planned"
            attend(
                q,
                k,
                v,
                memory,
                page_size,
                scale,
                out,
                lse,
                is_causal=is_causal,
                window_left=plan["window_left"],
                logits_soft_cap=plan["logits_soft_cap"],
            )

        self._fake.launch(kernel)
        return out if lse is None else (out, lse)


class FakeDecode(FakeWrapper):
    def __init__(self, fake: Fake, args: Any, kwargs: Any) -> None:
        bound = fake.bind("decode", self, *args, **kwargs)
        buffers = [
            bound[f"paged_kv_{name}_buffer"] for name in ("indptr", "indices", "last_page_len")
        ]
        self._uses_tensor_cores = bound["use_tensor_cores"]
        self.kernel = "fa2" if self._uses_tensor_cores else "decode"
        super().__init__(fake, bound, len(buffers[2]) if bound["use_cuda_graph"] else None)
        if self._is_graph:
            assert len(buffers[0]) == len(buffers[2]) + 1
            assert all(one.dtype == torch.int32 for one in buffers)
            self._indptr, self._indices, self._last_page_len = buffers

    def plan(self, *args: Any, **kwargs: Any) -> None:
        self._fake.bind("decode.plan", self, *args, **kwargs)
        bound = self._fake.bind("decode.plan keywords", self, *args, **kwargs)
        bound.pop("self")
        arrays = [bound[name] for name in ("indptr", "indices", "last_page_len")]
        assert [side_of(one) for one in arrays] == ["host", "device", "host"]
        self._plan(bound, arrays[0])
        if self._is_graph:
            self._indptr.copy_(arrays[0])
            self._indices[: len(arrays[1])].copy_(arrays[1])
            self._last_page_len.copy_(arrays[2])
        else:
            self._indptr, self._indices, self._last_page_len = (one.clone() for one in arrays)

    def plan_fast(self, bound: dict[str, Any]) -> None:
        """Nothing is copied to the device, and nothing may have to be copied from it."""
        assert self._planned, "the fast plan needs the module that a plan before has loaded"
        arrays = [bound[name] for name in ("indptr", "indices", "last_page_len")]
        host = bound["global_override_indptr_cpu"]
        assert host is not None
        assert side_of(host) == "host"
        if self._is_graph:
            assert len(arrays[1]) <= len(self._indices)
            if self._uses_tensor_cores and bound["page_size"] > 1:
                assert side_of(arrays[2]) == "host", "it is read on the host"
        else:
            assert not self._uses_tensor_cores
            assert [side_of(one) for one in arrays] == ["device"] * 3
            self._indptr, self._indices, self._last_page_len = arrays
        self._plan(bound, host)

    def _plan(self, bound: dict[str, Any], indptr: Tensor) -> None:
        if not self._uses_tensor_cores:
            assert bound["num_qo_heads"] // bound["num_kv_heads"] in GROUPS
        self._qo_indptr = torch.arange(len(indptr), dtype=torch.int32)
        self._keep(bound, self._qo_indptr, indptr)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        assert len(args[0]) == len(self._last_page_len), "one query a request"
        return self._run("decode", args, kwargs, is_causal=False)


class FakePrefill(FakeWrapper):
    def __init__(self, fake: Fake, args: Any, kwargs: Any) -> None:
        bound = fake.bind("prefill", self, *args, **kwargs)
        names = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
        buffers = [bound[f"{name}_buf"] for name in names]
        super().__init__(fake, bound, len(buffers[3]) if bound["use_cuda_graph"] else None)
        self.kernel = bound["backend"]
        self._most_tokens: int | None = None
        if self._is_graph:
            assert len(buffers[0]) == len(buffers[1]) == len(buffers[3]) + 1
            assert all(one.dtype == torch.int32 for one in buffers)
            self._qo_indptr, self._indptr, self._indices, self._last_page_len = buffers

    def plan(self, *args: Any, **kwargs: Any) -> None:
        bound = self._fake.bind("prefill.plan", self, *args, **kwargs)
        bound.pop("self")
        names = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
        arrays = [bound[name] for name in names]
        assert [side_of(one) for one in arrays] == ["host", "host", "device", "host"]
        lengths = arrays[0].diff()
        assert bound["max_token_per_sequence"] >= int(lengths.max()) > 0
        assert side_of(bound["seq_lens"]) == "host"
        num_pages = arrays[1].diff()
        kv_lens = torch.where(num_pages > 0, (num_pages - 1) * bound["page_size"] + arrays[3], 0)
        assert torch.equal(bound["seq_lens"], kv_lens.int())
        assert bound["max_sequence_kv"] is None, "fa2's plan breaks on it"
        num_tokens = int(arrays[0][-1])
        if self._is_graph:
            self._most_tokens = self._most_tokens or num_tokens
            assert num_tokens <= self._most_tokens
            for buffer, array in zip(
                (self._qo_indptr, self._indptr, self._last_page_len),
                (arrays[0], arrays[1], arrays[3]),
                strict=True,
            ):
                buffer.copy_(array)
            self._indices[: len(arrays[2])].copy_(arrays[2])
        else:
            self._qo_indptr, self._indptr, self._indices, self._last_page_len = (
                one.clone() for one in arrays
            )
        self._keep(bound, arrays[0], arrays[1])

    def run(self, *args: Any, **kwargs: Any) -> Any:
        assert len(args[0]) == int(self._qo_indptr[-1])
        return self._run("prefill", args, kwargs, is_causal=self._planned["causal"])


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    memory: tuple[Tensor, ...],
    page_size: int,
    scale: float,
    out: Tensor,
    lse: Tensor | None,
    *,
    is_causal: bool,
    window_left: int,
    logits_soft_cap: float,
) -> None:
    """Request by request in float64. Where nothing is to be written, nothing is.

    As in FlashInfer's DefaultAttention: the cap is of scaled scores, and a query sees the
    `window_left` positions before its own, in every kernel.
    """
    qo_indptr, kv_indptr, kv_indices, last_page_len = memory
    group = q.shape[1] // k.shape[2]
    for number, length in enumerate(last_page_len.tolist()):
        first, end = qo_indptr[number : number + 2].tolist()
        if first == end:
            continue
        pages = kv_indices[int(kv_indptr[number]) : int(kv_indptr[number + 1])].long()
        assert 0 < length <= page_size or not len(pages)
        num_keys = (len(pages) - 1) * page_size + length if len(pages) else 0
        if not num_keys:
            out[first:end] = 0
            if lse is not None:
                lse[first:end] = NO_KEYS
            continue
        keys, values = (
            x.index_select(0, pages).flatten(0, 1)[:num_keys].double().transpose(0, 1)
            for x in (k, v)
        )  # [Hkv, n, D]
        query = q[first:end].double().transpose(0, 1)  # [Hq, N, D]
        folded = query.reshape(len(keys), -1, query.shape[-1])  # [Hkv, G * N, D]
        scores = (folded @ keys.transpose(1, 2) * scale).view(-1, end - first, num_keys)
        if logits_soft_cap:
            scores = (scores / logits_soft_cap).tanh() * logits_soft_cap
        place = torch.arange(num_keys)
        last = torch.arange(num_keys - (end - first), num_keys)
        if is_causal:
            scores = scores.masked_fill(place > last[:, None], -torch.inf)
        if window_left >= 0:
            scores = scores.masked_fill(place < last[:, None] - window_left, -torch.inf)
        weights = scores.softmax(-1).view(len(keys), -1, num_keys)
        mixed = (weights @ values).view(group * len(keys), end - first, -1)
        out[first:end] = mixed.transpose(0, 1).to(out.dtype)
        if lse is not None:
            lse[first:end] = (scores.logsumexp(-1) * math.log2(math.e)).t().float()


# -- which side of the bus a tensor is on ---------------------------------------------------------


def side_of(array: Tensor) -> str:
    """ "host" for what a plan staged there, "device" for everything else; int32 all."""
    assert array.dtype == torch.int32
    return getattr(array, "side", "device")


def mark_sides(monkeypatch: Any) -> None:
    """Arrays that PlanUploader gives out for the host are marked: here all are on the CPU."""
    upload = PlanUploader.upload

    def marked(self: Any, *args: Any, **kwargs: Any) -> Any:
        host, device = upload(self, *args, **kwargs)
        for one in host:
            one.side = "host"
        return host, device

    monkeypatch.setattr(PlanUploader, "upload", marked)
