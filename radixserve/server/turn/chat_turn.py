"""`ChatTurn`: one turn of a conversation, for every protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.requests import Request

from radixserve.completion import Chunk, Completion
from radixserve.request import BeamParams, SamplingParams, TruncationSide
from radixserve.server.answer.output_parser import (
    Delta,
    OutputParser,
    OutputParserConfig,
    ParsedAnswer,
)
from radixserve.server.answer.text_logprobs import TextLogprobs
from radixserve.server.answer.tool_choice import ChatTools
from radixserve.server.gate.prompt_records import PromptParts, PromptRecord
from radixserve.server.gate.state import AppState, request_id_of
from radixserve.server.prompt.chat_prompt import ChatPrompt, read_chat
from radixserve.server.prompt.prompt_input import in_thread_if, is_long_text
from radixserve.server.prompt.rendering import tokenizer_of
from radixserve.server.turn.cache_diagnosis import TurnDiagnosis
from radixserve.server.turn.cache_use import CacheUse
from radixserve.server.turn.http_generation import HttpGeneration
from radixserve.server.turn.structured_outputs import Constraint
from radixserve.server.wire.errors import ApiError
from radixserve.server.wire.sampling import keep_last
from radixserve.server.wire.schema import TemplateFields


@dataclass(frozen=True, kw_only=True)
class TurnRequest:
    """A chat request in the form that all protocols are translated to.

    messages       in the format of chat completions
    messages_name  the name of their field in the protocol, for errors
    template       how the messages are rendered
    tools          the functions that the model may call
    params         how tokens are sampled; `max_tokens` below replaces theirs
    max_tokens     most tokens to generate; None: as many as the context has room for
    constraint     the grammar of the answer
    add_special_tokens  begin the prompt with the tokenizer's own special tokens, besides those of
                   the template
    keep_last      see truncate_prompt_tokens: keep this many of the prompt's last tokens
    truncation_side  "right": keep the first tokens instead
    beams          run a beam search with `params.n` beams
    stream         stream the answer
    background     generate the answer even if the client disconnects
    prewarm        compute the prompt and answer with an empty text
    compare_with   id of an earlier answer whose prompt is compared with this one, to explain
                   cache misses
    cache          namespace, session and hints
    """

    messages: Sequence[dict[str, Any]]
    messages_name: str = "messages"
    template: TemplateFields
    tools: ChatTools
    params: SamplingParams
    max_tokens: int | None
    constraint: Constraint | None
    add_special_tokens: bool = False
    keep_last: int | None = None
    truncation_side: TruncationSide | None = None
    beams: BeamParams | None = None
    stream: bool
    background: bool = False
    prewarm: bool = False
    compare_with: str | None = None
    cache: CacheUse


class ChatTurn:
    """A chat that is being answered: its prompt, its generation, and the parser of its answer.

    Await `answers` for whole answers. For a stream, enter `generation` (`EventStream` does) and
    iterate over `deltas`. Both remember the token ids of the conversation for its next turn.
    """

    def __init__(
        self,
        server: AppState,
        prompt: ChatPrompt,
        params: SamplingParams,
        parser_config: OutputParserConfig,
        generation: HttpGeneration,
        parts: PromptParts,
        previous: PromptRecord | None,
        *,
        request_id: str,
        streams: bool,
        prewarms: bool,
    ) -> None:
        """Use `start`. `previous`: the record of the earlier prompt that it is compared with."""
        self.server = server
        self.prompt = prompt
        self.params = params
        self.parser_config = parser_config
        self.generation = generation
        generation.returns_output = not prewarms
        self.streams = streams
        self.prewarms = prewarms
        self._parts = parts
        self._previous = previous
        self._request_id = request_id
        self._completions: dict[int, Completion] = {}  # those that have ended, by sample

    @classmethod
    async def start(cls, server: AppState, request: Request, asked: TurnRequest) -> ChatTurn:
        """Render and tokenise the messages, and compile the grammar. Raises ApiError and
        InvalidRequest."""
        max_seq_len = server.runtime.max_seq_len
        try:
            prompt = await read_chat(
                server,
                asked.template,
                asked.messages,
                asked.cache.namespace,
                tools=asked.tools,
                add_special_tokens=asked.add_special_tokens,
                keep_last=keep_last(asked.keep_last, max_seq_len, asked.max_tokens or 1),
                truncation_side=asked.truncation_side,
            )
        except ApiError as error:
            if error.param == "messages":
                error.param = asked.messages_name
            raise
        room = max_seq_len - len(prompt.token_ids)
        max_tokens = 1 if asked.prewarm else asked.max_tokens or room
        params = replace(asked.params, max_tokens=max_tokens)
        structured_outputs = None
        if asked.constraint is not None:
            structured_outputs = await asked.constraint.compile(server, asked.cache.namespace)
        parser_config = server.parser_configs.config(
            asked.tools,
            prompt.text,
            structured_outputs=structured_outputs,
            keeps_special=not params.skip_special_tokens,
        )
        if parser_config.grammar is not None:
            jumps = structured_outputs is not None and structured_outputs.jump_forward
            fields = {"grammar": parser_config.grammar, "jump_forward": jumps}
            structured_outputs = await Constraint("tools", fields).compile(
                server, asked.cache.namespace
            )
        params = replace(
            params, structured=structured_outputs, keep_special_ids=parser_config.keep_special_ids
        )
        generation = HttpGeneration(
            *(server, request, [prompt.token_ids], params, asked.cache),
            streams=asked.stream,
            beams=None if asked.prewarm else asked.beams,
            outlives_client=asked.background,
        )
        read_parts = partial(
            PromptParts.of,
            asked.tools.functions,
            prompt.rendered.messages,
            asked.template.chat_template_kwargs,
        )
        parts = await in_thread_if(is_long_text(prompt.text), read_parts)
        previous = None
        if asked.compare_with is not None:
            previous = server.prompt_records.find(asked.cache.namespace, asked.compare_with)
        return cls(
            *(server, prompt, params, parser_config, generation, parts, previous),
            request_id=request_id_of(request),
            streams=asked.stream,
            prewarms=asked.prewarm,
        )

    async def answers(self) -> list[tuple[ParsedAnswer, Completion]]:
        """Wait until all samples have ended. Returns the parsed answer and the completion of
        each."""
        with self.generation as generation:
            (group,) = await generation.groups()
            self._completions = dict(enumerate(group))
            self._remember()
            if self.prewarms:
                empty = OutputParser(self.parser_config).parse_all("")
                return [(empty, _without_sample(completion)) for completion in group]
            parsed_answers = [
                (OutputParser(self.parser_config).parse_all(completion.text), completion)
                for completion in group
            ]
            for parsed, completion in parsed_answers:
                await self.prompt.note_answer(self.server, parsed, completion)
        return parsed_answers

    async def deltas(self) -> AsyncIterator[list[tuple[int, Delta, Chunk]]]:
        """Batches of (sample index, parsed delta, chunk). A chunk with a `completion` is the last
        one of its sample."""
        parsers = [OutputParser(self.parser_config) for _ in range(self.params.n)]
        async for batch in self.generation.chunks():
            deltas = []
            for index, chunk in batch:
                if chunk.completion is not None:
                    self._completions[index] = chunk.completion
                    self._remember()
                if self.prewarms:
                    if chunk.completion is not None:
                        done = _without_sample(chunk.completion)
                        deltas.append((index, Delta(), Chunk(chunk.request_id, "", [], done)))
                    continue
                delta = parsers[index].feed(chunk.text)
                if chunk.completion is not None:
                    delta += parsers[index].finish()
                    answer = parsers[index].answer()
                    await self.prompt.note_answer(self.server, answer, chunk.completion)
                deltas.append((index, delta, chunk))
            yield deltas

    def text_logprobs(self) -> TextLogprobs | None:
        """A new collector of the log-probabilities of the answer's text; None if they were not
        requested."""
        if self.params.logprobs is None:
            return None
        return TextLogprobs(
            tokenizer_of(self.server.runtime),
            self.prompt.token_ids,
            self.params,
            self.parser_config,
            self.server.token_texts,
        )

    def diagnosis(self) -> TurnDiagnosis | None:
        """The comparison with the earlier prompt; None if that prompt is unknown. Until the turn
        has ended, tokens that both prompts have in common count as cached."""
        if self._previous is None:
            return None
        return TurnDiagnosis.of(
            self._completions.get(0),
            self.prompt.token_ids,
            self._parts,
            self._previous,
            partial(tokenizer_of(self.server.runtime).decode, keep_special=True),
        )

    def _remember(self) -> None:
        """Record the prompt once all samples have ended, so that later ones can be compared with
        it."""
        count = self.params.n - self.generation.num_missing
        if len(self._completions) == count:
            completions = [self._completions[index] for index in range(count)]
            self.server.prompt_records.put(
                self._request_id, self.prompt.namespace, self._parts, completions
            )


def _without_sample(completion: Completion) -> Completion:
    """The completion of a prewarmed prompt, without the token that had to be sampled."""
    return replace(
        completion,
        text="",
        token_ids=[],
        finish_reason="stop",
        stop_reason=None,
        usage=completion.usage.with_answer(0),
        logprobs=None if completion.logprobs is None else [],
        top_logprobs=None if completion.top_logprobs is None else [],
    )


def finish_reason(completion: Completion, *, calls: bool) -> str:
    """OpenAI's finish reason. `calls`: the answer contains tool calls, so that it is "tool_calls"
    instead of "stop"."""
    return (
        "tool_calls" if calls and completion.finish_reason == "stop" else completion.finish_reason
    )
