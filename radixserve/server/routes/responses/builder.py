"""`ResponseBuilder`: formats OpenAI's responses, whole and as events."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from radixserve.completion import Completion
from radixserve.output import Usage
from radixserve.server.answer.content_blocks import ContentBlock, ContentBlockEvent
from radixserve.server.routes.responses.schema import (
    ResponseFunctionTool,
    ResponseNamedTool,
    ResponseRequest,
)
from radixserve.server.turn.answer_builder import BlocksBuilder
from radixserve.server.turn.cache_diagnosis import openai_diagnostics
from radixserve.server.turn.chat_turn import ChatTurn
from radixserve.server.wire.errors import ApiError
from radixserve.server.wire.json_response import named_event
from radixserve.server.wire.usage import loaded_field

_PREFIXES = {"reasoning": "rs", "text": "msg", "tool_call": "fc"}
_STATUSES = {"length": "incomplete"}  # by finish_reason; others are "completed"
_EMPTY = ContentBlock("text", 0)  # the only block of an empty answer


class ResponseBuilder(BlocksBuilder):
    """Formats responses."""

    def __init__(
        self,
        turn: ChatTurn,
        request_id: str,
        body: ResponseRequest,
        keep: Callable[[dict[str, Any], dict[str, Any]], bool] | None,
    ) -> None:
        """`keep`: called with the response and its answer as a chat message, to store them; returns
        whether they are stored. None: the response is not stored."""
        super().__init__(turn)
        self._request_id = request_id
        self._number = 0  # of the next event
        self._keep = keep
        params = turn.params
        reasoning = body.reasoning
        # Reasoning is the content of its item, or the summary if a summary was requested.
        self._summarises = reasoning is not None and reasoning.summary is not None
        tools = [tool for tool in body.tools or [] if isinstance(tool, ResponseFunctionTool)]
        form = body.text.format if body.text is not None else None
        options = body.prompt_cache_options
        self._is_diagnosed = options is not None and options.comparison_response_id is not None
        choice: Any = body.tool_choice
        if isinstance(choice, ResponseNamedTool):
            choice = choice.model_dump()
        self._head: dict[str, Any] = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": self.generation.model,
            "background": bool(body.background),
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "prompt_cache_options": options and options.applied(),
            "prompt_cache_retention": body.prompt_cache_retention,
            "reasoning": {
                "effort": reasoning and reasoning.effort,
                "summary": reasoning and reasoning.summary,
            },
            "safety_identifier": body.safety_identifier,
            "store": keep is not None,
            "temperature": params.temperature,
            "text": {
                "format": {"type": "text"} if form is None else form.model_dump(by_alias=True)
            },
            "tool_choice": choice or "auto",
            "tools": [tool.model_dump() for tool in tools],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "user": body.user,
        }

    # -- whole answers ------------------------------------------------------------------------

    def message(
        self, blocks: Sequence[ContentBlock], completion: Completion, num_reasoning: int
    ) -> dict[str, Any]:
        """The whole response. If max_output_tokens ended the answer, its last item that is not a
        call is incomplete."""
        status = _STATUSES.get(completion.finish_reason, "completed")
        items = blocks or ([] if self._turn.prewarms else [_EMPTY])
        cut = max((item.index for item in items if item.kind != "tool_call"), default=None)
        response = self._response(
            status,
            [self._item(item, status if item.index == cut else "completed") for item in items],
        )
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        usage = response_usage(completion.usage, num_reasoning)
        response |= {"completed_at": int(time.time()), "usage": usage}
        response = self.generation.with_hints(response)
        if self._is_diagnosed:
            response["prompt_cache_diagnostics"] = openai_diagnostics(self._turn.diagnosis())
        if self._keep is not None:
            response["store"] = self._keep(response, assistant_message(blocks))
        return response

    def unfinished(self, status: str, error: ApiError | None = None) -> dict[str, Any]:
        """The response without its whole answer. `error`: the reason if it failed."""
        output = [self._item(block, "incomplete") for block in self._blocks.blocks]
        response = self._response(status, output)
        if error is not None:
            response["error"] = {"code": "server_error", "message": error.message}
        return response

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "status": status, "output": output, "usage": None}

    def _item(self, part: ContentBlock, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._id(part), "status": status}
        if part.kind == "tool_call":
            if status == "incomplete":
                item["status"] = "completed"
            call = {"call_id": part.call_id, "name": part.name, "arguments": part.text}
            return {**item, "type": "function_call", **call}
        content = [] if status == "in_progress" else [self._content(part, part.text)]
        if part.kind == "reasoning":
            texts = {"summary": [], "content": [], self._place_of(part): content}
            return {**item, "type": "reasoning", **texts}
        return {**item, "type": "message", "role": "assistant", "content": content}

    def _id(self, part: ContentBlock) -> str:
        return f"{_PREFIXES[part.kind]}_{self._request_id}_{part.index}"

    # -- streams ------------------------------------------------------------------------------

    def opening(self) -> str:
        body = self._response("in_progress", [])
        return self._event("created", response=body) + self._event("in_progress", response=body)

    def ping(self) -> str:
        """response.in_progress again, until the first block: some clients, such as Codex, count
        only events as signs of life. Later a comment, since clients may take the response in an
        event for the state of its output."""
        if self._blocks.blocks:
            return super().ping()
        return self._event("in_progress", response=self._response("in_progress", []))

    def block_event(self, block_event: ContentBlockEvent, completion: Completion | None) -> str:
        kind, part, piece = block_event
        if kind == "start":
            return "".join(self._opened(part))
        if kind == "stop":
            reason = "" if completion is None else completion.finish_reason
            return "".join(self._closed(part, _STATUSES.get(reason, "completed")))
        name = f"{self._name(part)}.delta"
        fields: dict[str, Any] = {"delta": piece}
        if part.kind == "text":
            fields["logprobs"] = (
                [] if self._logprobs is None else self._logprobs.next(part.index, len(piece))
            )
        return self._of_part(name, part, **fields)

    def closing(
        self, blocks: Sequence[ContentBlock], completion: Completion, num_reasoning: int
    ) -> str:
        text = ""
        if not blocks and not self._turn.prewarms:
            text = self.block_event(ContentBlockEvent("start", _EMPTY), completion)
            text += self.block_event(ContentBlockEvent("stop", _EMPTY), completion)
        response = self.message(blocks, completion, num_reasoning)
        return text + self._event(response["status"], response=response)

    def failed(self, error: ApiError) -> str:
        return self._event("failed", response=self.unfinished("failed", error))

    def _opened(self, part: ContentBlock) -> Iterator[str]:
        item = self._item(part, "in_progress")
        yield self._event("output_item.added", output_index=part.index, item=item)
        if part.kind != "tool_call":
            name = f"{self._name_of_place(part)}.added"
            yield self._of_part(name, part, part=self._content(part, ""))

    def _closed(self, part: ContentBlock, status: str) -> Iterator[str]:
        text, name = part.text, f"{self._name(part)}.done"
        if part.kind == "tool_call":
            yield self._of_part(name, part, name=part.name, arguments=text)
        else:
            fields = {"logprobs": self._entries(part, text)} if part.kind == "text" else {}
            yield self._of_part(name, part, text=text, **fields)
            name = f"{self._name_of_place(part)}.done"
            yield self._of_part(name, part, part=self._content(part, text))
        item = self._item(part, status)
        yield self._event("output_item.done", output_index=part.index, item=item)

    def _of_part(self, kind: str, part: ContentBlock, /, **fields: Any) -> str:
        place: dict[str, Any] = {"item_id": self._id(part), "output_index": part.index}
        if part.kind != "tool_call":
            place[f"{self._place_of(part)}_index"] = 0
        return self._event(kind, **place, **fields)

    def _place_of(self, part: ContentBlock) -> str:
        """The member of the item that contains the block's text."""
        return "summary" if part.kind == "reasoning" and self._summarises else "content"

    def _name_of_place(self, part: ContentBlock) -> str:
        is_summary = self._place_of(part) == "summary"
        return "reasoning_summary_part" if is_summary else "content_part"

    def _name(self, part: ContentBlock) -> str:
        is_summary = self._place_of(part) == "summary"
        return "reasoning_summary_text" if is_summary else _NAMES[part.kind]

    def _content(self, part: ContentBlock, text: str) -> dict[str, Any]:
        if self._place_of(part) == "summary":
            return {"type": "summary_text", "text": text}
        if part.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        entries = self._entries(part, text)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": entries}

    def _entries(self, part: ContentBlock, text: str) -> list[dict[str, Any]]:
        """The log-probabilities of a block's text; [] if they were not requested."""
        return [] if self._logprobs is None else self._logprobs.all(part.index, len(text))

    def _event(self, kind: str, /, **fields: Any) -> str:
        name, number = f"response.{kind}", self._number
        self._number += 1
        return named_event(name, {"type": name, "sequence_number": number, **fields})


_NAMES = {
    "reasoning": "reasoning_text",
    "text": "output_text",
    "tool_call": "function_call_arguments",
}


def response_usage(usage: Usage, num_reasoning: int) -> dict[str, Any]:
    """The `usage` of a response. input_tokens includes cached tokens, as in OpenAI's API."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": 0,
            **loaded_field(usage.loaded_tokens),
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def assistant_message(parts: Iterable[ContentBlock]) -> dict[str, Any]:
    """The answer as a chat message."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for part in parts:
        if part.kind == "text":
            message["content"] += part.text
        elif part.kind == "reasoning":
            message["reasoning_content"] = message.get("reasoning_content", "") + part.text
        else:
            function = {"name": part.name, "arguments": part.text}
            call = {"id": part.call_id, "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
    return message
