"""`ChatSession`: a conversation that keeps the exact token ids of all messages and answers."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import threading
import warnings
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from types import NoneType
from typing import Any, Self

import numpy as np

from radixserve.api.branch import Branch
from radixserve.api.client import EngineClient
from radixserve.api.request_builder import check_params
from radixserve.arrays import IntArray
from radixserve.cache.diagnosis import is_time, text_at
from radixserve.checks import check_int, check_str, shown
from radixserve.completion import Chunk, Completion
from radixserve.errors import EngineDead, InvalidRequest
from radixserve.picture import Pictures
from radixserve.request import SamplingParams
from radixserve.text.chat_format import ChatFormat
from radixserve.text.chat_options import ChatOptions, begun_answer
from radixserve.text.conversations import Answer
from radixserve.text.prompts import check_messages, is_token_id
from radixserve.text.template_traits import Message

_KIND, _VERSION = "radixserve chat", 2


@dataclass(frozen=True, slots=True)
class Turn:
    """Messages and the model's answer to them."""

    messages: tuple[Message, ...]
    answer: Answer
    tokens: IntArray  # [n] all ids of the conversation up to the answer's end


@dataclass(frozen=True, slots=True)
class ChatRecord:
    """A conversation and its settings, as in a file."""

    model: Mapping[str, Any]  # facts of the model that give token ids their meaning
    system: str | None
    options: ChatOptions
    turns: Sequence[Turn] = ()
    added: tuple[Message, ...] = ()  # messages since the last answer


def write_chat(path: str | os.PathLike[str], chat: ChatRecord) -> None:
    """Write a chat as JSON. Raises OSError, or InvalidRequest if a message is not JSON."""
    whole = chat.turns[-1].tokens.tolist() if chat.turns else []
    document = {
        "kind": _KIND,
        "version": _VERSION,
        "model": dict(chat.model),
        "system": chat.system,
        "template": chat.options.template,
        "tools": None if chat.options.tools is None else list(chat.options.tools),
        "chat_template_kwargs": chat.options.template_kwargs,
        "began": None if chat.options.now is None else chat.options.now.isoformat(),
        "added": list(chat.added),
        "token_ids": whole,
        "turns": [_document_of(turn, whole) for turn in chat.turns],
    }
    try:
        text = json.dumps(document)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the chat cannot be written as JSON: {error}") from None
    Path(path).write_text(text + "\n", encoding="utf-8")


