"""What these tests share with those of attention, and the three ways through gpu_ops."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from radixserve_kernels import gpu_ops
from tests.cpu_kernels import cpu_level, num_threads

__all__ = ["cpu_level", "num_threads", "path"]


class DeviceOps:
    """gpu_ops over CPU tensors, computed on a device. Whole storages are copied there and back, so
    that strides, aliases and what lies between rows stay."""

    def __init__(self, device: str) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        found = getattr(gpu_ops, name)
        return functools.partial(self._call, found) if callable(found) else found

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        copies: dict[int, tuple[Tensor, Tensor]] = {}  # a storage's bytes and theirs on the device
        originals: dict[int, Tensor] = {}  # by id of what is sent

        def sent(x: Any) -> Any:
            if not isinstance(x, Tensor) or x.device.type != "cpu":
                return x
            storage = x.untyped_storage()
            if storage.data_ptr() not in copies:
                own = torch.empty(0, dtype=torch.uint8).set_(storage)
                copies[storage.data_ptr()] = own, own.to(self._device, copy=True)
            memory = copies[storage.data_ptr()][1].untyped_storage()
            place = x.storage_offset(), x.shape, x.stride()
            there = torch.empty(0, dtype=x.dtype, device=self._device).set_(memory, *place)
            originals[id(there)] = x
            return there

        def received(x: Any) -> Any:
            if isinstance(x, tuple):
                return tuple(map(received, x))
            if id(x) in originals:
                return originals[id(x)]
            return x.cpu() if isinstance(x, Tensor) else x

        there = [sent(x) for x in args], {key: sent(x) for key, x in kwargs.items()}
        result = function(*there[0], **there[1])
        for own, other in copies.values():
            kept = own.to(self._device, copy=True).cpu()
            assert torch.equal(kept, own), "the device does not keep what is copied to it"
            own.copy_(other)
        return received(result)


PATHS = ("reference", "triton", "cuda")
needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no CUDA device"
)  # known at collection: see tests/pairwise.py


def on_each_path(
    names: Sequence[str], cells: Iterable[tuple[Any, ...]], is_short: Callable[..., bool]
) -> pytest.MarkDecorator:
    """Parametrizes a test with `path` and `names`. Interpreted kernels take seconds: their cells
    that are not `is_short` are long runs."""
    found = []
    for path, cell in itertools.product(PATHS, cells):
        marks = [needs_cuda] if path == "cuda" else []
        if path == "triton" and not is_short(*cell):
            marks = [pytest.mark.long]
        label = "-".join(map(str, (path, *cell)))
        found.append(pytest.param(path, *cell, marks=marks, id=label))
    return pytest.mark.parametrize(("path", *names), found, indirect=["path"])


@pytest.fixture(params=[*PATHS[:-1], pytest.param("cuda", marks=needs_cuda)])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The torch references and the interpreted Triton kernels on the CPU, or the compiled ones on
    a CUDA device, where fresh memory holds NaN. What is expected of them is computed on the CPU."""
    name: str = request.param
    if name != "cuda":
        if name == "triton":
            request.getfixturevalue("interpreted")
        yield name
        return
    monkeypatch.setattr(request.module, "gpu_ops", DeviceOps("cuda"))
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills fresh memory with NaN
    yield name
    torch.use_deterministic_algorithms(False)
