"""`AnswerBuilder`: the answer to one HTTP request, whole or as server-sent events.

All protocols wait for an answer, split it into events and end it in the same way. Each has a
subclass beside its routes, which formats the parts:

    ChoicesBuilder  completions and chat completions: a list of choices
    BlocksBuilder   Anthropic's messages and OpenAI's responses: content blocks of one answer
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, ClassVar

from starlette.responses import Response

from radixserve.completion import Chunk, Completion
from radixserve.server.answer.content_blocks import (
    ContentBlock,
    ContentBlockEvent,
    ContentBlocks,
    content_blocks_of,
    reasoning_of,
)
from radixserve.server.answer.output_parser import Delta
from radixserve.server.answer.reasoning import count_reasoning
from radixserve.server.prompt.rendering import tokenizer_of
from radixserve.server.turn.chat_turn import ChatTurn
from radixserve.server.turn.event_stream import EventStream
from radixserve.server.turn.http_generation import HttpGeneration
from radixserve.server.wire.errors import ApiError
from radixserve.server.wire.json_response import (
    DONE,
    PING,
    answer_of,
    dump,
    event,
    quote,
)
from radixserve.server.wire.schema import GenerationFields
from radixserve.server.wire.usage import (
    Group,
    StreamUsage,
    completion_usage,
    epochs_body,
    request_metrics,
)


class AnswerBuilder(ABC):
    """Formats the answer to one HTTP request."""

    done: ClassVar[str] = DONE  # the text that ends a stream

    def __init__(self, generation: HttpGeneration, *, streams: bool) -> None:
        self.generation = generation
        self.server = generation.server
        self._streams = streams

    async def respond(self) -> Response:
        """Wait for the whole answer, or return a stream that is generated while it is sent."""
        if self._streams:
            return EventStream(
                self.generation,
                self.events(),
                opening=self.opening(),
                ping=self.ping,
                failed=self.failed,
                done=self.done,
            )
        body = await self.full_body()
        return await answer_of(body, self.generation.num_logprobs)

    @abstractmethod
    async def full_body(self) -> Callable[[], Any]:
        """Wait for the whole answer. Enters the generation and leaves it. Returns a function that
        formats the answer as JSON values; a large one in another thread."""

    @abstractmethod
    def events(self) -> AsyncIterator[str]:
        """Each item is the text of all events for one batch of new chunks; it may be empty."""

    def opening(self) -> str:
        """The events that a stream begins with, before anything is computed."""
        return ""

    def ping(self) -> str:
        """The text that a stream sends after a silence: by default an SSE comment, which clients
        skip."""
        return PING

    def failed(self, error: ApiError) -> str:
        """The last events of a stream that fails after its head was sent."""
        return event(error.body()) + DONE


class ChoicesBuilder(AnswerBuilder):
    """Builds OpenAI's completions and chat completions."""

    chunk_object: ClassVar[str]  # `object` of a stream's events

    def __init__(
        self,
        generation: HttpGeneration,
        body: GenerationFields,
        num_samples: int,
        *,
        answer_id: str,
        object_name: str,
        streams: bool,
    ) -> None:
        """num_samples: choices of a prompt. object_name: `object` of a whole answer."""
        super().__init__(generation, streams=streams)
        self._num_samples = num_samples
        self._returns_ids = bool(body.return_token_ids)
        self._are_named = bool(body.logprob_token_ids)  # the tokens of top_logprobs
        config = self.server.config
        by_id = body.return_tokens_as_token_ids
        self._by_id = config.return_tokens_as_token_ids if by_id is None else by_id
        self._usage = StreamUsage(
            body.stream_options,
            generation.prompts,
            num_samples,
            self.usage,
            is_forced=config.enable_force_include_usage,
        )
        self._head: dict[str, Any] = {
            "id": answer_id,
            "object": object_name,
            "created": int(time.time()),
            "model": generation.model,
        }
        self._chunk_head = {**self._head, "object": self.chunk_object}
        self._opening = "data: " + dump(self._chunk_head)[:-1] + ',"choices":[{"index":'

    def _body(self, choices: list[dict[str, Any]], groups: Sequence[Group]) -> dict[str, Any]:
        """A whole answer, from its choices and the completions of each prompt."""
        head = {**self._head, "choices": choices, "usage": self.usage(groups)}
        return {**head, **self._metrics(groups), **self.final_members()}

    def usage(self, groups: Sequence[Group]) -> dict[str, Any]:
        """The usage of the completions of each prompt."""
        return completion_usage(groups)

    def _metrics(self, groups: Sequence[Group]) -> dict[str, Any]:
        """The member `metrics`, if the server returns the times of requests: of a single answer."""
        if not self.server.config.enable_per_request_metrics:
            return {}
        completions = [completion for group in groups for completion in group]
        if len(completions) != 1:
            return {"metrics": None}
        stats = self.server.runtime.status().stats
        token_s = stats.get("prefill_s", 0.0) / max(1, stats.get("prefilled_tokens", 0))
        return {"metrics": request_metrics(completions[0], token_s)}

    def final_members(self) -> dict[str, Any]:
        """Members of an answer that are known only after its end: the answers to hints."""
        return self.generation.with_hints({})

    @abstractmethod
    def _batches(self) -> AsyncIterator[list[tuple[int, Chunk, Delta | None]]]:
        """Batches of new chunks: the index of a choice, its chunk, and, for a chat, the parsed
        delta."""

    @abstractmethod
    def _frames(self, index: int, chunk: Chunk, delta: Delta | None) -> Iterator[str]:
        """The events of a chunk, made by `_frame`."""

    async def events(self) -> AsyncIterator[str]:
        usage = self._usage
        async for batch in self._batches():
            usage.num_missing = self.generation.num_missing
            usage.add([(index, chunk) for index, chunk, _ in batch])
            frames = [frame for item in batch for frame in self._frames(*item)]
            if frames:
                yield "".join(frames)
        last = usage.last_event()
        if last is not None:
            times = self._metrics(self.generation.streamed_groups())
            yield event({**self._chunk_head, "choices": [], "usage": last, **times})
        more = self.final_members()
        if more:
            yield event({**self._chunk_head, "choices": [], **more})

    def _prompt_ids(self, index: int) -> str:
        """The prompt's token ids as a member of a choice's first event, if requested."""
        if not self._returns_ids:
            return ""
        ids = self.generation.prompts[index // self._num_samples].tolist()
        return f',"prompt_token_ids":{dump(ids)}'

    def _frame(self, index: int, member: str, logprobs: str, chunk: Chunk, reason: str) -> str:
        """The server-sent event for one chunk of a choice.

        member    the member with the new text, such as `"delta":{...}`, as JSON
        logprobs  as JSON
        reason    the finish reason, if the choice has ended
        """
        ids = f',"token_ids":{dump(chunk.token_ids)}' if self._returns_ids else ""
        done = chunk.completion
        if done is not None and self._returns_ids:
            ids += f',"weight_epochs":{dump(epochs_body(done))}'
        end = "null" if done is None else f'{quote(reason)},"stop_reason":{dump(done.stop_reason)}'
        return (
            f'{self._opening}{index},{member},"logprobs":{logprobs}{ids},'
            f'"finish_reason":{end}}}]{self._usage.field(index, chunk)}}}\n\n'
        )


class BlocksBuilder(AnswerBuilder):
    """Builds answers of content blocks, from a turn with a single sample."""

    done = ""

    def __init__(self, turn: ChatTurn) -> None:
        super().__init__(turn.generation, streams=turn.streams)
        self._turn = turn
        self._blocks = ContentBlocks()  # of a stream
        self._logprobs = turn.text_logprobs()

    @abstractmethod
    def message(
        self, blocks: Sequence[ContentBlock], completion: Completion, num_reasoning: int
    ) -> dict[str, Any]:
        """The whole answer. `num_reasoning`: the number of reasoning tokens."""

    @abstractmethod
    def block_event(self, block_event: ContentBlockEvent, completion: Completion | None) -> str:
        """The text of the events for a block event. `completion`: the answer's, at the end of its
        last block."""

    @abstractmethod
    def closing(
        self, blocks: Sequence[ContentBlock], completion: Completion, num_reasoning: int
    ) -> str:
        """The events after the last block."""

    async def full_body(self) -> Callable[[], dict[str, Any]]:
        ((parsed, completion),) = await self._turn.answers()
        blocks = content_blocks_of(parsed)
        self._note_logprobs(completion, completion)
        message = self.message(blocks, completion, self._count_reasoning(blocks, completion))
        return lambda: message

    async def events(self) -> AsyncIterator[str]:
        async for batch in self._turn.deltas():
            text = ""
            for _, delta, chunk in batch:
                self._note_logprobs(chunk, chunk.completion)
                for block_event in self._blocks.push(delta):
                    text += self.block_event(block_event, None)
                if chunk.completion is not None:
                    text += self._end(chunk.completion)
            yield text

    def _end(self, completion: Completion) -> str:
        text = "".join(self.block_event(last, completion) for last in self._blocks.finish())
        blocks = self._blocks.blocks
        num_reasoning = self._count_reasoning(blocks, completion)
        return text + self.closing(blocks, completion, num_reasoning)

    def _note_logprobs(self, new: Chunk | Completion, completion: Completion | None) -> None:
        """Collect the log-probabilities of a chunk or of a whole answer. `completion`: set at the
        answer's end."""
        if self._logprobs is None:
            return
        if new.logprobs is not None:
            self._logprobs.add(new.token_ids, new.logprobs, new.top_logprobs)
        if completion is not None:
            self._logprobs.finish()

    def _count_reasoning(self, blocks: Sequence[ContentBlock], completion: Completion) -> int:
        tokenizer = tokenizer_of(self.server.runtime)
        return count_reasoning(tokenizer, reasoning_of(blocks), completion)
