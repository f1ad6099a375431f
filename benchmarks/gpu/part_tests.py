"""The repository's own tests that use a CUDA device where there is one.

Those of the kernels hold each of them against its definition in float64.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from gpu.bench import Bench
from gpu.jobs import Skip

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "kernels": ("tests/kernels",),
    "attention": ("tests/attention/test_on_device.py",),
    "engine": ("tests/runner/test_on_cuda.py",),
    **dict.fromkeys(("flashinfer", "triton", "torch"), ("tests/runner/test_parity_on_cuda.py",)),
}
DRY = "(cpu and triton and (graphs or mixed or tokens)) or (reference and flat_indices)"  # some
COUNTS = ("passed", "failed", "error", "skipped")


def run(bench: Bench, group: str) -> None:
    files = FILES[group]
    if not (ROOT / files[0]).exists():
        raise Skip("the tests are not here")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", *files]
    command += ["-o", "addopts="]  # in one process
    chosen = "cuda" if group in ("kernels", "attention", "engine") else f"cuda and {group}"
    command += ["-k", DRY if bench.is_dry else chosen]
    command += ["-m", "not long" if bench.is_quick else "long or not long"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(result.stdout, result.stderr, flush=True)
    if "No module named pytest" in result.stderr:
        raise Skip("pytest is not installed")
    counts = read_counts(result.stdout)
    failed = "" if result.returncode == 0 else f"exit code {result.returncode}, see the log"
    if not failed and not counts["passed"]:
        failed = "no test ran"
    bench.row(f"{', '.join(files)}, {chosen}", dict(counts), failed=failed)


def read_counts(text: str) -> dict[str, int]:
    """From pytest's last line."""
    lines = [
        line for line in text.splitlines() if re.search(r"\d+ (passed|failed|error|skipped)", line)
    ]
    last = lines[-1] if lines else ""
    found = {name: re.search(rf"(\d+) {name}", last) for name in COUNTS}
    return {name: int(match[1]) if match else 0 for name, match in found.items()}
