"""POST /v1/chat/completions.

The body is `ChatRequest` of `wire/schema.py`, which says how to add a field. `_turn_request`
translates it; `_ChatCompletionBuilder` formats the answer and the events of a stream.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from radixserve.completion import Chunk, Completion
from radixserve.server.answer.output_parser import Delta, ParsedAnswer, ToolCallDelta
from radixserve.server.answer.reasoning import count_reasoning
from radixserve.server.answer.tool_choice import ChatTools, functions_of
from radixserve.server.gate.json_body import JsonRoute, has_large_body
from radixserve.server.gate.request_log import note_skipped
from radixserve.server.gate.state import AppState, request_id_of, server_of
from radixserve.server.prompt.chat_messages import joined_text
from radixserve.server.prompt.prompt_input import in_thread_if
from radixserve.server.prompt.rendering import template_variables, thinks_at, tokenizer_of
from radixserve.server.turn.answer_builder import ChoicesBuilder
from radixserve.server.turn.cache_diagnosis import openai_diagnostics
from radixserve.server.turn.cache_use import CacheUse
from radixserve.server.turn.chat_turn import ChatTurn, TurnRequest, finish_reason
from radixserve.server.turn.structured_outputs import read_constraint
from radixserve.server.wire import logprobs
from radixserve.server.wire.cache_fields import retain_hints
from radixserve.server.wire.errors import ApiError
from radixserve.server.wire.json_response import dump, quote
from radixserve.server.wire.sampling import check_stream, read_beams, read_sampling, token_limit
from radixserve.server.wire.schema import ChatReasoning, ChatRequest, NamedTool, TemplateFields
from radixserve.server.wire.usage import Group, epochs_body, prediction_details
from radixserve.text.content_marks import unmarked

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions")
async def chat(request: Request, body: ChatRequest) -> Response:
    """Answer a conversation."""
    server = server_of(request)
    server.check_model(body.model)
    await note_skipped(request, body)
    asked = await in_thread_if(
        has_large_body(request), lambda: _turn_request(server, request, body)
    )
    turn = await ChatTurn.start(server, request, asked)
    return await _ChatCompletionBuilder(turn, body, request_id_of(request)).respond()


def _turn_request(server: AppState, request: Request, body: ChatRequest) -> TurnRequest:
    """Translate the body. Raises ApiError."""
    options = body.prompt_cache_options
    hints = retain_hints(options, body.prompt_cache_retention, body.breakpoints())
    cache = CacheUse.read(request, body, hints)
    limit_name, max_tokens = token_limit(body, "max_tokens", "max_completion_tokens", "n_predict")
    params = read_sampling(
        server.runtime,
        body,
        cache.namespace,
        server.config,
        renamed={"logprobs": "top_logprobs", "max_tokens": limit_name},
        max_tokens=server.runtime.max_seq_len if max_tokens is None else max_tokens,
        prediction=None if body.prediction is None else body.prediction.text,
        **_logprobs(body),
    )
    return TurnRequest(
        messages=[message.as_message() for message in body.messages],
        template=TemplateFields(
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template_kwargs=_template_variables(body),
        ),
        tools=_tools(body),
        params=params,
        max_tokens=max_tokens,
        constraint=read_constraint(body.response_format, body.structured_outputs),
        add_special_tokens=bool(body.add_special_tokens),
        keep_last=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side,
        beams=read_beams(body),
        stream=check_stream(body.stream, body.stream_options, params),
        prewarm=options is not None and bool(options.prewarm),
        compare_with=None if options is None else options.comparison_response_id,
        cache=cache,
    )


def _logprobs(body: ChatRequest) -> dict[str, Any]:
    """The fields of SamplingParams for log-probabilities. With `logprob_token_ids`, those of the
    named tokens are reported instead of the best ones'. Raises ApiError."""
    if not body.logprobs:
        for name in ("top_logprobs", "logprob_token_ids"):
            if getattr(body, name) is not None:
                raise ApiError(400, f"{name} needs logprobs: true", param=name)
        return {}
    if body.logprob_token_ids:
        return {"logprobs": None, "logprob_token_ids": body.logprob_token_ids}
    return {"logprobs": body.top_logprobs or 0}


