"""Decode steps of fixed shape: recorded once, planned and replayed for others, on the CPU.

A recording is the list of kernels that `attend` launched, with the tensors they were given: what a
CUDA graph keeps. Replaying it runs no Python of the backend.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor

from radixserve.attention.base import PLAIN, AttentionFeatures
from radixserve.attention.cuda import cascade
from radixserve.attention.cuda.backend import GraphBackend, PagedBackend
from radixserve.runner.input_batch import build_forward_batch
from radixserve.schedule import ScheduledRequest
from tests.attention.cases import CPU, Case, SharedCase, run
from tests.attention.conftest import MakePaged, Recording
from tests.attention.fake_flashinfer import Fake


class Recorded:
    """A graph's `attend` of one layer; `replay` runs what it launched."""

    def __init__(
        self,
        graph: GraphBackend,
        recording: Recording,
        layer: int,
        case: Case,
        features: AttentionFeatures = PLAIN,
    ) -> None:
        self.graph = graph
        self._q = torch.zeros(graph.shape.num_rows, *case.q.shape[1:], dtype=case.q.dtype)
        recording.clear()
        self._out = graph.attend(self._q, layer, features=features)
        self._kernels = list(recording)
        self.num_kernels = len(self._kernels)

    def replay(self, case: Case) -> Tensor:
        """[rows of the case, Hq, D] after a plan."""
        self._q.fill_(torch.nan)
        self._q[: len(case.q)] = case.q
        self._out.fill_(torch.nan)
        for kernel in self._kernels:
            kernel()
        return self._out[: len(case.q)]


def store(case: Case, kv: Tensor, layer: int) -> None:
    """The new tokens' K and V, as a model that calls `attend` does."""
    for at, new in enumerate((case.k, case.v)):
        kv[layer, at].flatten(0, 1)[case.batch.slot_mapping] = new


def pool_of(cases: list[Case]) -> Tensor:
    """Room for the pages of any of them; what is not used must not be read."""
    most = max(cases, key=lambda case: case.kv.shape[2]).kv
    return torch.full_like(most, torch.nan)


def check_replays(
    backend: PagedBackend,
    graph: GraphBackend,
    recording: Recording,
    cases: list[Case],
    layer: int = 1,
) -> None:
    """One recording, made of the first case, answers all of them in turn."""
    pool = backend.kv
    held: Recorded | None = None
    for case in [*cases, *cases[::-1]]:
        pool.fill_(torch.nan)
        pool[:, :, : case.kv.shape[2]] = case.kv
        pool[:, :, 0].nan_to_num_(0.5)  # the padding's page may hold anything that is a number
        store(case, pool, layer)
        assert graph.fits(case.batch)
        graph.plan(case.batch)
        held = held or Recorded(graph, recording, layer, case)
        out = held.replay(case)
        expected, _ = case.expected(layer)
        torch.testing.assert_close(out.double(), expected, atol=3e-6, rtol=2e-5)


