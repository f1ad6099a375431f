"""`OutputParserConfigs`: chooses the parsers and the tool grammar for a model's answers."""

from __future__ import annotations

import json
import secrets
import string
from functools import partial

from radixserve.errors import InvalidRequest
from radixserve.server.answer.output_parser import (
    OutputParser,
    OutputParserConfig,
    new_call_id,
)
from radixserve.server.answer.reasoning import THOUGHTS, shown_thoughts
from radixserve.server.answer.tool_choice import ChatTools
from radixserve.server.answer.tool_grammar import annotated_schema, text_terminal, tool_grammar
from radixserve.server.answer.tool_parsers.json_calls import ARGS
from radixserve.server.answer.tool_styles import STYLES, shown_style
from radixserve.server.wire.errors import ApiError, invalid
from radixserve.structured_outputs import StructuredOutput
from radixserve.text.content_marks import unmarked
from radixserve.text.tokenizer import Tokenizer

_PROBE = "find_weather"  # the function of a call that tests a template
_MOST_SHARED = 32  # characters, such as "<|" of "<|think|>"
_ALPHANUMERIC = string.ascii_letters + string.digits


class OutputParserConfigs:
    """The parsers of one model's answers: of tool calls, by name, and of reasoning."""

    def __init__(self, tokenizer: Tokenizer | None, tool_parser: str, reasoning: str) -> None:
        """`tool_parser` and `reasoning`: `tool_call_parser` and `reasoning_parser` of ServerConfig;
        "auto" chooses by the tokenizer's chat template."""
        template = "" if tokenizer is None else str(tokenizer.facts()["chat_template"] or "")
        self.tool_parser = tool_parser
        self.choice = tool_parser  # of the tool parser, with its reason, for the log
        if tool_parser == "auto":
            self.tool_parser = shown_style(template)
            reason = "the form of the chat template"
            if tokenizer is not None and template and not tokenizer.traits().has_tools:
                self.tool_parser = "generic"
                reason = "the chat template leaves out tools, calls or results"
            elif self.tool_parser == "generic":
                reason = "the chat template's own form is not known"
            elif tokenizer is not None and not _reads_calls(self.tool_parser, tokenizer):
                reason = f"the chat template's calls are not in the form {self.tool_parser}"
                self.tool_parser = "generic"
            self.choice = f"{self.tool_parser} ({reason})"
        elif tool_parser == "mistral" and ARGS in template:
            self.tool_parser = "mistral-args"
        self._is_harmony = self.tool_parser == "harmony" or shown_style(template) == "harmony"
        if reasoning == "auto":
            reasoning = "none" if self._is_harmony else shown_thoughts(template)
        self.thoughts = THOUGHTS.get(reasoning)  # None: reasoning is not parsed, or by `harmony`
        self._special = {} if tokenizer is None else _special_marks(tokenizer)

    def config(
        self,
        tools: ChatTools,
        prompt: str,
        *,
        structured_outputs: StructuredOutput | None,
        keeps_special: bool,
    ) -> OutputParserConfig:
        """How the answers to a request are parsed.

        prompt              the prompt's text, which may end with the mark that opens reasoning
        structured_outputs  the client's own constraint. It begins after reasoning, except a
                            grammar, which applies from the first token. Tools may be called instead
                            of an answer in JSON
        keeps_special       keep special tokens in the answer

        Raises ApiError if the constraint and the tool choice exclude each other, or a schema of the
        tools cannot be enforced.
        """
        parser = self.tool_parser if tools.may_call else "none"
        if tools.must_call and structured_outputs is not None:
            raise ApiError(
                400,
                "tool_choice must be auto or none where response_format or structured_outputs "
                "constrains the answer",
                param="tool_choice",
            )
        if tools.must_call and parser == "none":
            parser = "llama3"  # its calls are plain JSON
        if parser == "none" and self._is_harmony:
            parser = "harmony"  # answers have channels without tools, too
        style = STYLES.get(parser)
        marks = () if style is None else (*style.marks, *style.around)
        marks += () if self.thoughts is None else self.thoughts[:2]
        special = {mark: self._special[mark] for mark in marks if mark in self._special}
        schema = None if structured_outputs is None else annotated_schema(structured_outputs)
        is_thinking = self.thoughts is not None and prompt.rstrip().endswith(self.thoughts.head)
        text = None if structured_outputs is None else text_terminal(structured_outputs)
        has_form = schema is not None or text is not None
        is_thinking = is_thinking and (structured_outputs is None or has_form)
        thinks = self.thoughts is not None or parser == "harmony"
        may_speak = parser == "generic" and tools.choice == "auto" and structured_outputs is None
        grammar = None
        calls_or_json = schema is not None and tools.may_call
        if tools.must_call or may_speak or calls_or_json or (has_form and thinks):
            opened = "open" if is_thinking else "may"
            functions = tools.functions if tools.may_call and text is None else ()
            try:
                grammar = tool_grammar(
                    parser if style is not None else "hermes",
                    [f for f in functions if tools.name in (None, f["name"])],
                    special,
                    parallel=tools.parallel and tools.choice != "named",
                    thinking=opened if thinks else "none",
                    thoughts=self.thoughts,
                    schema=schema,
                    text=text,
                    may_speak=may_speak,
                )
            except InvalidRequest as error:
                raise invalid(error, param="tools") from None
        own = STYLES.get(self.tool_parser)
        hidden = () if own is None else own.around
        return OutputParserConfig(
            calls=None if style is None else partial(style.make, tools.functions),
            call_marks=() if style is None else style.certain,
            grammar=grammar,
            thoughts=self.thoughts,
            is_thinking=is_thinking,
            keep_special_ids=tuple(special.values()),
            hidden=() if keeps_special else tuple(dict.fromkeys((*special, *hidden))),
            max_calls=None if tools.parallel else 1,
            has_only_calls=tools.must_call,
            new_id=_nine_characters if parser.startswith("mistral") else new_call_id,
        )


