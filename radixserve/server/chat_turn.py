"""`ChatTurn`: one turn of a conversation, in whatever protocol it is asked for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from radixserve.arrays import IntArray
from radixserve.output import Chunk, Completion
from radixserve.request import SamplingParams
from radixserve.server.chat_prompt import ChatPrompt, read_chat
from radixserve.server.errors import ApiError
from radixserve.server.http_generation import HttpGeneration
from radixserve.server.output_parser import Delta, OutputParser, OutputParserConfig, ParsedAnswer
from radixserve.server.sampling import check_stream, keep_last, read_sampling
from radixserve.server.schema import ChatRequest
from radixserve.server.state import Server, caller_of
from radixserve.server.structured import compile_structured, with_structured
from radixserve.server.tools import Tools
from radixserve.structured_output import StructuredOutput


class ChatTurn:
    """The messages of a body in OpenAI's format, on their way through the model.

    `answers` gives all of it at the end; or the turn's `generation` is entered, by an `EventStream`
    say, and `deltas` are taken inside. Either remembers the conversation for its next turn.
    """

    def __init__(
        self,
        server: Server,
        prompt: ChatPrompt,
        params: SamplingParams,
        parser_config: OutputParserConfig,
        generation: HttpGeneration,
        *,
        streams: bool,
    ) -> None:
        """See `start`."""
        self.server = server
        self.prompt = prompt
        self.params = params
        self.parser_config = parser_config
        self.generation = generation
        self.streams = streams

    @classmethod
    async def start(cls, server: Server, request: Request, body: ChatRequest) -> ChatTurn:
        """Render, tokenise and queue it. Raises ApiError and InvalidRequest."""
        namespace = caller_of(request).namespace(body.cache_salt)
        tools = Tools.read(body.tools, body.tool_choice, body.parallel_tool_calls)
        last = keep_last(server, body, body.max_completion_tokens or body.max_tokens or 1)
        prompt = await read_chat(
            server, body, body.messages, namespace, tools=tools, keep_last=last
        )
        params = await with_structured(
            server, body, _params(server, body, namespace, prompt.token_ids)
        )
        structured = params.structured
        assert structured is None or isinstance(structured, StructuredOutput)
        parser_config = server.parser_configs.config(
            tools,
            prompt.text,
            structured=structured,
            keeps_special=body.skip_special_tokens is False,
        )
        params = replace(params, keep_special_ids=parser_config.keep_special_ids)
        if parser_config.grammar is not None:
            jumps = structured is not None and structured.jump_forward
            fields = {"grammar": parser_config.grammar, "jump_forward": jumps}
            params = replace(params, structured=await compile_structured(server, fields, "tools"))
        streams = check_stream(body, params)
        generation = HttpGeneration(
            server, request, [prompt.token_ids], params, body, namespace, streams=streams
        )
        return cls(server, prompt, params, parser_config, generation, streams=streams)

    async def answers(self) -> list[tuple[ParsedAnswer, Completion]]:
        """One a sample, when all have ended."""
        with self.generation as generation:
            (group,) = await generation.groups()
            found = [(OutputParser(self.parser_config).parse_all(one.text), one) for one in group]
            for parsed, one in found:
                await self.prompt.note_answer(self.server, parsed, one)
        return found

    async def deltas(self) -> AsyncIterator[list[tuple[int, Delta, Chunk]]]:
        """What came since the last time, each with its sample's index; a chunk with a `completion`
        is the sample's last."""
        parsers = [OutputParser(self.parser_config) for _ in range(self.params.n)]
        async for batch in self.generation.chunks():
            found = []
            for at, chunk in batch:
                delta = parsers[at].feed(chunk.text)
                if chunk.completion is not None:
                    delta += parsers[at].finish()
                    answer = parsers[at].answer()
                    await self.prompt.note_answer(self.server, answer, chunk.completion)
                found.append((at, delta, chunk))
            yield found


def finish_reason(one: Completion, *, calls: bool) -> str:
    """OpenAI's: an answer that has ended with calls in it waits for their results."""
    return "tool_calls" if calls and one.finish_reason == "stop" else one.finish_reason


def _params(server: Server, body: ChatRequest, namespace: str, prompt: IntArray) -> SamplingParams:
    """Without max_tokens an answer may take all that is left of the context."""
    limits = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise ApiError(
            400, "max_tokens and max_completion_tokens differ: give one", param="max_tokens"
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    own: dict[str, Any] = {
        "max_tokens": next(iter(limits), server.runtime.max_seq_len - len(prompt)),
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
    }
    renamed = {"logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        renamed["max_tokens"] = "max_completion_tokens"
    return read_sampling(body, namespace, server.config.max_n, renamed=renamed, **own)
