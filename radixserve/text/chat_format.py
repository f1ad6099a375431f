"""`ChatFormat`: turns a conversation into token ids, for `ChatSession`.

Answers keep their generated token ids. The text that the chat template puts between them is
tokenised. Tool calls of an answer are not read here, see server/answer/tool_styles.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from radixserve.text.chat_options import ChatOptions
from radixserve.text.conversations import Answer, is_same
from radixserve.text.template_traits import Message
from radixserve.text.tokenizer import Tokenizer


class ChatFormat:
    """Turns messages into token ids with a chat template. Caches the pieces of the last call."""

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
        """Returns the ids of the conversation up to the generation prompt, and whether the template
        renders the last answer unchanged. `answers`: by the index of their message.

        An answer keeps its generated ids, even if the template renders only a part of it. The text
        between answers is tokenised in the same pieces in every turn. If the rendered answers
        cannot be located, the whole text is tokenised again. Raises InvalidRequest if the template
        refuses the messages.
        """
        text, places = self._render(messages), sorted(answers)
        self._tokenizer.check_own_roles(messages, text, self._render)
        marks = dict(zip(places, _marks(text, len(places)), strict=True))
        marked = self._render(_replaced(messages, marks))
        literals = _split(marked, list(marks.values()))
        given = {index: self._tokenizer.mark_answer(answers[index].text) for index in places}
        rendered = None
        if literals is not None:
            rendered = self._answer_texts(messages, given, marks, marked, literals, text)
        if literals is None or rendered is None:
            return self._tokenizer.encode_rendered(text), False
        self._literal_ids = {
            literal: self._literal_ids.get(literal) or self._tokenizer.encode_rendered(literal)
            for literal in literals
        }
        keys = [(answers[index], rendered[index]) for index in places]
        self._answer_ids = {
            (answer, text): self._answer_ids.get((answer, text))
            or answer.ids_as_rendered(self._tokenizer, text)
            for answer, text in keys
        }
        self._rendered = {given[index]: rendered[index] for index in places}
        ids = list(self._literal_ids[literals[0]])
        for key, literal in zip(keys, literals[1:], strict=True):
            ids += [*self._answer_ids[key], *self._literal_ids[literal]]
        return ids, not places or is_same(given[places[-1]], rendered[places[-1]])

    # -- text ---------------------------------------------------------------------------------

    def _render(self, messages: Sequence[Message]) -> str:
        how = self._options
        return self._tokenizer.render_chat(
            messages,
            template=how.template,
            tools=how.tools,
            variables=how.template_kwargs,
            now=how.now,
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
        """Returns each answer as the template renders it, by index; None if `text` does not consist
        of `literals` with these answers between them."""
        if _joined(literals, given) == text:
            return given
        for known in (self._rendered, {}):
            rendered: dict[int, str] = {}
            for index in marks:
                answer_text = known.get(given[index])
                if answer_text is None:
                    answer_text = self._answer_text(index, messages, marks, marked)
                if answer_text is None:
                    return None
                rendered[index] = answer_text
            if _joined(literals, rendered) == text:
                return rendered
        return None

    def _answer_text(
        self, place: int, messages: Sequence[Message], marks: Mapping[int, str], marked: str
    ) -> str | None:
        """Returns one answer as the template renders it among the marks of the others; None if it
        cannot be located."""
        others = {index: mark for index, mark in marks.items() if index != place}
        text = self._render(_replaced(messages, others))
        head, _, tail = marked.partition(marks[place])
        if not text.startswith(head) or not text[len(head) :].endswith(tail):
            return None
        return text[len(head) : len(text) - len(tail)]


def _marks(text: str, count: int) -> list[str]:
    """Returns `count` placeholders for answers, which do not occur in `text`."""
    word = "answer"
    while f"[{word} " in text:
        word += "r"
    return [f"[{word} {number}]" for number in range(count)]


def _replaced(messages: Sequence[Message], contents: Mapping[int, str]) -> list[Message]:
    return [
        {**message, "content": contents[index]} if index in contents else message
        for index, message in enumerate(messages)
    ]


def _split(marked: str, marks: Sequence[str]) -> list[str] | None:
    """Returns the template's text before, between and after the marks; None if they do not occur
    once each and in order."""
    literals = []
    for mark in marks:
        head, separator, marked = marked.partition(mark)
        if not separator:
            return None
        literals.append(head)
    literals.append(marked)
    return None if any(mark in literal for mark in marks for literal in literals) else literals


def _joined(literals: Sequence[str], between: Mapping[int, str]) -> str:
    """Returns the literals joined with the texts of `between`, in order of their index."""
    texts = [*(between[index] for index in sorted(between)), ""]
    return "".join(part for pair in zip(literals, texts, strict=True) for part in pair)
