"""A model's own settings of generation: its end tokens and sampling defaults, read from
generation_config.json and config.json, or from its GGUF file."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from radixserve.errors import InvalidRequest
from radixserve.gguf_file import GgufFile
from radixserve.models.names import CONFIG_FILE
from radixserve.sampling_defaults import ModelSampling
from radixserve.sampling_fields import NEUTRAL, check_field

_log = logging.getLogger("radixserve")
_GGUF_NAMES = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}
FILE = "generation_config.json"


def read_sampling(folder: Path) -> ModelSampling:
    """The sampling defaults in a checkpoint's generation_config.json. A value that SamplingParams
    refuses is left out, with a warning."""
    file = folder / FILE
    return ModelSampling(_checked(read_json(file), file) if file.is_file() else {}, FILE)


def read_gguf_sampling(file: GgufFile) -> ModelSampling:
    """`read_sampling` of a GGUF file, from its keys general.sampling.*."""
    names = {name: f"general.sampling.{_GGUF_NAMES.get(name, name)}" for name in NEUTRAL}
    given = {name: file.fields.get(key) for name, key in names.items()}
    values = _checked(given, file.path)
    return ModelSampling({name: _shortest(value) for name, value in values.items()}, "GGUF file")


def _checked(settings: Mapping[str, Any], source: Path) -> dict[str, float]:
    defaults = {}
    for name in NEUTRAL:
        value = settings.get(name)
        if value is None:
            continue
        try:
            defaults[name] = check_field(name, value)
        except InvalidRequest as error:
            _log.warning("%s: %s; the field is not used", source, error)
    return defaults


def _shortest(value: float) -> float:
    """A float32 of a file as it was written: 0.2, not 0.20000000298."""
    return value if isinstance(value, int) else float(f"{value:.7g}")


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
    except (OSError, RecursionError, ValueError) as error:
        raise InvalidRequest(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise InvalidRequest(f"{path} must hold a JSON object")
    return data
