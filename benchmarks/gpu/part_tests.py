"""The repository's own tests that use a CUDA device where there is one.

Those of the kernels hold each of them against its definition in float64.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from gpu.bench import Bench
from gpu.jobs import Skip

ROOT = Path(__file__).resolve().parents[2]
PARITY = "tests/runner/test_parity_on_cuda.py"  # of the group's backend
FILES = {
    "kernels": "tests/kernels",
    "attention": "tests/attention/test_on_device.py",
    "engine": "tests/runner/test_on_cuda.py",
}
DRY = "(cpu and triton and (graphs or mixed or tokens)) or (reference and flat_indices)"  # some
PROCESSES = {"kernels": 8, "engine": 4}  # of the groups that compile most, on 16 cores
COUNTS = ("passed", "failed", "error", "skipped")


def run(bench: Bench, group: str) -> None:
    file = FILES.get(group, PARITY)
    if not (ROOT / file).exists():
        raise Skip("the tests are not here")
    chosen = "cuda" if group in FILES else f"cuda and {group}"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", file]
    command += ["-o", "addopts=", "-k", DRY if bench.is_dry else chosen]
    if group in PROCESSES and find_spec("xdist") and not bench.is_dry:
        command += ["-n", str(max(1, PROCESSES[group] * (os.cpu_count() or 1) // 16))]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(result.stdout, result.stderr, flush=True)
    if "No module named pytest" in result.stderr:
        raise Skip("pytest is not installed")
    last = next((line for line in result.stdout.splitlines()[::-1] if line.strip()), "")
    matches = {name: re.search(rf"(\d+) {name}", last) for name in COUNTS}
    counts = {name: int(match[1]) if match else 0 for name, match in matches.items()}
    failed = f"exit code {result.returncode}, see the log" if result.returncode else ""
    if not failed and not counts["passed"]:
        failed = "no test ran"
    bench.row(f"{file}, {chosen}", counts, failed=failed)
