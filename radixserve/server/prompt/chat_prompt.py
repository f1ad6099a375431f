"""`read_chat`: renders and tokenises a chat.

`ChatPrompt` also remembers the token ids of its answer, so that the next turn begins with exactly
the ids that are cached.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any

import numpy as np

from radixserve.arrays import IntArray
from radixserve.cache.namespace import as_namespace
from radixserve.completion import Completion
from radixserve.errors import InvalidRequest, PromptTooLong
from radixserve.images.sources import is_fetched
from radixserve.request import TruncationSide
from radixserve.server.answer.output_parser import ParsedAnswer
from radixserve.server.answer.tool_choice import ChatTools, functions_of
from radixserve.server.gate.state import AppState
from radixserve.server.gate.tenant_threads import TenantThreads
from radixserve.server.prompt.chat_messages import answer_key, call_message
from radixserve.server.prompt.prompt_input import (
    in_thread_if,
    is_large,
    is_long_text,
    num_characters,
)
from radixserve.server.prompt.rendering import RenderedPrompt, render, tokenizer_of
from radixserve.server.wire.errors import invalid
from radixserve.server.wire.schema import ChatMessage, ImagePart, TemplateFields
from radixserve.text.chat_clocks import clock_span
from radixserve.text.content_marks import unmarked
from radixserve.text.conversations import Answer, AnsweredChat
from radixserve.text.picture_parts import is_picture_part, without_pictures
from radixserve.text.template_traits import Message

_SHORT_CHAT = 1_000_000  # characters; a shorter chat is always rendered
# A chat with more characters for each token of the context is refused before it is rendered. That
# is many times what fits, since templates may leave out reasoning.
_MAX_CHARACTERS_PER_TOKEN = 64
_MEAN_CHARACTERS_PER_TOKEN = 4  # for the estimate in the error
# Chats with pictures wait for decoders, and some for hosts: in threads of their own, so that they
# hold up no other prompt.
_DECODING, _FETCHING = TenantThreads(), TenantThreads()
_MAX_CONTEXTS = 4  # of pictures that are counted only, or cut
_CONTEXT = 5  # prompt tokens that are decoded with an answer, for its first word's leading space


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The token ids of a conversation up to the assistant's next answer."""

    namespace: str
    rendered: RenderedPrompt
    token_ids: IntArray
    is_whole: bool  # not truncated, and nothing before it

    @property
    def text(self) -> str:
        return self.rendered.text

    def is_in_date(self, server: AppState, position: int) -> bool:
        """Whether the prompt has the date or time there, as its template prints it. O(tokens)."""
        start, tokenizer = self.rendered.start, tokenizer_of(server.runtime)
        if start is None or not self.is_whole:
            return False

        def encode(now: datetime) -> list[int]:
            at = replace(self.rendered, options={**self.rendered.options, "now": now})
            return tokenizer.encode_rendered(at.with_answer(tokenizer, []))

        first, end = clock_span(self.token_ids, start.began, encode)
        return first <= position < end

    async def note_answer(
        self, server: AppState, answer: ParsedAnswer, completion: Completion
    ) -> None:
        """Remember the token ids of the conversation up to this answer, for its next turn, and when
        it began."""
        if self.rendered.start is not None and answer.is_whole:
            calls = [(call.name, call.arguments) for call in answer.tool_calls]
            with contextlib.suppress(ValueError):  # arguments that were cut
                key = answer_key(answer.content or "", calls)
                server.chat_clocks.note_answer(self.rendered.start, key)
        if not self.is_whole or not server.config.max_conversations or not completion.text:
            return
        if answer.content == completion.text:
            tokenizer, context = tokenizer_of(server.runtime), self.token_ids[-_CONTEXT:].tolist()
            answer_ids, text = _answer_of(server, completion).exact_ids(tokenizer, context)
            marked = self.text + tokenizer.mark_answer(text)
            rendered = AnsweredChat(marked, self._with(answer_ids), completion.text)
        else:
            known = await in_thread_if(
                is_long_text(self.text), lambda: self._of_parts(server, answer, completion)
            )
            if known is None:
                return
            rendered = known
        server.conversations.note(self.namespace, rendered)

    def _of_parts(
        self, server: AppState, answer: ParsedAnswer, completion: Completion
    ) -> AnsweredChat | None:
        """The conversation with an answer that has several parts, such as reasoning and calls.

        The template may render the parts differently from what was generated, for example with
        other white space in the JSON. The result has the template's text and the generated ids.
        None if the template leaves out a part, or the client does not get the whole answer.
        """
        options = self.rendered.options
        cut = isinstance(completion.stop_reason, str) or not answer.is_whole
        if cut or options["continue_final_message"]:
            return None
        calls = [(call.name, call.arguments) for call in answer.tool_calls]
        message: Message = {"role": "assistant", "content": answer.content or ""}
        if answer.reasoning is not None:
            message["reasoning_content"] = answer.reasoning
        results: list[Message] = [{"role": "user", "content": "."}]
        if calls:
            message["tool_calls"] = [
                call_message(call.id, call.name, json.loads(call.arguments))
                for call in answer.tool_calls
            ]
            results = [
                {"role": "tool", "content": ".", "name": call.name, "tool_call_id": call.id}
                for call in answer.tool_calls
            ]
        tokenizer = tokenizer_of(server.runtime)
        try:
            text = self.rendered.with_answer(tokenizer, [message, *results])
        except InvalidRequest:  # for example from a template that renders a single call only
            return None
        if not text.startswith(self.text):
            return None
        ends = (tokenizer.decode([end], keep_special=True) for end in server.runtime.model.eos_ids)
        places = [position for end in ends if (position := text.find(end, len(self.text))) >= 0]
        rendered = text[len(self.text) : min(places, default=0)]
        parts = [answer.content, answer.reasoning, *(name for name, _ in calls)]
        readable = unmarked(rendered)
        if any(part is not None and part.strip() not in readable for part in parts):
            return None
        key = answer_key(answer.content or "", calls)
        answer_ids = _answer_of(server, completion).said_ids
        return AnsweredChat(self.text + rendered, self._with(answer_ids), key)

    def _with(self, answer_ids: Sequence[int]) -> IntArray:
        """The token ids of the prompt and of an answer."""
        return np.concatenate([self.token_ids, np.asarray(answer_ids, np.int32)])


