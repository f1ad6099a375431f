"""`ChatSession`: a conversation that keeps the exact ids of everything said and generated."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import warnings
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np

from radixserve.api.branch import Branch, BranchHost
from radixserve.api.chat_file import SavedChat, read_chat, write_chat
from radixserve.arrays import IntArray
from radixserve.checks import check_int, check_str, shown
from radixserve.errors import EngineDead, InvalidRequest
from radixserve.output import Chunk, Completion
from radixserve.request import SamplingParams
from radixserve.text.chat_format import Answer, ChatFormat, Message
from radixserve.text.prompts import check_messages
from radixserve.text.tokenizer import Tokenizer

_NOTHING: IntArray = np.empty(0, np.int32)
_NEXT: Message = {"role": "user", "content": "?"}


class HistoryRewritten(UserWarning):
    """A chat template changes earlier turns when new ones come: they are computed again."""


@dataclass(frozen=True, slots=True)
class ChatHost:
    """What chats need of their Runtime."""

    branches: BranchHost
    tokenizer: Tokenizer
    end_ids: frozenset[int]  # the model's
    model: Mapping[str, Any]  # what a saved chat must agree with


@dataclass(frozen=True, slots=True)
class Turn:
    """A message, the model's answer, and all ids of the conversation behind it."""

    message: Message
    answer: Answer
    tokens: IntArray


