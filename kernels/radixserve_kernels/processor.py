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
_ARM_FIELDS = ("CPU implementer", "CPU part", "CPU variant")  # -mcpu=native depends on them
_ARM_DESIGNS = {  # by implementer and part
    ("0x41", "0xd08"): "Cortex-A72",
    ("0x41", "0xd0b"): "Cortex-A76",
    ("0x41", "0xd0c"): "Neoverse-N1",
    ("0x41", "0xd40"): "Neoverse-V1",
    ("0x41", "0xd49"): "Neoverse-N2",
    ("0x41", "0xd4f"): "Neoverse-V2",
    ("0x61", "0x022"): "Apple M1",
    ("0x61", "0x023"): "Apple M1",
    ("0x61", "0x032"): "Apple M2",
    ("0x61", "0x033"): "Apple M2",
    ("0xc0", "0xac3"): "Ampere-1",
}
_AUXILIARY = {"asimd": (16, 1), "asimddp": (16, 20), "i8mm": (26, 13), "bf16": (26, 14)}  # key, bit
_SYSCTLS = {"asimddp": "FEAT_DotProd", "i8mm": "FEAT_I8MM", "bf16": "FEAT_BF16"}


def description() -> str:
    """What code is compiled for: the machine's name, the processor's and its instructions."""
    if IS_ARM:
        return " ".join((platform.machine(), name(), *arm_instructions()))
    found = [" ".join(values) for values in _processors(_X86_FIELDS)]
    return f"{platform.machine()} {' '.join(found) or platform.processor()}"


def name() -> str:
    """The processor's name and the numbers of its design, which tell more in a virtual machine."""
    if sys.platform == "darwin":
        return sysctl("machdep.cpu.brand_string").rstrip(b"\0").decode() or platform.machine()
    if IS_ARM:
        return ", ".join(map(_arm_name, _processors(_ARM_FIELDS))) or platform.machine()
    for model, family, number in _processors(("model name", "cpu family", "model")):
        return f"{model} (family {family}, model {number})"
    return platform.processor() or "unknown"


def _arm_name(numbers: tuple[str, ...]) -> str:
    implementer, part, variant = numbers
    design = _ARM_DESIGNS.get((implementer, part), "unknown design")
    return f"{design} (implementer {implementer}, part {part}, variant {variant})"


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


def _processors(fields: tuple[str, ...]) -> list[tuple[str, ...]]:
    """These fields of the different processors in /proc/cpuinfo; [] where it lacks them."""
    try:
        text = CPU_INFO.read_text(encoding="ascii", errors="replace")
    except OSError:
        return []
    found = []
    for lines in text.split("\n\n"):
        pairs = [line.partition(":") for line in lines.splitlines()]
        values = {field.strip(): value.strip() for field, _, value in pairs}
        if values.keys() >= set(fields):
            found.append(tuple(values[field] for field in fields))
    return list(dict.fromkeys(found))
