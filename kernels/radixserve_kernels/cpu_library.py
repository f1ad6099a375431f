"""The CPU kernels' machine code: compiled from `cpu/` for this processor when it is first needed.

There is a library for each number type, and one for 8- and 4-bit weights, each compiled when it is
first needed. It is kept in a cache folder of the user's, named after the sources, the compiler, the
processor and its own content: it is compiled once, and a damaged file is detected and replaced.
Without a compiler, callers use PyTorch's operations.

RADIXSERVE_CACHE      the folder; by default ~/.cache/radixserve ($XDG_CACHE_HOME is followed)
CXX                   the compiler, flags may follow; by default the first of c++, g++, clang++
RADIXSERVE_CPU_LEVEL  avx2, avx512, avx512vnni, avx512bf16, amx, on arm64 neon, dotprod, i8mm, bf16:
                      instructions up to there, of those that the processor has; by default all of
                      them that are fast on it
RADIXSERVE_AMX        0: bfloat16 products without AMX, even if the processor has it
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from radixserve_kernels import processor
from radixserve_kernels.cpu_compiler import (
    CompilerError,
    compile_once,
    compiler_version,
    find_compiled,
    find_compiler,
)
from radixserve_kernels.cpu_reading import Reading, use_reading

SOURCES = Path(__file__).parent / "cpu"
FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread"),
    "-fvisibility=hidden",  # else libraries of two levels in a process share tables of functions
    *("-fno-math-errno", "-fno-strict-aliasing", "-w"),  # keys are packed as words of 32 bits
)
WIDEN_BF16 = "-DRADIXSERVE_WIDEN_BF16"  # bfloat16 products in float32 despite instructions for them
DTYPE_FLAGS = {  # the type's name in C++
    torch.float32: ("-DRADIXSERVE_NUMBER=float",),
    torch.bfloat16: ("-DRADIXSERVE_NUMBER=bf16", "-DRADIXSERVE_IS_BF16"),
}
FORMS = "forms"  # the library of 8- and 4-bit weights


class CpuLibraryError(Exception):
    """The CPU kernels are unavailable, for the reason in the message."""


_loading = threading.Lock()
loaded: dict[torch.dtype | str, ctypes.CDLL] = {}  # in that order
readings: list[Reading] = []  # of the loaded library of 8- and 4-bit weights


def cpu_library(dtype: torch.dtype | None = None) -> ctypes.CDLL:
    """Load the library of a number type, compiling it if needed, which takes five to ten seconds.

    dtype None loads any library, for functions that do not depend on the type. A failure is
    remembered for the process. Raises CpuLibraryError.
    """
    if dtype is None:
        for part, library in loaded.items():
            if part != FORMS:
                return library
    return loaded[dtype] if dtype in loaded else _require(dtype or torch.float32)


def forms_library() -> ctypes.CDLL:
    """The library of 8- and 4-bit weights, see `cpu_library`; the others use it from then on."""
    return _require(FORMS)


def is_loaded() -> bool:
    """Whether a library has been loaded. Compiles nothing."""
    return bool(loaded)


def forget() -> None:
    """Drop all loaded libraries and remembered failures."""
    load.cache_clear()
    loaded.clear()
    readings.clear()


def _require(part: torch.dtype | str) -> ctypes.CDLL:
    with _loading:
        result = load(part)
        if isinstance(result, str):
            raise CpuLibraryError(result)
        if part not in loaded:
            loaded[part] = result
            if (forms := loaded.get(FORMS)) is not None:
                for library in loaded.values():
                    if library is not forms:
                        library.radixserve_use_forms(forms.radixserve_forms())
    return result


@functools.cache
def load(part: torch.dtype | str) -> ctypes.CDLL | str:
    """Load the library of a number type or FORMS; the reason as text if that fails."""
    try:
        compiler, flags = find_compiler(), compiler_flags()
        sources: tuple[str, ...] = ("forms.cpp",)
        if isinstance(part, torch.dtype):
            flags = (*flags, *DTYPE_FLAGS[part])
            sources = ("library.cpp", "attention.cpp", "tiles_f32.cpp")
        folder, name = cache_folder(), f"cpu-{_fingerprint(compiler, (*flags, *sources))}"
        path = find_compiled(folder, name) or _compile([*compiler, *flags], sources, folder, name)
        library = ctypes.CDLL(str(path))
    except (CompilerError, CpuLibraryError) as reason:
        return str(reason)
    except OSError as error:
        return f"the compiled CPU kernels cannot be loaded: {error}"
    if part == FORMS:
        _declare(library, _FORMS_INTERFACE)
        try:
            readings[:] = [use_reading(library, folder / f"{name}.reading")]
        except ValueError as error:
            return str(error)
        return library
    _declare(library, _INTERFACE)
    library.radixserve_start()
    if os.environ.get("RADIXSERVE_AMX") == "0":
        library.radixserve_use_amx(0)
    return library


def cache_folder() -> Path:
    """Where compiled code is kept. Raises CpuLibraryError where the user has no home."""
    chosen = os.environ.get("RADIXSERVE_CACHE")
    if chosen:
        return Path(chosen).absolute()  # a bare name would be searched for by the loader
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "radixserve"
    except RuntimeError as error:
        raise CpuLibraryError(
            f"{error}: set RADIXSERVE_CACHE to a folder for compiled code"
        ) from error


def compiler_flags() -> tuple[str, ...]:
    """The compiler's flags, for the level that is asked for. Raises CpuLibraryError."""
    asked, offered = os.environ.get("RADIXSERVE_CPU_LEVEL", ""), processor.levels()
    if asked and asked not in offered:
        allowed = ", ".join(offered) or "none, its instructions are not known"
        raise CpuLibraryError(f"RADIXSERVE_CPU_LEVEL={asked}: this processor has {allowed}")
    # A level of arm64 that is asked for takes no NATIVE_FLAG, which a cross compiler does not know.
    if asked in offered[:-1] or (asked and processor.IS_ARM):
        return (*FLAGS, *processor.LEVELS[asked][1])
    # Intel's cores with AVX512-FP16 take four times as long for a dot product of pairs as for an
    # FMA: measured on Emerald Rapids. A level that is asked for uses all of its instructions.
    is_slow = not asked and offered[-1:] == ("avx512bf16",) and _is_intel_fp16()
    return (*FLAGS, *((WIDEN_BF16,) if is_slow else ()), processor.NATIVE_FLAG)


