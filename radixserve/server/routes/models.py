"""GET /v1/models, and the tokenizer's routes: /tokenize, /detokenize, /tokenizer_info."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from radixserve.checks import shown
from radixserve.request import FIRST_PICTURE_ID
from radixserve.server.gate.json_body import JsonRoute
from radixserve.server.gate.state import caller_of, check_admin, model_path_for, server_of
from radixserve.server.prompt.chat_prompt import read_chat
from radixserve.server.prompt.prompt_input import in_thread_if, is_long_text
from radixserve.server.prompt.rendering import tokenizer_of
from radixserve.server.wire.errors import ApiError
from radixserve.server.wire.json_response import answer
from radixserve.server.wire.schema import (
    DetokenizeRequest,
    LoadAdapterRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)

router = APIRouter(route_class=JsonRoute)
_MANY_TOKENS = 4_096  # more are converted in another thread


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """The model that is served, once for each of its names, and the loaded adapters."""
    server = server_of(request)
    cards = [_card(request, name) for name in (*server.model_names, *server.runtime.adapters)]
    return answer({"object": "list", "data": cards})


@router.get("/v1/models/{name:path}")
async def show_model(request: Request, name: str) -> Response:
    server = server_of(request)
    server.check_model(name)
    return answer(_card(request, name))


def _card(request: Request, name: str) -> dict[str, Any]:
    server, path = server_of(request), model_path_for(request)
    adapter = None if name in server.model_names else server.runtime.adapters.get(name)
    if adapter is not None:
        path = adapter.path if caller_of(request).is_admin else name
    defaults = server.runtime.sampling_defaults
    return {
        "id": name,
        "object": "model",
        "created": server.started_at,
        "owned_by": "radixserve",
        "root": path,
        "parent": None if adapter is None else server.model_name,
        "max_model_len": server.runtime.max_seq_len,
        "sampling_defaults": {field: default._asdict() for field, default in defaults.items()},
    }


@router.post("/v1/load_lora_adapter")
async def load_lora_adapter(request: Request, body: LoadAdapterRequest) -> Response:
    """Load a LoRA adapter from a folder of this machine; requests name it as their model. Needs an
    admin key."""
    check_admin(request)
    server, name, path = server_of(request), body.lora_name, body.lora_path
    if not name or not path:
        raise ApiError(400, "give lora_name and lora_path", param="lora_name")
    if name in server.model_names:
        raise ApiError(400, f"{shown(name)} is the model's name", param="lora_name")
    load = partial(server.runtime.load_adapter, name, path, load_inplace=bool(body.load_inplace))
    info = await asyncio.to_thread(load)
    return answer({"id": name, "object": "lora_adapter", "rank": info.rank, "loaded": True})


@router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(request: Request, body: UnloadAdapterRequest) -> Response:
    """Take an adapter from new requests, wait until the open ones have ended, and drop its K/V.
    Needs an admin key."""
    check_admin(request)
    server, name = server_of(request), body.lora_name
    if not name or name not in server.runtime.adapters:
        raise ApiError(404, f"no adapter {shown(name)} is loaded", param="lora_name")
    await asyncio.to_thread(server.runtime.unload_adapter, name)
    return answer({"id": name, "object": "lora_adapter", "loaded": False})


@router.post("/tokenize")
async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """Token ids of a text, or of messages as a chat would render them."""
    server = server_of(request)
    server.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give prompt or messages", param="prompt")
    tokenizer = tokenizer_of(server.runtime)
    if body.prompt is None:
        namespace = caller_of(request).namespace(None)
        prompt = await read_chat(
            server,
            body,
            body.messages or (),
            namespace,
            add_special_tokens=bool(body.add_special_tokens),
            is_prompt=False,
        )
        ids = prompt.token_ids.tolist()
    else:
        text = body.prompt
        special = body.add_special_tokens is not False
        encode = tokenizer.encode if special else tokenizer.encode_more

        def read() -> list[int]:
            server.runtime.check_length(text, is_prompt=False)
            return encode(text)

        ids = await in_thread_if(is_long_text(text), read)

    def respond() -> Response:
        fields: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": server.runtime.max_seq_len,
            "tokens": ids,
            "token_strs": tokenizer.pieces_of(ids) if body.return_token_strs else None,
        }
        return answer(fields)

    return await in_thread_if(len(ids) > _MANY_TOKENS, respond)


@router.post("/detokenize")
async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
    """The text of token ids, special tokens included unless they are to be skipped."""
    server = server_of(request)
    server.check_model(body.model)
    vocab_size = server.runtime.model.vocab_size
    tokenizer, keeps = tokenizer_of(server.runtime), not body.skip_special_tokens
    takes_pictures = server.pictures is not None

    def respond() -> Response:
        for position, token_id in enumerate(body.tokens):
            if takes_pictures and FIRST_PICTURE_ID <= token_id < 1 << 31:
                continue  # a row of one, which has no text
            if not 0 <= token_id < vocab_size:
                raise ApiError(
                    400,
                    f"tokens[{position}] must be between 0 and {vocab_size - 1}, "
                    f"got {shown(token_id)}",
                    param="tokens",
                    index=position,
                )
        return answer({"prompt": tokenizer.decode(body.tokens, keep_special=keeps)})

    return await in_thread_if(len(body.tokens) > _MANY_TOKENS, respond)


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> Response:
    """The tokenizer's special tokens and chat template."""
    server = server_of(request)
    facts = tokenizer_of(server.runtime).facts()
    return answer({**facts, "vocab_size": server.runtime.model.vocab_size})
