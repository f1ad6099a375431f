"""The prompt of a chat: rendered, tokenised, and what is remembered of its answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from radixserve.arrays import IntArray
from radixserve.errors import InvalidRequest
from radixserve.output import Completion
from radixserve.server.conversations import RenderedChat
from radixserve.server.errors import invalid
from radixserve.server.messages import Message, answer_key, call_message
from radixserve.server.output_parser import ParsedAnswer
from radixserve.server.prompts import in_thread_if, is_much_text
from radixserve.server.rendering import Rendered, render, tokenizer_of
from radixserve.server.schema import TemplateFields
from radixserve.server.state import Server
from radixserve.server.tools import Tools

_LONGEST_CUT = 64  # tokens
_CONTEXT = 5  # prompt tokens decoded along, so that a first word keeps its leading space


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The token ids of a conversation up to where the assistant is to speak."""

    namespace: str
    rendered: Rendered
    token_ids: IntArray
    is_whole: bool  # not truncated

    @property
    def text(self) -> str:
        return self.rendered.text

    async def note_answer(self, server: Server, answer: ParsedAnswer, one: Completion) -> None:
        """Remember the conversation with this answer, for its next turn."""
        if not self.is_whole or not server.config.max_conversations or not one.text:
            return
        if answer.content == one.text:
            said, text = _answer_of(server, self.token_ids, one)
            found = RenderedChat(self.text + text, self._with(said), one.text)
        else:
            known = await in_thread_if(
                is_much_text(self.text), lambda: self._of_parts(server, answer, one)
            )
            if known is None:
                return
            found = known
        server.conversations.note(self.namespace, found)

    def _of_parts(
        self, server: Server, answer: ParsedAnswer, one: Completion
    ) -> RenderedChat | None:
        """An answer that comes back in parts, which the template renders in its own way: with other
        white space in the JSON, say. The generated ids stand for the text that it makes of them.

        None where it leaves out a part, and where the client does not get all of the answer.
        """
        options = self.rendered.options
        cut = isinstance(one.stop_reason, str) or not answer.is_whole
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
            text = tokenizer.render_chat([*self.rendered.messages, message, *results], **options)
        except InvalidRequest:  # a template that takes one call only, say
            return None
        if not text.startswith(self.text):
            return None
        ends = (tokenizer.decode([end], keep_special=True) for end in server.runtime.model.eos_ids)
        places = [at for end in ends if (at := text.find(end, len(self.text))) >= 0]
        rendered = text[len(self.text) : min(places, default=0)]
        parts = [answer.content, answer.reasoning, *(name for name, _ in calls)]
        if any(part is not None and part.strip() not in rendered for part in parts):
            return None
        said = _without_end(server, list(one.token_ids), one)
        key = answer_key(answer.content or "", calls)
        return RenderedChat(self.text + rendered, self._with(said), key)

    def _with(self, said: Sequence[int]) -> IntArray:
        return np.concatenate([self.token_ids, np.asarray(said, np.int32)])


async def read_chat(
    server: Server,
    body: TemplateFields,
    messages: object,
    namespace: str,
    *,
    tools: Tools | None = None,
    keep_last: int | None = None,
) -> ChatPrompt:
    """`tools`: by default those of the body. `keep_last`: so many of the last tokens. Raises
    ApiError."""
    keeps = server.config.keep_billing_header
    given = Tools.read(body.tools, None, None) if tools is None else tools

    def read() -> Rendered:
        return render(server.runtime, messages, body, given, keep_billing_header=keeps)

    rendered = await in_thread_if(is_much_text(str(messages)), read)
    server.num_billing_headers += rendered.num_headers
    text = rendered.text
    known = server.conversations.find(namespace, text, rendered.answers)
    server.counters.conversation_hits += known is not None
    rest = text if known is None else text[len(known.text) :]

    def encode() -> IntArray:
        try:
            ids = np.asarray(tokenizer_of(server.runtime).encode_more(rest), np.int64)
            if known is not None:
                ids = np.concatenate([known.token_ids, ids])
            return server.runtime.tokenize(ids, keep_last=keep_last)
        except InvalidRequest as error:
            raise invalid(error, param="messages") from None

    ids = await in_thread_if(is_much_text(rest), encode)
    return ChatPrompt(namespace, rendered, ids, is_whole=keep_last is None)


def _answer_of(server: Server, prompt: IntArray, one: Completion) -> tuple[list[int], str]:
    """The most tokens of an answer whose text is part of it, and that text: all of them but an end
    token, fewer where a stop string has cut the text; none where that cut more than `_LONGEST_CUT`.
    """
    decode, context = tokenizer_of(server.runtime).decode, prompt[-_CONTEXT:].tolist()
    start = len(decode(context))
    ids = list(one.token_ids)
    for _ in range(min(len(ids), _LONGEST_CUT)):
        text = decode([*context, *ids])[start:]
        if one.text.startswith(text):
            return _without_end(server, ids, one), text
        ids.pop()
    return [], ""


def _without_end(server: Server, ids: list[int], one: Completion) -> list[int]:
    is_end = one.finish_reason == "stop" and ids[-1] in server.runtime.model.eos_ids
    return ids[:-1] if is_end or ids[-1] == one.stop_reason else ids
