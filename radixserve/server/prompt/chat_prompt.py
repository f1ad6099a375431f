"""The prompt of a chat: rendered and tokenised; its answer's ids are kept for the next turn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from radixserve.arrays import IntArray
from radixserve.errors import InvalidRequest, PromptTooLong
from radixserve.output import Completion
from radixserve.request import TruncationSide
from radixserve.server.answer.output_parser import ParsedAnswer
from radixserve.server.answer.tool_choice import ChatTools, functions_of
from radixserve.server.gate.state import AppState
from radixserve.server.prompt.chat_messages import answer_key, call_message
from radixserve.server.prompt.prompt_input import (
    in_thread_if,
    is_large,
    is_long_text,
    num_characters,
)
from radixserve.server.prompt.rendering import RenderedPrompt, render, tokenizer_of
from radixserve.server.wire.errors import invalid
from radixserve.server.wire.schema import ChatMessage, TemplateFields
from radixserve.text.content_marks import unmarked
from radixserve.text.conversations import Answer, AnsweredChat
from radixserve.text.template_traits import Message

_SHORT_CHAT = 1_000_000  # characters; a chat of fewer is always rendered
_CHARACTERS_A_TOKEN = 64  # of the context: many times as many as fit, templates leave thoughts out
_CHARACTERS_OF_TEXT = 4  # that a token has, about
_CONTEXT = 5  # prompt tokens decoded along, so that a first word keeps its leading space


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The token ids of a conversation up to the assistant's next answer."""

    namespace: str
    rendered: RenderedPrompt
    token_ids: IntArray
    is_whole: bool  # not truncated

    @property
    def text(self) -> str:
        return self.rendered.text

    async def note_answer(
        self, server: AppState, answer: ParsedAnswer, completion: Completion
    ) -> None:
        """Remember the conversation with this answer, for its next turn."""
        if not self.is_whole or not server.config.max_conversations or not completion.text:
            return
        if answer.content == completion.text:
            tokenizer, context = tokenizer_of(server.runtime), self.token_ids[-_CONTEXT:].tolist()
            said, text = _answer_of(server, completion).exact_ids(tokenizer, context)
            marked = self.text + tokenizer.mark_answer(text)
            rendered = AnsweredChat(marked, self._with(said), completion.text)
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
        """The conversation with an answer of several parts. The template renders these in its own
        way, for instance with other white space in the JSON: the text is the template's, the ids
        are the generated ones.

        None if the template leaves out a part, or the client does not get all of the answer.
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
        except InvalidRequest:  # a template that takes one call only, say
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
        said = _answer_of(server, completion).said_ids
        return AnsweredChat(self.text + rendered, self._with(said), key)

    def _with(self, said: Sequence[int]) -> IntArray:
        return np.concatenate([self.token_ids, np.asarray(said, np.int32)])


async def read_chat(
    server: AppState,
    body: TemplateFields,
    messages: Sequence[ChatMessage | Message],
    namespace: str,
    *,
    tools: ChatTools | None = None,
    keep_last: int | None = None,
    truncation_side: TruncationSide | None = None,
) -> ChatPrompt:
    """`tools`: by default those of the body. `keep_last`: so many of the last tokens, or
    of the first with a `truncation_side` of "right". Raises
    ApiError."""
    keeps = server.config.keep_billing_header

    def read() -> RenderedPrompt:
        given = [
            message.as_message() if isinstance(message, ChatMessage) else message
            for message in messages
        ]
        check_size(server, given)
        return render(
            server.runtime,
            given,
            body,
            ChatTools.read(functions_of(body.tools)) if tools is None else tools,
            has_generic_tools=server.parser_configs.tool_parser == "generic",
            keep_billing_header=keeps,
        )

    functions = [] if tools is None else tools.functions
    parts = [*messages, body.tools, body.chat_template_kwargs, functions]
    rendered = await in_thread_if(is_large(parts), read)
    server.num_billing_headers += rendered.num_headers
    text = rendered.text
    known = server.conversations.find(namespace, text, rendered.answers)
    server.counters.conversation_hits += known is not None
    rest = text if known is None else text[len(known.text) :]

    def encode() -> IntArray:
        num_before = 0 if known is None else len(known.token_ids)
        try:
            server.runtime.check_length(rest, num_before=num_before, is_prompt=keep_last is None)
            ids = np.asarray(tokenizer_of(server.runtime).encode_rendered(rest), np.int64)
            if known is not None:
                ids = np.concatenate([known.token_ids, ids])
            return server.runtime.tokenize(
                ids, keep_last=keep_last, truncation_side=truncation_side or "left"
            )
        except InvalidRequest as error:
            raise invalid(error, param="messages") from None

    ids = await in_thread_if(is_long_text(rest), encode)
    return ChatPrompt(namespace, rendered, ids, is_whole=keep_last is None)


def check_size(server: AppState, messages: Sequence[Message]) -> None:
    """Raise ApiError where the texts of a chat are so long that no template makes a prompt of them:
    before a template is given them, which copies them several times."""
    size = num_characters(messages)
    limit = server.runtime.max_seq_len
    if size > max(_SHORT_CHAT, limit * _CHARACTERS_A_TOKEN):
        about = size // _CHARACTERS_OF_TEXT
        error = PromptTooLong(
            f"the messages have {size} characters, about {about} tokens; at most {limit - 1} are "
            "allowed",
            num_tokens=about,
            max_tokens=limit - 1,
        )
        raise invalid(error, param="messages")


def _answer_of(server: AppState, completion: Completion) -> Answer:
    """With the token that ended it marked as such."""
    ids = tuple(completion.token_ids)
    is_end = completion.finish_reason == "stop" and ids[-1] in server.runtime.model.eos_ids
    return Answer(completion.text, ids, is_end or ids[-1] == completion.stop_reason)
