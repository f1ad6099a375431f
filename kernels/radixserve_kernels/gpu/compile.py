"""Compile the kernels for GPUs that are not there: `python -m radixserve_kernels.gpu.compile`.

Prints what each takes of a multiprocessor: registers of a thread, bytes of stack of a thread (what
did not fit into registers), shared memory of a program. Exits with 1 if one does not fit, or spills
more than STACK_BYTES.
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

from radixserve_kernels.gpu.launch import JITFunction, KernelLaunch, has_pdl, tl
from radixserve_kernels.gpu.variants import Variant, variants

STACK_BYTES = 16  # of a thread, on Hopper and Blackwell servers, whose registers should do
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # of a program, by target


class Compiled(NamedTuple):
    """The resources of a compiled kernel."""

    target: int  # 90: sm_90
    kernel: str
    variant: str
    num_warps: int
    registers: int
    stack_bytes: int  # spilled registers among them
    shared_bytes: int

    @property
    def fits(self) -> bool:
        is_spilled = self.target >= 90 and self.stack_bytes > STACK_BYTES
        return not is_spilled and self.shared_bytes <= SHARED_BYTES[self.target]


def source_of(launch: KernelLaunch, backend: Any, pdl: bool) -> Any:
    """The kernel and its arguments, specialised by Triton's own binder as on a call: arguments that
    are not `varying` are constants where they are 1, and known multiples of 16 where they are."""
    from triton.compiler import ASTSource
    from triton.runtime.jit import create_function_from_signature

    kernel = launch.kernel
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, kinds, _ = bind(**launch.all_arguments(pdl), **launch.options(pdl), debug=False)
    types = {name: kind for name, (kind, _) in zip(bound, kinds, strict=True)}
    constants = {
        (number,): bound[name] for number, name in enumerate(bound) if types[name] == "constexpr"
    }
    attributes = {
        (number,): backend.parse_attr(known)
        for number, (kind, known) in enumerate(kinds)
        if kind != "constexpr" and known
    }
    return ASTSource(kernel, types, constants, attributes)


def compile_launch(variant: Variant, target: int) -> Compiled:
    """Compile for sm_<target>; nothing runs. Raises RuntimeError where Triton interprets."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    if not isinstance(tl.sum, JITFunction):
        raise RuntimeError("Triton was imported with TRITON_INTERPRET set: it cannot compile")
    launch, gpu = variant.launch, GPUTarget("cuda", target, 32)
    pdl = has_pdl(divmod(target, 10))
    source = source_of(launch, make_backend(gpu), pdl)
    made = triton.compile(source, target=gpu, options=launch.options(pdl))
    registers, stack_bytes = resource_usage(made.asm["cubin"])
    name = launch.kernel.__name__.removesuffix("_kernel")
    shared = made.metadata.shared
    return Compiled(target, name, variant.name, launch.num_warps, registers, stack_bytes, shared)


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes of a thread, as reported by Triton's own copy of cuobjdump."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert usage is not None, f"cuobjdump says {text!r}"
    return int(usage[1]), int(usage[2])


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
