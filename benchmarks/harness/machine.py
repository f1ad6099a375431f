"""Hardware and versions, as every report states them; resident memory of a process."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from radixserve import __version__

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_CPU_INFO, _DRIVER = Path("/proc/cpuinfo"), Path("/proc/driver/nvidia/version")


def describe_machine(packages: Sequence[str] = ("torch",)) -> dict[str, Any]:
    """CPU, memory and versions; of `packages` those that are installed."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "python": platform.python_version(),
        "radixserve": __version__,
    }
    for package in ("numpy", *packages):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return facts


def describe_gpu(index: int = 0) -> dict[str, Any]:
    """The CUDA device and its driver."""
    import torch

    card = torch.cuda.get_device_properties(index)
    return {
        "gpu": card.name,
        "capability": f"{card.major}.{card.minor}",
        "multiprocessors": card.multi_processor_count,
        "gpu_memory_gib": round(card.total_memory / 2**30, 1),
        "driver": _driver(),
        "cuda": torch.version.cuda,
    }


def read_status(field: str) -> int | None:
    """Bytes of a field of this process's status, such as VmRSS or VmHWM; None except on Linux."""
    if not _STATUS.exists():
        return None
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    return None


def reset_peak() -> None:
    """Reset VmHWM, the peak, to the memory that is resident now."""
    if _CLEAR.exists():
        _CLEAR.write_text("5")


def _cpu_name() -> str:
    if _CPU_INFO.exists():
        for line in _CPU_INFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _driver() -> str:
    """Its version, from nvidia-smi or else from /proc."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return found.stdout.split("\n")[0].strip()
    except (OSError, subprocess.SubprocessError):
        words = _DRIVER.read_text().split() if _DRIVER.exists() else []
        return next((word for word in words if word.replace(".", "").isdigit()), "unknown")
