"""`OutputParserConfigs`: which parsers read a model's answers."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping
from functools import partial

from radixserve.server import reasoning
from radixserve.server.errors import ApiError
from radixserve.server.output_parser import OutputParserConfig, new_call_id
from radixserve.server.tool_grammar import annotated_schema, tool_grammar
from radixserve.server.tool_parsers import hermes, llama3, mistral
from radixserve.server.tool_parsers.calls import ToolParser
from radixserve.server.tools import Tools
from radixserve.structured_output import StructuredOutput
from radixserve.text.tokenizer import Tokenizer

_THINKING = (reasoning.OPEN, reasoning.CLOSE)
_MARKS = {
    "hermes": (hermes.OPEN, hermes.CLOSE),
    "llama3": (llama3.TAG,),
    "mistral": (mistral.OPEN, mistral.CALL_ID, mistral.ARGS),
    "none": (),
}
# Tags of templates whose calls look like those of Hermes and are none.
_UNSUPPORTED_TAGS = ("<function=", "<arg_key>", "<parameter=")
_ALPHANUMERIC = string.ascii_letters + string.digits


class OutputParserConfigs:
    """How the answers of one model are parsed."""

    def __init__(self, tokenizer: Tokenizer | None, tool_parser: str, reasoning: str) -> None:
        """`tool_parser` and `reasoning`: as in ServerConfig; "auto" takes what the tokenizer's chat
        template shows."""
        template = "" if tokenizer is None else str(tokenizer.facts()["chat_template"] or "")
        self.tool_parser = shown_parser(template) if tool_parser == "auto" else tool_parser
        self._has_args = mistral.ARGS in template
        knows_think = any(tag in template for tag in _THINKING)
        self.has_reasoning = knows_think if reasoning == "auto" else reasoning == "think"
        self._special = {} if tokenizer is None else _special_marks(tokenizer)

    def config(
        self,
        tools: Tools,
        prompt: str,
        *,
        structured: StructuredOutput | None,
        keeps_special: bool,
    ) -> OutputParserConfig:
        """How the answers to a prompt's text are read.

        structured     the client's own constraint on the answer. JSON may come after a thought, and
                       tools may be called instead; other constraints begin with the first token
        keeps_special  the client wants to see special tokens

        Raises ApiError where calls cannot be read.
        """
        parser = self.tool_parser if tools.may_call else "none"
        if tools.choice == "auto" and parser == "none":
            raise ApiError(
                400,
                "tool_choice auto needs a format of calls that the server can parse, and the "
                "model's chat template shows none: give tool_choice, or start the server with "
                "--tool-call-parser",
                param="tools",
            )
        if tools.must_call and structured is not None:
            raise ApiError(
                400,
                "tool_choice must be auto or none where response_format or structured_outputs "
                "constrains the answer",
                param="tool_choice",
            )
        if tools.must_call and parser == "none":
            parser = "llama3"  # whose calls are plain JSON
        marks = (*_MARKS[parser], *(_THINKING if self.has_reasoning else ()))
        special = {mark: self._special[mark] for mark in marks if mark in self._special}
        schema = None if structured is None else annotated_schema(structured)
        is_thinking = prompt.rstrip().endswith(reasoning.OPEN)
        is_thinking = is_thinking and (structured is None or schema is not None)
        grammar = None
        if tools.must_call or (schema is not None and (tools.may_call or self.has_reasoning)):
            opened = "open" if is_thinking else "may"
            functions = tools.functions if tools.may_call else ()
            grammar = tool_grammar(
                "mistral-args" if parser == "mistral" and self._has_args else parser,
                [one for one in functions if tools.name in (None, one["name"])],
                special,
                parallel=tools.parallel and tools.choice != "named",
                thinking=opened if self.has_reasoning else "none",
                schema=schema,
            )
        return OutputParserConfig(
            calls=_makers(tools).get(parser),
            grammar=grammar,
            reasoning=self.has_reasoning,
            is_thinking=is_thinking,
            keep_special_ids=tuple(special.values()),
            hidden=() if keeps_special else tuple(special),
            max_calls=None if tools.parallel else 1,
            new_id=_nine_characters if parser == "mistral" else new_call_id,
        )


def shown_parser(template: str) -> str:
    """The name of the parser for the calls that a chat template renders."""
    if any(tag in template for tag in _UNSUPPORTED_TAGS):
        return "none"
    if mistral.OPEN in template:
        return "mistral"
    if hermes.OPEN in template:
        return "hermes"
    is_llama = "<|start_header_id|>" in template and '"parameters"' in template
    return "llama3" if llama3.TAG in template or is_llama else "none"


def _makers(tools: Tools) -> Mapping[str, Callable[[], ToolParser]]:
    names = frozenset(one["name"] for one in tools.functions)
    return {
        "hermes": hermes.HermesParser,
        "llama3": partial(llama3.Llama3Parser, names),
        "mistral": mistral.MistralParser,
    }


def _special_marks(tokenizer: Tokenizer) -> dict[str, int]:
    """The marks that are special tokens, with their ids."""
    known = {mark for marks in _MARKS.values() for mark in marks} | set(_THINKING)
    texts = {tokenizer.decode([one], keep_special=True): one for one in tokenizer.special_ids}
    return {text: token_id for text, token_id in texts.items() if text in known}


def _nine_characters() -> str:
    """What Mistral's templates take for an id."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