def code_fingerprint() -> str:
    """A name for the kernels' sources and the instructions that they are compiled to: results have
    the same bits where it is the same. Raises CpuLibraryError."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    flags = (*processor.levels()[-1:], *compiler_flags(), os.environ.get("RADIXSERVE_AMX", ""))
    digest.update(" ".join(flags).encode())
    return digest.hexdigest()[:16]


def _is_intel_fp16() -> bool:
    description = processor.description()
    return "Intel" in description and "avx512_fp16" in description.split()


def _fingerprint(compiler: list[str], flags: tuple[str, ...]) -> str:
    """A name for what the compiled code depends on. Raises CompilerError."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    digest.update(compiler_version(*compiler))
    digest.update(" ".join((*compiler, *flags)).encode() + processor.description().encode())
    return digest.hexdigest()[:16]


def _compile(compiler: list[str], sources: tuple[str, ...], folder: Path, name: str) -> Path:
    """Raises CompilerError, and CpuLibraryError where the file cannot be kept."""
    paths = [SOURCES / source for source in sources]
    try:
        return compile_once(compiler, paths, folder, name, "the CPU kernels")
    except OSError as error:
        raise CpuLibraryError(
            f"compiled code cannot be kept in {folder}: {error}; "
            "RADIXSERVE_CACHE may name another folder"
        ) from error


def _check(lacks_memory: int) -> None:
    if lacks_memory:
        raise MemoryError("the CPU kernels found none")


def _check_pointer(pointer: int | None, *_: object) -> int:
    _check(pointer is None)
    assert pointer is not None
    return pointer


