"""What FlashInfer's functions take: recorded, or read from the installed package."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parent / "flashinfer_signatures.json"
DECODE = "flashinfer.decode:BatchDecodeWithPagedKVCacheWrapper"
PREFILL = "flashinfer.prefill:BatchPrefillWithPagedKVCacheWrapper"
# Where each thing that is called lives. The keywords of the decode wrapper's plan stand on what it
# hands them to.
PLACES = {
    "decode": f"{DECODE}.__init__",
    "decode.plan": f"{DECODE}.plan",
    "decode.plan keywords": f"{DECODE}._plan_impl",
    "decode.run": f"{DECODE}.run",
    "decode.reset_workspace_buffer": f"{DECODE}.reset_workspace_buffer",
    "prefill": f"{PREFILL}.__init__",
    "prefill.plan": f"{PREFILL}.plan",
    "prefill.run": f"{PREFILL}.run",
    "prefill.reset_workspace_buffer": f"{PREFILL}.reset_workspace_buffer",
    "fast_decode_plan": "flashinfer.decode:fast_decode_plan",
    "merge_state_in_place": "flashinfer.cascade:merge_state_in_place",
    "gen_batch_decode_module": "flashinfer.jit.attention:gen_batch_decode_module",
    "gen_batch_prefill_module": "flashinfer.jit.attention:gen_batch_prefill_module",
    "gen_cascade_module": "flashinfer.jit.cascade:gen_cascade_module",
    "build_jit_specs": "flashinfer.jit.core:build_jit_specs",
}


def recorded() -> dict[str, inspect.Signature]:
    calls = json.loads(RECORD.read_text())["calls"]
    return {name: _signature(form) for name, form in calls.items()}


def recorded_version() -> str:
    return str(json.loads(RECORD.read_text())["version"])


def installed() -> dict[str, list[dict[str, Any]]]:
    """Parameters of everything in PLACES, as they are recorded."""
    return {name: _form(place) for name, place in PLACES.items()}


def _form(place: str) -> list[dict[str, Any]]:
    module, _, path = place.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return [_parameter_form(one) for one in inspect.signature(found).parameters.values()]


def _parameter_form(parameter: inspect.Parameter) -> dict[str, Any]:
    form: dict[str, Any] = {"name": parameter.name, "kind": parameter.kind.name}
    if parameter.default is not inspect.Parameter.empty:
        form["default"] = parameter.default
    return form


def _signature(forms: list[dict[str, Any]]) -> inspect.Signature:
    return inspect.Signature(
        [
            inspect.Parameter(
                form["name"],
                getattr(inspect.Parameter, form["kind"]),
                default=form.get("default", inspect.Parameter.empty),
            )
            for form in forms
        ]
    )
