"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from radixserve.server.answer.tool_choice import ChatTools
from radixserve.server.gate.json_body import JsonRoute, has_large_body
from radixserve.server.gate.request_log import note_skipped
from radixserve.server.gate.state import namespace_of, request_id_of, server_of
from radixserve.server.prompt.chat_prompt import read_chat
from radixserve.server.prompt.prompt_input import in_thread_if
from radixserve.server.routes.anthropic_messages.builder import MessageBuilder
from radixserve.server.routes.anthropic_messages.schema import CountTokensRequest, MessagesRequest
from radixserve.server.routes.anthropic_messages.translate import (
    chat_messages,
    retain_hints,
    template_of,
    tools_of,
    turn_request,
)
from radixserve.server.turn.cache_use import CacheUse
from radixserve.server.turn.chat_turn import ChatTurn
from radixserve.server.wire.json_response import answer
from radixserve.server.wire.schema import TemplateFields

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/messages")
async def create_message(request: Request, body: MessagesRequest) -> Response:
    """Answer a conversation, in Anthropic's protocol."""
    server = server_of(request)
    server.check_model(body.model)
    await note_skipped(request, body)
    asked = await in_thread_if(
        has_large_body(request),
        lambda: turn_request(server, body, CacheUse.read(request, body, retain_hints(body))),
    )
    turn = await ChatTurn.start(server, request, asked)
    return await MessageBuilder(turn, request_id_of(request), body).respond()


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request, body: CountTokensRequest) -> Response:
    """The number of prompt tokens that a message with these fields has, cached ones included."""
    server = server_of(request)
    server.check_model(body.model)
    await note_skipped(request, body)
    namespace = namespace_of(request, body)

    def read() -> tuple[list[dict[str, Any]], TemplateFields, ChatTools]:
        messages = chat_messages(body)
        return messages, template_of(body, messages), tools_of(body)

    messages, template, tools = await in_thread_if(has_large_body(request), read)
    prompt = await read_chat(server, template, messages, namespace, tools=tools, is_prompt=False)
    return answer({"input_tokens": len(prompt.token_ids)})
