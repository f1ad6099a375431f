"""`Linear` against torch's own, over odd shapes, both dtypes, with and without a bias."""

from __future__ import annotations

import runpy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from radixserve_kernels import linear
from radixserve_kernels.linear import Linear

SHAPES = [(1, 1, 1), (1, 64, 48), (2, 7, 5), (33, 129, 65), (64, 256, 300), (512, 24, 1000)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("rows", "inner", "outer"), SHAPES)
def test_same_as_torch(
    rows: int, inner: int, outer: int, has_bias: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inner, generator=generator).to(dtype)
    weight = torch.randn(outer, inner, generator=generator).to(dtype)
    bias = torch.randn(outer, generator=generator).to(dtype) if has_bias else None
    plus = torch.randn(rows, outer, generator=generator).to(dtype)
    layer = Linear(weight, bias)
    out, total = layer(x), layer(x, plus)
    assert (out.dtype, total.dtype) == (dtype, dtype)
    assert out.shape == (rows, outer)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    atol = tolerance * inner**0.5
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=atol)
    torch.testing.assert_close(total.double(), exact + plus.double(), rtol=tolerance, atol=atol)


@pytest.mark.parametrize("build", ["without oneDNN", "without the operations"])
def test_on_another_build_it_is_torch(build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if build == "without oneDNN":
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    else:
        monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    module = runpy.run_path(linear.__file__)  # it looks for them when it is imported
    x, weight, plus = torch.randn(3, 8), torch.randn(5, 8), torch.randn(3, 5)
    layer = module["Linear"](weight)
    assert torch.equal(layer(x), F.linear(x, weight))
    assert torch.equal(layer(x, plus), F.linear(x, weight) + plus)
    assert torch.equal(module["product"](x, weight), F.linear(x, weight))


def test_other_dtypes_are_not_packed() -> None:
    x, weight = torch.randn(3, 8).double(), torch.randn(5, 8).double()
    assert torch.equal(Linear(weight)(x), F.linear(x, weight))