async def read_chat(
    server: AppState,
    body: TemplateFields,
    messages: Sequence[ChatMessage | Message],
    namespace: str,
    *,
    tools: ChatTools | None = None,
    add_special_tokens: bool = False,
    keep_last: int | None = None,
    truncation_side: TruncationSide | None = None,
    is_prompt: bool = True,
) -> ChatPrompt:
    """Render and tokenise the messages of a chat. The beginning that an earlier answer of the
    namespace has in common with them keeps the ids of that answer. Raises ApiError.

    body             the options and variables of the template
    tools            None: those of the body
    add_special_tokens  begin with the tokenizer's own special tokens, besides the template's
    keep_last        keep this many of the last tokens; None: all
    truncation_side  "right": keep the first tokens instead
    is_prompt        False: the tokens are only counted, and may be more than the context has
    """
    keeps = server.config.keep_billing_header
    limits = is_prompt and keep_last is None

    def read() -> RenderedPrompt:
        pictures, tenant = server.pictures, as_namespace(namespace).tenant
        most = server.runtime.max_seq_len * (1 if limits else _MAX_CONTEXTS)
        given = [
            message.as_message() if isinstance(message, ChatMessage) else message
            for message in messages
        ]
        check_size(server, without_pictures(given))
        return render(
            server.runtime,
            given,
            body,
            ChatTools.read(functions_of(body.tools)) if tools is None else tools,
            has_generic_tools=server.parser_configs.tool_parser == "generic",
            keep_billing_header=keeps,
            start_of=partial(server.chat_clocks.start_of, namespace),
            pictures=None if pictures is None else pictures.of_prompt(most, tenant),
        )

    functions = [] if tools is None else tools.functions
    parts = [*messages, body.tools, body.chat_template_kwargs, functions]
    if pictures := _picture_parts(messages):
        threads = _FETCHING if any(map(is_fetched, pictures)) else _DECODING
        rendered = await asyncio.get_running_loop().run_in_executor(threads, read)
    else:
        rendered = await in_thread_if(is_large(parts), read)
    server.num_billing_headers += rendered.num_headers
    text = rendered.text
    known = server.conversations.find(namespace, text, rendered.answers)
    server.counters.conversation_hits += known is not None
    rest = text if known is None else text[len(known.text) :]

    def encode() -> IntArray:
        num_before = 0 if known is None else len(known.token_ids)
        try:
            server.runtime.check_length(rest, num_before=num_before, is_prompt=limits)
            ids = np.asarray(tokenizer_of(server.runtime).encode_rendered(rest), np.int64)
            if known is not None:
                ids = np.concatenate([known.token_ids, ids])
            if add_special_tokens:
                special = np.asarray(tokenizer_of(server.runtime).encode(""), np.int64)
                ids = np.concatenate([special, ids])
            if not is_prompt:
                return ids.astype(np.int32)
            return server.runtime.tokenize(
                ids, keep_last=keep_last, truncation_side=truncation_side or "left"
            )
        except InvalidRequest as error:
            raise invalid(error, param="messages") from None

    ids = await in_thread_if(is_long_text(rest), encode)
    is_whole = keep_last is None and not add_special_tokens
    return ChatPrompt(namespace, rendered, ids, is_whole=is_whole)


def _picture_parts(messages: Sequence[ChatMessage | Message]) -> list[Mapping[str, Any]]:
    """Returns the parts of messages that are pictures."""
    contents = (
        message.content if isinstance(message, ChatMessage) else message.get("content")
        for message in messages
    )
    parts = (part for content in contents if isinstance(content, list) for part in content)
    pictures: list[Mapping[str, Any]] = []
    for part in parts:
        if isinstance(part, ImagePart):
            pictures.append({"image_url": part.image_url})
        elif isinstance(part, Mapping) and is_picture_part(part):
            pictures.append(part)
    return pictures


def check_size(server: AppState, messages: Sequence[Message]) -> None:
    """Raise ApiError if the texts of a chat are too long for any template to make a prompt of them.
    To be called before rendering, which copies the texts several times."""
    size = num_characters(messages)
    limit = server.runtime.max_seq_len
    if size > max(_SHORT_CHAT, limit * _MAX_CHARACTERS_PER_TOKEN):
        about = size // _MEAN_CHARACTERS_PER_TOKEN
        error = PromptTooLong(
            f"the messages have {size} characters, about {about} tokens; at most {limit - 1} are "
            "allowed",
            num_tokens=about,
            max_tokens=limit - 1,
        )
        raise invalid(error, param="messages")


def _answer_of(server: AppState, completion: Completion) -> Answer:
    """The answer of a completion. Whether its last token ended it (end-of-text or a stop token) is
    noted, since that token is not part of its text."""
    ids = tuple(completion.token_ids)
    is_end = completion.finish_reason == "stop" and ids[-1] in server.runtime.model.eos_ids
    return Answer(completion.text, ids, is_end or ids[-1] == completion.stop_reason)
