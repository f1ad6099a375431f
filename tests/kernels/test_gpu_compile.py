"""Every kernel compiles for GPUs that are not here and fits into them."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch

from radixserve_kernels import gpu_ops

if TYPE_CHECKING:
    from radixserve_kernels.gpu.variants import Variant

TARGETS = [80, 90, 100]
SOURCES = Path(gpu_ops.__file__).parent / "gpu"


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, with an empty cache of its own."""
    pytest.importorskip("triton", reason="there is no Triton for this system")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    from radixserve_kernels.gpu import launch

    if not isinstance(launch.tl.sum, launch.JITFunction):
        pytest.skip("Triton was imported with TRITON_INTERPRET set: it cannot compile")
    return importlib.import_module("radixserve_kernels.gpu.compile")


def kernels_in_sources() -> set[str]:
    """Names of all kernels that can be started, without the ending."""
    trees = [ast.parse(path.read_text()) for path in SOURCES.glob("*.py")]
    functions = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    names = {one.name for one in functions if one.decorator_list}
    return {name.removesuffix("_kernel") for name in names if name.endswith("_kernel")}


def check(
    compiler: ModuleType, target: int, variants: Iterable[Variant], *, every: bool = False
) -> Iterator[str]:
    print()
    for variant in variants:
        made = compiler.compile_launch(variant, target)
        print(compiler.table_line((f"sm_{target}", *made[1:])))
        assert made.fits, f"{made} takes more than {compiler.SHARED_BYTES[target]} bytes"
        assert made.stack_bytes <= (16 if every else 0), f"{made} spills registers"
        yield made.kernel


def test_every_kernel_compiles(compiler: ModuleType) -> None:
    """One variant of each for Hopper: without spills, within its shared memory; see the table with
    -s."""
    from radixserve_kernels.gpu.variants import variants

    firsts = {one.launch.kernel: one for one in reversed(variants((9, 0), every=False))}
    assert set(check(compiler, 90, firsts.values())) == kernels_in_sources()


@pytest.mark.long
@pytest.mark.parametrize("target", TARGETS)
def test_the_usual_variants_compile(compiler: ModuleType, target: int) -> None:
    from radixserve_kernels.gpu.variants import variants

    usual = variants(divmod(target, 10), every=False)
    assert set(check(compiler, target, usual)) == kernels_in_sources()


@pytest.mark.long
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("target", TARGETS)
def test_every_variant_compiles(compiler: ModuleType, target: int) -> None:
    """All dtypes, head dimensions, groups and page sizes; 16 bytes of spills are allowed."""
    from radixserve_kernels.gpu.variants import variants

    all_variants = variants(divmod(target, 10), every=True)
    assert set(check(compiler, target, all_variants, every=True)) == kernels_in_sources()


def test_compiled_and_interpreted_live_together(
    compiler: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interpreting in between changes nothing of what is compiled before and after."""
    from radixserve_kernels.gpu import launch, norm
    from radixserve_kernels.gpu.variants import Variant
    from tests.kernels.interpreter import interpret

    def compiled() -> object:
        x = torch.empty(2, 48, dtype=torch.bfloat16, device="meta")
        (one,) = norm.rms_norm(x, None, x[0], 1e-6, False, x)
        return compiler.compile_launch(Variant("", one), 90)

    before, names = compiled(), [dict(vars(one)) for one in (launch.tl, launch.tl.core)]
    x = torch.randn(2, 48)
    with monkeypatch.context() as patches:
        patches.setattr(gpu_ops, "cpu_launcher", interpret)
        interpreted = gpu_ops.rms_norm(x, torch.ones(48), 1e-6)
    torch.testing.assert_close(interpreted, gpu_ops.rms_norm(x, torch.ones(48), 1e-6))
    assert names == [dict(vars(one)) for one in (launch.tl, launch.tl.core)]
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    assert compiled() == before


FRESH = """
import os, sys, torch
sys.modules["triton"] = None  # cannot be imported
from radixserve_kernels import gpu_ops
x = torch.randn(2, 8)
gpu_ops.add_rms_norm(gpu_ops.rms_norm(x, x[0], 1e-6), x, x[0], 1e-6)
best = gpu_ops.argmax(x)
assert gpu_ops.triton_unsupported_reason()
assert "radixserve_kernels.gpu.launch" not in sys.modules

del sys.modules["triton"]
os.environ["TRITON_INTERPRET"] = "1"
from tests.kernels.interpreter import interpret
gpu_ops.cpu_launcher = interpret
assert all(map(torch.equal, gpu_ops.argmax(x), best))
from radixserve_kernels.gpu import launch
assert isinstance(launch.tl.sum, launch.JITFunction)
assert os.environ["TRITON_INTERPRET"] == "1"
"""


def test_triton_is_imported_when_a_kernel_starts() -> None:
    """References need none; with TRITON_INTERPRET set its own functions can still be compiled."""
    pytest.importorskip("triton", reason="there is no Triton for this system")
    path = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", FRESH], check=True, env=environment)


def test_the_command(compiler: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compiler.main(["--targets", "70"])
    assert "70" in capsys.readouterr().err


def test_what_spills_does_not_fit(compiler: ModuleType) -> None:
    def made(target: int, stack_bytes: int, shared_bytes: int = 0) -> bool:
        return bool(compiler.Compiled(target, "k", "v", 4, 255, stack_bytes, shared_bytes).fits)

    assert made(90, 16)
    assert not made(90, 24)
    assert not made(100, 24)
    assert made(80, 24)  # more live in registers there
    assert not made(90, 0, 228 << 10)


def ptx_of(compiler: ModuleType, launch: Any, target: int) -> str:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    from radixserve_kernels.gpu.launch import has_pdl

    gpu, pdl = GPUTarget("cuda", target, 32), has_pdl(divmod(target, 10))
    source = compiler.source_of(launch, make_backend(gpu), pdl)
    made = triton.compile(source, target=gpu, options=launch.options(pdl))
    assert made.metadata.launch_pdl == (pdl and launch.takes_pdl)
    return str(made.asm["ptx"])


def test_programs_of_one_kernel_start_while_those_before_it_end(
    compiler: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From Hopper on; only weights are read before all that the others wrote is there."""
    from radixserve_kernels.gpu import launch, norm, pages

    if launch.gdc_wait is None:
        pytest.skip("this Triton has no programmatic dependent launch")
    x = torch.empty(2, 4_096, dtype=torch.bfloat16, device="meta")
    (add_norm,) = norm.rms_norm(x, x, x[0], 1e-6, False, x)
    before, after = ptx_of(compiler, add_norm, 90).split("griddepcontrol.wait")
    assert "griddepcontrol.launch_dependents" in after
    assert "st.global" not in before
    assert before.count("ld.global") < after.count("ld.global")
    assert "griddepcontrol" not in ptx_of(compiler, add_norm, 80)
    index = torch.empty(4, dtype=torch.int32, device="meta")
    (flat,) = pages.flat_indices(index[None], index, index, index)
    assert "griddepcontrol" not in ptx_of(compiler, flat, 90)
    monkeypatch.setenv("RADIXSERVE_PDL", "0")
    assert "griddepcontrol" not in ptx_of(compiler, add_norm, 90)
