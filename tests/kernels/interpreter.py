"""Launches through Triton's interpreter: kernels as numpy code, on CPU tensors. For tests.

Triton decides when it is imported whether `tl.sum` and its like are to be compiled or interpreted,
and patches its modules while it interprets. Here each launch gets copies of its functions and of
`tl`'s own, and puts everything back: compiled and interpreted kernels live in one process. Five
faults of the interpreter are mended: it multiplies the bits of bfloat16 matrices as integers, cuts
off what float32 has more than bfloat16 instead of rounding, rounds ties to float8_e4m3fn up and
knows none of its NaNs, is slow with float16 matrices, and before Triton 3.9 stumbles over numpy
2.4, which makes no numbers of arrays with an axis.

Most of its time went into the same small values made again for each operation, into looking for
overflows with operations of its own, and into the rules of types and shapes, which Triton follows
anew for each operation: here values are made once, numpy looks for overflows, and what the rules
gave for two types is kept.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

from radixserve_kernels.gpu.launch import JITFunction, KernelLaunch, tl

from triton.language.semantic import TritonSemantic  # isort: skip
from triton.runtime import interpreter  # isort: skip  (launch decides how Triton is imported)
from triton.runtime.interpreter import _patch_lang_tensor  # isort: skip
from triton.runtime.jit import mangle_type  # isort: skip

mangle_type(1)  # its first call imports parts of Triton that need the compiled functions
TensorHandle, InterpreterBuilder = interpreter.TensorHandle, interpreter.InterpreterBuilder

PATCHED = (tl, tl.core, tl.math, tl.standard, tl.core.tensor, tl.core.dtype)


class _Interpreted(interpreter.InterpretedFunction):
    """A kernel that is interpreted, also where another one calls it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.rewrite()(*args, **kwargs)  # Triton's own patches everything once more


def interpret(launch: KernelLaunch) -> None:
    """Run a launch on CPU tensors, one program after another."""
    if 0 not in launch.grid:
        with _interpreting():
            interpreted(launch.kernel)[launch.grid](**launch.all_arguments(pdl=False))


def interpreted(kernel: Any) -> Any:
    """The interpreted copy of a compiled kernel."""
    return _interpreted(kernel.fn)


@functools.cache
def _interpreted(function: Any) -> Any:
    """A copy whose calls of other kernels are calls of their copies."""
    names = dict(function.__globals__) | {"_core": tl.core}  # modules among them get patched
    for name in function.__code__.co_names:
        if isinstance(names.get(name), JITFunction):
            names[name] = interpreted(names[name])
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    copy.__annotations__, copy.__module__ = function.__annotations__, function.__module__
    copy.__qualname__ = function.__qualname__
    return _Interpreted(copy)


@functools.cache
def _standard() -> dict[str, Any]:
    """Interpreted copies of the functions of `tl` that are kernels themselves."""
    functions = vars(tl.standard).items()
    return {name: interpreted(value) for name, value in functions if isinstance(value, JITFunction)}


@contextmanager
def _interpreting() -> Iterator[None]:
    """Triton's language made of numpy; all of it is as before afterwards."""
    before = [dict(vars(place)) for place in PATCHED]
    try:
        for name, function in _standard().items():
            setattr(tl.standard, name, function)
            if isinstance(getattr(tl, name, None), JITFunction):
                setattr(tl, name, function)
        with ExitStack() as stack:
            for place, methods in _MENDED.items():
                for name, method in methods.items():
                    stack.enter_context(patch.object(place, name, method))
            stack.enter_context(np.errstate(all="ignore"))  # as a GPU does
            yield
    finally:
        for place, names in zip(PATCHED, before, strict=True):
            _restore(place, names)


def _restore(place: Any, names: dict[str, Any]) -> None:
    for name, value in list(vars(place).items()):
        if name not in names:
            if place is not tl.standard:  # where Triton itself interprets it leaves names there
                delattr(place, name)
        elif value is not names[name]:
            setattr(place, name, names[name])
    for name in names.keys() - vars(place).keys():
        setattr(place, name, names[name])


