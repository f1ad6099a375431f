"""Compiling the CPU kernels where it cannot be done, or was done badly: torch's operations remain.

Compilers are scripts here.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from radixserve import Runtime
from radixserve.config import EngineConfig
from radixserve.errors import ModelNotSupported
from radixserve.request import SamplingParams
from radixserve.runner.cpu_runner import CpuModelRunner
from radixserve_kernels import cpu_compiler as compiler
from radixserve_kernels import cpu_library as library
from radixserve_kernels.cpu_ops import unsupported_reason
from radixserve_kernels.cpu_weights import PackedWeight
from tests.checkpoints import make_checkpoint
from tests.pacing import PATIENCE_S, wait_until
from tests.runner.driver import Driver

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")
PRODUCT = """
import torch
from radixserve_kernels.cpu_weights import PackedWeight
x, weight = torch.ones(3, 5), torch.ones(7, 5)
assert torch.equal(PackedWeight(weight)(x), x @ weight.T)
print("right")
"""
ASK = "import torch; from radixserve_kernels.cpu_ops import unsupported_reason\n"
Script = Callable[[str], Path]


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has not looked for the kernels yet, with an empty cache folder."""
    monkeypatch.setenv("RADIXSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    library.forget()
    yield
    library.forget()


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Makes a shell script the compiler; `$out` is where it has to write, "" if asked --version.

    Every other call of it is a line of the file "calls".
    """

    def make(body: str) -> Path:
        path, calls = tmp_path / "a compiler", tmp_path / "calls"
        find_out = 'for a in "$@"; do [ "$last" = -o ] && out="$a"; last="$a"; done'
        path.write_text(
            f'#!/bin/sh\nout=; last=; {find_out}\n[ -n "$out" ] && echo "$@" >> "{calls}"\n{body}\n'
        )
        path.chmod(0o755)
        monkeypatch.setenv("CXX", f"'{path}'")
        return calls

    return make


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the real library: a copy of what this user has."""
    folder = tmp_path_factory.mktemp("compiled")
    return Path(shutil.copy(library.cpu_library()._name, folder)).parent


@pytest.fixture
def compilations(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that link from here on; each makes a copy of the library."""
    (made,) = compiled.glob("*.so")
    commands = []

    def run(command: Sequence[str], _: Path) -> tuple[int, str]:
        if "-c" not in command:
            commands.append(list(command))
        shutil.copy(made, command[-1])
        return 0, ""

    monkeypatch.setattr(compiler, "run_compiler", run)
    return commands


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own."""
    kept = {k: v for k, v in os.environ.items() if k not in ("CXX", "RADIXSERVE_CACHE")}
    kept["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**kept, **environment},
        check=False,
    )


def check_torch_remains(folder: Path, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint runs on torch with a warning; who asks for the kernels is told why not."""
    make_checkpoint(folder, "llama")
    with caplog.at_level(logging.WARNING, "radixserve"):
        runner = CpuModelRunner(str(folder), EngineConfig(num_pages=64))
    assert runner.backend_name == "torch"
    assert reason in caplog.text
    assert "PyTorch's operations are used" in caplog.text
    driver = Driver(runner, 1)
    stream = driver.add([1, 2, 3])
    driver.run()
    assert stream.is_done
    with pytest.raises(ModelNotSupported) as error:
        CpuModelRunner(str(folder), EngineConfig(num_pages=64, attention_backend="cpu"))
    assert reason in str(error.value)
    assert "attention_backend" in str(error.value)


# -- nothing that compiles ------------------------------------------------------------------------


def test_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent")
    reason = "there is no C++ compiler: CXX=/nonexistent not found"
    check_torch_remains(tmp_path / "model", reason, caplog)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    library.forget()
    reason = "there is no C++ compiler: c++, g++ and clang++ not found"
    assert unsupported_reason(torch.float32) == reason


def test_the_demo_needs_no_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent")
    with Runtime("demo", num_pages=200) as runtime:
        assert runtime.attention_backend == "torch"
        assert len(runtime.generate("Hello").token_ids) > 0
    assert "there is no C++ compiler: CXX=/nonexistent not found" in caplog.text


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            "echo note; echo 'x.h:1: error: no such thing' >&2; echo bye >&2; exit 1",
            "no such thing",
        ),
        ('[ -n "$out" ] && kill -9 $$', "Killed"),
        ('printf half > "$out"; echo "no space left on device" >&2; exit 1', "no space left"),
        ('[ -n "$out" ] && : > "$out"; exit 0', "cannot be loaded"),
        ('[ -n "$out" ] && echo "no library" > "$out"; exit 0', "cannot be loaded"),
        ('[ -n "$out" ] && rm "$out"; exit 0', "compiled code cannot be kept"),
    ],
)
def test_a_broken_compiler(
    body: str, reason: str, script: Script, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls = script(body)
    check_torch_remains(tmp_path / "model", reason, caplog)
    assert len(calls.read_text().splitlines()) <= 4  # three sources and their link, once a process
    left = {path.suffix for path in (tmp_path / "cache").iterdir()}
    assert left <= ({".so"} if "loaded" in reason else set())


def test_the_torch_backend_compiles_nothing(script: Script, tmp_path: Path) -> None:
    calls = script("exit 1")
    make_checkpoint(tmp_path / "model", "llama")
    config = EngineConfig(num_pages=64, attention_backend="torch")
    driver = Driver(CpuModelRunner(str(tmp_path / "model"), config), 1)
    stream = driver.add([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=2))
    driver.run()
    assert stream.is_done
    assert not calls.exists()


def test_a_compiler_that_does_not_run(script: Script, tmp_path: Path) -> None:
    script("")
    (tmp_path / "a compiler").write_bytes(b"\x7fELF nonsense")
    assert "does not run" in unsupported_reason(torch.float32)


def test_a_command_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", 'g++ "-DNAME')
    assert (
        unsupported_reason(torch.float32) == 'CXX=g++ "-DNAME cannot be read: No closing quotation'
    )


def test_a_compiler_that_makes_no_progress(
    script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compiler, "PATIENCE_S", 0.2)
    script('[ -n "$out" ] && exec sleep 60')
    assert "no progress for 0.2 seconds" in unsupported_reason(torch.float32)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_notice_after_a_second(
    script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    monkeypatch.setattr(compiler, "NOTICE_S", 0.01)
    monkeypatch.setattr(compiler.logger, "warning", told.write_text)
    script(f'[ -n "$out" ] && until [ -e "{told}" ]; do sleep 0.02; done; exit 1')
    unsupported_reason(torch.float32)
    assert told.read_text().startswith("compiling the CPU kernels, once")


def test_nothing_is_left_of_a_process_that_is_killed(script: Script, tmp_path: Path) -> None:
    """Neither the compiler, nor what it wrote."""
    script(f'[ -n "$out" ] && echo $$ > "{tmp_path}/pid" && echo half > "$out" && exec sleep 60')
    code = f"{ASK}print(unsupported_reason(torch.float32))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, cwd=ROOT)
    try:
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
    finally:
        process.kill()
        process.wait()
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_running(pid))
    wait_until(lambda: not list((tmp_path / "cache").glob("*.tmp")))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("name", ["a file", "a file/below"])
def test_a_cache_folder_that_cannot_be(
    name: str,
    script: Script,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = script("exit 0")
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("RADIXSERVE_CACHE", str(tmp_path / name))
    reason = f"compiled code cannot be kept in {tmp_path / name}"
    check_torch_remains(tmp_path / "model", reason, caplog)
    assert "RADIXSERVE_CACHE may name another folder" in caplog.text
    assert not calls.exists()


def test_a_full_disk(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script('[ -n "$out" ] && : > "$out"; exit 0')

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    for owner, name in ((compiler.Path, "mkdir"), (compiler.os, "replace")):
        with monkeypatch.context() as patches:
            patches.setattr(owner, name, full)
            assert "No space left on device" in unsupported_reason(torch.float32)
        library.forget()
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("home", ["nothing", "a file"])
def test_no_home(
    home: str, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = script("exit 0")
    monkeypatch.delenv("RADIXSERVE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if home == "nothing":

        def homeless() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(library.Path, "home", homeless)
    else:
        (tmp_path / home).write_text("")
        monkeypatch.setenv("HOME", str(tmp_path / home))
    assert "RADIXSERVE_CACHE" in unsupported_reason(torch.float32)
    assert not calls.exists()


def test_where_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXSERVE_CACHE", "/here")
    assert library.cache_folder() == Path("/here")
    monkeypatch.setenv("RADIXSERVE_CACHE", ".")  # the loader takes a bare name for another place
    assert library.cache_folder() == Path.cwd()
    monkeypatch.delenv("RADIXSERVE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/there")
    assert library.cache_folder() == Path("/there/radixserve")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert library.cache_folder() == Path("/home/me/.cache/radixserve")


@needs_compiler
def test_the_compiler_may_bring_flags(
    compiled: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    (made,) = compiled.glob("*.so")
    calls = script(f'[ -n "$out" ] && cp "{made}" "$out"; exit 0')
    monkeypatch.setenv("CXX", f"{os.environ['CXX']} -O1 '-DNAME=two words'")
    assert unsupported_reason(torch.float32) == ""
    assert calls.read_text().startswith("-O1 -DNAME=two words -O3")


# -- what was compiled ----------------------------------------------------------------------------


@needs_compiler
def test_compiled_once(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that has it is only read: nothing is compiled, nothing written."""
    before = {path: path.stat().st_mtime_ns for path in compiled.iterdir()}
    assert len(before) == 1
    monkeypatch.setenv("RADIXSERVE_CACHE", str(compiled))
    monkeypatch.setattr(library, "compile_once", None)
    compiled.chmod(0o555)
    try:
        assert unsupported_reason(torch.float32) == ""
    finally:
        compiled.chmod(0o755)
    x, weight = torch.randn(3, 20), torch.randn(9, 20)
    torch.testing.assert_close(PackedWeight(weight)(x), x @ weight.T)
    assert {path: path.stat().st_mtime_ns for path in compiled.iterdir()} == before


@needs_compiler
def test_amx_can_be_left_out(compiled: Path) -> None:
    code = "from radixserve_kernels.cpu_library import cpu_library as library\n"
    code += "print(library().radixserve_bf16())"
    done = run_python(code, RADIXSERVE_AMX="0", RADIXSERVE_CACHE=str(compiled))
    assert done.stdout.strip() in ("0", "1", "3"), done.stderr  # 2: AMX


@needs_compiler
@pytest.mark.parametrize("damage", ["cut off", "empty", "a byte", "a folder"])
def test_a_damaged_library_is_replaced(
    damage: str,
    compiled: Path,
    compilations: list[list[str]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is never loaded: that would end the process. The compiler runs again, once."""
    (sound,) = compiled.glob("*.so")
    content = sound.read_bytes()
    path = tmp_path / "cache" / sound.name
    path.parent.mkdir()
    if damage == "a folder":
        path.mkdir()
    elif damage == "cut off":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        path.write_bytes(content[:9_000] + bytes([content[9_000] ^ 1]) + content[9_001:])
    with caplog.at_level(logging.WARNING, "radixserve"):
        reason = unsupported_reason(torch.float32)
    if damage == "a folder":
        assert "cannot be kept" in reason
        return
    assert reason == ""
    assert "damaged" in caplog.text
    assert len(compilations) == 1
    assert path.read_bytes() == content
    library.forget()
    assert unsupported_reason(torch.float32) == ""
    assert len(compilations) == 1


@needs_compiler
def test_other_sources_or_compilers_are_other_files(
    compilations: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def num_made() -> int:
        library.forget()
        assert unsupported_reason(torch.float32) == ""
        assert len(list(library.cache_folder().iterdir())) == len(compilations)
        return len(compilations)

    assert num_made() == 1
    assert num_made() == 1
    with monkeypatch.context() as patches:
        patches.setenv("CXX", f"'{COMPILER}' -O1")
        assert num_made() == 2
    with monkeypatch.context() as patches:
        patches.setattr("platform.machine", lambda: "another one")
        assert num_made() == 3
    copy = tmp_path / "cpu"
    shutil.copytree(library.SOURCES, copy)
    monkeypatch.setattr(library, "SOURCES", copy)
    assert num_made() == 3
    (copy / "another.h").write_text("// nothing")
    assert num_made() == 4


@needs_compiler
def test_two_processes_at_the_same_time(compiled: Path, tmp_path: Path) -> None:
    """One compiles, the other waits for it, both work."""
    (made,) = compiled.glob("*.so")
    slow = tmp_path / "slow"
    slow.write_text(
        f"""#!/bin/sh
out=; last=; for a in "$@"; do [ "$last" = -o ] && out="$a"; last="$a"; done
[ -n "$out" ] || {{ : > "{tmp_path}/asked.$$"; exit 0; }}
case "$out" in *.o) exit 0;; esac
: > "{tmp_path}/begun.$$"
while [ $(ls "{tmp_path}" | grep -c asked) -lt 2 ]; do sleep 0.05; done
head -c 9000 "{made}" > "$out"; sleep 0.3; cat "{made}" > "$out"
"""
    )
    slow.chmod(0o755)
    folder = tmp_path / "cache"
    environment = {
        **os.environ,
        "CXX": str(slow),
        "RADIXSERVE_CACHE": str(folder),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PRODUCT],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        for _ in range(2)
    ]
    for process in processes:
        out, err = process.communicate(timeout=PATIENCE_S)
        assert out == "right\n", err
    assert len(list(folder.iterdir())) == 1
    assert len(list(tmp_path.glob("begun.*"))) == 1


@needs_compiler
def test_two_runtimes_at_the_same_time(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXSERVE_CACHE", str(compiled))
    with (
        Runtime("demo", num_pages=200) as first,
        Runtime("demo", num_pages=200, attention_backend="torch") as second,
    ):
        assert (first.attention_backend, second.attention_backend) == ("cpu", "torch")
        assert first.generate("Hello").token_ids == second.generate("Hello").token_ids
