"""Every kernel compiles for GPUs that are not here and fits into them."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from radixserve_kernels import gpu_ops

TARGETS = [80, 90, 100]
SOURCES = Path(gpu_ops.__file__).parent / "gpu"


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
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


def check(compiler, target: int, *, every: bool) -> Iterator[str]:
    print()
    for made in compiler.compile_all([target], every=every):
        print(compiler.table_line((f"sm_{target}", *made[1:])))
        assert made.fits, f"{made} takes more than {compiler.SHARED_BYTES[target]} bytes"
        if "fp32" not in made.variant or made.kernel != "extend":  # products without tensor cores
            assert made.stack_bytes == 0, f"{made} spills registers"
        assert made.stack_bytes <= 64, f"{made} spills many registers"
        yield made.kernel


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles(compiler, target: int) -> None:
    """Without spills, within the shared memory of the target; see the table with -s."""
    assert set(check(compiler, target, every=False)) == kernels_in_sources()


@pytest.mark.long
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("target", TARGETS)
def test_every_variant_compiles(compiler, target: int) -> None:
    """All dtypes, head dimensions and page sizes."""
    assert set(check(compiler, target, every=True)) == kernels_in_sources()


def test_compiled_and_interpreted_live_together(compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreting in between changes nothing of what is compiled before and after."""
    from radixserve_kernels.gpu import launch, norm
    from radixserve_kernels.gpu.variants import Variant

    def compiled() -> object:
        x = torch.empty(2, 48, dtype=torch.bfloat16, device="meta")
        (one,) = norm.rms_norm(x, None, x[0], 1e-6, x)
        return compiler.compile_launch(Variant("", one), 90)

    before, names = compiled(), [dict(vars(one)) for one in (launch.tl, launch.tl.core)]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x = torch.randn(2, 48)
    interpreted = gpu_ops.rms_norm(x, torch.ones(48), 1e-6)
    monkeypatch.delenv("TRITON_INTERPRET")
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
assert gpu_ops.unavailable()
assert "radixserve_kernels.gpu.launch" not in sys.modules

del sys.modules["triton"]
os.environ["TRITON_INTERPRET"] = "1"
assert all(map(torch.equal, gpu_ops.argmax(x), best))
from radixserve_kernels.gpu import launch
assert isinstance(launch.tl.sum, launch.JITFunction)
assert os.environ["TRITON_INTERPRET"] == "1"
"""


def test_triton_is_imported_when_a_kernel_starts() -> None:
    """Twins need none; with the interpreter asked for, its own functions can still be compiled."""
    pytest.importorskip("triton", reason="there is no Triton for this system")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    subprocess.run([sys.executable, "-c", FRESH], check=True, env=environment)


def test_signatures_are_specialised_as_triton_does(compiler) -> None:
    """1 becomes a constant, multiples of 16 are known as such, what varies is neither."""
    from radixserve_kernels.gpu import launch, pages

    table = torch.empty(3, 32, dtype=torch.int32, device="meta")
    (one,) = pages.flat_indices(table, table[0], table[0], table[0], table[0])
    found = compiler.signature_of(one)
    assert found.types["table_ptr"] == "*i32"
    assert found.types["stride_table"] == "i32"
    assert found.types["block"] == "constexpr"
    assert found.attributes == {(5,): [["tt.divisibility", 16]]}
    (thin,) = pages.flat_indices(table[:, :1], *[table[0]] * 4)
    assert compiler.signature_of(thin).attributes == found.attributes
    (single,) = pages.copy_pages(torch.empty(1, 2, 9, 1, 1, 1, device="meta"), table.view(-1, 2))
    types = compiler.signature_of(single).types
    assert types["token_cells"] == "constexpr"
    assert launch.power_of_2(1) == 1
    assert launch.power_of_2(17) == 32


def test_the_command(compiler, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compiler.main(["--targets", "70"])
    assert "70" in capsys.readouterr().err
