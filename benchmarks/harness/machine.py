"""Hardware and versions, as every report states them; CPU time and memory of a process."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from radixserve import __version__
from radixserve_kernels import processor

_PROCESSES = Path("/proc")
_DRIVER = Path("/proc/driver/nvidia/version")


def describe_machine(packages: Sequence[str] = ("torch",)) -> dict[str, Any]:
    """CPU, memory and versions; of `packages` those that are installed."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    installed = [name for name in ("numpy", *packages) if find_spec(name) is not None]
    return {
        "cpu": processor.name(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "python": platform.python_version(),
        "radixserve": __version__,
        **{name: version(name) for name in installed},
    }


def describe_gpu() -> dict[str, Any]:
    """The CUDA device and its driver."""
    import torch

    card = torch.cuda.get_device_properties(0)
    return {
        "gpu": card.name,
        "capability": f"{card.major}.{card.minor}",
        "multiprocessors": card.multi_processor_count,
        "gpu_memory_gib": round(card.total_memory / 2**30, 1),
        "driver": _driver(),
        "cuda": torch.version.cuda,
    }


def cpu_s(pid: int) -> float:
    """User and system seconds of a process's threads so far."""
    if pid == os.getpid():
        return time.process_time()
    fields = (_PROCESSES / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def read_status(field: str, pid: int | str = "self") -> int | None:
    """Bytes of a field of a process's status, such as VmRSS or VmHWM; None except on Linux."""
    status = _PROCESSES / str(pid) / "status"
    lines = status.read_text().splitlines() if status.exists() else []
    return next(
        (int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:")), None
    )


def reset_peak(pid: int | str = "self") -> None:
    """Reset VmHWM, the peak, to the memory that is resident now."""
    clear = _PROCESSES / str(pid) / "clear_refs"
    if clear.exists():
        clear.write_text("5")


def _driver() -> str:
    """Its version, from nvidia-smi or else from /proc."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.split("\n")[0].strip()
    except (OSError, subprocess.SubprocessError):
        words = _DRIVER.read_text().split() if _DRIVER.exists() else []
        return next((word for word in words if word.replace(".", "").isdigit()), "unknown")
