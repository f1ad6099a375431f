"""Compile the kernels for GPUs that are not there: `python -m radixserve_kernels.gpu.compile`.

Prints what each takes of a multiprocessor: registers of a thread, bytes of stack of a thread (what
did not fit into registers), shared memory of a program. Exits with 1 if one does not fit.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from radixserve_kernels.gpu.launch import JITFunction, Launch, tl
from radixserve_kernels.gpu.variants import Variant, variants

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # of a program, by target
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*u1",
}


class Compiled(NamedTuple):
    """What a kernel takes."""

    target: int  # 90: sm_90
    kernel: str
    variant: str
    num_warps: int
    registers: int
    stack_bytes: int  # spilled registers among them
    shared_bytes: int

    @property
    def fits(self) -> bool:
        return self.shared_bytes <= SHARED_BYTES[self.target]


class Signature(NamedTuple):
    """A launch's arguments as the compiler sees them, specialised as Triton does on a call."""

    types: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], list[list[Any]]]


def signature_of(launch: Launch) -> Signature:
    """Arguments that are not `varying` are constants where they are 1, and else known to be
    multiples of 16 where they are."""
    found = Signature({}, {}, {})
    for number, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        is_special = not parameter.do_not_specialize
        is_one = type(value) is int and value == 1 and is_special
        if parameter.is_constexpr or value is None or is_one:
            found.types[parameter.name] = "constexpr"
            found.constants[number,] = value
            continue
        if isinstance(value, Tensor):
            found.types[parameter.name] = POINTERS[value.dtype]
            is_aligned = value.data_ptr() % 16 == 0
        elif isinstance(value, float):
            found.types[parameter.name], is_aligned = "fp32", False
        else:
            is_int32 = -(2**31) <= value < 2**31
            found.types[parameter.name] = "i32" if is_int32 else "i64"
            is_aligned = value % 16 == 0
        if is_aligned and is_special:
            found.attributes[number,] = [["tt.divisibility", 16]]
    return found


def compile_launch(variant: Variant, target: int) -> Compiled:
    """Compile for sm_<target>; nothing runs. Raises RuntimeError where Triton interprets."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if not isinstance(tl.sum, JITFunction):
        raise RuntimeError("Triton was imported with TRITON_INTERPRET set: it cannot compile")
    launch = variant.launch
    types, constants, attributes = signature_of(launch)
    source = ASTSource(launch.kernel, types, constants, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", target, 32), options=launch.options)
    registers, stack_bytes = resource_usage(made.asm["cubin"])
    name = launch.kernel.__name__.removesuffix("_kernel")
    shared = made.metadata.shared
    return Compiled(target, name, variant.name, launch.num_warps, registers, stack_bytes, shared)


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes of a thread, as Triton's own copy of cuobjdump tells them."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, f"cuobjdump says {text!r}"
    return int(found[1]), int(found[2])


def compile_all(targets: Sequence[int], *, every: bool) -> Iterator[Compiled]:
    """Each variant for each target, as they are done."""
    for target in targets:
        for variant in variants(divmod(target, 10), every=every):
            yield compile_launch(variant, target)


def table_line(cells: Sequence[object]) -> str:
    widths = (8, 18, 32, 6, 6, 6, 8)
    return "".join(f"{cell!s:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--targets", type=int, nargs="+", default=list(SHARED_BYTES))
    parser.add_argument("--every", action="store_true", help="all dtypes, head and page sizes")
    options = parser.parse_args(arguments)
    if unknown := set(options.targets) - set(SHARED_BYTES):
        parser.error(f"targets are {', '.join(map(str, SHARED_BYTES))}, not {unknown}")
    print(table_line(("target", "kernel", "variant", "warps", "regs", "stack", "shared")))
    fits = True
    for made in compile_all(options.targets, every=options.every):
        print(table_line((f"sm_{made.target}", *made[1:])), flush=True)
        fits &= made.fits
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