def _template_variables(body: ChatRequest) -> dict[str, Any] | None:
    """The template's variables. Raises ApiError."""
    reasoning = body.reasoning or ChatReasoning()
    efforts = {body.reasoning_effort, reasoning.effort} - {None}
    if len(efforts) > 1:
        raise ApiError(
            400, "reasoning_effort and reasoning.effort differ: give one", param="reasoning_effort"
        )
    effort = next(iter(efforts), None)
    return template_variables(
        body.chat_template_kwargs,
        effort=effort,
        enable_thinking=body.enable_thinking,
        thinking=body.thinking,
        thinks=thinks_at(effort) if reasoning.enabled is None else reasoning.enabled,
        budget=reasoning.max_tokens,
        verbosity=body.verbosity,
    )


def _tools(body: ChatRequest) -> ChatTools:
    """The checked tools and tool choice. Raises ApiError and InvalidRequest."""
    choice = body.tool_choice
    return ChatTools.read(
        functions_of(body.tools),
        "named" if isinstance(choice, NamedTool) else choice,
        choice.function.name if isinstance(choice, NamedTool) else None,
        parallel=body.parallel_tool_calls,
    )


class _ChatCompletionBuilder(ChoicesBuilder):
    """Formats chat completions, whole and as chunks."""

    chunk_object = "chat.completion.chunk"

    def __init__(self, turn: ChatTurn, body: ChatRequest, request_id: str) -> None:
        super().__init__(
            turn.generation,
            body,
            turn.params.n,
            answer_id=f"chatcmpl-{request_id}",
            object_name="chat.completion",
            streams=turn.streams,
        )
        self._turn = turn
        self._request = body
        self._begun: set[int] = set()  # choices that have had an event
        self._calling: set[int] = set()  # choices that have had a tool call
        # Whether chunks whose delta is empty are sent, too.
        self._sends_empty = bool(
            body.logprobs or body.return_token_ids or self._usage.is_continuous
        )
        reasoning = body.reasoning or ChatReasoning()
        self._hides_reasoning = body.include_reasoning is False or reasoning.exclude is True
        self._reasoning: dict[int, list[str]] = {}  # by choice, also if it is hidden
        self._echoed = _echoed(body)

    def usage(self, groups: Sequence[Group]) -> dict[str, Any]:
        """The usage, with the tokens of reasoning and those of a prediction."""
        tokenizer = tokenizer_of(self.server.runtime)
        num_reasoning = sum(
            count_reasoning(tokenizer, "".join(self._reasoning.get(index, ())), completion)
            for group in groups  # one, since a chat is one prompt
            for index, completion in enumerate(group)
        )
        details = {"reasoning_tokens": num_reasoning}
        if self._request.prediction is not None:
            details |= prediction_details(groups)
        return {**super().usage(groups), "completion_tokens_details": details}

    async def full_body(self) -> Callable[[], dict[str, Any]]:
        answers = await self._turn.answers()
        return lambda: self._whole(answers)

    def _whole(self, answers: Sequence[tuple[ParsedAnswer, Completion]]) -> dict[str, Any]:
        for index, (parsed, _) in enumerate(answers):
            self._reasoning[index] = [parsed.reasoning or ""]
        choices = [self._choice(index, *parsed) for index, parsed in enumerate(answers)]
        group = [completion for _, completion in answers]
        body = self._body(choices, [group])
        ids = self._turn.prompt.token_ids.tolist()
        prompt_logprobs = None
        if self._request.prompt_logprobs is not None:
            prompt_logprobs = logprobs.of_prompt(self.server.token_texts, ids, group[0])
        return {
            **body,
            "prompt_logprobs": prompt_logprobs,
            "prompt_token_ids": ids if self._returns_ids else None,
            "prompt_text": self._prompt_text(),
        }

    def _prompt_text(self) -> str | None:
        """The rendered prompt; None if it was not requested."""
        return unmarked(self._turn.prompt.text) if self._request.return_prompt_text else None

    def final_members(self) -> dict[str, Any]:
        """The answers to hints, and the prompt cache's diagnostics if they were requested."""
        options = self._request.prompt_cache_options
        if options is None or options.comparison_response_id is None:
            return super().final_members()
        diagnostics = openai_diagnostics(self._turn.diagnosis())
        return {**super().final_members(), "prompt_cache_diagnostics": diagnostics}

    def _choice(self, index: int, parsed: ParsedAnswer, completion: Completion) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "message": self._message(parsed),
            "logprobs": None,
            "finish_reason": finish_reason(completion, calls=bool(parsed.tool_calls)),
            "stop_reason": completion.stop_reason,
            "token_ids": None,
        }
        if completion.score is not None:
            choice["score"] = completion.score
        if self._request.logprobs:
            assert completion.logprobs is not None
            choice["logprobs"] = self._logprobs(
                completion.token_ids, completion.logprobs, completion.top_logprobs
            )
        if self._request.return_token_ids:
            choice["token_ids"] = completion.token_ids
            choice["prompt_token_ids"] = self._turn.prompt.token_ids.tolist()
            choice["weight_epochs"] = epochs_body(completion)
        return choice

    async def _batches(self) -> AsyncIterator[list[tuple[int, Chunk, Delta | None]]]:
        async for deltas in self._turn.deltas():
            yield [(index, chunk, delta) for index, delta, chunk in deltas]

    def _frames(self, index: int, chunk: Chunk, delta: Delta | None) -> Iterator[str]:
        assert delta is not None
        self._reasoning.setdefault(index, []).append(delta.reasoning)
        if self._hides_reasoning:
            delta = delta.without_reasoning()
        if index not in self._begun:
            self._begun.add(index)
            yield self._first_frame(index, chunk)
        if delta.tool_calls:
            self._calling.add(index)
        done = chunk.completion
        if not delta and done is None and not self._sends_empty:
            return
        logprobs_text = "null"
        if self._request.logprobs and chunk.logprobs is not None:
            logprobs_text = dump(
                self._logprobs(chunk.token_ids, chunk.logprobs, chunk.top_logprobs)
            )
        reason = "" if done is None else finish_reason(done, calls=index in self._calling)
        yield self._frame(index, f'"delta":{_delta(delta)}', logprobs_text, chunk, reason)

    def _first_frame(self, index: int, chunk: Chunk) -> str:
        """The event that opens a choice. The first one has what was requested of the prompt."""
        content = "null"
        if self._turn.parser_config.is_plain or self._echoed:
            content = quote(self._echoed)
        delta = f'"delta":{{"role":"assistant","content":{content}}}'
        prompt = ""
        if len(self._begun) == 1:
            prompt = self._prompt_ids(index)
            if self._request.return_prompt_text:
                prompt += f',"prompt_text":{quote(self._prompt_text() or "")}'
        return (
            f'{self._opening}{index},{delta},"logprobs":null,"finish_reason":null}}]'
            f"{prompt}{self._usage.opening_field(index, chunk)}}}\n\n"
        )

    def _logprobs(
        self, ids: Sequence[int], values: Sequence[float], tops: logprobs.Tops | None
    ) -> dict[str, Any]:
        texts = self.server.token_texts
        return logprobs.of_chat(
            texts, ids, values, tops, are_named=self._are_named, by_id=self._by_id
        )

    def _message(self, parsed: ParsedAnswer) -> dict[str, Any]:
        content = parsed.content
        if self._echoed:
            content = self._echoed + (content or "")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if parsed.reasoning is not None and not self._hides_reasoning:
            message |= {"reasoning": parsed.reasoning, "reasoning_content": parsed.reasoning}
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


def _echoed(body: ChatRequest) -> str:
    """With `echo`, the text of a last message of the assistant; else ""."""
    last = body.messages[-1].as_message()
    if not body.echo or last["role"] != "assistant":
        return ""
    content = last["content"] or ""
    return content if isinstance(content, str) else joined_text(content)


def _delta(delta: Delta) -> str:
    """The `delta` of a chunk as JSON."""
    if not delta.reasoning and not delta.tool_calls:
        return f'{{"content":{quote(delta.content)}}}' if delta.content else "{}"
    fields: dict[str, Any] = {}
    if delta.reasoning:
        fields |= {"reasoning": delta.reasoning, "reasoning_content": delta.reasoning}
    if delta.content:
        fields["content"] = delta.content
    if delta.tool_calls:
        fields["tool_calls"] = [_call(call) for call in delta.tool_calls]
    return dump(fields)


def _call(call: ToolCallDelta) -> dict[str, Any]:
    """A member of `delta.tool_calls`."""
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
