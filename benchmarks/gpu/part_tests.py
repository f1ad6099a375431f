"""The repository's own tests that use a CUDA device where there is one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from gpu.bench import Bench
from gpu.jobs import Skip

ROOT = Path(__file__).resolve().parents[2]
FILES = ("tests/attention/test_on_device.py",)
DRY = "test_graphs and cpu and triton"
COUNTS = ("passed", "failed", "error", "skipped")


def run(bench: Bench, group: str) -> None:
    del group
    if not (ROOT / FILES[0]).exists():
        raise Skip("the tests are not here")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", *FILES]
    command += ["-k", DRY if bench.is_dry else "cuda"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(result.stdout, result.stderr, flush=True)
    if "No module named pytest" in result.stderr:
        raise Skip("pytest is not installed")
    counts = read_counts(result.stdout)
    failed = "" if result.returncode == 0 else f"exit code {result.returncode}, see the log"
    if not failed and not counts["passed"]:
        failed = "no test ran"
    bench.row(", ".join(FILES), dict(counts), failed=failed)


def read_counts(text: str) -> dict[str, int]:
    """From pytest's last line."""
    lines = [
        line for line in text.splitlines() if re.search(r"\d+ (passed|failed|error|skipped)", line)
    ]
    last = lines[-1] if lines else ""
    found = {name: re.search(rf"(\d+) {name}", last) for name in COUNTS}
    return {name: int(match[1]) if match else 0 for name, match in found.items()}
