"""This processor: its name, its instructions, and the levels of them that the CPU kernels have code
for. Linux lists the instructions of x86-64 in /proc/cpuinfo; those of arm64 are read from the
auxiliary vector, and from sysctl on macOS."""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from pathlib import Path
from typing import Any

Levels = dict[str, tuple[tuple[str, ...], tuple[str, ...]]]

# Of each level, lowest first: the instructions that it adds, as `description` has them, and the
# compiler's flags.
X86_LEVELS: Levels = {
    "avx2": (("avx2", "fma", "f16c"), ("-march=x86-64-v3",)),
    "avx512": (
        ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
        ("-march=x86-64-v4",),
    ),
    "avx512vnni": (("avx512_vnni",), ("-march=x86-64-v4", "-mavx512vnni")),
    "avx512bf16": (("avx512_bf16",), ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16")),
    "amx": (
        ("amx_tile", "amx_bf16"),
        ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    ),
}
ARM_LEVELS: Levels = {
    "neon": (("asimd",), ("-march=armv8-a",)),
    "dotprod": (("asimddp",), ("-march=armv8.2-a+dotprod",)),
    "i8mm": (("i8mm",), ("-march=armv8.2-a+dotprod+i8mm",)),
    "bf16": (("bf16",), ("-march=armv8.2-a+dotprod+i8mm+bf16",)),
}
IS_ARM = platform.machine() in ("aarch64", "arm64")
LEVELS = ARM_LEVELS if IS_ARM else X86_LEVELS
NATIVE_FLAG = "-mcpu=native" if IS_ARM else "-march=native"  # Apple's clang knows the first alone

CPU_INFO = Path("/proc/cpuinfo")
_X86_FIELDS = ("model name", "flags")
_ARM_FIELDS = ("CPU implementer", "CPU variant", "CPU part")  # -mcpu=native depends on them
_AUXILIARY = {"asimd": (16, 1), "asimddp": (16, 20), "i8mm": (26, 13), "bf16": (26, 14)}  # key, bit
_SYSCTLS = {"asimddp": "FEAT_DotProd", "i8mm": "FEAT_I8MM", "bf16": "FEAT_BF16"}


def description() -> str:
    """What code is compiled for: the machine's name, the processor's and its instructions."""
    if IS_ARM:
        return " ".join((platform.machine(), name(), *arm_instructions()))
    return f"{platform.machine()} {''.join(_cpu_info(_X86_FIELDS)) or platform.processor()}"


def name() -> str:
    """The processor's name; on arm64 under Linux the numbers of its maker and its design."""
    if sys.platform == "darwin":
        return sysctl("machdep.cpu.brand_string").rstrip(b"\0").decode() or platform.machine()
    lines = _cpu_info(_ARM_FIELDS if IS_ARM else _X86_FIELDS[:1])
    if not IS_ARM:
        return lines[0].partition(":")[2].strip() if lines else platform.processor() or "unknown"
    numbers = [" ".join(line.replace(":", " ").split()) for line in lines]
    return ", ".join(numbers) or platform.machine()


def levels() -> tuple[str, ...]:
    """The instruction levels of this processor, lowest first; () if its flags are unknown."""
    flags = set(description().split())
    found = []
    for level, (wanted, _) in LEVELS.items():
        if not flags.issuperset(wanted):
            break
        found.append(level)
    return tuple(found)


def arm_instructions() -> list[str]:
    """Which of the instructions of ARM_LEVELS the system lets a process use."""
    if sys.platform == "darwin":
        added = [each for each, key in _SYSCTLS.items() if any(sysctl(f"hw.optional.arm.{key}"))]
        return ["asimd", *added]
    words = {key: auxiliary_value(key) for key, _ in _AUXILIARY.values()}
    return [each for each, (key, bit) in _AUXILIARY.items() if words[key] >> bit & 1]


def auxiliary_value(key: int) -> int:
    """A word that Linux gives each process; 0 where there is none."""
    function = getattr(_libc(), "getauxval", None)
    if function is None:
        return 0
    function.restype, function.argtypes = ctypes.c_ulong, (ctypes.c_ulong,)
    return int(function(key))


def sysctl(key: str) -> bytes:
    """A value of macOS's kernel; empty where it has none of that name."""
    value = ctypes.create_string_buffer(256)
    size = ctypes.c_size_t(len(value))
    failed = _libc().sysctlbyname(key.encode(), value, ctypes.byref(size), None, 0)
    return b"" if failed else value.raw[: size.value]


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None)


def _cpu_info(fields: tuple[str, ...]) -> list[str]:
    """The different lines of /proc/cpuinfo that begin so, sorted; [] where there is none."""
    try:
        text = CPU_INFO.read_text(encoding="ascii", errors="replace")
    except OSError:
        return []
    return sorted({line for line in text.splitlines(keepends=True) if line.startswith(fields)})
