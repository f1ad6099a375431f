"""A conversation as token ids: generated ids stay, the rest is the template's text, tokenised."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from radixserve.text.chat_options import ChatOptions
from radixserve.text.tokenizer import Tokenizer

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """The model's words in one turn."""

    text: str
    token_ids: tuple[int, ...]  # as generated
    has_end: bool  # the last of them is an end token, which is not part of the text

    @property
    def said_ids(self) -> tuple[int, ...]:
        return self.token_ids[:-1] if self.has_end else self.token_ids


class ChatFormat:
    """Turns messages into token ids with a chat template; caches those of the last call."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        options: ChatOptions,
    ) -> None:
        self._options = options
        self._tokenizer = tokenizer
        self._literal_ids: dict[str, list[int]] = {}
        self._rendered: dict[str, str] = {}  # an answer's text -> as the template renders it
        self._answer_ids: dict[tuple[Answer, str], Sequence[int]] = {}  # (answer, rendered) -> ids

    def tokenise(
        self, messages: Sequence[Message], answers: Mapping[int, Answer]
    ) -> tuple[list[int], bool]:
        """The ids of the conversation up to where the assistant is to speak, and whether the last
        of the `answers`, which come by the index of their message, stands in it as it was given.

        Their own ids are used, also where the template keeps only a part of one; the text between
        them is tokenised piece by piece, always in the same pieces. Where the template treats the
        conversation in ways that cannot be followed, all of it is tokenised again. Raises
        InvalidRequest where the template refuses the messages.
        """
        text, places = self._render(messages), sorted(answers)
        marks = dict(zip(places, _marks(text, len(places)), strict=True))
        marked = self._render(_replaced(messages, marks))
        literals = _split(marked, list(marks.values()))
        given = {at: answers[at].text for at in places}
        rendered = None
        if literals is not None:
            rendered = self._answer_texts(messages, given, marks, marked, literals, text)
        if literals is None or rendered is None:
            return self._tokenizer.encode_more(text), False
        self._literal_ids = {
            literal: self._literal_ids.get(literal) or self._tokenizer.encode_more(literal)
            for literal in literals
        }
        keys = [(answers[at], rendered[at]) for at in places]
        self._answer_ids = {key: self._answer_ids.get(key) or self._cut(*key) for key in keys}
        self._rendered = {given[at]: rendered[at] for at in places}
        ids = list(self._literal_ids[literals[0]])
        for key, literal in zip(keys, literals[1:], strict=True):
            ids += [*self._answer_ids[key], *self._literal_ids[literal]]
        return ids, not places or _is_same(given[places[-1]], rendered[places[-1]])

    # -- text ---------------------------------------------------------------------------------

    def _render(self, messages: Sequence[Message]) -> str:
        how = self._options
        return self._tokenizer.render_chat(
            messages, template=how.template, tools=how.tools, variables=how.template_kwargs
        )

    def _answer_texts(
        self,
        messages: Sequence[Message],
        given: dict[int, str],
        marks: Mapping[int, str],
        marked: str,
        literals: Sequence[str],
        text: str,
    ) -> dict[int, str] | None:
        """Each answer as the template renders it; None if that does not add up to `text`."""
        if _joined(literals, given) == text:
            return given
        for known in (self._rendered, {}):
            rendered: dict[int, str] = {}
            for at in marks:
                found = known.get(given[at])
                if found is None:
                    found = self._answer_text(at, messages, marks, marked)
                if found is None:
                    return None
                rendered[at] = found
            if _joined(literals, rendered) == text:
                return rendered
        return None

    def _answer_text(
        self, place: int, messages: Sequence[Message], marks: Mapping[int, str], marked: str
    ) -> str | None:
        """One answer as the template renders it between the marks of all others."""
        others = {at: mark for at, mark in marks.items() if at != place}
        text = self._render(_replaced(messages, others))
        head, _, tail = marked.partition(marks[place])
        if not text.startswith(head) or not text[len(head) :].endswith(tail):
            return None
        return text[len(head) : len(text) - len(tail)]

    # -- token ids ----------------------------------------------------------------------------

    def _cut(self, answer: Answer, rendered: str) -> Sequence[int]:
        """The ids of the rendered part of an answer: the generated ones as far as they fit."""
        ids = answer.said_ids
        spoken = self._tokenizer.decode(ids)
        if _is_same(spoken, rendered):
            return ids
        is_whole = _is_same(answer.text, rendered)
        wanted = answer.text if is_whole else rendered
        is_head = is_whole and spoken.startswith(wanted)  # cut by a stop string
        start = 0 if is_head else spoken.rfind(wanted)
        first = self._boundary(ids, start) if start >= 0 else 0
        if start < 0 or self._tokenizer.decode(ids[:first]) != spoken[:start]:
            return self._tokenizer.encode_more(rendered)
        end = start + len(wanted)
        last = self._boundary(ids, end)
        while last > first and not spoken[:end].startswith(self._tokenizer.decode(ids[:last])):
            last -= 1  # inside a character
        rest = spoken[len(self._tokenizer.decode(ids[:last])) : end]
        return [*ids[first:last], *(self._tokenizer.encode_more(rest) if rest else [])]

    def _boundary(self, ids: Sequence[int], length: int) -> int:
        """The most tokens whose text has at most `length` characters. O(log n) decodings."""
        counts = range(1, len(ids) + 1)
        return bisect_right(counts, length, key=lambda one: len(self._tokenizer.decode(ids[:one])))


def _is_same(text: str, rendered: str) -> bool:
    """Whether a template that trims white space renders the whole text."""
    return text.strip() == rendered.strip()


def _marks(text: str, count: int) -> list[str]:
    """Words that stand for answers and do not occur in `text`."""
    word = "answer"
    while f"[{word} " in text:
        word += "r"
    return [f"[{word} {number}]" for number in range(count)]


def _replaced(messages: Sequence[Message], contents: Mapping[int, str]) -> list[Message]:
    return [
        {**message, "content": contents[at]} if at in contents else message
        for at, message in enumerate(messages)
    ]


def _split(marked: str, marks: Sequence[str]) -> list[str] | None:
    """The template's text before, between and after the marks; None if they do not occur once
    each and in order."""
    literals = []
    for mark in marks:
        head, found, marked = marked.partition(mark)
        if not found:
            return None
        literals.append(head)
    literals.append(marked)
    return None if any(mark in literal for mark in marks for literal in literals) else literals


def _joined(literals: Sequence[str], between: Mapping[int, str]) -> str:
    """The literals with a text between each two, in order of its place."""
    texts = [*(between[at] for at in sorted(between)), ""]
    return "".join(part for pair in zip(literals, texts, strict=True) for part in pair)
