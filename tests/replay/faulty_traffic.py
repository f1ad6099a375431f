"""Chats of several applications, each of which breaks its prefixes in one way, or in none.

Texts are made of random words. `traffic(kinds)` interleaves an application for each kind; the same
seed without a fault gives the same chats, so what a fault loses can be counted.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from radixserve.arrays import IntArray
from radixserve.replay.trace import PackedTokens, Trace

NUM_CHATS, NUM_TURNS = 6, 4
SYSTEM_WORDS = 150  # of a system prompt; an answer has half as many
PIECE = re.compile(r" ?[A-Za-z]{1,7}| ?\d{1,3}| ?[^\sA-Za-z\d]{1,3}|\s+")
_SYLLABLES = "ba co du fe gi ho ju ka le mi no pu ra se ti vo wa xe yu zo".split()


class Writer:
    """Writes texts of random words."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def word(self) -> str:
        return "".join(self.rng.choice(_SYLLABLES) for _ in range(self.rng.randint(2, 3)))

    def text(self, count: int) -> str:
        return " ".join(self.word() for _ in range(count))

    def hex(self, size: int) -> str:
        return "".join(self.rng.choice("0123456789abcdef") for _ in range(size))


@dataclass
class Chat:
    """A chat so far; messages have a mark of their own in front."""

    system: str
    tools: list[tuple[str, str]]  # name, description
    turns: list[tuple[str, str, str]]  # question, thinking, answer


def render_tools(tools: Iterable[tuple[str, str]]) -> str:
    return "\n".join(json.dumps({"name": name, "description": text}) for name, text in tools)


def _render(chat: Chat, ask: str, *, head: str = "", system_at: str = "front") -> str:
    parts = [f"<system>{head}{chat.system}\n{render_tools(chat.tools)}"]
    for question, thinking, answer in chat.turns:
        parts += [f"<user>{question}<answer>\n", f"<think>{thinking}</think>{answer}"]
    if system_at == "last":
        parts = [*parts[1:], parts[0]]
    return "".join([*parts, f"<user>{ask}<answer>\n"])


def _date(chat: Chat, ask: str, write: Writer) -> str:
    second = write.rng.randrange(86_400)
    clock = f"{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}"
    return _render(chat, ask, head=f"Today is 2026-11-{write.rng.randint(1, 28):02d} {clock}. ")


def _request_id(chat: Chat, ask: str, write: Writer) -> str:
    return _render(chat, ask, head=f"Request {write.hex(8)}-{write.hex(4)}-{write.hex(12)}: ")


def _compacted(chat: Chat, ask: str, write: Writer) -> str:
    if len(chat.turns) < 2:
        return _render(chat, ask)
    short = Chat(chat.system, chat.tools, chat.turns[-1:])
    whole = _render(short, ask)
    mark = whole.index("<user>")
    return f"{whole[:mark]}<summary>{write.text(12)}{whole[mark:]}"


def _renamed(chat: Chat, ask: str, write: Writer) -> str:
    (name, text), *others = chat.tools
    version = write.word()
    return _render(Chat(chat.system, [(f"{name}{version}", text), *others], chat.turns), ask)


def _reordered(chat: Chat, ask: str, write: Writer) -> str:
    tools = list(chat.tools)
    write.rng.shuffle(tools)
    return _render(Chat(chat.system, tools, chat.turns), ask)


def _whitespace(chat: Chat, ask: str, write: Writer) -> str:
    blank = write.rng.choice(
        ["\n", "\n\n", " \n", "\n ", "  ", "\t", "\n\t", " \t", "\t\n", "\t\t"]
    )
    return _render(chat, ask).replace(" ", blank, 1)


def _unthinking(chat: Chat, ask: str, _write: Writer) -> str:
    whole = _render(chat, ask)
    for _, thinking, _ in chat.turns:
        whole = whole.replace(f"<think>{thinking}</think>", "", 1)
    return whole


def _moved(chat: Chat, ask: str, _write: Writer) -> str:
    return _render(chat, ask, system_at="last")


def _clean(chat: Chat, ask: str, _write: Writer) -> str:
    return _render(chat, ask)


RENDERERS: dict[str, Callable[[Chat, str, Writer], str]] = {
    "date or time": _date,
    "request id": _request_id,
    "compacted history": _compacted,
    "renamed tool": _renamed,
    "changing order": _reordered,
    "whitespace": _whitespace,
    "dropped thinking": _unthinking,
    "tokenisation": _clean,
    "moved system prompt": _moved,
    "clean": _clean,
}


class Vocabulary:
    """Numbers pieces of text, so that each token has one text."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def encode(self, text: str) -> IntArray:
        return self.numbers(PIECE.findall(text))

    def numbers(self, pieces: Iterable[str]) -> IntArray:
        ids = [self._ids.setdefault(piece, len(self._ids)) for piece in pieces]
        return np.asarray(ids, np.int32)

    def words(self) -> dict[int, str]:
        return {number: piece for piece, number in self._ids.items()}

    def resplit(self, ids: IntArray, rng: random.Random) -> IntArray:
        """The same text in other tokens: a word of the beginning is cut in two."""
        place = rng.randrange(20, 30)
        word = self.words()[int(ids[place])]
        cut = rng.randint(1, max(1, len(word) - 1))
        return np.concatenate(
            (ids[:place], self.numbers((word[:cut], word[cut:])), ids[place + 1 :])
        )


def traffic(
    kinds: Iterable[str],
    seed: int = 0,
    *,
    is_faulty: bool = True,
    sizes: dict[str, int] | None = None,
) -> tuple[Trace, list[str]]:
    """The chats of an application for each kind, and the kind of each request.

    `sizes`: words of an application's system prompt, for some. Without a fault, requests are the
    same but for what the fault changes.
    """
    sizes = sizes or {}
    vocabulary = Vocabulary()
    packed, lengths, sessions, owners = PackedTokens(), [], [], []
    order = random.Random(seed)
    open_chats = []
    for number, kind in enumerate(kinds):
        write = Writer(1000 * seed + number)
        system = write.text(sizes.get(kind, SYSTEM_WORDS))
        tools = [(write.word(), write.text(30)) for _ in range(6)]
        first = 10**6 * (seed + 1) + 77 * number
        open_chats += [
            (kind, f"{kind} {n}", Chat(system, tools, []), Writer(first + n))
            for n in range(NUM_CHATS)
        ]
    for _ in range(NUM_TURNS):
        order.shuffle(open_chats)
        for kind, session, chat, write in open_chats:
            ask, thinking = write.text(20), write.text(40)
            answer = write.text(sizes.get(kind, SYSTEM_WORDS) // 2)
            faults = Writer(order.randrange(1 << 30))
            render = RENDERERS[kind] if is_faulty else _clean
            prompt = vocabulary.encode(render(chat, ask, faults))
            if kind == "tokenisation" and is_faulty:
                prompt = vocabulary.resplit(prompt, faults.rng)
            output = vocabulary.encode(f"<think>{thinking}</think>{answer}")
            lengths.append(packed.add(prompt, output))
            sessions.append(session)
            owners.append(kind)
            chat.turns.append((ask, thinking, answer))
    num_prompt, num_output = np.asarray(lengths, np.int64).T
    trace = Trace(
        name="chats",
        source=packed,
        times=np.arange(len(lengths), dtype=np.float64),
        sessions=sessions,
        namespaces=[""] * len(lengths),
        num_prompt=num_prompt,
        num_output=num_output,
        words=vocabulary.words(),
    )
    return trace, owners
