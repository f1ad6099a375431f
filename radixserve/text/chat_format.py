"""A conversation as token ids: what was generated stays, the rest is the template's text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from radixserve.text.tokenizer import Tokenizer

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model said in one turn."""

    text: str
    token_ids: tuple[int, ...]  # as generated
    has_end: bool  # the last of them is an end token, which is not part of the text

    @property
    def said_ids(self) -> tuple[int, ...]:
        return self.token_ids[:-1] if self.has_end else self.token_ids


class ChatFormat:
    """Turns messages into token ids with a chat template; remembers what it tokenised last."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """`template`: Jinja, None is the tokenizer's own. `tools`: JSON schemas of functions."""
        self.template = template
        self.tools = None if tools is None else [dict(tool) for tool in tools]
        self._tokenizer = tokenizer
        self._encoded: dict[str, list[int]] = {}
        self._shown: dict[str, str] = {}  # an answer's text -> what the template makes of it
        self._kept: dict[tuple[Answer, str], Sequence[int]] = {}  # and the ids of that

    def lay_out(
        self, messages: Sequence[Message], answers: Mapping[int, Answer]
    ) -> tuple[list[int], bool]:
        """The ids of the conversation up to where the assistant is to speak, and whether the last
        of the `answers`, which come by the index of their message, stands in it as it was given.

        Their own ids are used, also where the template keeps only a part of one; the text between
        them is tokenised piece by piece, always in the same pieces. Only where the template treats
        the conversation in ways that cannot be followed all of it is tokenised anew. Raises
        InvalidRequest where the template refuses the messages.
        """
        text, places = self._render(messages), sorted(answers)
        marks = dict(zip(places, _marks(text, len(places)), strict=True))
        literals = self._literals(messages, marks)
        shown = None if literals is None else self._texts(messages, answers, marks, literals, text)
        if literals is None or shown is None:
            return self._tokenizer.encode_more(text), False
        self._encoded = {literal: self._encode(literal) for literal in literals}
        self._kept = {(answers[at], shown[at]): self._ids(answers[at], shown[at]) for at in places}
        self._shown = {answers[at].text: shown[at] for at in places}
        ids = list(self._encoded[literals[0]])
        for at, literal in zip(places, literals[1:], strict=True):
            ids += [*self._kept[answers[at], shown[at]], *self._encoded[literal]]
        return ids, not places or _is_same(answers[places[-1]].text, shown[places[-1]])

    # -- text ---------------------------------------------------------------------------------

    def _render(self, messages: Sequence[Message]) -> str:
        return self._tokenizer.render_chat(messages, template=self.template, tools=self.tools)

    def _literals(self, messages: Sequence[Message], marks: Mapping[int, str]) -> list[str] | None:
        """The template's text before, between and behind the answers, seen around marks in their
        places; None if they are not each rendered once and in order."""
        rest, literals = self._render(_replaced(messages, marks)), []
        for mark in marks.values():
            head, found, rest = rest.partition(mark)
            if not found:
                return None
            literals.append(head)
        literals.append(rest)
        is_twice = any(mark in literal for mark in marks.values() for literal in literals)
        return None if is_twice else literals

    def _texts(
        self,
        messages: Sequence[Message],
        answers: Mapping[int, Answer],
        marks: Mapping[int, str],
        literals: Sequence[str],
        text: str,
    ) -> dict[int, str] | None:
        """What the template makes of each answer; None if that does not add up to `text`."""
        given = {at: answer.text for at, answer in answers.items()}
        if _joined(literals, given) == text:
            return given
        for known in (self._shown, {}):
            shown = {}
            for at in marks:
                found = known.get(given[at])
                if found is None:
                    found = self._shown_at(at, messages, marks, literals)
                if found is None:
                    return None
                shown[at] = found
            if _joined(literals, shown) == text:
                return shown
        return None

    def _shown_at(
        self,
        place: int,
        messages: Sequence[Message],
        marks: Mapping[int, str],
        literals: Sequence[str],
    ) -> str | None:
        """What the template makes of one answer, seen between the marks of all others."""
        others = {at: mark for at, mark in marks.items() if at != place}
        text = self._render(_replaced(messages, others))
        before = {at: mark for at, mark in others.items() if at < place}
        behind = {at: mark for at, mark in others.items() if at > place}
        head = _joined(literals[: len(before) + 1], before)
        tail = _joined(literals[len(before) + 1 :], behind)
        if not text.startswith(head) or not text[len(head) :].endswith(tail):
            return None
        return text[len(head) : len(text) - len(tail)]

    # -- token ids ----------------------------------------------------------------------------

    def _encode(self, text: str) -> list[int]:
        found = self._encoded.get(text)
        return self._tokenizer.encode_more(text) if found is None else found

    def _ids(self, answer: Answer, shown: str) -> Sequence[int]:
        found = self._kept.get((answer, shown))
        return self._cut(answer, shown) if found is None else found

    def _cut(self, answer: Answer, shown: str) -> Sequence[int]:
        """The generated ids of the part of an answer that is shown, as far as they can be had."""
        ids = answer.said_ids
        spoken = self._tokenizer.decode(ids)
        if _is_same(spoken, shown):
            return ids
        wanted = answer.text if _is_same(answer.text, shown) else shown
        is_head = spoken.startswith(wanted) and _is_same(answer.text, shown)  # cut by a stop string
        start = 0 if is_head else spoken.rfind(wanted)
        first = self._boundary(ids, start) if start >= 0 else 0
        if start < 0 or self._tokenizer.decode(ids[:first]) != spoken[:start]:
            return self._tokenizer.encode_more(shown)
        end = start + len(wanted)
        last = self._boundary(ids, end)
        while last > first and not spoken[:end].startswith(self._tokenizer.decode(ids[:last])):
            last -= 1  # inside a character
        rest = spoken[len(self._tokenizer.decode(ids[:last])) : end]
        return [*ids[first:last], *(self._tokenizer.encode_more(rest) if rest else [])]

    def _boundary(self, ids: Sequence[int], length: int) -> int:
        """The most tokens whose text has at most `length` characters. O(log n) decodings."""
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high + 1) // 2
            if len(self._tokenizer.decode(ids[:middle])) <= length:
                low = middle
            else:
                high = middle - 1
        return low


def _is_same(text: str, shown: str) -> bool:
    """Whether a template that trims white space shows the whole text."""
    return text.strip() == shown.strip()


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


def _joined(literals: Sequence[str], between: Mapping[int, str]) -> str:
    """The literals with a text between each two, in order of its place."""
    texts = [between[at] for at in sorted(between)]
    parts = [part for pair in zip(literals, texts, strict=False) for part in pair]
    return "".join([*parts, *literals[len(texts) :]])
