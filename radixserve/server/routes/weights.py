"""Pauses and weight updates for admins, under SGLang's and vLLM's names.

SGLang says at the pause what becomes of the K/V of open requests, here it is said at the update:
"in_place" makes "stale" the default of the updates that follow, "retract" makes it "recompute".
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from safetensors import SafetensorError
from starlette.requests import Request
from starlette.responses import Response

from radixserve.epochs.messages import KVAfterUpdate
from radixserve.errors import InvalidRequest, ModelNotSupported
from radixserve.server.gate.json_body import JsonRoute
from radixserve.server.gate.state import AppState, check_admin, server_of
from radixserve.server.wire.body import Body, Short
from radixserve.server.wire.errors import ApiError
from radixserve.server.wire.json_response import answer

router = APIRouter(route_class=JsonRoute)
_SHARED_MEMORY = Path("/dev/shm")


class PauseRequest(Body):
    """SGLang's modes; null is "abort", as there."""

    mode: Literal["abort", "retract", "in_place"] | None = None


class UpdateRequest(Body):
    """What all updates take. `flush_cache` has no effect: K/V of other weights is not found."""

    kv: Literal["recompute", "stale"] | None = None
    weight_version: Short | None = None
    abort_all_requests: bool | None = None
    flush_cache: bool | None = None


class DiskRequest(UpdateRequest):
    model_path: str | None = None
    load_format: Literal["auto"] | None = None


class TensorRequest(UpdateRequest):
    """A safetensors file, by its path or by its name in shared memory. Pickled tensors, SGLang's
    `serialized_named_tensors`, are not read: they could contain any program."""

    path: str | None = None
    shared_memory: str | None = None
    is_last: bool | None = None  # false: further buckets of tensors follow


# -- SGLang's names -----------------------------------------------------------------------------


@router.post("/pause_generation")
async def pause_generation(request: Request) -> Response:
    """Stop computing. `mode`: "abort" ends open requests, "retract" and "in_place" keep them."""
    check_admin(request)
    server, body = server_of(request), _read(request, PauseRequest)
    mode = body.mode or "abort"
    server.kv_after_update = "stale" if mode == "in_place" else "recompute"
    await _pause(server, "abort" if mode == "abort" else "keep")
    return answer({"message": "Generation paused successfully.", "status": "ok"})


@router.post("/continue_generation")
async def continue_generation(request: Request) -> Response:
    """Continue after a pause."""
    check_admin(request)
    await asyncio.to_thread(server_of(request).runtime.resume)
    return answer({"message": "Generation continued successfully.", "status": "ok"})


@router.post("/update_weights_from_disk")
async def update_weights_from_disk(request: Request, body: DiskRequest) -> Response:
    """Compute with the weights of a checkpoint folder or GGUF file of the server's machine."""
    check_admin(request)
    if body.model_path is None:
        raise ApiError(400, "model_path is missing", param="model_path")
    return await _update(server_of(request), body, body.model_path)


@router.post("/update_weights_from_tensor")
async def update_weights_from_tensor(request: Request, body: TensorRequest) -> Response:
    """Compute with the tensors of a safetensors file, by their names in a checkpoint."""
    check_admin(request)
    if (body.path is None) == (body.shared_memory is None):
        raise ApiError(400, "give path or shared_memory", param="path")
    if body.path is not None:
        path = Path(body.path)
    else:
        name = body.shared_memory or ""
        if "/" in name or name.startswith("."):
            raise ApiError(400, "shared_memory must be a name, without /", param="shared_memory")
        path = _SHARED_MEMORY / name
    try:
        tensors = await asyncio.to_thread(_read_tensors, path)
    except (OSError, ValueError, SafetensorError) as error:  # ValueError: of a path with NUL
        raise ApiError(400, f"{path} is not a safetensors file: {error}", param="path") from None
    return await _update(server_of(request), body, tensors, is_last=body.is_last is not False)


@router.get("/get_weight_version")
@router.get("/weight_version")
async def weight_version(request: Request) -> Response:
    """The caller's name of the present weights, and the number of their epoch."""
    check_admin(request)
    info = await asyncio.to_thread(lambda: server_of(request).runtime.weights_info)
    return answer({"weight_version": info.version or "default", "epoch": info.epoch})


# -- vLLM's names -------------------------------------------------------------------------------


@router.post("/pause")
async def pause(
    request: Request, mode: Literal["abort", "keep", "wait"] = "abort", clear_cache: bool = True
) -> Response:
    """Stop computing. `mode` "abort" ends open requests, "keep" lets them wait. `clear_cache` has
    no effect: K/V of other weights is not found."""
    check_admin(request)
    del clear_cache
    if mode == "wait":
        raise ApiError(400, 'mode "wait" is not implemented: use "keep" or "abort"', param="mode")
    await _pause(server_of(request), mode)
    return answer({"status": "paused"})


@router.post("/resume")
async def resume(request: Request) -> Response:
    """Continue after a pause."""
    check_admin(request)
    await asyncio.to_thread(server_of(request).runtime.resume)
    return answer({"status": "resumed"})


@router.get("/is_paused")
async def is_paused(request: Request) -> Response:
    """Whether the engine is paused."""
    check_admin(request)
    info = await asyncio.to_thread(lambda: server_of(request).runtime.weights_info)
    return answer({"is_paused": info.is_paused})


# -- inside -------------------------------------------------------------------------------------


def _read(request: Request, kind: type[PauseRequest]) -> PauseRequest:
    """The body of a route that may come without one. Raises RequestValidationError."""
    given: Any = request.scope.get("radixserve.json")
    try:
        return kind.model_validate({} if given is None else given)
    except ValidationError as error:
        errors = [{**wrong, "loc": ("body", *wrong["loc"])} for wrong in error.errors()]
        raise RequestValidationError(errors) from None


async def _pause(server: AppState, mode: Literal["keep", "abort"]) -> None:
    await asyncio.to_thread(server.runtime.pause, mode)


async def _update(
    server: AppState, body: UpdateRequest, weights: Any, *, is_last: bool = True
) -> Response:
    """SGLang's answer: status 400 where the weights do not fit, and nothing has changed."""
    runtime = server.runtime
    kv: KVAfterUpdate = body.kv or server.kv_after_update
    if body.abort_all_requests:
        await asyncio.to_thread(runtime.abort)
    try:
        epoch = await asyncio.to_thread(
            runtime.update_weights, weights, kv=kv, version=body.weight_version, is_last=is_last
        )
    except (InvalidRequest, ModelNotSupported) as error:
        return answer({"success": False, "message": str(error)}, 400)
    message = "Succeeded to update model weights." if is_last else "The tensors wait for others."
    return answer({"success": True, "message": message, "epoch": epoch, "kv": kv})


def _read_tensors(path: Path) -> dict[str, Any]:
    """The tensors of a safetensors file, copied: its writer may change it afterwards."""
    from safetensors.torch import load

    if not path.is_file():  # a pipe or a device would be read for ever
        raise OSError("not a file")
    return load(path.read_bytes())
