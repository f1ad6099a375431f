"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from radixserve.server.anthropic_messages.builder import MessageBuilder
from radixserve.server.anthropic_messages.cache_control import num_retained
from radixserve.server.anthropic_messages.errors import error_body
from radixserve.server.anthropic_messages.schema import CountTokensRequest, MessagesRequest
from radixserve.server.anthropic_messages.translate import chat_fields, prompt_fields
from radixserve.server.chat_prompt import read_chat
from radixserve.server.chat_turn import ChatTurn
from radixserve.server.errors import ApiError
from radixserve.server.http_generation import HttpGeneration
from radixserve.server.items import errors_in_terms
from radixserve.server.json_response import answer
from radixserve.server.reasoning_tokens import count_reasoning
from radixserve.server.rendering import tokenizer_of
from radixserve.server.schema import ChatRequest
from radixserve.server.sse import EventStream, named_event
from radixserve.server.state import caller_of, request_id_of, server_of

router = APIRouter()
_TERMS = [
    (r"response_format\.json_schema", "output_config.format"),
    (r"response_format", "output_config.format"),
    (r"stop\b", "stop_sequences"),
    (r"tools\[(\d+)\]\.function\.parameters", r"tools[\1].input_schema"),
    (r"tools\[(\d+)\]\.function", r"tools[\1]"),
    (r"tool_choice\.function", "tool_choice"),
]


@router.post("/v1/messages")
async def create_message(request: Request, body: MessagesRequest) -> Response:
    """Answer a conversation, in Anthropic's protocol."""
    server = server_of(request)
    server.check_model(body.model)
    with errors_in_terms(_TERMS):
        turn = await ChatTurn.start(server, request, ChatRequest.model_validate(chat_fields(body)))
    request_id = request_id_of(request)
    builder = MessageBuilder(f"msg_{request_id}", server.model_name, body.max_tokens)

    async def events(_generation: HttpGeneration) -> AsyncIterator[str]:
        text = builder.begin(len(turn.prompt.token_ids))
        async for batch in turn.deltas():
            for _, delta, chunk in batch:
                text += builder.more(delta)
                if chunk.completion is not None:
                    text += builder.end(chunk.completion, tokenizer, num_retained(turn.generation))
            yield text
            text = ""

    def failed(error: ApiError) -> str:
        return named_event("error", error_body(error, request_id))

    tokenizer = tokenizer_of(server.runtime)
    if turn.streams:
        return EventStream(turn.generation, events, done="", failed=failed)
    ((parsed, one),) = await turn.answers()
    num_reasoning = count_reasoning(tokenizer, parsed.reasoning, one)
    kept = num_retained(turn.generation)
    return answer(builder.message(parsed, one, num_reasoning, kept))


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request, body: CountTokensRequest) -> Response:
    """The length of the prompt that the same fields make of a message: what is cached included."""
    server = server_of(request)
    server.check_model(body.model)
    namespace = caller_of(request).namespace(body.cache_salt)
    with errors_in_terms(_TERMS):
        chat = ChatRequest.model_validate(prompt_fields(body))
        prompt = await read_chat(server, chat, chat.messages, namespace)
    return answer({"input_tokens": len(prompt.token_ids)})
