"""The CUDA backends on a CUDA device, graphs captured for real; and the same on the CPU.

Where there is no such device, the CPU's half still shows that the test is a test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from radixserve.attention.base import PLAIN, AttentionBackend, AttentionFeatures
from radixserve.attention.choice import unusable_reason
from radixserve.attention.cuda.backend import PagedBackend
from radixserve.attention.cuda.flashinfer import FlashInferBackend
from radixserve.attention.cuda.triton import TritonBackend
from radixserve.runner.input_batch import build_forward_batch
from tests.attention.cases import LENGTHS, SHARED, Case, SharedCase
from tests.attention.fake_flashinfer import Fake
from tests.attention.test_features import LONG
from tests.attention.test_paged_graph import store

DTYPE = torch.bfloat16
SHAPE = {"heads": 8, "kv_heads": 2, "dim": 64, "dtype": DTYPE}
Build = Callable[..., PagedBackend]
LAYERS = [  # of one model, as layers of Gemma 2 and Gemma 3 may be
    PLAIN,
    AttentionFeatures(sliding_window=21),
    AttentionFeatures(sliding_window=192),
    AttentionFeatures(logits_soft_cap=2.0),
    AttentionFeatures(sliding_window=1, logits_soft_cap=50.0),
]


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return torch.device(request.param)


@pytest.fixture(params=["flashinfer", "triton"])
def build(request: pytest.FixtureRequest, device: torch.device) -> Build:
    """A backend on the device, over a case's pool with the new tokens stored in layer 1; of
    `features`, those of its layers, one that does not share."""
    name = request.param
    if device.type == "cuda" and (reason := unusable_reason(name, DTYPE, device, 64)):
        pytest.skip(reason)
    fake = request.getfixturevalue("fake") if device.type == "cpu" else Fake()

    def make(case: Case, features: Sequence[AttentionFeatures] = ()) -> PagedBackend:
        kv = case.kv.clone()
        store(case, kv, 1)
        if name == "triton":
            return TritonBackend(kv.to(device), 8, shares=not features)
        library = fake.library if device.type == "cpu" else None
        variants = [one.variant for one in features]
        return FlashInferBackend(kv.to(device), 8, variants=variants, library=library)

    return make


def cases() -> list[tuple[str, int]]:
    return [(name, page_size) for name in (*LENGTHS, *SHARED) for page_size in (1, 16)]


def case_of(name: str, page_size: int) -> Case:
    if name in LENGTHS:
        return Case(LENGTHS[name], page_size, **SHAPE)
    lengths, groups = SHARED[name]
    shared = [(rows, count * 2 // page_size) for rows, count in groups]
    return SharedCase(lengths, page_size, shared, **SHAPE)


def check(out: Tensor, case: Case, features: AttentionFeatures = PLAIN) -> None:
    expected, _ = case.expected(1, features=features)
    torch.testing.assert_close(out.cpu().double(), expected, atol=2e-2, rtol=5e-2)


@pytest.mark.usefixtures("always_share")
@pytest.mark.parametrize(("name", "page_size"), cases()[::3])
def test_steps(name: str, page_size: int, build: Build, device: torch.device) -> None:
    case = case_of(name, page_size)
    backend = build(case)
    backend.plan(build_forward_batch(case.rows, page_size, device))
    check(backend.attend(case.q.to(device), 1), case)


@pytest.mark.parametrize(("name", "page_size"), [*cases()[1::3], ("long", 1), ("long", 16)])
def test_steps_with_features(name: str, page_size: int, build: Build, device: torch.device) -> None:
    case = Case(LONG, page_size, **SHAPE) if name == "long" else case_of(name, page_size)
    backend = build(case, LAYERS)
    backend.plan(build_forward_batch(case.rows, page_size, device))
    for features in LAYERS:
        check(backend.attend(case.q.to(device), 1, features=features), case, features)


def captured(
    backend: AttentionBackend, q: Tensor, features: AttentionFeatures = PLAIN
) -> tuple[Callable[[], None], Tensor]:
    """What attends anew in layer 1, over the same memory, and where the result lies."""
    out = torch.empty_like(q)

    def attend() -> None:
        out.copy_(backend.attend(q, 1, features=features))

    attend()  # compiles and allocates what must not happen while a graph is captured
    if not q.is_cuda:
        return attend, out
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    return graph.replay, out


@pytest.mark.usefixtures("always_share")
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("num_levels", [0, 1])
def test_graphs(num_levels: int, page_size: int, build: Build, device: torch.device) -> None:
    """Captured with one batch, replayed with others of every number of rows."""
    everything = SharedCase([(64 + 9 * at, 1) for at in range(12)], page_size, [], **SHAPE)
    for row in everything.rows[1:7]:
        row.page_ids[: 48 // page_size] = everything.rows[0].page_ids[: 48 // page_size]
    everything.batch = build_forward_batch(everything.rows, page_size, torch.device("cpu"))
    backend = build(everything)
    graph = backend.make_graph_backend(12, 12 * 200, num_levels)
    q = torch.zeros(12, 8, 64, dtype=DTYPE, device=device)
    replay, out = captured(graph, q)
    expected, _ = everything.expected(1)
    for some in ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [3], [0, 1, 2, 6], [8, 2, 11, 0, 1]):
        rows = [everything.rows[at] for at in some]
        graph.plan(build_forward_batch(rows, page_size, device))
        q.fill_(torch.nan)
        q[: len(some)] = everything.q[some].to(device)
        replay()
        torch.testing.assert_close(
            out[: len(some)].cpu().double(), expected[np.array(some)], atol=2e-2, rtol=5e-2
        )


@pytest.mark.parametrize("page_size", [1, 16])
def test_graphs_with_features(page_size: int, build: Build, device: torch.device) -> None:
    """One plan before the replays of all layers."""
    everything = Case([(130 * at, 1) for at in range(8)], page_size, **SHAPE)
    graph = build(everything, LAYERS).make_graph_backend(8, 8 * 1_000)
    q = torch.zeros(8, 8, 64, dtype=DTYPE, device=device)
    layers = [(*captured(graph, q, one), everything.expected(1, features=one)[0]) for one in LAYERS]
    for some in ([0, 1, 2, 3, 4, 5, 6, 7], [7], [3, 0, 6]):
        rows = [everything.rows[at] for at in some]
        graph.plan(build_forward_batch(rows, page_size, device))
        q.fill_(torch.nan)
        q[: len(some)] = everything.q[some].to(device)
        for replay, out, expected in layers:
            replay()
            torch.testing.assert_close(
                out[: len(some)].cpu().double(), expected[np.array(some)], atol=2e-2, rtol=5e-2
            )
