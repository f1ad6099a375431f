"""`radixserve info`: shows versions, the machine, attention backends and a model's memory plan."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
from collections import Counter
from typing import TYPE_CHECKING, Any

from radixserve._version import __version__
from radixserve.checks import check_int
from radixserve.commands.flags import (
    EXPORTS,
    add_command,
    add_engine_flags,
    add_flags,
    add_model_flags,
    given_engine,
    given_model,
)
from radixserve.commands.terminal import make_console
from radixserve.config import EngineConfig, format_bytes, parse_bytes
from radixserve.errors import InvalidRequest
from radixserve.models.names import RANDOM
from radixserve.sampling_defaults import SamplingDefault, describe_sampling
from radixserve_kernels import processor

if TYPE_CHECKING:
    import torch

    from radixserve.models.base import ModelInfo
    from radixserve.models.source import ModelSource

_PACKAGES = "torch transformers tokenizers safetensors numpy sortedcontainers rich".split()
_MODEL_FIELDS = (
    "architecture is_native num_parameters dtype num_layers num_heads num_kv_heads head_dim "
    "vocab_size max_positions attention_features"
).split()
_EXACT = "yes: bits of answers depend on their own tokens alone"
_EXAMPLES = """\
examples:
  radixserve info
  radixserve info ./my-checkpoint --dtype bfloat16 --kv-cache-memory 2GB
  radixserve info --config llama-3-8b
  radixserve info --config llama-3-70b --device-memory 80GB --kv-dtype fp8_e4m3
  radixserve info --no-model --json
"""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser = add_command(
        commands,
        "info",
        "versions, devices, attention backends and a model's memory plan",
        "Show versions, devices, attention backends and a model's memory plan.",
        _EXAMPLES,
    )
    add_model_flags(parser)
    flags = {
        "--no-model": "load no model",
        "--device-memory SIZE": "load no model: show what CUDA devices with this memory each would "
        "hold of it, such as 80GB: K/V, sessions; with 1, 2, 4 and 8 devices, or "
        "--tensor-parallel-size of them",
        "--session-tokens NUMBERS": "with --device-memory: lengths of sessions, such as 8k,32k",
        "--json": "print one JSON document instead",
    }
    add_flags(parser, flags)
    add_engine_flags(parser, without=EXPORTS)
    return parser


def run(args: argparse.Namespace) -> int:
    settings = given_engine(args)
    if args.session_tokens is not None and args.device_memory is None:
        raise InvalidRequest("--session-tokens needs --device-memory")
    facts = {
        "versions": _versions(),
        "machine": _machine(),
        "attention_backends": _attention_backends(),
    }
    if args.device_memory is not None:
        facts["model"] = _what_if(args, settings)
    elif args.config is not None and not args.random_weights and not args.no_model:
        facts["model"] = _shapes(RANDOM + args.config, args.config, settings)
    elif not args.no_model:
        facts["model"] = _model(given_model(args), settings)
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

    from radixserve.runner.system_memory import free_memory

    cuda = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": processor.name(),
        "cores": os.cpu_count(),
        "cores_usable": _usable_cores(),
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": _total_memory(),
        "memory_free_bytes": free_memory(),
        "cuda_devices": [torch.cuda.get_device_name(index) for index in cuda],
    }


def _usable_cores() -> int | None:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # some systems do not have it
        return os.cpu_count()


def _total_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError, AttributeError):
        return None


def _attention_backends() -> dict[str, dict[str, Any]]:
    """All backends for the device that "auto" chooses: those that "auto" tries there in its order,
    then the others."""
    import torch

    from radixserve.attention.choice import BACKENDS, candidates_on, unusable_reason
    from radixserve.runner.device import choose_device, cuda_unavailable_reason

    device = choose_device("auto")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    backends = {}
    for name in dict.fromkeys([*candidates_on(device.type), *BACKENDS]):
        backend = BACKENDS[name]
        package = backend.package
        version = __version__ if name == "cpu" else _installed(package or "torch")
        reason = unusable_reason(name, dtype, device)
        if package is not None and reason:
            reason = "not installed" if version is None else reason
            if device.type == "cpu" and version is not None:
                reason = f"installed, but there is no CUDA device: {cuda_unavailable_reason()}"
        usable = not reason
        why = reason or backend.about(device.type)
        backends[name] = {"version": version, "usable": usable, "used": usable, "why": why}
    return backends


def _model(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    from radixserve.api.runtime import Runtime

    with Runtime(name, **settings) as runtime:
        return {
            **_facts_of(name, runtime.model),
            "max_seq_len": runtime.max_seq_len,
            "has_tokenizer": runtime.tokenizer is not None,
            "sampling_defaults": {
                name: default._asdict() for name, default in runtime.sampling_defaults.items()
            },
            "attention_backend": runtime.attention_backend,
            "device": runtime.resolved_config.device,
            "graph_sizes": list(runtime.resolved_config.graph_sizes),
            "overlap": runtime.resolved_config.overlap,
            "exact": not runtime.resolved_config.inexact,
            "inexact_because": runtime.resolved_config.inexact,
            **dataclasses.asdict(runtime.memory),
            "page_size": runtime.config.page_size,
        }


def _shapes(model: str, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The facts of a model's shapes, without its weights. `name`: shown for it."""
    from radixserve.models.decoder_tensors import describe
    from radixserve_kernels.stored_kv import dtype_name

    source, dtype, kv_dtype = _located(model, settings)
    info = dataclasses.replace(describe(source, dtype), kv_dtype=kv_dtype)
    return {
        **_facts_of(name, info),
        "has_tokenizer": source.path is not None,
        "weight_bytes": info.weight_bytes,
        "kv_bytes_per_token": info.kv_bytes_per_token,
        "kv_dtype": dtype_name(info.stored_kv_dtype),
    }


