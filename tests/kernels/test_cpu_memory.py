"""Kernels that find no memory: MemoryError, whichever allocation fails, right results after it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from radixserve.attention.cpu import CpuBackend
from radixserve.models.cpu_decoder import load_cpu_decoder
from radixserve.models.source import find_model
from radixserve_kernels.cpu_library import cpu_library
from radixserve_kernels.cpu_ops import unsupported_reason
from radixserve_kernels.cpu_weights import PackedWeight
from radixserve_kernels.quantized import quantize_int8
from tests.attention.cases import Case, run
from tests.checkpoints import make_checkpoint
from tests.pacing import PATIENCE_S

pytestmark = [
    pytest.mark.skipif(
        bool(unsupported_reason(torch.float32)),
        reason=unsupported_reason(torch.float32) or "they are here",
    ),
    pytest.mark.usefixtures("num_threads"),
]


def in_new_thread(compute: Callable[[], Tensor]) -> Tensor | MemoryError:
    """Where all working memory is allocated anew, that of threads too."""
    found: list[Tensor | MemoryError] = []
    num_threads = torch.get_num_threads()

    def target() -> None:
        torch.set_num_threads(num_threads)
        try:
            found.append(compute())
        except MemoryError as error:
            found.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join(PATIENCE_S)
    assert found, "it neither ended nor failed"
    return found[0]


def check_each_allocation(make: Callable[[], Callable[[], Tensor]]) -> None:
    """`make` returns what computes, with no working memory yet."""
    expected, fail_allocation = make()(), cpu_library(torch.float32).radixserve_fail_allocation
    for count in range(200):
        compute = make()
        fail_allocation(count)
        try:
            out = in_new_thread(compute)
        finally:
            fail_allocation(-1)
        if isinstance(out, Tensor):
            assert count > 0, "nothing was allocated"
            assert torch.equal(out, expected)
            return
        assert torch.equal(compute(), expected)  # what failed once
    pytest.fail("there is no end of allocations")


def test_a_product() -> None:
    weight = PackedWeight(quantize_int8(torch.randn(700, 576)))
    x = torch.randn(200, 576)
    check_each_allocation(lambda: lambda: weight(x))


@pytest.mark.parametrize("lengths", [[(4_000, 1)], [(300, 300), (40, 1)]])
def test_attention(lengths: list[tuple[int, int]]) -> None:
    case = Case(lengths, 16, heads=8, kv_heads=2, dim=64)

    def make() -> Callable[[], Tensor]:
        backend = CpuBackend(case.kv.clone(), 8)
        return lambda: run(backend, case)

    check_each_allocation(make)


def test_a_decoder(tmp_path: Path) -> None:
    source = find_model(str(make_checkpoint(tmp_path, "llama")))

    def make() -> Callable[[], Tensor]:
        model = load_cpu_decoder(source, torch.float32)
        info = model.info
        case = Case([(0, 200), (3, 1)], 16, info.num_heads, info.num_kv_heads, info.head_dim)
        shape = (info.num_layers, *case.kv.shape[1:])
        backend = CpuBackend(torch.zeros(shape), info.num_heads)

        def compute() -> Tensor:
            backend.plan(case.batch)
            return model.forward(case.batch, backend)

        return compute

    check_each_allocation(make)


def test_a_request_that_is_too_large() -> None:
    """More memory than there are addresses."""
    weight, x = PackedWeight(quantize_int8(torch.randn(40, 64))), torch.randn(1, 64)
    library = cpu_library(torch.float32)
    library.radixserve_set_threads(torch.get_num_threads())
    with pytest.raises(MemoryError):
        library.radixserve_linear(
            *(0, x.data_ptr(), 64, 1 << 50),
            *(ctypes.byref(weight.record), x.data_ptr()),
        )
    assert weight(x).isfinite().all()


def test_a_plan_that_could_not_be_made_is_made_later() -> None:
    library, ends = cpu_library(), np.array([0, 1])
    rows = (ctypes.c_int64 * 9)(1 << 50, 1, *[ends.ctypes.data] * 5, 0, 1)
    heads, jobs = (ctypes.c_int64 * 4)(4, 2, 8), (ctypes.c_int64 * 14)()
    plan = library.radixserve_plan(rows, heads, 0, 0)
    for _ in range(2):
        with pytest.raises(MemoryError):
            library.radixserve_jobs(plan, jobs)
    rows[0] = 1
    library.radixserve_jobs(plan, jobs)
    assert jobs[0] == 1
    rows[0], rows[8] = 1 << 50, 1  # other rows
    with pytest.raises(MemoryError):
        library.radixserve_jobs(plan, jobs)
    library.radixserve_delete_plan(plan)
