"""A conversation in a JSON file: messages and exact token ids, and which model they are of."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np

from radixserve.arrays import IntArray
from radixserve.errors import InvalidRequest
from radixserve.text.chat_format import Answer, Message
from radixserve.text.chat_options import ChatOptions
from radixserve.text.prompts import check_messages, is_token_id

_KIND, _VERSION = "radixserve chat", 2


@dataclass(frozen=True, slots=True)
class Turn:
    """Messages, the model's answer, and all ids of the conversation up to its end."""

    messages: tuple[Message, ...]
    answer: Answer
    tokens: IntArray


@dataclass(frozen=True, slots=True)
class ChatRecord:
    """A conversation and its settings, as a file holds them."""

    model: Mapping[str, Any]  # facts that have to be equal for ids to mean the same
    system: str | None
    options: ChatOptions
    turns: Sequence[Turn] = ()
    added: tuple[Message, ...] = ()  # said since the last answer


def write_chat(path: str | os.PathLike[str], chat: ChatRecord) -> None:
    """Raises OSError, or InvalidRequest where a message holds what JSON cannot."""
    whole = chat.turns[-1].tokens.tolist() if chat.turns else []
    document = {
        "kind": _KIND,
        "version": _VERSION,
        "model": dict(chat.model),
        "system": chat.system,
        "template": chat.options.template,
        "tools": None if chat.options.tools is None else list(chat.options.tools),
        "chat_template_kwargs": chat.options.template_kwargs,
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
    """Raises OSError, or InvalidRequest for the chat of another model and for other files."""
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
        raise InvalidRequest(f"{os.fspath(path)} is no saved chat: {error!r}") from None
    return chat


def _document_of(turn: Turn, whole: list[int]) -> dict[str, Any]:
    ids = turn.tokens.tolist()
    return {
        "messages": list(turn.messages),
        "answer": asdict(turn.answer),
        # all ids up to the turn's end: the first so many of "token_ids", or others
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
        raise ValueError("there are ids outside of the vocabulary")
    return list(ids)


def _of(value: Any, *kinds: type) -> Any:
    if not isinstance(value, kinds):
        raise TypeError(f"{value!r} should be of type {kinds[0].__name__}"[:200])
    return value
