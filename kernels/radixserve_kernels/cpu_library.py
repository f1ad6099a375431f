"""The CPU kernels' machine code: compiled from `cpu/` for this processor when it is first needed.

The library is kept in a cache folder of the user's, named after the sources, the compiler, the
processor and its own content: it is compiled once, and a damaged file is detected and replaced.
Without a compiler, callers use PyTorch's operations.

RADIXSERVE_CACHE      the folder; by default ~/.cache/radixserve ($XDG_CACHE_HOME is followed)
CXX                   the compiler, flags may follow; by default the first of c++, g++, clang++
RADIXSERVE_CPU_LEVEL  avx2, avx512, avx512bf16, amx: instructions up to there, of those that the
                      processor has; by default all of them
RADIXSERVE_AMX        0: bfloat16 products without AMX, even if the processor has it
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("radixserve")

SOURCES = Path(__file__).parent / "cpu"
FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-shared"),
    *("-fno-math-errno", "-fno-strict-aliasing", "-w"),  # keys are packed as words of 32 bits
)
LEVELS = {  # what a processor says of itself, lowest first, and what the compiler is told
    "avx2": (("avx2", "fma", "f16c"), ("-march=x86-64-v3",)),
    "avx512": (
        ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
        ("-march=x86-64-v4",),
    ),
    "avx512bf16": (("avx512_bf16",), ("-march=x86-64-v4", "-mavx512bf16")),
    "amx": (
        ("amx_tile", "amx_bf16"),
        ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    ),
}
THREADS = ("-fopenmp",)  # left out where the compiler has no OpenMP
PATIENCE_S = 300


class CpuLibraryError(Exception):
    """Why there are no CPU kernels here."""


_loading = threading.Lock()


def cpu_library() -> ctypes.CDLL:
    """The loaded library, compiled if need be: about ten seconds. Raises CpuLibraryError.

    Tried once a process: a failure is remembered.
    """
    with _loading:
        found = _load()
    if isinstance(found, str):
        raise CpuLibraryError(found)
    return found


def is_loaded() -> bool:
    """Whether the library was asked for before, and is there: nothing is compiled."""
    return _load.cache_info().currsize > 0 and not isinstance(_load(), str)


@functools.cache
def _load() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    try:
        compiler = _find_compiler()
        folder, name = cache_folder(), f"cpu-{_fingerprint(compiler)}"
        path = _find_compiled(folder, name) or _compile(compiler, folder, name)
        library = ctypes.CDLL(str(path))
    except CpuLibraryError as reason:
        return str(reason)
    except OSError as error:
        return f"the compiled CPU kernels cannot be loaded: {error}"
    _declare(library)
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


def _find_compiler() -> list[str]:
    """The compiler and what the user wants it to be called with."""
    chosen = os.environ.get("CXX", "").strip()
    for name in (chosen,) if chosen else ("c++", "g++", "clang++"):
        try:
            words = shlex.split(name)
        except ValueError as error:
            raise CpuLibraryError(f"CXX={chosen} cannot be read: {error}") from error
        if shutil.which(words[0]):
            return words
    wanted = f"CXX={chosen}" if chosen else "c++, g++ and clang++"
    raise CpuLibraryError(f"there is no C++ compiler: {wanted} not found")


def levels() -> tuple[str, ...]:
    """The instruction levels that this processor has, lowest first; none where it does not say."""
    told = set(_processor().split())
    found = []
    for name, (wanted, _) in LEVELS.items():
        if not told.issuperset(wanted):
            break
        found.append(name)
    return tuple(found)


def _flags() -> tuple[str, ...]:
    """The compiler's flags, for the level that is asked for. Raises CpuLibraryError."""
    asked, found = os.environ.get("RADIXSERVE_CPU_LEVEL", ""), levels()
    if asked and asked not in found:
        allowed = ", ".join(found) or "none, its instructions are not known"
        raise CpuLibraryError(f"RADIXSERVE_CPU_LEVEL={asked}: this processor has {allowed}")
    return (*FLAGS, *(LEVELS[asked][1] if asked and asked != found[-1] else ("-march=native",)))


