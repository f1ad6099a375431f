"""Sampling defaults: the values of sampling fields that a request leaves out, and their sources.

Fields of a request come first, then those of `EngineConfig.override_generation_config`, then the
model's: its own file, else its model card, else llama.cpp's for a GGUF file. A field that none of
them names is neutral: temperature 1, the others off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from radixserve.checks import shown, suggestion
from radixserve.errors import InvalidRequest
from radixserve.sampling_fields import NEUTRAL, check_field

LLAMA_CPP: Mapping[str, float] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
OVERRIDE = "override_generation_config"  # the engine's setting, as a source


class SamplingDefault(NamedTuple):
    """The value of a field in force, and its source, such as "generation_config.json"."""

    value: float
    source: str


class ModelSampling(NamedTuple):
    """The sampling defaults of a model, which are all from one source."""

    values: Mapping[str, float]
    source: str


NO_SAMPLING = ModelSampling({}, "")


def check_override(values: object) -> dict[str, float]:
    """Returns a checked `override_generation_config`. Raises InvalidRequest."""
    if not isinstance(values, Mapping):
        raise InvalidRequest(f"{OVERRIDE} must be {{field: value}}, got {shown(values)}")
    for name in values:
        if name not in NEUTRAL:
            raise InvalidRequest(
                f"unknown field {shown(name)} in {OVERRIDE}{suggestion(str(name), NEUTRAL)}; "
                f"allowed: {', '.join(NEUTRAL)}"
            )
    try:
        return {name: check_field(name, value) for name, value in values.items()}
    except InvalidRequest as error:
        raise InvalidRequest(f"{OVERRIDE}: {error}") from None


def in_force(
    override: Mapping[str, float] | None, model: ModelSampling
) -> dict[str, SamplingDefault]:
    """Returns the default of each field: of the engine's setting, else of the model, else
    neutral."""
    layers = (NEUTRAL, "neutral"), (model.values, model.source), (override or {}, OVERRIDE)
    return {
        name: SamplingDefault(value, source)
        for values, source in layers
        for name, value in values.items()
    }


def describe_sampling(defaults: Mapping[str, SamplingDefault]) -> str:
    """Returns the defaults as a line such as "temperature 0.2, top_p 0.9 (model card); ..."."""
    by_source: dict[str, list[str]] = {}
    for name, (value, source) in defaults.items():
        by_source.setdefault(source, []).append(f"{name} {value:g}")
    order = sorted(by_source.items(), key=lambda item: item[0] == "neutral")
    return "; ".join(f"{', '.join(values)} ({source})" for source, values in order)
