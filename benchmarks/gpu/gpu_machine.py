"""Hardware and versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
from gpu_bench import Bench

from radixserve import __version__

PACKAGES = ("triton", "flashinfer-python", "transformers", "numpy")


def run(bench: Bench, group: str) -> None:
    del group
    bench.give_facts(describe(bench.device))


def describe(device: torch.device) -> dict[str, Any]:
    """What the figures were measured on and with."""
    facts: dict[str, Any] = {}
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        facts["gpu"] = card.name
        facts["capability"] = f"{card.major}.{card.minor}"
        facts["multiprocessors"] = card.multi_processor_count
        facts["memory_gib"] = round(card.total_memory / 2**30, 1)
        facts["driver"] = _driver()
        facts["cuda"] = torch.version.cuda
    facts["cores"] = os.cpu_count()
    facts["python"] = platform.python_version()
    facts["torch"] = torch.__version__
    for package in PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "none"
    facts["radixserve"] = __version__
    return facts


def _driver() -> str:
    """As the system tells."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return told.stdout.split("\n")[0].strip()
    except (OSError, subprocess.SubprocessError):
        pass
    path = Path("/proc/driver/nvidia/version")
    words = path.read_text().split() if path.exists() else []
    return next((word for word in words if word.replace(".", "").isdigit()), "unknown")