def _located(
    model: str, settings: dict[str, Any]
) -> tuple[ModelSource, torch.dtype, torch.dtype | None]:
    """A model that is not loaded, and its dtypes on CUDA: of weights, and of K/V if another."""
    import torch

    from radixserve.models.source import find_model
    from radixserve.models.weights import choose_dtype
    from radixserve_kernels.stored_kv import KV_DTYPES

    source = find_model(model)
    dtype = choose_dtype(settings.get("dtype", "auto"), source.config, torch.device("cuda"))
    kv_dtype = settings.get("kv_dtype", "auto")
    return source, dtype, None if kv_dtype == "auto" else KV_DTYPES[kv_dtype]


_DEVICES = (1, 2, 4, 8)
_SESSION_TOKENS = (2048, 8192, 32_768, 131_072)


def _what_if(args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """The facts of a model's shapes, and "plans": what devices would hold of it."""
    from radixserve.api.runtime import DEMO
    from radixserve.runner.memory_plan import plan_memory

    name = args.model or args.config
    model = RANDOM + name if args.model is None else str(DEMO) if name == "demo" else name
    facts = _shapes(model, name, settings)
    memory = parse_bytes(args.device_memory, "--device-memory")
    lengths = _lengths(args.session_tokens, facts["max_positions"])
    source, dtype, kv_dtype = _located(model, settings)
    number = settings.get("tensor_parallel_size")
    plans = []
    for num_devices in _DEVICES if number is None else (number,):
        config = EngineConfig(**{**settings, "tensor_parallel_size": num_devices})
        plan: dict[str, Any] = {"devices": num_devices}
        try:
            made = plan_memory(source, dtype, kv_dtype, config, memory)
        except InvalidRequest as error:
            if number is not None:
                raise
            plan["reason"] = str(error)
        else:
            sessions = [{"tokens": size, "number": made.num_sessions(size)} for size in lengths]
            plan |= {**dataclasses.asdict(made), "sessions": sessions}
        plans.append(plan)
    return {**facts, "device_memory_bytes": memory, "plans": plans}


def _lengths(text: str | None, longest: int) -> list[int]:
    """The lengths of sessions in --session-tokens, or the usual ones that the model allows."""
    from radixserve.replay.caches import parse_tokens

    if text is None:
        return [size for size in _SESSION_TOKENS if size <= longest] or [longest]
    flag = "--session-tokens"
    return [check_int(flag, parse_tokens(size, flag), 1, longest) for size in text.split(",")]


def _facts_of(name: str, model: ModelInfo) -> dict[str, Any]:
    fields = {field: getattr(model, field) for field in _MODEL_FIELDS}
    return {
        "model": name,
        **fields,
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention_features": list(model.attention_features),
        "weight_forms": dict(model.weight_forms),
        "kv_shapes": [
            {"layers": layers, "num_kv_heads": heads, "head_dim": dim}
            for (heads, dim), layers in Counter(model.shapes_of_kv).items()
        ],
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
        "cuda devices": ", ".join(machine["cuda_devices"]) or "none",
    }


def _backend_lines(backends: dict[str, dict[str, Any]]) -> dict[str, str]:
    preferred = next(name for name, backend in backends.items() if backend["used"])
    lines = {}
    for name, backend in backends.items():
        lines[name] = backend["why"]
        if name == preferred:
            lines[name] += '; what "auto" takes'
        elif not backend["usable"]:
            lines[name] = f"cannot be used: {backend['why']}"
    return lines


def _model_lines(model: dict[str, Any]) -> dict[str, str]:
    code = "native decoder" if model["is_native"] else "transformers' code"
    each, is_loaded = model["kv_bytes_per_token"], "pool_tokens" in model
    backend = f", {model['attention_backend']} attention" if is_loaded else ""
    context = f"{model['max_positions']:,} tokens"
    if is_loaded:
        longest = model["max_seq_len"]
        context += f"; a request may have up to {longest:,}, prompt and output together"
    lines = {
        "architecture": f"{model['architecture']} ({code}{backend})",
        "parameters": f"{model['num_parameters']:,} in {_forms(model)}",
        "shape": f"{model['num_layers']} layers, {model['num_heads']} query heads"
        + _kv_heads(model),
        "attention": _attention(model),
        "vocabulary": f"{model['vocab_size']:,}"
        + ("" if model["has_tokenizer"] else "; no tokenizer: prompts are token ids"),
        "context": context,
        "weights": format_bytes(model["weight_bytes"]),
    }
    if not is_loaded:
        lines["KV"] = f"{format_bytes(each)} a token in {model['kv_dtype']}"
        return lines | _plan_lines(model.get("plans", []), model)
    pool = f"{format_bytes(model['pool_bytes'])}: {model['pool_tokens']:,} tokens of "
    pool += f"{format_bytes(each)} in {model['kv_dtype']}"
    if windows := model["window_tokens"]:
        pool += f", those of layers with windows for {windows:,} of them"
    states = model["states_bytes"]
    return {
        **lines,
        "KV pool": pool,
        **({"states": format_bytes(states)} if states else {}),
        "page size": str(model["page_size"]),
        "exact": f"no: {model['inexact_because']}" if model["inexact_because"] else _EXACT,
        "runs on": _runs_on(model),
        "sampling": describe_sampling(_sampling_defaults(model)),
    }


def _plan_lines(plans: list[dict[str, Any]], model: dict[str, Any]) -> dict[str, str]:
    """What devices would hold, a line for each number of them."""
    lines = {}
    for plan in plans:
        number = plan["devices"]
        name = f"{number} device{'s' if number > 1 else ''}"
        if "reason" in plan:
            lines[name] = f"not possible: {plan['reason']}"
            continue
        windows = plan["window_tokens"]
        sessions = (f"{fit['number']:,} of {fit['tokens']:,}" for fit in plan["sessions"])
        lines[name] = (
            f"{format_bytes(plan['weight_bytes'])} weights and about "
            f"{format_bytes(plan['working_bytes'])} for steps of "
            f"{format_bytes(model['device_memory_bytes'])} each; "
            f"{format_bytes(plan['pool_bytes'])} K/V: {plan['pool_tokens']:,} tokens of "
            f"{format_bytes(plan['kv_bytes_per_token'])}"
            + (f", {windows:,} in layers with windows" if windows else "")
            + f"; sessions that fit: {', '.join(sessions)} tokens"
        )
    return lines


def _sampling_defaults(model: dict[str, Any]) -> dict[str, SamplingDefault]:
    given = model["sampling_defaults"]
    return {name: SamplingDefault(**default) for name, default in given.items()}


def _kv_heads(model: dict[str, Any]) -> str:
    shapes = model["kv_shapes"]
    if len(shapes) == 1:
        return f" and {model['num_kv_heads']} key/value heads of {model['head_dim']}"
    parts = [
        f"{shape['num_kv_heads']} of {shape['head_dim']} ({shape['layers']} layers)"
        for shape in shapes
    ]
    return f"; key/value heads: {', '.join(parts)}"


def _attention(model: dict[str, Any]) -> str:
    """The features that the model's layers need of an attention backend, as text."""
    names = [name.replace("_", " ") for name in model["attention_features"]]
    return f"with {', '.join(names)} in some layers or all" if names else "causal, no more"


def _forms(model: dict[str, Any]) -> str:
    """The dtype of the weights, or the formats of quantised weights and the other dtype."""
    forms, total = model["weight_forms"], model["num_parameters"]
    if not forms:
        return str(model["dtype"])
    shares = (f"{form} {100 * count / total:.0f} %" for form, count in forms.items())
    return f"{', '.join(shares)}; the others and activations in {model['dtype']}"


def _runs_on(model: dict[str, Any]) -> str:
    sizes = model["graph_sizes"]
    graphs = f"graphs of decode steps of up to {sizes[-1]} rows" if sizes else "no graphs"
    return f"{model['device']}, {graphs}, {'overlap' if model['overlap'] else 'no overlap'}"
