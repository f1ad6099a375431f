"""Levels of processors: which one has which, and the compiler's flags for each."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from radixserve_kernels import cpu_library as library
from radixserve_kernels import processor
from radixserve_kernels.cpu_ops import unsupported_reason

NEOVERSE_N1 = """\
processor\t: 0
BogoMIPS\t: 243.75
Features\t: fp asimd evtstrm aes crc32 atomics fphp asimdhp cpuid asimdrdm asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

"""

ZEN_4 = """\
processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 17
model name\t: AMD EPYC
flags\t\t: fpu sse2 avx2 fma f16c

"""


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """The kernels have not been looked for yet."""
    library.forget()
    yield
    library.forget()


@pytest.mark.parametrize("machine", ["x86_64", "arm64"])
def test_the_levels_of_a_processor(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that it has, one on top of the other; a level below the highest can be asked for."""
    levels = use_levels(machine, monkeypatch)
    native = processor.NATIVE_FLAG
    wanted = [name for names, _ in levels.values() for name in names]
    least = len(levels[next(iter(levels))][0])
    for told, found in (
        (wanted, tuple(levels)),
        ([name for name in wanted if name not in levels[[*levels][-1]][0]], tuple(levels)[:-1]),
        ([*wanted[:least], *wanted[least + 1 :]], tuple(levels)[:1]),
        (["sse2"], ()),
    ):
        monkeypatch.setattr(processor, "description", lambda told=told: " ".join(told))
        assert processor.levels() == found
        monkeypatch.delenv("RADIXSERVE_CPU_LEVEL", raising=False)
        assert library.compiler_flags()[-1] == native
        for level, (_, flags) in levels.items():
            monkeypatch.setenv("RADIXSERVE_CPU_LEVEL", level)
            library.forget()
            if level not in found:
                allowed = ", ".join(found) or "none, its instructions are not known"
                reason = f"RADIXSERVE_CPU_LEVEL={level}: this processor has {allowed}"
                assert unsupported_reason(torch.float32) == reason
            elif level == found[-1] and machine == "x86_64":
                assert library.compiler_flags()[-1] == native
            else:
                assert library.compiler_flags()[-len(flags) :] == flags


def use_levels(machine: str, monkeypatch: pytest.MonkeyPatch) -> processor.Levels:
    """Make the module choose as on another machine. Returns the levels."""
    is_arm = machine == "arm64"
    levels = processor.ARM_LEVELS if is_arm else processor.X86_LEVELS
    monkeypatch.setattr(processor, "IS_ARM", is_arm)
    monkeypatch.setattr(processor, "LEVELS", levels)
    monkeypatch.setattr(processor, "NATIVE_FLAG", "-mcpu=native" if is_arm else "-march=native")
    return levels


def test_arm64_under_linux(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Instructions come from the auxiliary vector, the name from /proc/cpuinfo."""
    use_levels("arm64", monkeypatch)
    monkeypatch.setattr(sys, "platform", "linux")
    cpu_info = tmp_path / "cpuinfo"
    cpu_info.write_text(NEOVERSE_N1 * 2)
    monkeypatch.setattr(processor, "CPU_INFO", cpu_info)
    for words, found in (
        ({16: 1 << 1, 26: 0}, ("neon",)),
        ({16: 1 << 1 | 1 << 20, 26: 0}, ("neon", "dotprod")),
        ({16: 1 << 1 | 1 << 20, 26: 1 << 13 | 1 << 14}, tuple(processor.ARM_LEVELS)),
        ({16: 1 << 1 | 1 << 20, 26: 1 << 14}, ("neon", "dotprod")),  # bf16 is above i8mm
    ):
        monkeypatch.setattr(processor, "auxiliary_value", words.__getitem__)
        assert processor.levels() == found
    assert processor.name() == "Neoverse-N1 (implementer 0x41, part 0xd0c, variant 0x3)"
    assert processor.name() in processor.description()  # libraries are named after it
    cpu_info.write_text(NEOVERSE_N1 + NEOVERSE_N1.replace("0xd0c", "0xfff"))  # of two designs
    other = "unknown design (implementer 0x41, part 0xfff, variant 0x3)"
    assert processor.name() == f"Neoverse-N1 (implementer 0x41, part 0xd0c, variant 0x3), {other}"
    monkeypatch.setattr(processor, "CPU_INFO", tmp_path / "none")
    assert processor.name() == platform.machine()
    assert processor.levels() == ("neon", "dotprod")


def test_x86_under_linux(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A virtual machine's name tells little: the numbers tell a Zen 4 from others."""
    use_levels("x86_64", monkeypatch)
    monkeypatch.setattr(sys, "platform", "linux")
    cpu_info = tmp_path / "cpuinfo"
    cpu_info.write_text(ZEN_4 * 2)
    monkeypatch.setattr(processor, "CPU_INFO", cpu_info)
    assert processor.name() == "AMD EPYC (family 25, model 17)"
    assert processor.levels() == ("avx2",)
    for text in ("", "processor\t: 0\n\n"):
        cpu_info.write_text(text)
        assert processor.name() == (platform.processor() or "unknown")
        assert processor.levels() == ()


def test_arm64_under_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    use_levels("arm64", monkeypatch)
    monkeypatch.setattr(sys, "platform", "darwin")
    yes, no = b"\1\0\0\0", b"\0\0\0\0"
    m1 = {"machdep.cpu.brand_string": b"Apple M1\0", "hw.optional.arm.FEAT_DotProd": yes}
    m1 |= {"hw.optional.arm.FEAT_I8MM": no, "hw.optional.arm.FEAT_BF16": no}
    m2 = {name: yes if name.startswith("hw") else b"Apple M2\0" for name in m1}
    for values, named, found in (
        (m1, "Apple M1", ("neon", "dotprod")),
        (m2, "Apple M2", tuple(processor.ARM_LEVELS)),
        ({}, platform.machine(), ("neon",)),  # a system that does not know the names
    ):
        monkeypatch.setattr(processor, "sysctl", lambda key, of=values: of.get(key, b""))
        assert processor.name() == named
        assert processor.levels() == found


def test_bfloat16_is_widened_where_its_instructions_are_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    levels = use_levels("x86_64", monkeypatch)
    names = [name for names, _ in levels.values() for name in names]
    with_bf16 = names[: names.index("avx512_bf16") + 1]
    for told, level, is_widened in (
        ([*with_bf16, "avx512_fp16", "Intel(R)"], "", True),
        ([*with_bf16, "avx512_fp16", "Intel(R)"], "avx512bf16", False),
        ([*with_bf16, "avx512_fp16", "AMD"], "", False),
        ([*with_bf16, "Intel(R)"], "", False),
        ([*names, "avx512_fp16", "Intel(R)"], "", False),
    ):
        monkeypatch.setattr(processor, "description", lambda told=told: " ".join(told))
        monkeypatch.setenv("RADIXSERVE_CPU_LEVEL", level)
        assert (library.WIDEN_BF16 in library.compiler_flags()) == is_widened