def read_chat(
    path: str | os.PathLike[str], model: Mapping[str, Any], vocab_size: int
) -> ChatRecord:
    """Read a chat that `write_chat` wrote. Raises OSError, or InvalidRequest for the chat of
    another model and for other files."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        if document["kind"] != _KIND or document["version"] not in (1, _VERSION):
            raise ValueError(f"it is not of kind {_KIND!r}, version 1 or {_VERSION}")
        _check_model(path, document["model"], model)
        whole = _ids(document["token_ids"], vocab_size)
        turns = [_turn(turn, whole, vocab_size) for turn in document["turns"]]
        options = ChatOptions.read(
            _of(document["tools"], list, NoneType),
            document.get("chat_template_kwargs"),
            _of(document["template"], str, NoneType),
        )
        began = document.get("began")
        now = datetime.now() if began is None else datetime.fromisoformat(began)
        options = replace(options, now=now)
        chat = ChatRecord(
            document["model"],
            _of(document["system"], str, NoneType),
            options,
            turns,
            tuple(check_messages(_of(document.get("added", []), list))),
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest(f"{os.fspath(path)} is not a saved chat: {error!r}") from None
    return chat


def _document_of(turn: Turn, whole: list[int]) -> dict[str, Any]:
    ids = turn.tokens.tolist()
    return {
        "messages": list(turn.messages),
        "answer": asdict(turn.answer),
        # the number of leading ids of "token_ids" up to the turn's end, or the ids themselves
        "tokens": len(ids) if whole[: len(ids)] == ids else ids,
    }


def _check_model(
    path: str | os.PathLike[str], theirs: Mapping[str, Any], ours: Mapping[str, Any]
) -> None:
    other = [
        f"{name} {theirs.get(name)!r}, here {value!r}"
        for name, value in ours.items()
        if theirs.get(name) != value
    ]
    if other:
        raise InvalidRequest(f"{os.fspath(path)} is the chat of another model: {'; '.join(other)}")


def _turn(turn: Any, whole: list[int], vocab_size: int) -> Turn:
    given = [turn["message"]] if "message" in turn else _of(turn["messages"], list)
    messages = tuple(check_messages(given))
    if not messages:
        raise ValueError("a turn has no message")
    given, tokens = turn["answer"], turn["tokens"]
    own = _ids(given["token_ids"], vocab_size)
    answer = Answer(_of(given["text"], str), tuple(own), _of(given["has_end"], bool))
    ids = whole[: _of(tokens, int)] if is_token_id(tokens) else _ids(tokens, vocab_size)
    if ids[len(ids) - len(own) :] != own:
        raise ValueError("a turn does not end with its answer")
    return Turn(messages, answer, np.asarray(ids, np.int32))


def _ids(value: Any, vocab_size: int) -> list[int]:
    ids = _of(value, list)
    if not all(is_token_id(token) and 0 <= token < vocab_size for token in ids):
        raise ValueError("an id is not in the vocabulary")
    return list(ids)


def _of(value: Any, *kinds: type) -> Any:
    if not isinstance(value, kinds):
        raise TypeError(f"{value!r} should be of type {kinds[0].__name__}"[:200])
    return value


Said = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]
_NO_TOKENS: IntArray = np.empty(0, np.int32)
_NEXT: Message = {"role": "user", "content": "?"}  # in place of any next message


class HistoryRewritten(UserWarning):
    """The chat template changes earlier turns when later ones follow: these are computed again."""


class ChatSession:
    """A conversation. `Runtime.chat` makes it; `close`, or its last reference, ends it.

        with rt.chat(system="Be brief.") as chat:
            print(chat.send("What is a heap?").text)
            print(chat.send("And a treap?").usage)     # cached: the whole history

    A turn computes only new tokens: those of the message, of the template around it, and the last
    token of the previous answer. Generated tokens are never tokenised again. If the chat template
    changes earlier turns (drops their thinking, moves the system prompt), the chat warns once with
    HistoryRewritten and continues after the last unchanged token. The K/V of the dropped tokens is
    released after the answer.

    A second turn at the same time raises InvalidRequest. Methods raise InvalidRequest after
    `close`, and EngineDead after the Runtime was closed. The history can always be read.
    """

    def __init__(
        self,
        client: EngineClient,
        record: ChatRecord,
        params: SamplingParams | None,
        branch: Branch | None = None,
    ) -> None:
        """`branch`: its tokens are those of the record's turns; None: a new branch."""
        self._client = client
        self._record = record
        self._format = ChatFormat(client.tokenizer, record.options)
        self._params = client.builder.params(params)
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
        """Returns a chat without turns, for `Runtime.chat`. Raises InvalidRequest."""
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
        """[n] int32: the exact token ids of the conversation; read-only."""
        return self._turns[-1].tokens if self._turns else _NO_TOKENS

    # -- turns --------------------------------------------------------------------------------

    def send(self, message: Said, params: SamplingParams | None = None) -> Completion:
        """Send a message and return the answer. An error leaves the chat unchanged.

        A message is the user's text, or {"role", "content"} for another role, such as "tool". A
        list holds several messages, such as the results of tool calls. If the last message has the
        role "assistant", the answer continues its text.
        """
        with self._answering(self._read(message), self._params_of(params)) as answer:
            return answer.add(self._branch.generate(answer.params))

    async def asend(self, message: Said, params: SamplingParams | None = None) -> Completion:
        """`send` for asyncio. Cancelling the task leaves the chat unchanged."""
        with self._answering(self._read(message), self._params_of(params)) as answer:
            return answer.add(await self._branch.agenerate(answer.params))

    def add(self, message: Said) -> None:
        """Add a message without an answer. It is sent with the next message.

        Computes nothing. The template checks the message when it is sent.
        """
        messages = self._read(message)
        with self._turn():
            self._added += messages

    def stream(
        self, message: Said, params: SamplingParams | None = None
    ) -> Generator[Chunk, None, None]:
        """`send` in chunks. The request starts with the first iteration.

        Leaving the loop ends the answer after the chunks that the loop got. The chat is unchanged
        if the loop got no chunk, and after an error.
        """
        self._check()
        return self._stream(self._read(message), self._params_of(params))

    def astream(
        self, message: Said, params: SamplingParams | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """`stream` for asyncio."""
        self._check()
        return self._astream(self._read(message), self._params_of(params))

    def undo(self) -> list[Message]:
        """Remove the last turn, or the messages added since. Returns the removed messages, the
        answer included. Raises InvalidRequest for an empty chat."""
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
        """Returns `n` independent chats with this history. Computes and copies nothing.

        During an answer the new chats have the turns before it.
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
        """Write the conversation as JSON: its messages, exact token ids and model."""
        write_chat(path, self._whole())

    @classmethod
    def load(
        cls,
        client: EngineClient,
        model: Mapping[str, Any],
        path: str | os.PathLike[str],
        params: SamplingParams | None = None,
    ) -> ChatSession:
        """Returns a chat that `save` wrote, for `Runtime.load_chat`.

        Raises InvalidRequest for another model's chat and for files of another kind.
        """
        return cls(client, read_chat(path, model, client.reader.vocab_size), params)

    # -- inside -------------------------------------------------------------------------------

    def _read(self, message: Said) -> list[Message]:
        return _as_messages(message, self._client.reader.pictures)

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
        """Run a turn: records the answer, or the part of it that the caller got."""
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
        return self._params if params is None else check_params(params).with_defaults(self._params)

    def _messages(self) -> list[Message]:
        text = self._record.system
        system = [] if text is None else [{"role": "system", "content": text}]
        return [*system, *(message for turn in self._turns for message in _messages_of(turn))]

    def _whole(self) -> ChatRecord:
        return replace(self._record, turns=tuple(self._turns), added=tuple(self._added))

    def _tokenise(self, messages: Sequence[Message]) -> tuple[IntArray, bool]:
        """Returns the ids up to the answer to `messages`, and whether all earlier turns are
        unchanged."""
        index = -1 if self._record.system is None else 0
        answers = {}
        for turn in self._turns:
            index += len(turn.messages) + 1
            answers[index] = turn.answer
        token_ids, is_whole = self._format.tokenise([*self._messages(), *messages], answers)
        ids = np.asarray(token_ids, np.int32)
        if not self._turns:
            return ids, True
        answer, before = self._turns[-1].answer, len(self.tokens)
        # An end token or a stop string may be missing at the answer's end.
        least = before - (len(answer.token_ids) if is_whole else len(answer.token_ids[-1:]))
        return ids, _common(ids, self.tokens) >= least

    def _move_to(self, messages: Sequence[Message], begun: str) -> int:
        """Make the branch's tokens those up to the answer to `messages`, and its text `begun`.
        Returns the position of the answer's first token."""
        if not self._turns:  # the conversation begins: its template's date stays that of now
            options = replace(self._record.options, now=datetime.now())
            self._record = replace(self._record, options=options)
            self._format = ChatFormat(self._client.tokenizer, options)
        ids, is_stable = self._tokenise(messages)
        start = len(ids)
        if begun:
            ids = np.append(ids, np.asarray(self._client.tokenizer.encode_answer(begun), np.int32))
        self._client.reader.read(ids)  # raises before any change where they are too long
        kept = _common(self._branch.tokens, ids)
        if not is_stable and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"the chat template changes earlier turns ({self._rewriting(ids, kept)}): the "
                f"first {kept} of {len(self.tokens)} tokens are kept, the others are computed "
                "again",
                HistoryRewritten,
                stacklevel=5,
            )
        if kept < self._branch.length:
            self._branch.truncate(kept)
        self._branch.extend(ids[kept:])
        return start

    def _rewriting(self, ids: IntArray, kept: int) -> str:
        """Returns what the template may have changed, for a warning: the prompt `ids` differs from
        the turns so far at token `kept`."""
        tokenizer = self._client.tokenizer
        was, now = (text_at(tokenizer.decode, tokens, kept) for tokens in (self.tokens, ids))
        template = self._record.options.template or tokenizer.chat_template
        if "strftime_now" in template and is_time(was) and is_time(now):
            return f"it writes the date or the time: {shown(now)} in place of {shown(was)}"
        return "drops thinking, or moves the system prompt or the tools"

    def _add_turn(self, messages: Sequence[Message], answer: _Answering) -> None:
        done, tokens = answer.completion, self._branch.tokens
        if done is not None:
            has_end, text = self._has_end(done, answer.params), done.text
            if not answer.params.skip_special_tokens or (
                has_end and answer.params.include_stop_str_in_output
            ):  # the template writes its own end token
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
        """Release the K/V of tokens that the template leaves out in the next turn."""
        try:
            ids, is_stable = self._tokenise([_NEXT])
            if not is_stable:
                self._branch.truncate(_common(self._branch.tokens, ids))
        except (InvalidRequest, EngineDead):
            pass  # the chat was closed; a template's error is raised again in the next turn

    def _has_end(self, completion: Completion, params: SamplingParams) -> bool:
        if completion.finish_reason != "stop" or not completion.token_ids:
            return False
        last = completion.token_ids[-1]
        is_models = last in self._client.builder.end_ids and not params.ignore_eos
        return is_models or last in tuple(params.stop_token_ids)


