"""/version, /load, /get_model_info and /get_server_info: routes of vLLM and SGLang about the
server."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from radixserve._version import __version__
from radixserve.server.gate.state import check_admin, model_path_for, server_of
from radixserve.server.wire.json_response import answer

router = APIRouter()
_LEFT_OUT = ("api_key_file", "kv_store")  # settings that may contain secrets


@router.get("/version")
async def version() -> Response:
    """The version of radixserve."""
    return answer({"version": __version__})


@router.get("/load")
async def load(request: Request) -> Response:
    """The number of requests that run or wait; needs an admin key."""
    check_admin(request)
    status = server_of(request).engine_status()
    return answer({"server_load": status.running + status.waiting})


@router.get("/get_model_info")
@router.get("/model_info")
async def model_info(request: Request) -> Response:
    """The model's place, for an admin; for others, its name. And the lengths that it takes."""
    server = server_of(request)
    place = model_path_for(request)
    facts = {
        "model_path": place,
        "tokenizer_path": place,
        "served_model_name": server.model_name,
        "is_generation": True,
        "max_model_len": server.runtime.max_seq_len,
        "vocab_size": server.runtime.model.vocab_size,
    }
    return answer(facts)


@router.get("/get_server_info")
@router.get("/server_info")
async def server_info(request: Request) -> Response:
    """The settings of server and engine, and the size of the pool; needs an admin key."""
    check_admin(request)
    server = server_of(request)
    runtime = server.runtime
    settings: dict[str, Any] = {**asdict(runtime.config), **asdict(server.config)}
    stats = runtime.status().stats
    facts = {
        **{name: _plain(value) for name, value in settings.items() if name not in _LEFT_OUT},
        "version": __version__,
        "model_path": server.model_path,
        "served_model_name": list(server.model_names),
        "max_model_len": runtime.max_seq_len,
        "max_total_num_tokens": stats["pages_total"] * runtime.config.page_size,
    }
    return answer(facts)


def _plain(value: Any) -> Any:
    """A setting as JSON; other objects by their text."""
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(name): _plain(member) for name, member in value.items()}
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
