"""`read_peft`: a LoRA adapter's folder as PEFT saves it."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from radixserve.checks import shown
from radixserve.errors import InvalidRequest, ModelNotSupported
from radixserve.models.lora import LoraModule
from radixserve.request import MAX_TOKEN_IDS

MAX_RANK = 256
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_MAX_CONFIG_BYTES = 1 << 20
_MAX_INVOCATION = 1024  # tokens
_MAX_NAMED = 6  # tensors named in an error message
_MAX_PATTERNS, _MAX_PATTERN, _MAX_REPEATS = 4096, 256, 3  # of a field; characters; * + { in one
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_TENSOR = re.compile(r"base_model\.model\.(.{1,128})\.lora_([AB])\.weight")
# Fields that make another kind of adapter, and the values with which they do not.
_PLAIN: dict[str, tuple[object, ...]] = {
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
    "arrow_config": (None,),
    # others change the base's weights, too
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
}


class PeftAdapter(NamedTuple):
    """An adapter's tensors and what else decides what it computes."""

    modules: dict[str, LoraModule]  # by the names of the base's modules
    rank: int  # the largest
    invocation: tuple[int, ...]  # token ids from which on it computes; (): from the beginning
    digest: str  # of all of it, 16 hexadecimal digits


def read_peft(path: str) -> PeftAdapter:
    """Read an adapter's folder. Raises InvalidRequest for a folder that is none or is damaged,
    ModelNotSupported naming what of it is not computed here."""
    folder = Path(path).expanduser()
    raw, data = _read(folder / CONFIG_FILE, _MAX_CONFIG_BYTES), _read(folder / WEIGHTS_FILE)
    config = _read_config(folder / CONFIG_FILE, raw)
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise InvalidRequest(
            f"{folder / WEIGHTS_FILE} is not a safetensors file: {error}"
        ) from None
    modules = _modules(folder, config, tensors)
    return PeftAdapter(
        modules,
        max(module.a.shape[0] for module in modules.values()),
        _invocation(config),
        hashlib.sha256(hashlib.sha256(raw).digest() + data).hexdigest()[:16],
    )


def _read(path: Path, most: int | None = None) -> bytes:
    try:
        if path.exists() and not path.is_file():  # a pipe or a device would be read for ever
            raise OSError(0, "not a file")
        if most is not None and path.stat().st_size > most:
            raise InvalidRequest(f"{path} is larger than {most} bytes")
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: of a path with NUL
        reason = getattr(error, "strerror", error)
        raise InvalidRequest(
            f"{path.parent} is no adapter: {path.name} cannot be read ({reason})"
        ) from None


def _read_config(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise InvalidRequest(f"{path} must hold a JSON object, got {shown(config)}")
    if config.get("peft_type") != "LORA":
        raise ModelNotSupported(
            f"{path} is of type {shown(config.get('peft_type'))}; LORA alone can be computed"
        )
    for name, plain in _PLAIN.items():
        value = config.get(name)
        if not any(value == allowed and type(value) is type(allowed) for allowed in plain):
            raise ModelNotSupported(f"{path}: adapters with {name}={shown(value)} are not built")
    return config


def _modules(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, LoraModule]:
    pairs: dict[str, dict[str, Tensor]] = {}
    others = []
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            others.append(name)
        else:
            pairs.setdefault(match[1], {})[match[2]] = tensor
    if others:
        raise ModelNotSupported(
            f"{folder} has tensors that are not built: {', '.join(sorted(others)[:_MAX_NAMED])}; "
            "possible are lora_A and lora_B of linear layers"
        )
    if not pairs:
        raise InvalidRequest(f"{folder / WEIGHTS_FILE} holds no tensor")
    ranks, alphas = (_patterns(folder, config, name) for name in ("rank_pattern", "alpha_pattern"))
    return {
        name: _module(
            f"{folder}, {name}",
            pair,
            _of_pattern(ranks, name, config.get("r")),
            _of_pattern(alphas, name, config.get("lora_alpha")),
            is_rslora=bool(config.get("use_rslora")),
        )
        for name, pair in pairs.items()
    }


def _module(
    where: str, pair: Mapping[str, Tensor], r: object, lora_alpha: object, *, is_rslora: bool
) -> LoraModule:
    if len(pair) < 2:
        raise InvalidRequest(f"{where}: lora_A or lora_B is missing")
    if not all(tensor.is_floating_point() for tensor in pair.values()):
        raise InvalidRequest(f"{where}: lora_A and lora_B must be tensors of floats")
    a, b = (pair[letter].float() for letter in "AB")
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
        raise InvalidRequest(
            f"{where}: lora_A of {tuple(a.shape)} and lora_B of {tuple(b.shape)} make no product"
        )
    rank, alpha = _number(where, "r", r), _number(where, "lora_alpha", lora_alpha)
    if rank != a.shape[0]:
        raise InvalidRequest(f"{where}: lora_A has rank {a.shape[0]}, the config says {rank:g}")
    if rank > MAX_RANK:
        raise ModelNotSupported(f"{where}: rank {rank:g}; ranks of at most {MAX_RANK} are built")
    if not (bool(torch.isfinite(a).all()) and bool(torch.isfinite(b).all())):
        raise InvalidRequest(f"{where}: some of its numbers are not finite")
    return LoraModule(a, b, alpha / (math.sqrt(rank) if is_rslora else rank))


def _patterns(
    folder: Path, config: Mapping[str, Any], field: str
) -> list[tuple[re.Pattern[str], object]]:
    """The patterns of modules' names in a field, and their values. Raises InvalidRequest, also for
    patterns whose matching may take long: no other thread runs meanwhile."""
    where, patterns = f"{folder / CONFIG_FILE}: {field}", config.get(field) or {}
    if not isinstance(patterns, dict) or len(patterns) > _MAX_PATTERNS:
        raise InvalidRequest(
            f"{where} must be an object of at most {_MAX_PATTERNS} members, got {shown(patterns)}"
        )
    compiled = []
    for pattern, value in patterns.items():
        repeats = sum(pattern.count(sign) for sign in "*+{")
        is_long = len(pattern) > _MAX_PATTERN or repeats > _MAX_REPEATS
        if is_long or _REPEATED_GROUP.search(pattern):
            raise InvalidRequest(
                f"{where}: {shown(pattern)} has over {_MAX_PATTERN} characters, over "
                f"{_MAX_REPEATS} repetitions or a repeated group"
            )
        try:
            compiled.append((re.compile(rf"(?:.*\.)?(?:{pattern})$"), value))
        except (re.error, OverflowError, RecursionError) as error:
            raise InvalidRequest(f"{where}: {shown(pattern)} is not a pattern: {error}") from None
    return compiled


def _of_pattern(
    patterns: Sequence[tuple[re.Pattern[str], object]], name: str, otherwise: object
) -> object:
    """The value of the first pattern that is the end of a module's name, or matches it."""
    return next((value for pattern, value in patterns if pattern.match(name)), otherwise)


def _number(where: str, field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise InvalidRequest(f"{where}: {field} must be a number above 0, got {shown(value)}")
    return float(value)


def _invocation(config: Mapping[str, Any]) -> tuple[int, ...]:
    tokens = config.get("alora_invocation_tokens") or ()
    is_list = isinstance(tokens, list) and len(tokens) <= _MAX_INVOCATION
    if tokens and not (
        is_list and all(type(token) is int and 0 <= token < MAX_TOKEN_IDS for token in tokens)
    ):
        raise InvalidRequest(
            f"alora_invocation_tokens must be 1 to {_MAX_INVOCATION} token ids, got {shown(tokens)}"
        )
    return tuple(tokens)