@dataclass(slots=True)
class _Answering:
    """An answer in progress."""

    params: SamplingParams
    start: int  # position of its first token in the branch
    begun_len: int  # length of the branch with the text `begun`
    begun: str  # text that the answer continues
    text: str = ""  # that the caller has got
    completion: Completion | None = None

    def add(self, completion: Completion) -> Completion:
        self.completion = completion
        return completion

    def add_chunk(self, chunk: Chunk) -> None:
        self.text += chunk.text
        self.completion = chunk.completion


def _as_messages(said: object, pictures: Pictures | None) -> list[Message]:
    """Returns one message or a list of them as a list of plain dicts. Raises InvalidRequest."""
    several = list(said) if isinstance(said, list | tuple) else [said]
    if not several:
        raise InvalidRequest("there is no message to send")
    messages: list[Mapping[str, Any]] = []
    for item in several:
        message = {"role": "user", "content": item} if isinstance(item, str) else item
        if not isinstance(message, Mapping):
            raise InvalidRequest(
                'a message is text, {"role": ..., "content": ...} or a list of them, got '
                + shown(item)
            )
        if message.get("role") == "system":
            raise InvalidRequest(
                f"a chat's system message is given when it is made, got {shown(message)}"
            )
        messages.append(message)
    return check_messages(messages, pictures)


def _messages_of(turn: Turn) -> list[Message]:
    return [*turn.messages, {"role": "assistant", "content": turn.answer.text}]


def _common(tokens: IntArray, other: IntArray) -> int:
    """Returns the number of equal leading ids."""
    size = min(len(tokens), len(other))
    differs = tokens[:size] != other[:size]
    first = int(differs.argmax()) if size else 0
    return first if size and differs[first] else size