def _fingerprint(compiler: list[str]) -> str:
    """A name for what the compiled code depends on."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise CpuLibraryError(f"the C++ compiler {compiler[0]} does not run: {error}") from error
    digest.update(version + " ".join((*compiler, *_flags())).encode() + _processor().encode())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """What the code is compiled for: the machine's name and the processor's instructions."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            told = [line for line in lines if line.startswith(("model name", "flags", "Features"))]
    except OSError:
        told = [platform.processor()]
    return f"{platform.machine()} {''.join(sorted(set(told)))}"


def _find_compiled(folder: Path, name: str) -> Path | None:
    """A file of that name whose content is what it was when it was made.

    Checked before it is loaded: a file that was cut off would end the process.
    """
    for path in sorted(folder.glob(f"{name}-*.so")):
        try:
            content = path.read_bytes()
        except OSError:
            continue
        if path.name == _file_name(name, content):
            return path
        logger.warning("%s is damaged; the CPU kernels are compiled again", path)
        with contextlib.suppress(OSError):
            path.unlink()
    return None


def _file_name(name: str, content: bytes) -> str:
    return f"{name}-{hashlib.sha256(content).hexdigest()[:16]}.so"


def _compile(compiler: list[str], folder: Path, name: str) -> Path:
    """Into a file of its own first: processes may compile at the same time, or be killed."""
    logger.info("compiling the CPU kernels, once, into %s", folder)
    made = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, made = tempfile.mkstemp(".tmp", dir=folder)
        os.close(handle)
        _run_compiler(compiler, made)
        path = folder / _file_name(name, Path(made).read_bytes())
        os.replace(made, path)
    except OSError as error:
        raise CpuLibraryError(
            f"compiled code cannot be kept in {folder}: {error}; "
            "RADIXSERVE_CACHE may name another folder"
        ) from error
    finally:
        if made is not None:
            Path(made).unlink(missing_ok=True)
    return path


def _run_compiler(compiler: list[str], made: str) -> None:
    failure = ""
    for threads in (THREADS, ()):
        command = [*compiler, *_flags(), *threads, str(SOURCES / "library.cpp"), "-o", made]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
        except (OSError, subprocess.SubprocessError) as error:
            raise CpuLibraryError(
                f"{compiler[0]} cannot compile the CPU kernels: {error}"
            ) from error
        if done.returncode == 0:
            return
        failure = failure or _complaint(done.stderr)
    raise CpuLibraryError(f"{compiler[0]} cannot compile the CPU kernels: {failure}")


def _complaint(text: str) -> str:
    """The line of a compiler's messages that says most."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no message"]
    return next((line for line in lines if "error" in line.lower()), lines[-1])


def _declare(library: ctypes.CDLL) -> None:
    """Argument types of the C interface in cpu/library.cpp."""
    pointer, number, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    signatures = {
        "start": (None, ()),
        "bf16": (flag, ()),
        "use_amx": (None, (flag,)),
        "lanes": (flag, ()),
        "set_threads": (None, (flag,)),
        "packed_size": (number, (flag, number, number)),
        "pack": (None, (flag, pointer, number, number, pointer)),
        "linear": (None, (flag, pointer, number, number, pointer, pointer)),
        "plan": (pointer, (pointer, pointer, flag, number)),
        "reset_plan": (None, (pointer, pointer, pointer, flag, number)),
        "jobs": (None, (pointer, pointer)),
        "delete_plan": (None, (pointer,)),
        "attention": (pointer, ()),
        "delete_attention": (None, (pointer,)),
        "attend": (
            None,
            (
                *(flag, pointer, pointer, pointer, number),
                *(pointer, pointer, pointer, number, ctypes.c_float),
            ),
        ),
        "argmax": (number, (pointer, number, number, pointer)),
        "decoder": (pointer, (flag, pointer, pointer, pointer, pointer, pointer)),
        "delete_decoder": (None, (pointer,)),
        "run": (None, (pointer, pointer, pointer, pointer, number)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"radixserve_{name}")
        function.restype, function.argtypes = result, arguments


def finalize(owner: object, delete: Callable[..., None], pointer: Any) -> None:
    """Call `delete(pointer)` when `owner` is collected, but not at the end of the process: the
    engine's thread may still be computing with it then."""
    weakref.finalize(owner, delete, pointer).atexit = False


def is_bf16(dtype: torch.dtype) -> int:
    """The number type as C takes it."""
    return int(dtype == torch.bfloat16)


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
