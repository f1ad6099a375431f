"""`Linear` against torch's own, over odd shapes, both dtypes, with and without a bias."""

from __future__ import annotations

import runpy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from radixserve_kernels import cpu_ops, linear
from radixserve_kernels.linear import Linear

SHAPES = [(1, 1, 1), (1, 64, 48), (2, 7, 5), (33, 129, 65), (64, 256, 300), (512, 24, 1000)]


@pytest.mark.pairs
@pytest.mark.parametrize("build", ["with kernels", "without kernels"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("rows", "inner", "outer"), SHAPES)
def test_same_as_torch(
    rows: int,
    inner: int,
    outer: int,
    has_bias: bool,
    dtype: torch.dtype,
    build: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if build == "without kernels":
        monkeypatch.setattr(linear, "unsupported_reason", lambda _: "there are none")
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inner, generator=generator).to(dtype)
    weight = torch.randn(outer, inner, generator=generator).to(dtype)
    bias = torch.randn(outer, generator=generator).to(dtype) if has_bias else None
    out = Linear(weight, bias)(x)
    assert out.dtype == dtype
    assert out.shape == (rows, outer)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    atol = tolerance * inner**0.5
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=atol)


@pytest.mark.parametrize("build", ["without oneDNN", "without the operations"])
def test_on_another_build_it_is_torch(build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if build == "without oneDNN":
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    else:
        monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    monkeypatch.setattr(cpu_ops, "unsupported_reason", lambda _: "there are none")
    module = runpy.run_path(linear.__file__)  # it looks for them when it is imported
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    assert torch.equal(module["Linear"](weight)(x), F.linear(x, weight))


@pytest.mark.skipif(bool(cpu_ops.unsupported_reason(torch.float32)), reason="no CPU kernels here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_among_others(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = Linear(torch.randn(300, 129, generator=generator).to(dtype))
    x = torch.randn(40, 129, generator=generator).to(dtype)
    together = layer(x)
    for part in (1, 3, 16):
        assert torch.equal(torch.cat([layer(rows) for rows in x.split(part)]), together)


def test_other_dtypes_are_not_packed() -> None:
    x, weight = torch.randn(3, 8).double(), torch.randn(5, 8).double()
    assert torch.equal(Linear(weight)(x), F.linear(x, weight))
