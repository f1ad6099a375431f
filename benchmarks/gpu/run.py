"""Everything that only a GPU can tell, in one command: first correctness, then speed.

    python benchmarks/gpu/run.py --out DIR [--parts limits,tests,...] [--deadline S]
        [--patience F] [--kernel-cache DIR] [--dry-run] [--backend flashinfer|triton]
        [--page-size N]

Installs and downloads nothing. Each group of a part runs in a process of its own, under a time
limit: one that crashes, hangs or runs out of memory does not hide the others. What it tells lies in
DIR/*.jsonl at once, and in results.json and results.md when it ends; log.txt has what it printed.
Parts that an earlier run on the same machine left in DIR are kept, so that a run can be made in
several pieces; each ends before its --deadline, and no process outlives this one. --patience
multiplies the time limits, for a slow host. Compiled kernels lie in the folder --kernel-cache,
which can be carried to a machine with the same software. docs/gpu.md lists the parts.

Ends with 0 when all parts ran (a missed target is marked and no error), 1 when one failed, 2 when
there is no GPU. --dry-run walks through all parts on the CPU, with the kernels' torch references
and a tiny model: its figures mean nothing.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1]
ROOT = BENCHMARKS.parent


def set_paths() -> None:
    """The jobs find what they import, also when nothing is installed."""
    folders = [str(folder) for folder in (BENCHMARKS, ROOT, ROOT / "kernels")]
    sys.path[:1] = folders  # in place of this file's folder
    given = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, given] if given else folders)
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # looking for a card uses none


if __name__ == "__main__":
    set_paths()
    from gpu.session import parse_arguments, run_all

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and the jobs with it
    sys.exit(run_all(parse_arguments(doc=__doc__)))
