"""Each benchmark runs and prints what it says; no test asserts a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_bench_cache() -> None:
    command = [sys.executable, "benchmarks/bench_cache.py", "--quick", "--json", "--only", "A,D,I"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])  # also when not installed
    env = {**os.environ, "PYTHONPATH": path}
    result = subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True, text=True)
    document = json.loads(result.stdout)
    assert document["setting"]["page_size"] == 1
    assert {figure["case"] for figure in document["figures"]} == {"ref", "A", "B", "D", "I"}
    assert all(figure["micros"] > 0 and figure["ratio"] > 0 for figure in document["figures"])
