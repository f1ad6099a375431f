"""Levels of x86 processors: which this one has, and the compiler's flags for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from radixserve_kernels import cpu_library as library
from radixserve_kernels.cpu_ops import unsupported_reason


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """The kernels have not been looked for yet."""
    library.forget()
    yield
    library.forget()


def test_the_levels_of_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that it has, one on top of the other; a level below the highest can be asked for."""
    wanted = [name for names, _ in library.LEVELS.values() for name in names]
    for told, found in (
        (wanted, ("avx2", "avx512", "avx512vnni", "avx512bf16", "amx")),
        (wanted[:-1], ("avx2", "avx512", "avx512vnni", "avx512bf16")),
        ([*wanted[:3], "avx512_bf16", "avx512f"], ("avx2",)),
        (["sse2"], ()),
    ):
        monkeypatch.setattr(library, "processor", lambda told=told: " ".join(told))
        assert library.levels() == found
        monkeypatch.delenv("RADIXSERVE_CPU_LEVEL", raising=False)
        assert library.compiler_flags()[-1] == "-march=native"
        for level, (_, flags) in library.LEVELS.items():
            monkeypatch.setenv("RADIXSERVE_CPU_LEVEL", level)
            library.forget()
            if level not in found:
                allowed = ", ".join(found) or "none, its instructions are not known"
                reason = f"RADIXSERVE_CPU_LEVEL={level}: this processor has {allowed}"
                assert unsupported_reason(torch.float32) == reason
            elif level == found[-1]:
                assert library.compiler_flags()[-1] == "-march=native"
            else:
                assert library.compiler_flags()[-len(flags) :] == flags


def test_bfloat16_is_widened_where_its_instructions_are_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [name for names, _ in library.LEVELS.values() for name in names]
    with_bf16 = names[: names.index("avx512_bf16") + 1]
    for told, level, is_widened in (
        ([*with_bf16, "avx512_fp16", "Intel(R)"], "", True),
        ([*with_bf16, "avx512_fp16", "Intel(R)"], "avx512bf16", False),
        ([*with_bf16, "avx512_fp16", "AMD"], "", False),
        ([*with_bf16, "Intel(R)"], "", False),
        ([*names, "avx512_fp16", "Intel(R)"], "", False),
    ):
        monkeypatch.setattr(library, "processor", lambda told=told: " ".join(told))
        monkeypatch.setenv("RADIXSERVE_CPU_LEVEL", level)
        assert (library.WIDEN_BF16 in library.compiler_flags()) == is_widened