class ChatSession:
    """Made by `Runtime.chat`; ends with `close`, or when nobody refers to it.

        with rt.chat(system="Be brief.") as chat:
            print(chat.send("What is a heap?").text)
            print(chat.send("And a treap?").usage)     # cached: the whole history

    A turn computes only what is new: the ids of the message and of the template around it, and the
    last token of the answer before. What was generated is never tokenised again. Where the chat
    template changes earlier turns (drops their thinking, moves the system prompt), the chat warns
    once with HistoryRewritten and goes on from the last token that stays; the K/V of what the
    template drops is given up as soon as the answer is there.

    One turn at a time: another one meanwhile raises InvalidRequest. After `close` what acts raises
    InvalidRequest, after the Runtime was closed EngineDead; the history can be read for ever.
    """

    def __init__(
        self,
        host: ChatHost,
        form: ChatFormat,
        system: str | None,
        params: SamplingParams | None,
        turns: Sequence[Turn] = (),
        branch: Branch | None = None,
    ) -> None:
        self._host = host
        self._form = form
        self._system = system
        self._params = SamplingParams() if params is None else params
        self._turns = list(turns)
        tokens = self._turns[-1].tokens.copy() if self._turns else _NOTHING.copy()
        self._branch = branch or Branch(host.branches, tokens, self._params.namespace)
        self._has_warned = False
        self._busy = threading.Lock()

    @classmethod
    def start(
        cls,
        host: ChatHost,
        system: str | None,
        tools: Sequence[Mapping[str, Any]] | None,
        template: str | None,
        params: SamplingParams | None,
    ) -> Self:
        """A chat in which nothing was said; `Runtime.chat` calls it. Raises InvalidRequest."""
        for name, value in (("system", system), ("template", template)):
            if value is not None:
                check_str(name, value)
        if tools is not None and not _are_tools(tools):
            raise InvalidRequest(f"tools must be a list of JSON schemas, got {shown(tools)}")
        chat = cls(host, ChatFormat(host.tokenizer, template, tools), system, _checked(params))
        chat._lay_out(_NEXT)  # a template that cannot be used is told now
        return chat

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ChatSession(turns={len(self._turns)}, tokens={len(self.tokens)})"

    # -- knowing ------------------------------------------------------------------------------

    @property
    def history(self) -> list[Message]:
        """The messages so far, as copies: {"role", "content"}."""
        return copy.deepcopy(self._messages())

    @property
    def tokens(self) -> IntArray:
        """[n] int32: everything that the model has read and said, exactly; not to be written."""
        return self._turns[-1].tokens if self._turns else _NOTHING

    # -- turns --------------------------------------------------------------------------------

    def send(
        self, message: str | Mapping[str, Any], params: SamplingParams | None = None
    ) -> Completion:
        """Say something, get the answer. An error leaves the chat as it was.

        A message is the user's text, or {"role", "content"} for another role, such as "tool".
        """
        said, used = _as_message(message), self._used(params)
        with self._turn():
            self._move_to(said)
            completion = self._branch.generate(used)
            self._record(
                said, completion.text, completion.token_ids, self._has_end(completion, used)
            )
            return completion

    async def asend(
        self, message: str | Mapping[str, Any], params: SamplingParams | None = None
    ) -> Completion:
        """`send` for asyncio. Cancelling the task leaves the chat as it was."""
        said, used = _as_message(message), self._used(params)
        with self._turn():
            self._move_to(said)
            completion = await self._branch.agenerate(used)
            self._record(
                said, completion.text, completion.token_ids, self._has_end(completion, used)
            )
            return completion

    def stream(
        self, message: str | Mapping[str, Any], params: SamplingParams | None = None
    ) -> Generator[Chunk, None, None]:
        """`send` piece by piece; begun with the first iteration.

        Leaving the loop ends the answer there: what was handed out is what was said. Nothing handed
        out, or an error: the chat is as it was.
        """
        self._check()
        return self._stream(_as_message(message), self._used(params))

    async def astream(
        self, message: str | Mapping[str, Any], params: SamplingParams | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """`stream` for asyncio."""
        said, used = _as_message(message), self._used(params)
        with self._turn():
            start, heard = self._move_to(said), _Heard()
            with heard.to_the_end():
                async with contextlib.aclosing(self._branch.astream(used)) as chunks:
                    async for chunk in chunks:
                        heard.add(chunk)
                        yield chunk
            self._record_heard(said, start, heard, used)

    def undo(self) -> list[Message]:
        """Take back the last turn; returns its two messages. InvalidRequest if there is none."""
        with self._turn():
            if not self._turns:
                raise InvalidRequest("nothing was said yet that could be taken back")
            last = self._messages()[-2:]
            self._turns.pop()
            self._branch.truncate(_common(self._branch.tokens, self.tokens))
            return copy.deepcopy(last)

    def fork(self, n: int = 1) -> list[ChatSession]:
        """`n` chats with this history, each on its own from here. Nothing is computed or copied.

        While an answer is under way they have the turns before it.
        """
        count = check_int("n", n, 1)
        self._check()
        turns, made = tuple(self._turns), []
        for branch in self._branch.fork(count):
            form = ChatFormat(self._host.tokenizer, self._form.template, self._form.tools)
            chat = ChatSession(self._host, form, self._system, self._params, turns, branch)
            chat._has_warned = self._has_warned
            made.append(chat)
        return made

    def close(self) -> None:
        """Let go of the cache: nobody will come back. Never raises; twice does nothing."""
        self._branch.release()

    # -- files --------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the conversation as JSON: messages, exact token ids, and which model it is of."""
        turns = [(t.message, t.answer, t.tokens.tolist()) for t in self._turns]
        form = self._form
        chat = SavedChat(self._host.model, self._system, form.template, form.tools, turns)
        write_chat(path, chat)

    @classmethod
    def load(
        cls, host: ChatHost, path: str | os.PathLike[str], params: SamplingParams | None = None
    ) -> ChatSession:
        """What `save` wrote; `Runtime.load_chat` calls it.

        Raises InvalidRequest for another model's chat and for what is no such file.
        """
        saved = read_chat(path, host.model, host.branches.reader.vocab_size)
        form = ChatFormat(host.tokenizer, saved.template, saved.tools)
        turns = [Turn(m, a, _as_ids(ids)) for m, a, ids in saved.turns]
        return cls(host, form, saved.system, _checked(params), turns)

    # -- inside -------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._branch.is_released:
            raise InvalidRequest("this chat was closed")
        self._host.branches.worker.check_alive()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        self._check()
        if not self._busy.acquire(blocking=False):
            raise InvalidRequest("this chat is answering: wait, leave its stream, or fork it")
        try:
            yield
        finally:
            self._busy.release()

    def _used(self, params: SamplingParams | None) -> SamplingParams:
        return _checked(params) or self._params

    def _messages(self) -> list[Message]:
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        answered = (
            (turn.message, {"role": "assistant", "content": turn.answer.text})
            for turn in self._turns
        )
        return [*system, *(message for pair in answered for message in pair)]

    def _lay_out(self, message: Message) -> tuple[IntArray, bool]:
        """The ids up to the answer to `message`, and whether nothing said before is changed."""
        first = 1 if self._system is None else 2
        answers = {first + 2 * at: turn.answer for at, turn in enumerate(self._turns)}
        ids, is_whole = self._form.lay_out([*self._messages(), message], answers)
        laid = _as_ids(ids)
        if not self._turns:
            return laid, True
        answer, before = self._turns[-1].answer, len(self.tokens)
        # of the answer itself an end token or a stop string may go
        least = before - (len(answer.token_ids) if is_whole else len(answer.token_ids[-1:]))
        return laid, _common(laid, self.tokens) >= least

    def _move_to(self, message: Message) -> int:
        """Put the branch where the answer to `message` begins; returns that position."""
        ids, is_stable = self._lay_out(message)
        self._host.branches.reader.read(ids)  # not too long, before anything is changed
        kept = _common(self._branch.tokens, ids)
        if not is_stable and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "the chat template changes earlier turns (drops thinking, or moves the system "
                f"prompt or the tools): of {len(self.tokens)} tokens said the first {kept} stay, "
                "the others are computed again",
                HistoryRewritten,
                stacklevel=3,
            )
        if kept < self._branch.length:
            self._branch.truncate(kept)
        self._branch.extend(ids[kept:])
        return len(ids)

    def _record(self, message: Message, text: str, token_ids: Sequence[int], has_end: bool) -> None:
        answer = Answer(text, tuple(token_ids), has_end)
        self._turns.append(Turn(message, answer, self._branch.tokens))
        self._give_up_dropped()

    def _give_up_dropped(self) -> None:
        """Where the next turn will not have what was just generated, let go of it now."""
        try:
            ids, is_stable = self._lay_out(_NEXT)
            if not is_stable:
                self._branch.truncate(_common(self._branch.tokens, ids))
        except (InvalidRequest, EngineDead):
            pass  # closed meanwhile: there is nothing to give up; a template will say so again

    def _has_end(self, completion: Completion, params: SamplingParams) -> bool:
        if completion.finish_reason != "stop" or not completion.token_ids:
            return False
        last = completion.token_ids[-1]
        is_models = last in self._host.end_ids and not params.ignore_eos
        return is_models or last in tuple(params.stop_token_ids)

    def _stream(self, message: Message, params: SamplingParams) -> Generator[Chunk, None, None]:
        with self._turn():
            start, heard = self._move_to(message), _Heard()
            with heard.to_the_end(), contextlib.closing(self._branch.stream(params)) as chunks:
                for chunk in chunks:
                    heard.add(chunk)
                    yield chunk
            self._record_heard(message, start, heard, params)

    def _record_heard(
        self, message: Message, start: int, heard: _Heard, params: SamplingParams
    ) -> None:
        done = heard.completion
        if done is not None:
            self._record(message, done.text, done.token_ids, self._has_end(done, params))
        elif self._branch.length > start:
            self._record(message, heard.text, self._branch.tokens[start:].tolist(), False)
        if heard.interrupt is not None:
            raise heard.interrupt