def _reads_calls(style: str, tokenizer: Tokenizer) -> bool:
    """Whether the style's parser finds a call that the chat template wrote."""
    traits = tokenizer.traits()
    if traits.has_listed_calls:
        return True  # the server writes these calls, not the template
    arguments = {"days": 3}
    days = {"type": "integer", "description": "-"}
    schema = {"type": "object", "properties": {"days": days}}
    function = {"name": _PROBE, "description": "-", "parameters": schema}
    config = OutputParserConfig(
        calls=partial(STYLES[style].make, [function]), hidden=STYLES[style].around
    )
    tools = [{"type": "function", "function": function}]
    question = {"role": "user", "content": "Why?"}
    for call_id in (_nine_characters(), f"functions.{_PROBE}:0"):  # a template may render ids alone
        call = {"name": _PROBE, "arguments": arguments}
        calls = [{"id": call_id, "type": "function", "function": call}]
        answer = {"role": "assistant", "content": "", "tool_calls": calls}
        try:
            prompt = tokenizer.render_chat([question], tools=tools)
            text = tokenizer.render_chat(
                [question, answer], tools=tools, add_generation_prompt=False
            )
        except InvalidRequest:
            continue
        pairs = enumerate(zip(prompt, text, strict=False))
        shared = next((at for at, (ours, theirs) in pairs if ours != theirs), len(prompt))
        # The generation prompt may end with the call's first characters.
        for start in range(shared, max(shared - _MOST_SHARED, 0), -1):
            found = OutputParser(config).parse_all(unmarked(text[start:])).tool_calls
            if [(call.name, json.loads(call.arguments)) for call in found] == [(_PROBE, arguments)]:
                return True
    return False


def _special_marks(tokenizer: Tokenizer) -> dict[str, int]:
    """The marks of all styles that are special tokens of the tokenizer, with their ids."""
    known = {mark for style in STYLES.values() for mark in (*style.marks, *style.around)}
    known.update(mark for thoughts in THOUGHTS.values() for mark in thoughts[:2])
    texts = {tokenizer.decode([token], keep_special=True): token for token in tokenizer.special_ids}
    return {text: token for text, token in texts.items() if text in known}


def _nine_characters() -> str:
    """A call id in the form that Mistral's templates require."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
