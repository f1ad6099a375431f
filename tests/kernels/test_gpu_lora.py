"""What adapters add to a product: the kernels and their reference against one product a row."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from radixserve.attention.base import AdapterRows
from radixserve.models.device_lora import DeviceLora, entry_of, lora_of
from radixserve_kernels import gpu_ops
from radixserve_kernels.cpu_lora import LoraProduct

both = pytest.mark.usefixtures("path")  # references, interpreted kernels, compiled ones
DTYPES = [torch.float32, torch.bfloat16]


def device_of(path: str) -> torch.device:
    return torch.device("cuda" if path == "cuda" else "cpu")


def product(rank: int, depth: int, size: int, dtype: torch.dtype) -> LoraProduct:
    a, b = torch.randn(rank, depth) / math.sqrt(depth), torch.randn(size, rank)
    return LoraProduct(a.to(dtype).float(), b.to(dtype).float())


def added(out: Tensor, x: Tensor, adapter: LoraProduct, places: list[int]) -> Tensor:
    """In float64, with a x rounded as the kernels do."""
    expected = out.double().clone()
    inner = (x[places].double() @ adapter.a.double().T).to(x.dtype).double()
    expected[places] += inner @ adapter.b.double().T
    return expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("ranks", "num_tokens", "depth", "size"),
    [((1,), 3, 40, 9), ((16, 3), 21, 70, 130), ((48, 5, 16, 1), 60, 2_100, 33), ((80,), 70, 33, 5)],
)
def test_add_lora(
    path: str, ranks: tuple[int, ...], num_tokens: int, depth: int, size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(len(ranks))
    device = device_of(path)
    products = [product(rank, depth, size, dtype) for rank in ranks]
    # Each has another product in the layer before, and the last one none in this layer.
    layers = [[{"o": product(2, 8, 8, dtype)}, {"qkv": each}] for each in products]
    layers.append([{"qkv": products[0]}, {}])
    adapters = [DeviceLora(each, dtype, device) for each in layers]
    owner = torch.randint(-1, len(adapters), (num_tokens,))  # -1: of none
    places = [torch.nonzero(owner == number)[:, 0].numpy() for number in range(len(adapters))]
    groups = [AdapterRows(one, own, own) for one, own in zip(adapters, places, strict=True)]
    rows = lora_of(groups, device).tokens
    x = torch.randn(num_tokens, depth + 3).to(dtype)[:, :depth]
    before = torch.randn(num_tokens, size + 2).to(dtype)[:, :size]
    expected = before.double()
    for adapter, own in zip(products, places, strict=False):
        expected = added(expected, x, adapter, own.tolist())
    entry = entry_of(1, "qkv")
    out = gpu_ops.add_lora(x.to(device), rows, entry, before.to(device, copy=True)).cpu()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=10 * tolerance)
    untouched = owner < 0
    assert torch.equal(out[untouched], before[untouched])
    assert torch.equal(out[owner == len(products)], before[owner == len(products)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_among_others(path: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    device, depth, size = device_of(path), 2_200, 40
    first, second = (
        DeviceLora([{"down": product(rank, depth, size, dtype)}], dtype, device) for rank in (20, 4)
    )
    x, before = torch.randn(90, depth).to(device, dtype), torch.randn(90, size).to(device, dtype)
    entry = entry_of(0, "down")

    def computed(*owned: tuple[DeviceLora, range]) -> Tensor:
        groups = [AdapterRows(one, (a := torch.tensor(own).numpy()), a) for one, own in owned]
        return gpu_ops.add_lora(x, lora_of(groups, device).tokens, entry, before.clone())

    together = computed((first, range(70)), (second, range(70, 90)))
    for start, end in ((0, 1), (15, 16), (16, 17), (33, 34), (0, 17), (17, 34)):
        rows = range(start, end)
        assert torch.equal(computed((first, rows))[rows], together[rows])


@both
def test_no_rows_and_no_adapters() -> None:
    out = torch.ones(2, 4)
    rows = lora_of([], torch.device("cpu"))
    assert torch.equal(gpu_ops.add_lora(torch.ones(2, 3), rows.tokens, 0, out), torch.ones(2, 4))