class _Heard:
    """What a stream has handed out when it is left."""

    def __init__(self) -> None:
        self.text = ""
        self.completion: Completion | None = None
        self.interrupt: KeyboardInterrupt | None = None

    def add(self, chunk: Chunk) -> None:
        self.text += chunk.text
        self.completion = chunk.completion

    @contextlib.contextmanager
    def to_the_end(self) -> Iterator[None]:
        """Goes on behind a loop that was left, and, once it is kept, with Ctrl-C."""
        try:
            yield
        except GeneratorExit:
            pass
        except KeyboardInterrupt as interrupt:
            self.interrupt = interrupt


def _as_message(message: object) -> Message:
    if isinstance(message, str):
        message = {"role": "user", "content": message}
    if not isinstance(message, Mapping):
        raise InvalidRequest(
            f'a message is text or {{"role": ..., "content": ...}}, got {shown(message)}'
        )
    (checked,) = check_messages([message])
    if checked["role"] in ("system", "assistant"):
        raise InvalidRequest(f"a chat takes messages of users and tools, got {shown(message)}")
    return checked


def _checked(params: object) -> SamplingParams | None:
    if params is not None and not isinstance(params, SamplingParams):
        raise InvalidRequest(f"params must be SamplingParams, got {shown(params)}")
    return params


def _are_tools(tools: object) -> bool:
    return isinstance(tools, list | tuple) and all(isinstance(tool, Mapping) for tool in tools)


def _as_ids(ids: Sequence[int]) -> IntArray:
    return np.asarray(ids, np.int32)


def _common(one: IntArray, other: IntArray) -> int:
    """Leading ids that both have."""
    size = min(len(one), len(other))
    differs = one[:size] != other[:size]
    first = int(differs.argmax()) if size else 0
    return first if size and differs[first] else size
