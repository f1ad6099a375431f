"""`ChatSession`: a conversation that keeps the exact ids of everything said and generated."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import warnings
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from radixserve.api.branch import Branch
from radixserve.api.chat_file import ChatRecord, Turn, read_chat, write_chat
from radixserve.api.client import EngineClient
from radixserve.api.request_builder import check_params
from radixserve.arrays import IntArray
from radixserve.checks import check_int, check_str, shown
from radixserve.errors import EngineDead, InvalidRequest
from radixserve.output import Chunk, Completion
from radixserve.request import SamplingParams
from radixserve.text.chat_format import Answer, ChatFormat, Message
from radixserve.text.chat_options import ChatOptions, begun_answer
from radixserve.text.prompts import check_messages

Said = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]
_NO_TOKENS: IntArray = np.empty(0, np.int32)
_NEXT: Message = {"role": "user", "content": "?"}  # stands for any next message


class HistoryRewritten(UserWarning):
    """A chat template changes earlier turns when new ones come: they are computed again."""


class ChatSession:
    """Made by `Runtime.chat`; ends with `close`, or with the last reference to it.

        with rt.chat(system="Be brief.") as chat:
            print(chat.send("What is a heap?").text)
            print(chat.send("And a treap?").usage)     # cached: the whole history

    A turn computes only what is new: the ids of the message and of the template around it, and the
    last token of the answer before. What was generated is never tokenised again. Where the chat
    template changes earlier turns (drops their thinking, moves the system prompt), the chat warns
    once with HistoryRewritten and goes on from the last token that stays; the K/V of the dropped
    tokens is given up as soon as the answer is there.

    One turn at a time: another one meanwhile raises InvalidRequest. Every act raises InvalidRequest
    after `close`, EngineDead after the Runtime was closed; the history can be read for ever.
    """

    def __init__(
        self,
        client: EngineClient,
        record: ChatRecord,
        params: SamplingParams | None,
        branch: Branch | None = None,
    ) -> None:
        """`branch`: stands where the record's turns end; None: a new one."""
        self._client = client
        self._record = record
        self._format = ChatFormat(client.tokenizer, record.options)
        self._params = check_params(params)
        self._turns = list(record.turns)
        self._added = list(record.added)  # messages since the last answer
        self._branch = branch or Branch(client, self.tokens.copy(), self._params.namespace)
        self._has_warned = False
        self._turn_lock = threading.Lock()

    @classmethod
    def start(
        cls,
        client: EngineClient,
        model: Mapping[str, Any],
        system: str | None,
        options: ChatOptions,
        params: SamplingParams | None,
    ) -> Self:
        """A chat without turns; `Runtime.chat` calls it. Raises InvalidRequest."""
        if system is not None:
            check_str("system", system)
        client.tokenizer.warn_of_ignored_tools(options)
        chat = cls(client, ChatRecord(model, system, options), params)
        chat._tokenise([_NEXT])  # refuses a template that cannot be used
        return chat

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ChatSession(turns={len(self._turns)}, tokens={len(self.tokens)})"

    # -- reading ------------------------------------------------------------------------------

    @property
    def history(self) -> list[Message]:
        """The messages so far, as copies: {"role", "content"}."""
        return copy.deepcopy([*self._messages(), *self._added])

    @property
    def tokens(self) -> IntArray:
        """[n] int32: all that the model has read and said, exactly; not to be written."""
        return self._turns[-1].tokens if self._turns else _NO_TOKENS

    # -- turns --------------------------------------------------------------------------------

    def send(self, message: Said, params: SamplingParams | None = None) -> Completion:
        """Say something, get the answer. An error leaves the chat as it was.

        A message is the user's text, or {"role", "content"} for another role, such as "tool"; or a
        list of them: the results of several tool calls. Where the last one is of the "assistant",
        the answer goes on from its text.
        """
        with self._answering(_as_messages(message), self._params_of(params)) as answer:
            return answer.add(self._branch.generate(answer.params))

    async def asend(self, message: Said, params: SamplingParams | None = None) -> Completion:
        """`send` for asyncio. Cancelling the task leaves the chat as it was."""
        with self._answering(_as_messages(message), self._params_of(params)) as answer:
            return answer.add(await self._branch.agenerate(answer.params))

    def add(self, message: Said) -> None:
        """Say something without an answer: it is read together with what is sent next.

        Nothing is computed, and whether the template takes it is seen then.
        """
        messages = _as_messages(message)
        with self._turn():
            self._added += messages

    def stream(
        self, message: Said, params: SamplingParams | None = None
    ) -> Generator[Chunk, None, None]:
        """`send` piece by piece; begun with the first iteration.

        Leaving the loop ends the answer there: the chunks handed out are the answer. Nothing handed
        out, or an error: the chat is as it was.
        """
        self._check()
        return self._stream(_as_messages(message), self._params_of(params))

    def astream(
        self, message: Said, params: SamplingParams | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """`stream` for asyncio."""
        self._check()
        return self._astream(_as_messages(message), self._params_of(params))

    def undo(self) -> list[Message]:
        """Take back the last turn, or what was added since; returns its messages, answer included.
        InvalidRequest if there is none."""
        with self._turn():
            if self._added:
                added, self._added = self._added, []
                return added
            if not self._turns:
                raise InvalidRequest("nothing was said yet that could be taken back")
            last = _messages_of(self._turns.pop())
            self._branch.truncate(_common(self._branch.tokens, self.tokens))
            return copy.deepcopy(last)

    def fork(self, n: int = 1) -> list[ChatSession]:
        """`n` chats with this history, each on its own from here. Nothing is computed or copied.

        While an answer is under way they have the turns before it.
        """
        count = check_int("n", n, 1)
        self._check()
        record = self._whole()
        made = [
            ChatSession(self._client, record, self._params, branch)
            for branch in self._branch.fork(count)
        ]
        for chat in made:
            chat._has_warned = self._has_warned
        return made

    def close(self) -> None:
        """Close its session in the cache. Never raises; a second call does nothing."""
        self._branch.release()

    # -- files --------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the conversation as JSON: messages, exact token ids, and which model it is of."""
        write_chat(path, self._whole())

    @classmethod
    def load(
        cls,
        client: EngineClient,
        model: Mapping[str, Any],
        path: str | os.PathLike[str],
        params: SamplingParams | None = None,
    ) -> ChatSession:
        """A chat that `save` wrote; `Runtime.load_chat` calls it.

        Raises InvalidRequest for another model's chat and for a file that holds none.
        """
        return cls(client, read_chat(path, model, client.reader.vocab_size), params)

    # -- inside -------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._branch.is_released:
            raise InvalidRequest("this chat was closed")
        self._client.core.check_alive()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        self._check()
        if not self._turn_lock.acquire(blocking=False):
            raise InvalidRequest("this chat is answering: wait, leave its stream, or fork it")
        try:
            yield
        finally:
            self._turn_lock.release()

    @contextlib.contextmanager
    def _answering(
        self, messages: Sequence[Message], params: SamplingParams
    ) -> Iterator[_Answering]:
        """A turn: records the answer, or as much of it as was handed out when it is left early."""
        with self._turn():
            said = [*self._added, *messages]
            begun = begun_answer(said)
            if begun is not None:
                said.pop()
            start = self._move_to(said, begun or "")
            answer = _Answering(params, start, self._branch.length, begun or "")
            try:
                yield answer
            except (GeneratorExit, KeyboardInterrupt):
                self._add_turn(said, answer)
                raise
            self._add_turn(said, answer)

    def _stream(
        self, messages: Sequence[Message], params: SamplingParams
    ) -> Generator[Chunk, None, None]:
        with (
            self._answering(messages, params) as answer,
            contextlib.closing(self._branch.stream(params)) as chunks,
        ):
            for chunk in chunks:
                answer.add_chunk(chunk)
                yield chunk

    async def _astream(
        self, messages: Sequence[Message], params: SamplingParams
    ) -> AsyncGenerator[Chunk, None]:
        with self._answering(messages, params) as answer:
            async with contextlib.aclosing(self._branch.astream(params)) as chunks:
                async for chunk in chunks:
                    answer.add_chunk(chunk)
                    yield chunk

    def _params_of(self, params: SamplingParams | None) -> SamplingParams:
        return check_params(params, default=self._params)

    def _messages(self) -> list[Message]:
        text = self._record.system
        system = [] if text is None else [{"role": "system", "content": text}]
        return [*system, *(message for turn in self._turns for message in _messages_of(turn))]

    def _whole(self) -> ChatRecord:
        return replace(self._record, turns=tuple(self._turns), added=tuple(self._added))

    def _tokenise(self, messages: Sequence[Message]) -> tuple[IntArray, bool]:
        """The ids up to the answer to `messages`, and whether no earlier turn is changed."""
        at = -1 if self._record.system is None else 0
        answers = {}
        for turn in self._turns:
            at += len(turn.messages) + 1
            answers[at] = turn.answer
        found, is_whole = self._format.tokenise([*self._messages(), *messages], answers)
        ids = np.asarray(found, np.int32)
        if not self._turns:
            return ids, True
        answer, before = self._turns[-1].answer, len(self.tokens)
        # of the answer itself an end token or a stop string may go
        least = before - (len(answer.token_ids) if is_whole else len(answer.token_ids[-1:]))
        return ids, _common(ids, self.tokens) >= least

    def _move_to(self, messages: Sequence[Message], begun: str) -> int:
        """Put the branch where the answer to `messages` goes on after its text `begun`; returns the
        position where it begins."""
        ids, is_stable = self._tokenise(messages)
        start = len(ids)
        if begun:
            ids = np.append(ids, self._client.reader.read_more(begun))
        self._client.reader.read(ids)  # not too long, before anything is changed
        kept = _common(self._branch.tokens, ids)
        if not is_stable and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "the chat template changes earlier turns (drops thinking, or moves the system "
                f"prompt or the tools): of {len(self.tokens)} tokens said the first {kept} stay, "
                "the others are computed again",
                HistoryRewritten,
                stacklevel=5,
            )
        if kept < self._branch.length:
            self._branch.truncate(kept)
        self._branch.extend(ids[kept:])
        return start

    def _add_turn(self, messages: Sequence[Message], answer: _Answering) -> None:
        done, tokens = answer.completion, self._branch.tokens
        if done is not None:
            has_end, text = self._has_end(done, answer.params), done.text
            if not answer.params.skip_special_tokens or (
                has_end and answer.params.include_stop_str_in_output
            ):  # the template brings its own
                ids = done.token_ids[:-1] if has_end else done.token_ids
                text = self._client.tokenizer.decode(ids)
        elif len(tokens) > answer.begun_len:
            has_end, text = False, answer.text
        else:
            return
        said = Answer(answer.begun + text, tuple(tokens[answer.start :].tolist()), has_end)
        self._turns.append(Turn(tuple(messages), said, tokens))
        self._added = []
        self._drop_rewritten()

    def _drop_rewritten(self) -> None:
        """Give up the K/V of tokens that the template will leave out in the next turn."""
        try:
            ids, is_stable = self._tokenise([_NEXT])
            if not is_stable:
                self._branch.truncate(_common(self._branch.tokens, ids))
        except (InvalidRequest, EngineDead):
            pass  # closed meanwhile: there is nothing to give up; a template will say so again

    def _has_end(self, completion: Completion, params: SamplingParams) -> bool:
        if completion.finish_reason != "stop" or not completion.token_ids:
            return False
        last = completion.token_ids[-1]
        is_models = last in self._client.builder.end_ids and not params.ignore_eos
        return is_models or last in tuple(params.stop_token_ids)


