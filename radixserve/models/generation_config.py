"""A model's own settings of generation: its end tokens and sampling defaults, read from
generation_config.json and config.json, or from its GGUF file."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from radixserve.errors import InvalidRequest
from radixserve.gguf_file import SUFFIX, GgufFile
from radixserve.models.names import CONFIG_FILE
from radixserve.request import SamplingParams

_log = logging.getLogger("radixserve")
_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_GGUF_NAMES = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}
FILE = "generation_config.json"


def read_sampling_defaults(path: Path | None) -> dict[str, Any]:
    """Fields of SamplingParams that the checkpoint folder or GGUF file names; a value that
    SamplingParams refuses is left out, with a warning."""
    if path is None:
        return {}
    if path.suffix == SUFFIX:
        fields = GgufFile(path).fields
        names = {name: f"general.sampling.{_GGUF_NAMES.get(name, name)}" for name in _FIELDS}
        return _checked({name: fields.get(key) for name, key in names.items()}, path)
    file = path / FILE
    return _checked(read_json(file), file) if file.is_file() else {}


def _checked(settings: Mapping[str, Any], source: Path) -> dict[str, Any]:
    defaults: dict[str, Any] = {}
    for name in _FIELDS:
        value = settings.get(name)
        if value is None:
            continue
        try:
            defaults[name] = getattr(SamplingParams(**{name: value}), name)
        except InvalidRequest as error:
            _log.warning("%s: %s; the field is not used", source, error)
    return defaults


def read_eos_ids(folder: Path, config: Any) -> tuple[int, ...]:
    """End tokens of generation_config.json and config.json; of `config`, which may hold a class's
    default, where neither names one. Ascending."""
    path = folder / FILE
    files = [read_json(file) for file in (path, folder / CONFIG_FILE) if file.is_file()]
    files += [file["text_config"] for file in files if isinstance(file.get("text_config"), dict)]
    named = [file.get("eos_token_id") for file in files]
    if all(ids is None for ids in named):
        named = [getattr(config, "eos_token_id", None)]
    every = {int(token) for ids in named for token in _as_list(ids)}
    return tuple(sorted(token for token in every if token >= 0))


def _as_list(ids: Any) -> list[Any]:
    if ids is None:
        return []
    return list(ids) if isinstance(ids, list | tuple) else [ids]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises InvalidRequest if it is not one."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise InvalidRequest(f"{path} must hold a JSON object")
    return data