_POINTER, _NUMBER, _FLAG = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_INTERFACE: dict[str, tuple[Any, tuple[Any, ...]]] = {  # of cpu/library.cpp
    "start": (None, ()),
    "bf16": (_FLAG, ()),
    "use_amx": (None, (_FLAG,)),
    "lanes": (_FLAG, ()),
    "set_threads": (None, (_FLAG,)),
    "packed_size": (_NUMBER, (_FLAG, _NUMBER, _NUMBER)),
    "lora_depth": (_NUMBER, (_FLAG, _NUMBER)),
    "pack": (None, (_FLAG, _POINTER, _NUMBER, _NUMBER, _POINTER)),
    "integer_dot": (_FLAG, ()),
    "use_forms": (None, (_POINTER,)),
    "linear": (_check, (_FLAG, _POINTER, _NUMBER, _NUMBER, _POINTER, _POINTER)),
    "experts": (_check, (_FLAG, _POINTER, _POINTER, _NUMBER, _NUMBER, _POINTER)),
    "job_grid": (_FLAG, ()),
    "plan": (_POINTER, (_POINTER, _POINTER, _NUMBER, _FLAG)),
    "jobs": (_check, (_POINTER, _POINTER)),
    "delete_plan": (None, (_POINTER,)),
    "attention": (_POINTER, ()),
    "delete_attention": (None, (_POINTER,)),
    "attend": (
        _check,
        (
            *(_FLAG, _POINTER, _POINTER, _POINTER, _NUMBER, _POINTER),
            *(_POINTER, _NUMBER, ctypes.c_float, _POINTER, _POINTER),
        ),
    ),
    "argmax": (_NUMBER, (_POINTER, _NUMBER, _NUMBER, _POINTER)),
    "argmax_allowed": (
        _NUMBER,
        (_POINTER, _NUMBER, _NUMBER, _POINTER, _NUMBER, _POINTER, _POINTER),
    ),
    "sample": (
        _NUMBER,
        (
            *(_POINTER, _NUMBER, _NUMBER, _POINTER, _NUMBER, _POINTER),
            *(_POINTER, _POINTER, _POINTER, _POINTER),
        ),
    ),
    "copy_allowed": (
        None,
        (_POINTER, _NUMBER, _NUMBER, _POINTER, _NUMBER, _POINTER, _POINTER),
    ),
    "decoder": (_POINTER, (_FLAG, *[_POINTER] * 6)),
    "delete_decoder": (None, (_POINTER,)),
    "fail_allocation": (None, (_NUMBER,)),
    "run": (_check, (_POINTER, _POINTER, _POINTER, _POINTER)),
}
_FORMS_INTERFACE = {  # of cpu/forms.cpp
    "forms": (_POINTER, ()),
    "form_bytes": (_NUMBER, (_NUMBER, _NUMBER, _NUMBER)),
    "pack_form": (None, (_NUMBER, _POINTER, _POINTER)),
    "use_reading": (None, (_FLAG, _FLAG)),
    "time_reading": (ctypes.c_double, (_NUMBER, _FLAG, _POINTER, _NUMBER)),
}


def _declare(library: ctypes.CDLL, interface: dict[str, tuple[Any, tuple[Any, ...]]]) -> None:
    """Set the argument types of a library's functions. Those that need memory raise MemoryError."""
    for name, (result, arguments) in interface.items():
        function = getattr(library, f"radixserve_{name}")
        function.restype, function.argtypes = result, arguments
        if result is _POINTER:
            function.errcheck = _check_pointer


def finalize(owner: object, delete: Callable[..., None], pointer: Any) -> None:
    """Call `delete(pointer)` when `owner` is collected, but not at the end of the process: the
    engine's thread may still be computing with it then."""
    weakref.finalize(owner, delete, pointer).atexit = False


def is_bf16(dtype: torch.dtype) -> int:
    """The number type as C takes it."""
    return int(dtype == torch.bfloat16)


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