def _widened(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """bfloat16 numbers, kept as their bits, in float32."""
    return np.left_shift(bits.astype(np.uint32), 16).view(np.float32)


def _rounded(numbers: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of the nearest bfloat16 numbers, ties to even."""
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    nearest = bits + 0x7FFF + (bits >> 16 & 1)
    nearest = np.where(np.isnan(numbers), bits | 0x400000, nearest)
    return (nearest >> 16).astype(np.uint16)


_cast, _dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot


def _mended_cast(self: Any, source: Any, kind: Any) -> Any:
    mine, wanted = source.dtype.scalar, kind.scalar
    if mine != wanted and mine == tl.float8e4nv:
        numbers = torch.from_numpy(np.ascontiguousarray(source.data)).view(torch.float8_e4m3fn)
        source = TensorHandle(numbers.float().numpy(), tl.float32)
        return source if wanted == tl.float32 else _mended_cast(self, source, kind)
    if mine != wanted and mine == tl.bfloat16:
        source = TensorHandle(_widened(source.data), tl.float32)
        return source if wanted == tl.float32 else _cast(self, source, kind)
    if mine != wanted and wanted == tl.bfloat16:
        return TensorHandle(_rounded(source.data.astype(np.float32)), wanted)
    if mine != wanted and wanted == tl.float8e4nv:
        numbers = torch.from_numpy(source.data.astype(np.float32)).to(torch.float8_e4m3fn)
        return TensorHandle(numbers.view(torch.uint8).numpy(), wanted)
    return _cast(self, source, kind)


def _mended_round(self: Any, source: Any, kind: Any, _rounding_mode: Any) -> Any:
    return _mended_cast(self, source, kind)


def _mended_dot(self: Any, a: Any, b: Any, total: Any, precision: Any, imprecise: Any) -> Any:
    a, b = (_mended_cast(self, one, tl.float32) for one in (a, b))
    return _dot(self, a, b, total, precision, imprecise)


def _mended_tensor(tensor: Any, scope: Any) -> None:
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


_tensor_init, _block_init = tl.core.tensor.__init__, tl.core.block_type.__init__
_tensors: dict[str, dict[str, Any]] = {}  # what tensors of a type hold, by its name
_blocks: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}  # what a type holds
_numpy_dtype = interpreter._get_np_dtype
_numpy_dtypes: dict[str, np.dtype[Any]] = {}


def _fast_tensor(self: Any, handle: Any, kind: Any) -> None:
    if kind.name not in _tensors:
        _tensor_init(self, handle, kind)
        _tensors[kind.name] = dict(vars(self))
    vars(self).update(_tensors[kind.name], handle=handle, type=kind)


def _fast_block(self: Any, element: Any, shape: Any) -> None:
    sizes = tuple([x.value if isinstance(x, tl.constexpr) else x for x in shape])
    if (element.name, sizes) not in _blocks:
        _block_init(self, element, list(sizes))
        _blocks[element.name, sizes] = dict(vars(self))
    vars(self).update(_blocks[element.name, sizes])


def _fast_dtype(kind: Any) -> np.dtype[Any]:
    name = kind.scalar.name
    if name not in _numpy_dtypes:
        _numpy_dtypes[name] = _numpy_dtype(kind)
    return _numpy_dtypes[name]


def _refuse_overflow(_semantic: Any, left: Any, right: Any, operation: Any) -> None:
    """Of `add`, `sub` and `mul`, as Triton's own check."""
    kind, name = left.type.scalar, operation.__name__
    if kind.int_bitwidth < 64:
        exact = getattr(operator, name)(*(x.handle.data.astype(np.int64) for x in (left, right)))
        lowest, highest = kind.get_int_min_value(), kind.get_int_max_value()
        is_held = lowest <= exact.min() and exact.max() <= highest
        assert is_held, f"int{kind.int_bitwidth} overflow detected for operation {name}"


_operand_types = TritonSemantic.binary_op_type_checking_impl
_broadcast = TritonSemantic.broadcast_impl_value
_FOUND: dict[tuple[Any, ...], tuple[Any, Any]] = {}  # of two operands' types: those they are given
_NUMBERS = (int, float, bool)


def _fast_operands(
    self: Any,
    left: Any,
    right: Any,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> Any:
    """Both in the type and the shape in which an operation takes them."""
    rules = allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
    key = _name(self, left), _name(self, right), rules
    if key not in _FOUND:
        operands = _operand_types(self, left, right, *rules)
        _FOUND[key] = operands[0].type, operands[1].type
        return operands
    return tuple(_turned(self, x, kind) for x, kind in zip((left, right), _FOUND[key], strict=True))


def _fast_broadcast(self: Any, left: Any, right: Any) -> Any:
    key = left.type.name, right.type.name
    if key not in _FOUND:
        operands = _broadcast(self, left, right)
        _FOUND[key] = operands[0].type, operands[1].type
        return operands
    return tuple(_turned(self, x, kind) for x, kind in zip((left, right), _FOUND[key], strict=True))


def _name(semantic: Any, x: Any) -> Any:
    """What the rules look at: a tensor's type, or that x is a number, and of which type."""
    if isinstance(x, _NUMBERS):
        return type(x), semantic.to_tensor_type(x).name
    return x.type.name


def _turned(semantic: Any, x: Any, kind: Any) -> Any:
    """x as a tensor of the type: cast and repeated."""
    if isinstance(x, _NUMBERS):
        x = semantic._cast_to_computation_type(x, kind.scalar)
    if x.type.name == kind.name:
        return x
    if x.type.scalar.name != kind.scalar.name:
        x = semantic.cast(x, kind.scalar)
        if x.type.name == kind.name:
            return x
    numbers = x.handle.data
    dtype = numbers.dtype if x.type.is_block() else _fast_dtype(x.handle.dtype)
    repeated = np.empty(tuple(kind.shape), dtype)
    repeated[...] = numbers
    return semantic.tensor(TensorHandle(repeated, x.handle.dtype.scalar), kind)


_MENDED: dict[Any, dict[str, Any]] = {
    InterpreterBuilder: {
        "cast_impl": _mended_cast,
        "create_dot": _mended_dot,
        "create_fp_to_fp": _mended_round,
    },
    interpreter: {"_patch_lang_tensor": _mended_tensor, "_get_np_dtype": _fast_dtype},
    tl.core.tensor: {"__init__": _fast_tensor},
    tl.core.block_type: {"__init__": _fast_block},
    TritonSemantic: {
        "binary_op_sanitize_overflow_impl": _refuse_overflow,
        "broadcast_impl_value": _fast_broadcast,
        **(
            {"binary_op_type_checking_impl": _fast_operands}
            if hasattr(TritonSemantic, "_cast_to_computation_type")  # from Triton 3.9 on
            else {}
        ),
    },
}
