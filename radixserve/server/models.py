"""GET /v1/models, and the routes of the tokenizer."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from radixserve.checks import shown
from radixserve.server.chat_prompt import read_chat
from radixserve.server.errors import ApiError
from radixserve.server.json_response import answer
from radixserve.server.prompts import in_thread_if, is_much_text
from radixserve.server.rendering import tokenizer_of
from radixserve.server.schema import DetokenizeRequest, TokenizeRequest
from radixserve.server.state import Server, caller_of, server_of

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """The one model that is served."""
    return answer({"object": "list", "data": [_card(server_of(request))]})


@router.get("/v1/models/{name:path}")
async def show_model(request: Request, name: str) -> Response:
    server = server_of(request)
    server.check_model(name)
    return answer(_card(server))


def _card(server: Server) -> dict[str, Any]:
    return {
        "id": server.model_name,
        "object": "model",
        "created": server.started_at,
        "owned_by": "radixserve",
        "max_model_len": server.runtime.max_seq_len,
    }


@router.post("/tokenize")
async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """Token ids of a text, or of messages as a chat would render them."""
    server = server_of(request)
    server.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give prompt or messages", param="prompt")
    if body.prompt is None:
        namespace = caller_of(request).namespace(None)
        prompt = await read_chat(server, body, body.messages, namespace)
        ids = prompt.token_ids.tolist()
    else:
        text, tokenizer = body.prompt, tokenizer_of(server.runtime)
        special = body.add_special_tokens is not False
        encode = tokenizer.encode if special else tokenizer.encode_more
        ids = await in_thread_if(is_much_text(text), lambda: encode(text))
    found: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": server.runtime.max_seq_len,
        "tokens": ids,
    }
    if body.return_token_strs:
        found["token_strs"] = [server.token_texts.text(token_id) for token_id in ids]
    return answer(found)


@router.post("/detokenize")
async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
    """The text of token ids, special tokens included unless they are to be skipped."""
    server = server_of(request)
    server.check_model(body.model)
    vocab_size = server.runtime.model.vocab_size
    for at, token_id in enumerate(body.tokens):
        if not 0 <= token_id < vocab_size:
            raise ApiError(
                400,
                f"tokens[{at}] must be between 0 and {vocab_size - 1}, got {shown(token_id)}",
                param="tokens",
                index=at,
            )
    tokenizer, keeps = tokenizer_of(server.runtime), not body.skip_special_tokens
    text = await in_thread_if(
        len(body.tokens) > 4096, lambda: tokenizer.decode(body.tokens, keep_special=keeps)
    )
    return answer({"prompt": text})


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> Response:
    """Its special tokens and chat template."""
    server = server_of(request)
    facts = tokenizer_of(server.runtime).facts()
    return answer({**facts, "vocab_size": server.runtime.model.vocab_size})
