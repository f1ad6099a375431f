"""Runs tests of the CPU kernels on an emulated arm64 machine, at each level of its instructions.

    python tests/arm64/run.py                    the long run: hours
    python tests/arm64/run.py --resume --jobs 2  the rest of it, two parts at a time
    python tests/arm64/run.py --short            products with weights of 8 and 4 bits
    python tests/arm64/run.py --count            instructions that a product executes
    python tests/arm64/run.py --levels bf16 tests/kernels/test_linear.py -x

It needs root and Debian's packages qemu-user-static, debootstrap and g++-aarch64-linux-gnu; without
them it prints a line and ends with status 0, and so does the short run where the machine cannot be
made. The first run downloads a system and wheels for arm64, 400 MB, into `--machine`. Each level
runs on a processor with the instructions of that level. Emulation says nothing about speed.

The long run goes part by part, each at all levels. Files whose tests load no kernel (ONCE) run at
one level, and fail if one is loaded. Tests that have passed are noted in `--machine`, by level and
by the kernels' sources as that level's compiler reads them: `--resume` leaves them out. With
several jobs the output of each part goes to a file in `--machine`.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "kernels"))

from radixserve_kernels.processor import ARM_LEVELS  # noqa: E402

QEMU, COMPILER = "qemu-aarch64-static", "aarch64-linux-gnu-g++"
TOOLS = (QEMU, "debootstrap", COMPILER)
LARGEST = "max,sve=off,pauth=off"  # which are slow to emulate, and used by PyTorch
PROCESSORS = {"neon": "cortex-a72", "dotprod": "neoverse-n1", "i8mm": LARGEST, "bf16": LARGEST}
PYTHON = "usr/bin/python3.11"  # of Debian 12
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux2014_aarch64", "manylinux_2_17_aarch64")
# Later builds of PyTorch for arm64 bring CUDA.
ALONE = "torch==2.9.1 xxhash msgspec pyzmq gguf".split()
WITH_DEPENDENCIES = """numpy sortedcontainers typing_extensions sympy mpmath jinja2 networkx
    filelock fsspec safetensors tokenizers transformers>=5.13,<5.25 rich prompt_toolkit tqdm regex
    requests pytest pytest-timeout pytest-xdist hypothesis jsonschema""".split()

READING = "tests/kernels/test_cpu_reading.py::test"
# They time reads of memory, which take minutes here and tell nothing.
TIMED = ["the_measured_reading", "a_reading_that_cannot_be_kept", "a_measurement_names_ways"]
KERNELS = ["tests/kernels", "--ignore-glob=*/test_gpu_*"]
KERNELS += [f"--deselect={READING}_{name}" for name in TIMED]
ONCE = """tests/cache tests/kernels/test_interpreter.py tests/kernels/test_torch_ops.py
    tests/attention/test_flashinfer_calls.py tests/attention/test_flashinfer_features.py
    tests/attention/test_on_device.py tests/attention/test_paged_graph.py
    tests/attention/test_paged_plan.py tests/attention/test_reference.py
    tests/attention/test_triton_backend.py tests/store/test_daemon_executor.py
    tests/store/test_heads.py tests/store/test_load_cost.py tests/store/test_store.py
    tests/store/test_use_counts.py""".split()
NOT_ONCE = [f"--ignore={path}" for path in ONCE]
LONG = [
    [*KERNELS, *NOT_ONCE],
    ["tests/models/test_gguf.py", "tests/models/test_quantized.py"],
    ["tests/attention", *NOT_ONCE],
    ["tests/store", *NOT_ONCE],
    ["tests/api/test_parity.py", "-k", "test_every_family"],
    ["tests/exact"],
]
DTYPE_FLAGS = (("-DRADIXSERVE_NUMBER=float",), ("-DRADIXSERVE_NUMBER=bf16", "-DRADIXSERVE_IS_BF16"))
NO_TESTS = 5  # pytest's status where none is left
SHORT = [["tests/kernels/test_quantized.py", "-k", "sums_are_exact"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--short", action="store_true", help="products of 8 and 4 bits alone")
    parser.add_argument("--count", action="store_true", help="count the instructions of products")
    parser.add_argument("--levels", default=",".join(ARM_LEVELS), help="default: %(default)s")
    parser.add_argument("--machine", type=Path, default=default_machine(), help="its folder")
    parser.add_argument("--resume", action="store_true", help="leave out tests that have passed")
    parser.add_argument("--jobs", type=int, default=1, help="parts to run at a time, default: 1")
    options, tests = parser.parse_known_args()
    levels = options.levels.split(",")
    if unknown := sorted(set(levels) - set(ARM_LEVELS)):
        parser.error(f"--levels {','.join(unknown)}: allowed are {', '.join(ARM_LEVELS)}")
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        print(f"arm64 is left out: there is no {', '.join(missing)}")
        return 0
    if options.count:
        return count(levels)
    machine = options.machine.absolute()
    if not (machine / "ready").exists():
        try:
            make_machine(machine)
        except subprocess.CalledProcessError as error:
            print(f"arm64 is left out: no machine could be made: {error}")
            return int(not options.short)
    parts = [tests] if tests else SHORT if options.short else LONG
    plan = [(level, part) for part in parts for level in levels]
    if parts is LONG:
        plan.insert(0, (levels[-1], ONCE))
    with ThreadPoolExecutor(options.jobs) as pool:
        statuses = list(pool.map(lambda one: run_part(machine, *one, options), plan))
    failed = [
        f"{level}: {shlex.join(part)}"
        for (level, part), status in zip(plan, statuses, strict=True)
        if status
    ]
    if failed:
        print("\n".join(["failed:", *failed]))
    else:
        hung = "; in the others the emulator hung" if None in statuses else ""
        print(f"arm64: {statuses.count(0)} of {len(plan)} parts passed{hung}")
    return int(bool(failed))


def default_machine() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "radixserve-arm64"


def make_machine(machine: Path) -> None:
    """Debian's Python in `machine`/root with wheels for arm64, and bin/python, which starts it."""
    print(f"making an arm64 machine in {machine}", flush=True)
    shutil.rmtree(machine, ignore_errors=True)
    machine.mkdir(parents=True)
    root, wheels = machine / "root", machine / "wheels"
    packages = "--include=python3,libgomp1,libstdc++6"
    debootstrap = ["debootstrap", "--arch=arm64", "--variant=minbase", "--foreign", packages]
    with (machine / "debootstrap.log").open("w") as log:
        subprocess.run([*debootstrap, "bookworm", root], check=True, stdout=log, stderr=log)
    for package in (root / "var/cache/apt/archives").glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, root], check=True)
    download = [sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:"]
    download += ["--python-version", "3.11", "-d", str(wheels)]
    download += [f"--platform={platform}" for platform in PLATFORMS]
    subprocess.run([*download, "--no-deps", *ALONE], check=True)
    subprocess.run([*download, *WITH_DEPENDENCIES], check=True)
    for wheel in wheels.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(root / "usr/lib/python3/dist-packages")
    python = machine / "bin/python"
    python.parent.mkdir()
    # Processes that tests start are found by sys.executable: this script.
    start = [QEMU, "-L", str(root), "-0", str(python), str(root / PYTHON)]
    python.write_text(f'#!/bin/sh\nexec {shlex.join(start)} "$@"\n')
    for name in ("c++", "g++"):  # which the tests look for
        (machine / "bin" / name).write_text(f'#!/bin/sh\nexec {COMPILER} "$@"\n')
    for script in (machine / "bin").iterdir():
        script.chmod(0o755)
    (machine / "ready").touch()


# Where a process with several threads starts another, an emulator before QEMU 8.0 may hang: between
# fork and exec it translates code, and GLib's allocator of slices, which it uses for that, is not
# safe after a fork. GLib is told to use malloc, which is. The short run has this limit a level.
SHORT_LIMIT_S = 300


def run_part(machine: Path, level: str, part: list[str], options: argparse.Namespace) -> int | None:
    """Runs pytest at a level. Returns its exit status: 0 where nothing is left to resume, None
    where the emulator hung in the short run."""
    command = [str(machine / "bin/python"), "-m", "pytest", "-n", "0", "-p", "no:cacheprovider"]
    command += ["-p", "tests.arm64.passed", "-o", "timeout=0", "-rfE", *part]
    title = f"{level} ({PROCESSORS[level]}): {shlex.join(part)}"
    print(f"+ {title}", flush=True)
    own = {
        "QEMU_CPU": PROCESSORS[level],
        "RADIXSERVE_CPU_LEVEL": level,
        "PATH": f"{machine / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "RADIXSERVE_CPU_READING": "near,near",  # measured, it would take minutes
        "RADIXSERVE_PASSED": str(machine / f"passed-{level}-{sources_digest(level)}.txt"),
        "RADIXSERVE_RESUME": str(int(options.resume)),
        "RADIXSERVE_NO_KERNELS": str(int(part is ONCE)),
        "G_SLICE": "always-malloc",  # of the emulator: see SHORT_LIMIT_S
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
        "PYTHONDONTWRITEBYTECODE": "",
        "XDG_CACHE_HOME": str(machine / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    began = time.monotonic()
    with output_of(machine, level, part, options.jobs) as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **own},
            stdout=output,
            stderr=output,
            start_new_session=options.short,  # the long run is stopped and continued as one group
        )
        try:
            code = process.wait(SHORT_LIMIT_S if options.short else None)
        except BaseException as error:
            if options.short:
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            print(f"the emulator hangs, stopped after {SHORT_LIMIT_S} s: {title}", flush=True)
            return None
    has_passed = options.resume and code == NO_TESTS
    status = 0 if has_passed else code
    minutes = (time.monotonic() - began) / 60
    print(f"{'FAILED' if status else 'passed'} in {minutes:.1f} min: {title}", flush=True)
    return status


def output_of(
    machine: Path, level: str, part: list[str], jobs: int
) -> AbstractContextManager[IO[str] | None]:
    """Where a part prints: here, or with several jobs a file of its own."""
    if jobs == 1:
        return nullcontext()
    return (machine / f"{level}-{part[0].replace('/', '-')}.log").open("w")


@functools.cache
def sources_digest(level: str) -> str:
    """A name for the kernels' sources, without what is for other processors."""
    digest = hashlib.sha256()
    folder = ROOT / "kernels/radixserve_kernels"
    for source in sorted(folder.glob("*.py")):
        digest.update(source.name.encode() + source.read_bytes())
    for dtype, source in itertools.product(DTYPE_FLAGS, sorted(folder.glob("cpu/*.cpp"))):
        command = [COMPILER, "-E", "-P", "-std=c++17", *dtype, *ARM_LEVELS[level][1], str(source)]
        digest.update(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return digest.hexdigest()[:12]


# -- instructions executed

COUNTED = {  # WeightForm, bits of activations
    "bfloat16": (0, 8),
    "int8": (1, 8),
    "int8, 16 bits": (1, 16),
    "int4": (3, 8),
    "int4, 16 bits": (3, 16),
}
NUM_PRODUCTS = 512 * 512  # of a row in products.cpp


def count(levels: list[str]) -> int:
    """Prints the instructions for each multiplication and addition, by level."""
    print(f"{'instructions a product of two numbers':40}" + "".join(f"{one:>9}" for one in levels))
    with tempfile.TemporaryDirectory() as folder:
        programs = {level: compile_products(level, Path(folder)) for level in levels}
        for rows in (1, 4):
            for name, (form, bits) in COUNTED.items():
                counts = [
                    executed(programs[level], PROCESSORS[level], form, rows, bits) / rows
                    for level in levels
                ]
                figures = "".join(f"{one / NUM_PRODUCTS:9.3f}" for one in counts)
                print(f"{f'{name}, rows {rows}':40}{figures}", flush=True)
    return 0


def compile_products(level: str, folder: Path) -> Path:
    sources = ROOT / "kernels/radixserve_kernels/cpu"
    flags = ["-O3", "-std=c++17", "-static", "-pthread", "-fno-math-errno", "-fno-strict-aliasing"]
    flags += ["-w", *DTYPE_FLAGS[1], f"-I{sources}"]
    program = folder / level
    command = [COMPILER, *flags, *ARM_LEVELS[level][1]]
    source = Path(__file__).with_name("products.cpp")
    subprocess.run([*command, str(source), "-o", str(program)], check=True)
    return program


def executed(program: Path, processor: str, form: int, rows: int, bits: int) -> int:
    """Instructions of one product: those of a run with two, less those of a run with one."""
    counts = []
    for repeats in (1, 2):
        log = program.with_suffix(".log")
        command = [QEMU, "-cpu", processor, "-singlestep", "-d", "exec,nochain", "-D", str(log)]
        command += [str(program), *map(str, (form, rows, bits, repeats))]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        counts.append(sum(line.startswith(b"Trace") for line in log.open("rb")))
    return counts[1] - counts[0]


if __name__ == "__main__":
    sys.exit(main())