@dataclass(slots=True)
class _Answering:
    """An answer on its way."""

    params: SamplingParams
    start: int  # its position in the branch
    begun_len: int  # the branch's length with what it began with
    begun: str  # that text
    text: str = ""  # handed out so far
    completion: Completion | None = None

    def add(self, completion: Completion) -> Completion:
        self.completion = completion
        return completion

    def add_chunk(self, chunk: Chunk) -> None:
        self.text += chunk.text
        self.completion = chunk.completion


def _as_messages(said: object) -> list[Message]:
    """One message or a list of them, as plain dicts. Raises InvalidRequest."""
    several = list(said) if isinstance(said, list | tuple) else [said]
    if not several:
        raise InvalidRequest("there is no message to send")
    found: list[Mapping[str, Any]] = []
    for one in several:
        message = {"role": "user", "content": one} if isinstance(one, str) else one
        if not isinstance(message, Mapping):
            raise InvalidRequest(
                'a message is text, {"role": ..., "content": ...} or a list of them, got '
                + shown(one)
            )
        if message.get("role") == "system":
            raise InvalidRequest(
                f"a chat's system message is given when it is made, got {shown(message)}"
            )
        found.append(message)
    return check_messages(found)


def _messages_of(turn: Turn) -> list[Message]:
    return [*turn.messages, {"role": "assistant", "content": turn.answer.text}]


def _common(one: IntArray, other: IntArray) -> int:
    """Leading ids that both have."""
    size = min(len(one), len(other))
    differs = one[:size] != other[:size]
    first = int(differs.argmax()) if size else 0
    return first if size and differs[first] else size
