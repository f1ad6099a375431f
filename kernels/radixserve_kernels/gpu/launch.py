"""A launch of a Triton kernel: a value that can be run, interpreted or only compiled.

A family's functions make `Launch`es from tensors and touch no device. The same launches, made from
tensors of the meta device, tell the ahead-of-time compiler what would be compiled on a GPU.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor


def _import_triton() -> tuple[Any, Any]:
    """Triton's language with its own functions compiled, whatever TRITON_INTERPRET says: Triton
    reads that variable when it is imported."""
    interpret = os.environ.pop("TRITON_INTERPRET", None)
    language = importlib.import_module("triton.language")
    if interpret is not None:
        os.environ["TRITON_INTERPRET"] = interpret
    return language, importlib.import_module("triton.runtime.jit").JITFunction


if TYPE_CHECKING:
    import triton.language as tl
    from triton.runtime.jit import JITFunction
else:
    tl, JITFunction = _import_triton()

Capability = tuple[int, int]  # of the GPU: (9, 0) is Hopper


def kernel(varying: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """A function in Triton's language, never run by Python.

    It stays compiled code whatever TRITON_INTERPRET says.
    varying: arguments that change from call to call, or may lie anywhere in a larger buffer.
    Nothing is compiled anew for their values (1, multiples of 16) or, of pointers, alignment.
    """
    return lambda function: JITFunction(function, do_not_specialize=list(varying))


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel, its grid of programs and its arguments by name, constants included."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 1

    def run(self) -> None:
        """Queue it on the current stream."""
        if 0 in self.grid:
            return
        self.kernel[self.grid](**self.arguments, **self.options)

    @property
    def options(self) -> dict[str, Any]:
        """The compiler's."""
        sizes = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return sizes | {"enable_fp_fusion": True}


def capability_of(x: Tensor) -> Capability:
    """Compute capability of x's GPU; (8, 0) for other devices."""
    return _capability(x.device) if x.is_cuda else (8, 0)


@functools.cache
def _capability(device: torch.device) -> Capability:
    return torch.cuda.get_device_capability(device)


def power_of_2(n: int) -> int:
    """The least power of two >= n, as which blocks come."""
    return 1 << max(n - 1, 0).bit_length()