def decodes(seed: int, page_size: int, *, shared: bool) -> Case:
    generator = np.random.default_rng(seed)
    lengths = [(int(n), 1) for n in generator.integers(0, 60, generator.integers(1, 9))]
    shape = {"heads": 4, "kv_heads": 2, "dim": 16, "seed": seed}
    if not shared:
        return Case(lengths, page_size, **shape)
    groups, first = [], 0
    while first + 1 < len(lengths):
        end = min(len(lengths), first + int(generator.integers(2, 5)))
        least = min(start for start, _ in lengths[first:end]) // page_size
        groups.append((range(first, end), int(generator.integers(0, least + 1))))
        first = end
    if len(lengths) > 3:
        groups.append(((0, 1, len(lengths) - 1), min(3, min(n for n, _ in lengths) // page_size)))
    return SharedCase(lengths, page_size, groups, **shape)


@pytest.mark.pairs
@pytest.mark.usefixtures("always_share")
@pytest.mark.parametrize("num_levels", [0, 1])
@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_replays_of_one_recording(
    page_size: int, num_levels: int, make_paged: MakePaged, recording: Recording
) -> None:
    cases = [decodes(seed, page_size, shared=seed % 3 > 0) for seed in range(6)]
    backend = make_paged(pool_of(cases), 4)
    graph = backend.make_graph_backend(9, 9 * 64, num_levels)
    assert graph.num_levels == num_levels
    check_replays(backend, graph, recording, cases)


@pytest.mark.usefixtures("always_share")
@pytest.mark.parametrize(("page_size", "kernel_page_size"), [(4, 1), (6, 2), (96, None)])
def test_pages_may_be_read_as_smaller_ones(
    page_size: int, kernel_page_size: int | None, make_paged: MakePaged, recording: Recording
) -> None:
    cases = [decodes(seed, page_size, shared=seed % 2 > 0) for seed in range(4)]
    backend = make_paged(pool_of(cases), 4, kernel_page_size=kernel_page_size)
    check_replays(backend, backend.make_graph_backend(8, 8 * 20, 1), recording, cases)
    for case in cases:
        backend.kv[:, :, : case.kv.shape[2]] = case.kv
        expected, _ = case.expected(0)
        torch.testing.assert_close(run(backend, case, 0).double(), expected, atol=3e-6, rtol=2e-5)


@pytest.mark.usefixtures("always_share")
def test_graphs_of_all_sizes_in_turn(make_paged: MakePaged, recording: Recording) -> None:
    """They share memory and are used one at a time, between steps that are no graphs'."""
    cases = [decodes(seed, 2, shared=True) for seed in range(9)]
    backend = make_paged(pool_of(cases), 4)
    sizes = [(n, levels) for n in (8, 4, 2, 1) for levels in (0, 1)]
    graphs = [backend.make_graph_backend(n, n * 40, levels) for n, levels in sizes]
    held: dict[int, Recorded] = {}
    for case in cases * 2:
        pool = backend.kv
        pool[:, :, : case.kv.shape[2]] = case.kv
        pool[:, :, 0].nan_to_num_(0.5)
        store(case, pool, 0)
        expected, _ = case.expected(0)
        for number, graph in enumerate(graphs):
            if len(case.rows) > graph.shape.num_rows:
                assert not graph.fits(case.batch)
                continue
            graph.plan(case.batch)
            if number not in held:
                held[number] = Recorded(graph, recording, 0, case)
            out = held[number].replay(case)
            torch.testing.assert_close(out.double(), expected, atol=3e-6, rtol=2e-5)
        eager = run(backend, case, 0)
        torch.testing.assert_close(eager.double(), expected, atol=3e-6, rtol=2e-5)


def grown(case: Case, start: int, first_row: int) -> Case:
    """The case's rows from `first_row` on, of page size 1, as a running batch has them once they
    have `start` tokens: each in a slot of its own, with one new page."""
    step = copy.copy(case)
    step.rows = tuple(
        row._replace(start=start, page_ids=row.page_ids[: start + 1], first_new_page=start, slot=at)
        for at, row in enumerate(case.rows[first_row:], first_row)
    )
    step.lengths = [(start, 1)] * len(step.rows)
    step.q, step.k, step.v = (x[first_row:] for x in (case.q, case.k, case.v))
    step.batch = build_forward_batch(step.rows, 1, CPU)
    return step


@pytest.mark.usefixtures("always_share")
def test_shared_pages_are_planned_again_only_when_they_change(
    make_flashinfer: MakePaged, fake: Fake, recording: Recording
) -> None:
    """Or when another graph was planned in the same memory."""
    groups = [(range(3), 10), ((1, 2), 18)]
    case = SharedCase([(40, 1)] * 3, 1, groups, heads=4, kv_heads=2, dim=16)
    backend = make_flashinfer(case.kv.clone(), 4)
    graph, other = (backend.make_graph_backend(n, n * 40, 1) for n in (4, 3))
    steps = [grown(case, start, first_row=int(start >= 27)) for start in range(20, 30)]
    held: Recorded | None = None
    num_plans = []
    for number, step in enumerate(steps):
        backend.kv.copy_(step.kv)
        store(step, backend.kv, 1)
        if number == 4:
            other.plan(step.batch)
        before = fake.calls.count("prefill.plan")
        graph.plan(step.batch)
        num_plans.append(fake.calls.count("prefill.plan") - before)
        held = held or Recorded(graph, recording, 1, step)
        expected, _ = step.expected(1)
        torch.testing.assert_close(held.replay(step).double(), expected, atol=3e-6, rtol=2e-5)
    assert num_plans == [1, 0, 0, 0, 1, 0, 0, 1, 0, 0]  # step 7: one row is gone


def test_what_a_graph_launches(make_paged: MakePaged, recording: Recording) -> None:
    case = decodes(1, 2, shared=False)
    backend = make_paged(case.kv, 4)
    for num_levels, num_kernels in ((0, 1), (1, 3)):
        graph = backend.make_graph_backend(16, 600, num_levels)
        assert Recorded(graph, recording, 0, case).num_kernels == num_kernels
    with pytest.raises(ValueError, match="0 or 1 shared levels, not 2"):
        backend.make_graph_backend(16, 600, 2)


def test_which_graph_to_replay(make_paged: MakePaged, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with a level where it pays for the rows as they lie."""
    token_bytes = 2 * 2 * 16 * 4
    monkeypatch.setattr(cascade, "SHARE_BYTES", 200 * token_bytes)
    groups, lengths = [(range(4), 40)], [(80, 1)] * 4 + [(5, 1)] * 3
    case = SharedCase(lengths, 2, groups, heads=4, kv_heads=2, dim=16)
    assert make_paged(case.kv, 4).shared_levels(case.batch) == 1  # saves 3 * 80 tokens
    assert make_paged(case.kv, 4, shares=False).shared_levels(case.batch) == 0
    apart = [case.rows[at] for at in (0, 4, 1, 5, 2, 6, 3)]
    batch = build_forward_batch(apart, 2, CPU)
    backend = make_paged(case.kv, 4)
    assert backend.shared_levels(batch) == 0
    assert backend.nodes.find(batch.host)  # where rows may be put together it pays


def test_what_does_not_fit(make_paged: MakePaged) -> None:
    case = Case([(9, 1)] * 3, 2, heads=4, kv_heads=2, dim=16)  # of 5 pages each
    backend = make_paged(case.kv, 4)
    assert backend.make_graph_backend(3, 15).fits(case.batch)
    assert backend.make_graph_backend(4, 16).fits(case.batch)  # a page for the row that is padded
    for num_rows, max_pages in ((4, 15), (3, 14), (2, 99)):
        assert not backend.make_graph_backend(num_rows, max_pages).fits(case.batch)
        with pytest.raises(ValueError, match="do not fit a graph"):
            backend.make_graph_backend(num_rows, max_pages).plan(case.batch)
    chunk = ScheduledRequest("r", np.ones(2, np.int32), 3, np.arange(3, dtype=np.int32), None)
    assert not backend.make_graph_backend(4, 99).fits(build_forward_batch([chunk], 2, CPU))


def test_smaller_graphs_use_the_memory_of_larger_ones(make_paged: MakePaged) -> None:
    backend = make_paged(torch.zeros(1, 2, 4, 2, 2, 16), 4)
    large, small, larger = (backend.make_graph_backend(n, n * 10, 1) for n in (8, 2, 9))
    pages = [[one.kv_indices.data_ptr() for one in graph.buffers] for graph in (large, small)]
    assert pages[0] == pages[1]
    assert large.buffers[0].kv_indices.data_ptr() != larger.buffers[0].kv_indices.data_ptr()
    assert len(set(pages[0])) == 2
    for graph in (large, small, larger):
        for buffers in graph.buffers:
            for one in buffers[:-1]:
                assert one.data_ptr() % 16 == 0
            assert buffers.window_kv_indices is None
