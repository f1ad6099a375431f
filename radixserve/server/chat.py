"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from radixserve.output import Chunk, Completion
from radixserve.server import logprobs
from radixserve.server.chat_turn import ChatTurn, finish_reason
from radixserve.server.http_generation import HttpGeneration
from radixserve.server.json_response import answer, dump
from radixserve.server.output_parser import Delta, ParsedAnswer, ToolCallDelta
from radixserve.server.schema import ChatRequest
from radixserve.server.sse import EventStream, event, quote
from radixserve.server.state import request_id_of, server_of
from radixserve.server.stream_usage import StreamUsage
from radixserve.server.usage import usage_of

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat(request: Request, body: ChatRequest) -> Response:
    """Answer a conversation."""
    server = server_of(request)
    server.check_model(body.model)
    turn = await ChatTurn.start(server, request, body)
    builder = _ResponseBuilder(turn, body, request_id_of(request))
    if turn.streams:
        return EventStream(turn.generation, builder.events)
    found = builder.response(await turn.answers())
    return answer(turn.generation.with_hints(found))


class _ResponseBuilder:
    """How one request's answer looks."""

    def __init__(self, turn: ChatTurn, body: ChatRequest, request_id: str) -> None:
        self._turn = turn
        self._body = body
        self._head = {
            "id": f"chatcmpl-{request_id}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": turn.server.model_name,
        }

    def response(self, answers: list[tuple[ParsedAnswer, Completion]]) -> dict[str, Any]:
        choices = [self._choice(index, *one) for index, one in enumerate(answers)]
        group = [one for _, one in answers]
        found = {**self._head, "choices": choices, "usage": usage_of([group])}
        ids = self._turn.prompt.token_ids.tolist()
        if self._body.return_token_ids:
            found["prompt_token_ids"] = ids
        if self._body.prompt_logprobs is not None:
            texts = self._turn.server.token_texts
            found["prompt_logprobs"] = logprobs.of_prompt(texts, ids, group[0])
        return found

    def _choice(self, index: int, parsed: ParsedAnswer, one: Completion) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "message": _message(parsed),
            "logprobs": None,
            "finish_reason": finish_reason(one, calls=bool(parsed.tool_calls)),
            "stop_reason": one.stop_reason,
        }
        if self._body.logprobs:
            assert one.logprobs is not None
            choice["logprobs"] = logprobs.of_chat(
                self._turn.server.token_texts, one.token_ids, one.logprobs, one.top_logprobs
            )
        if self._body.return_token_ids:
            choice["token_ids"] = one.token_ids
        return choice

    async def events(self, generation: HttpGeneration) -> AsyncIterator[str]:
        """A text of server-sent events for all that came meanwhile."""
        turn = self._turn
        usage = StreamUsage(self._body.stream_options, [turn.prompt.token_ids], turn.params.n)
        head = {**self._head, "object": "chat.completion.chunk"}
        opening = "data: " + dump(head)[:-1] + ',"choices":[{"index":'
        begun: set[int] = set()
        calling: set[int] = set()  # samples with a call
        async for found in turn.deltas():
            usage.add([(at, chunk) for at, _, chunk in found])
            frames = []
            for at, delta, chunk in found:
                if at not in begun:
                    begun.add(at)
                    frames.append(self._first_frame(opening, at, usage))
                if delta.tool_calls:
                    calling.add(at)
                if delta or chunk.completion is not None or self._wants_tokens:
                    calls = at in calling
                    frames.append(self._frame(opening, at, delta, chunk, usage, calls=calls))
            if frames:
                yield "".join(frames)
        last = usage.last_event(generation.streamed_groups())
        if last is not None:
            yield event({**head, "choices": [], "usage": last})
        if generation.hint_answers:
            yield event(generation.with_hints({**head, "choices": []}))

    @property
    def _wants_tokens(self) -> bool:
        """Whether a chunk is to be told of also where it has no text yet."""
        options = self._body.stream_options
        is_continuous = options is not None and options.continuous_usage_stats
        return bool(self._body.logprobs or self._body.return_token_ids or is_continuous)

    def _first_frame(self, opening: str, at: int, usage: StreamUsage) -> str:
        content = '""' if self._turn.parser_config.is_plain else "null"
        delta = f'"delta":{{"role":"assistant","content":{content}}}'
        return (
            f'{opening}{at},{delta},"logprobs":null,"finish_reason":null}}]'
            f"{usage.empty_field()}}}\n\n"
        )

    def _frame(
        self,
        opening: str,
        at: int,
        delta: Delta,
        chunk: Chunk,
        usage: StreamUsage,
        *,
        calls: bool,
    ) -> str:
        found = "null"
        if self._body.logprobs and chunk.logprobs is not None:
            texts = self._turn.server.token_texts
            found = dump(
                logprobs.of_chat(texts, chunk.token_ids, chunk.logprobs, chunk.top_logprobs)
            )
        ids = f',"token_ids":{dump(chunk.token_ids)}' if self._body.return_token_ids else ""
        done = chunk.completion
        reason = "null" if done is None else quote(finish_reason(done, calls=calls))
        if done is not None:
            reason += f',"stop_reason":{dump(done.stop_reason)}'
        return (
            f'{opening}{at},"delta":{_delta(delta)},"logprobs":{found}{ids},'
            f'"finish_reason":{reason}}}]{usage.field(at, chunk)}}}\n\n'
        )


def _message(parsed: ParsedAnswer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content, "refusal": None}
    if parsed.reasoning is not None:
        message["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in parsed.tool_calls
        ]
    return message


def _delta(delta: Delta) -> str:
    """As JSON."""
    if not delta.reasoning and not delta.tool_calls:
        return f'{{"content":{quote(delta.content)}}}' if delta.content else "{}"
    found: dict[str, Any] = {}
    if delta.reasoning:
        found["reasoning_content"] = delta.reasoning
    if delta.content:
        found["content"] = delta.content
    if delta.tool_calls:
        found["tool_calls"] = [_call(call) for call in delta.tool_calls]
    return dump(found)


def _call(call: ToolCallDelta) -> dict[str, Any]:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
