"""A launch of a Triton kernel: a value that can be run, interpreted or only compiled.

A family's functions make launches from tensors and touch no device. The same launches, made from
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


def _import_triton() -> tuple[Any, Any, Any, Any]:
    """Triton's language with its own functions compiled, whatever TRITON_INTERPRET says: Triton
    reads that variable when it is imported. Then what kernels are compiled as, and the two
    functions of programmatic dependent launch, None before Triton 3.6."""
    interpret = os.environ.pop("TRITON_INTERPRET", None)
    language = importlib.import_module("triton.language")
    cuda = importlib.import_module("triton.language.extra.cuda")
    if interpret is not None:
        os.environ["TRITON_INTERPRET"] = interpret
    gdc = (getattr(cuda, name, None) for name in ("gdc_wait", "gdc_launch_dependents"))
    return language, importlib.import_module("triton.runtime.jit").JITFunction, *gdc


if TYPE_CHECKING:
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
    from triton.runtime.jit import JITFunction
else:
    tl, JITFunction, gdc_wait, gdc_launch_dependents = _import_triton()

Capability = tuple[int, int]  # of the GPU: (9, 0) is Hopper
PDL_CAPABILITY = (9, 0)  # least of programmatic dependent launch


def kernel(varying: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """A function in Triton's language, never run by Python.

    It stays compiled code whatever TRITON_INTERPRET says.
    varying: arguments that change from call to call, or may lie anywhere in a larger buffer.
    Nothing is recompiled for their values (1, multiples of 16) or, of pointers, alignment.
    """
    return lambda function: JITFunction(function, do_not_specialize=list(varying))


@kernel()
def wait_for_inputs(pdl: tl.constexpr):
    """Called by a kernel with an argument `pdl` before it reads what others wrote, or writes.

    With programmatic dependent launch its programs may start while the kernel before it ends: they
    wait here for all that it wrote, and let the next one do the same.
    """
    if pdl:
        gdc_wait()
        gdc_launch_dependents()


def has_pdl(capability: Capability) -> bool:
    """Whether kernels are launched that way: from Hopper and Triton 3.6 on, unless the variable
    RADIXSERVE_PDL is 0."""
    is_there = gdc_wait is not None and gdc_launch_dependents is not None
    return is_there and capability >= PDL_CAPABILITY and os.environ.get("RADIXSERVE_PDL") != "0"


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """A kernel, its grid of programs and its arguments by name, constants included."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 1
    # Whether products and sums may become one operation, which rounds once. Kernels that must agree
    # in every bit do not let the compiler choose: on an H200 it chose otherwise in each of them.
    enable_fp_fusion: bool = True

    def run(self) -> None:
        """Queue it on the current stream."""
        if 0 in self.grid:
            return
        pdl = _runs_with_pdl(torch.cuda.current_device())
        self.kernel[self.grid](**self.all_arguments(pdl), **self.options(pdl))

    def compile(self) -> None:
        """Compile it for the current device, unless that is done; nothing runs."""
        pdl = _runs_with_pdl(torch.cuda.current_device())
        self.kernel.warmup(grid=self.grid, **self.all_arguments(pdl), **self.options(pdl))

    @property
    def variant(self) -> tuple[Any, ...]:
        """What Triton recompiles for: constants, dtypes, and which of the arguments that are not
        `varying` are 1 or multiples of 16."""
        options = self.num_warps, self.num_stages, self.enable_fp_fusion
        kinds: list[Any] = [self.kernel.__name__, *options]
        for param in self.kernel.params:
            value = self.arguments.get(param.name)  # none of pdl
            if isinstance(value, Tensor):
                is_aligned = not param.do_not_specialize and value.data_ptr() % 16 == 0
                kinds.append((value.dtype, is_aligned))
            elif param.is_constexpr or value is None:
                kinds.append(value)
            elif param.do_not_specialize or isinstance(value, float):
                kinds.append(type(value))
            else:
                kinds.append((value == 1, value % 16 == 0))
        return tuple(kinds)

    @property
    def takes_pdl(self) -> bool:
        return "pdl" in self.kernel.arg_names

    def all_arguments(self, pdl: bool) -> dict[str, Any]:
        """`arguments`, and whether programmatic dependent launch is used, if it can be."""
        return self.arguments | {"pdl": pdl} if self.takes_pdl else self.arguments

    def options(self, pdl: bool) -> dict[str, Any]:
        """The compiler's."""
        chosen = {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": self.enable_fp_fusion,
        }
        return chosen | {"launch_pdl": True} if pdl and self.takes_pdl else chosen


def capability_of(x: Tensor) -> Capability:
    """Compute capability of x's GPU; (8, 0) for other devices."""
    return _capability(x.device) if x.is_cuda else (8, 0)


@functools.cache
def _runs_with_pdl(device: int) -> bool:
    return has_pdl(torch.cuda.get_device_capability(device))


@functools.cache
def _capability(device: torch.device) -> Capability:
    return torch.cuda.get_device_capability(device)


def power_of_2(n: int) -> int:
    """The least power of two >= n, as which blocks come."""
    return 1 << max(n - 1, 0).bit_length()
