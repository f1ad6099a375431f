"""`radixserve info`: versions, the machine, attention backends, and a model's memory plan."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

from radixserve._version import __version__
from radixserve.commands.flags import add_engine_flags, add_model_flag, given_engine
from radixserve.commands.terminal import format_bytes, make_console

_PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "sortedcontainers",
    "rich",
)
_OPTIONAL_BACKENDS = {"flashinfer": "flashinfer-python", "triton": "triton"}
_EXAMPLES = """\
examples:
  radixserve info
  radixserve info --model ./my-checkpoint --dtype bfloat16 --kv-cache-memory 2GB
  radixserve info --no-model --json
"""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "info",
        help="versions, devices, attention backends and a model's memory plan",
        description="Show versions, devices, attention backends and a model's memory plan.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_flag(parser)
    parser.add_argument("--no-model", action="store_true", help="load no model")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    add_engine_flags(parser, without=("trace", "trace_hash_block"))
    return parser


def run(args: argparse.Namespace) -> int:
    settings = given_engine(args)
    facts = {
        "versions": _versions(),
        "machine": _machine(),
        "attention_backends": _attention_backends(),
    }
    if not args.no_model:
        facts["model"] = _model(args.model, settings)
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        _print(facts)
    return 0


def _versions() -> dict[str, str | None]:
    packages = {name: _installed(name) for name in _PACKAGES}
    return {"radixserve": __version__, "python": platform.python_version(), **packages}


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _machine() -> dict[str, Any]:
    import torch

    from radixserve.runner.kv_pool import free_memory

    cuda = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "cores_usable": _usable_cores(),
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": _total_memory(),
        "memory_free_bytes": free_memory(),
        "cuda_devices": [torch.cuda.get_device_name(at) for at in cuda],
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _usable_cores() -> int | None:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count()


def _total_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError, AttributeError):
        return None


def _attention_backends() -> dict[str, dict[str, Any]]:
    """What is there; on this version's device, the CPU, "auto" is the first that is usable."""
    import torch

    found = {
        "cpu": _cpu_backend(),
        "torch": {
            "version": torch.__version__,
            "usable": True,
            "used": True,
            "why": "PyTorch's operations, everywhere",
        },
    }
    has_cuda = torch.cuda.is_available()
    for name, package in _OPTIONAL_BACKENDS.items():
        version = _installed(package)
        why = "not installed" if version is None else "has a CUDA device"
        if version is not None and not has_cuda:
            why = "installed, but there is no CUDA device"
        usable = version is not None and has_cuda
        found[name] = {"version": version, "usable": usable, "used": False, "why": why}
    return found


def _cpu_backend() -> dict[str, Any]:
    """The kernels are compiled for it, unless they were before."""
    import torch

    from radixserve_kernels.cpu_ops import describe, unavailable

    reason = unavailable(torch.float32)
    why = reason or f"compiled for this processor; {describe()}"
    return {"version": __version__, "usable": not reason, "used": not reason, "why": why}


def _model(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    from radixserve.runtime import Runtime

    with Runtime(name, **settings) as runtime:
        model, memory = runtime.model, runtime.memory
        return {
            "model": name,
            "architecture": model.architecture,
            "is_native": model.is_native,
            "num_parameters": model.num_parameters,
            "dtype": str(model.dtype).removeprefix("torch."),
            "num_layers": model.num_layers,
            "num_heads": model.num_heads,
            "num_kv_heads": model.num_kv_heads,
            "head_dim": model.head_dim,
            "vocab_size": model.vocab_size,
            "max_positions": model.max_positions,
            "max_seq_len": runtime.max_seq_len,
            "has_tokenizer": runtime.tokenizer is not None,
            "attention_backend": runtime.attention_backend,
            "weight_bytes": memory.weight_bytes,
            "pool_bytes": memory.pool_bytes,
            "pool_tokens": memory.pool_tokens,
            "kv_bytes_per_token": memory.kv_bytes_per_token,
            "page_size": runtime.config.page_size,
        }


def _print(facts: dict[str, Any]) -> None:
    sections = {
        "versions": {name: text or "not installed" for name, text in facts["versions"].items()},
        "machine": _machine_lines(facts["machine"]),
        "attention backends": _backend_lines(facts["attention_backends"]),
    }
    if "model" in facts:
        sections[f"model {facts['model']['model']}"] = _model_lines(facts["model"])
    from rich.padding import Padding
    from rich.table import Table

    console = make_console()
    for title, lines in sections.items():
        console.print(title, style="bold", markup=False)
        table = Table.grid(padding=(0, 2))
        table.add_column(min_width=18, style="cyan", no_wrap=True)
        table.add_column()
        for name, text in lines.items():
            table.add_row(name, text)
        console.print(Padding(table, (0, 0, 0, 2)))


def _machine_lines(machine: dict[str, Any]) -> dict[str, str]:
    total = machine["memory_bytes"]
    memory = "" if total is None else f"{format_bytes(total)}, "
    return {
        "system": machine["system"],
        "cpu": machine["cpu"],
        "cores": f"{machine['cores']}, {machine['cores_usable']} usable; "
        f"torch runs {machine['torch_threads']} threads",
        "memory": f"{memory}{format_bytes(machine['memory_free_bytes'])} free",
        "cuda devices": ", ".join(machine["cuda_devices"])
        + ("; not used by this version yet" if machine["cuda_devices"] else "none"),
    }


def _backend_lines(backends: dict[str, dict[str, Any]]) -> dict[str, str]:
    preferred = next(name for name, backend in backends.items() if backend["used"])
    lines = {}
    for name, backend in backends.items():
        lines[name] = backend["why"]
        if name == preferred:
            lines[name] += '; what "auto" takes'
        elif name in _OPTIONAL_BACKENDS:
            lines[name] += "; not used by this version yet"
        elif not backend["usable"]:
            lines[name] = f"cannot be used: {backend['why']}"
    return lines


def _model_lines(model: dict[str, Any]) -> dict[str, str]:
    code = "native decoder" if model["is_native"] else "transformers' code"
    tokens, each = model["pool_tokens"], model["kv_bytes_per_token"]
    return {
        "architecture": f"{model['architecture']} ({code}, {model['attention_backend']} attention)",
        "parameters": f"{model['num_parameters']:,} in {model['dtype']}",
        "shape": f"{model['num_layers']} layers, {model['num_heads']} query heads and "
        f"{model['num_kv_heads']} key/value heads of {model['head_dim']}",
        "vocabulary": f"{model['vocab_size']:,}"
        + ("" if model["has_tokenizer"] else "; no tokenizer: prompts are token ids"),
        "context": f"{model['max_positions']:,} tokens; a request may have up to "
        f"{model['max_seq_len']:,}, prompt and output together",
        "weights": format_bytes(model["weight_bytes"]),
        "KV pool": f"{format_bytes(model['pool_bytes'])}: {tokens:,} tokens of "
        f"{format_bytes(each)}",
        "page size": str(model["page_size"]),
    }
