"""STYLES: how each family of models writes tool calls: its parser, its marks, its grammar.

The parsers are in `tool_parsers/`: `json_calls.py` (Hermes, Qwen, Llama 3, Mistral, Granite,
DeepSeek, Kimi), `tagged_calls.py` (Qwen3-Coder, GLM, Gemma), `pythonic_calls.py` (LFM2) and
`harmony.py` (gpt-oss). To add a style, add an entry here and its name to
`server.config.TOOL_CALL_PARSERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from radixserve.server.answer.tool_parsers import (
    harmony,
    json_calls,
    pythonic_calls,
    tagged_calls,
)
from radixserve.server.answer.tool_parsers.base import ToolParser

Functions = Sequence[Mapping[str, Any]]
NAME, JSON_NAME, ARGUMENTS, INDEX = "the name", "the name in quotes", "the arguments", "a number"
_OBJECT = ('{"name": ', JSON_NAME, ', "arguments": ', ARGUMENTS, "}")
_DEEPSEEK = {
    word: f"<\uff5ctool\u2581{word.replace(' ', chr(0x2581))}\uff5c>"
    for word in ("calls begin", "calls end", "call begin", "call end", "sep")
}
_BEGIN, _END, _SEP = _DEEPSEEK["call begin"], _DEEPSEEK["call end"], _DEEPSEEK["sep"]
_AROUND_DEEPSEEK = (_DEEPSEEK["calls begin"], _DEEPSEEK["calls end"])
_AROUND_KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_KIMI_BEGIN, _KIMI_ARGUMENTS = json_calls.KIMI.opening, "<|tool_call_argument_begin|>"


class ToolStyle(NamedTuple):
    """How a family of models writes tool calls.

    make      makes the parser of one answer, for the given functions
    marks     the texts that the parser recognises
    around    texts before and after all calls, which are removed from the answer
    call      grammar of one call, as pieces; NAME, JSON_NAME, ARGUMENTS and INDEX are replaced
    between   pieces between two calls
    head      pieces before the first call
    tail      pieces after the last call
    notation  of the arguments: "json", "function", "glm", "gemma4", "function-gemma" or "pythonic"
    thought   pieces that open and close reasoning, if the style has its own
    answer    pieces before an answer in JSON of the client's schema
    """

    make: Callable[[Functions], ToolParser]
    marks: tuple[str, ...]
    call: Sequence[str]
    between: Sequence[str] = ()
    head: Sequence[str] = ()
    tail: Sequence[str] = ()
    around: tuple[str, ...] = ()
    notation: str = "json"
    thought: tuple[Sequence[str], Sequence[str]] | None = None
    answer: Sequence[str] = ()


def _schemas(functions: Functions) -> dict[str, Mapping[str, Any]]:
    return {function["name"]: function.get("parameters") or {} for function in functions}


def _gemma(marks: tagged_calls.GemmaMarks, notation: str) -> ToolStyle:
    return ToolStyle(
        lambda _: tagged_calls.GemmaParser(marks),
        tuple(marks),
        (marks.opening, "call:", NAME, ARGUMENTS, marks.closing),
        notation=notation,
    )


_HERMES = ToolStyle(
    lambda _: json_calls.HermesParser(),
    (json_calls.HERMES_OPEN, json_calls.HERMES_CLOSE),
    (json_calls.HERMES_OPEN, "\n", *_OBJECT, "\n", json_calls.HERMES_CLOSE),
    ("\n",),
)
STYLES: dict[str, ToolStyle] = {
    "hermes": _HERMES,
    "generic": _HERMES,  # for templates without a place for tools
    "llama3": ToolStyle(
        lambda functions: json_calls.Llama3Parser({f["name"] for f in functions}),
        (json_calls.LLAMA_TAG,),
        ('{"name": ', JSON_NAME, ', "parameters": ', ARGUMENTS, "}"),
        ("; ",),
    ),
    "mistral": ToolStyle(
        lambda _: json_calls.MistralParser(),
        (json_calls.MISTRAL_OPEN, json_calls.CALL_ID, json_calls.ARGS),
        _OBJECT,
        (", ",),
        (json_calls.MISTRAL_OPEN, "["),
        ("]",),
    ),
    "mistral-args": ToolStyle(
        lambda _: json_calls.MistralParser(),
        (json_calls.MISTRAL_OPEN, json_calls.CALL_ID, json_calls.ARGS),
        (json_calls.MISTRAL_OPEN, NAME, json_calls.ARGS, ARGUMENTS),
    ),
    "granite": ToolStyle(
        lambda _: json_calls.GraniteParser(),
        (json_calls.GRANITE_OPEN,),
        _OBJECT,
        (", ",),
        (json_calls.GRANITE_OPEN, "["),
        ("]",),
    ),
    "deepseek-v3": ToolStyle(
        lambda _: json_calls.FramedParser(json_calls.DEEPSEEK),
        (_BEGIN, _SEP, _END),
        (_BEGIN, "function", _SEP, NAME, "\n```json\n", ARGUMENTS, "\n```", _END),
        ("\n",),
        _AROUND_DEEPSEEK[:1],
        _AROUND_DEEPSEEK[1:],
        around=_AROUND_DEEPSEEK,
    ),
    "deepseek-v3.1": ToolStyle(
        lambda _: json_calls.FramedParser(json_calls.DEEPSEEK),
        (_BEGIN, _SEP, _END),
        (_BEGIN, NAME, _SEP, ARGUMENTS, _END),
        (),
        _AROUND_DEEPSEEK[:1],
        _AROUND_DEEPSEEK[1:],
        around=_AROUND_DEEPSEEK,
    ),
    "kimi": ToolStyle(
        lambda _: json_calls.FramedParser(json_calls.KIMI),
        (_KIMI_BEGIN, _KIMI_ARGUMENTS, json_calls.KIMI.closing),
        (_KIMI_BEGIN, "functions.", NAME, ":", INDEX, _KIMI_ARGUMENTS, ARGUMENTS,
         json_calls.KIMI.closing),
        (),
        _AROUND_KIMI[:1],
        _AROUND_KIMI[1:],
        around=_AROUND_KIMI,
    ),
    "qwen3-coder": ToolStyle(
        lambda f: tagged_calls.TaggedParser(tagged_calls.read_function, _schemas(f)),
        (tagged_calls.OPEN, tagged_calls.CLOSE),
        (tagged_calls.OPEN, "\n<function=", NAME, ">\n", ARGUMENTS, "</function>\n",
         tagged_calls.CLOSE),
        ("\n",),
        notation="function",
    ),
    "glm": ToolStyle(
        lambda f: tagged_calls.TaggedParser(tagged_calls.read_glm, _schemas(f)),
        (tagged_calls.OPEN, tagged_calls.CLOSE, "<arg_key>", "</arg_key>", "<arg_value>",
         "</arg_value>"),
        (tagged_calls.OPEN, NAME, "\n", ARGUMENTS, tagged_calls.CLOSE),
        ("\n",),
        notation="glm",
    ),
    "gemma4": _gemma(tagged_calls.GEMMA4, "gemma4"),
    "function-gemma": _gemma(tagged_calls.FUNCTION_GEMMA, "function-gemma"),
    "lfm2": ToolStyle(
        lambda _: pythonic_calls.PythonicParser(),
        (pythonic_calls.OPEN, pythonic_calls.CLOSE),
        (NAME, "(", ARGUMENTS, ")"),
        (", ",),
        (pythonic_calls.OPEN, "["),
        ("]", pythonic_calls.CLOSE),
        notation="pythonic",
    ),
    "harmony": ToolStyle(
        lambda _: harmony.HarmonyParser(),
        harmony.MARKS,
        (harmony.CHANNEL, "commentary to=functions.", NAME, " ", harmony.CONSTRAIN, "json",
         harmony.MESSAGE, ARGUMENTS),
        thought=(
            (harmony.CHANNEL, "analysis", harmony.MESSAGE),
            (harmony.END, harmony.START, "assistant"),
        ),
        answer=(harmony.CHANNEL, "final", harmony.MESSAGE),
    ),
}  # fmt: skip
GEMMA_QUOTES = {
    "gemma4": tagged_calls.GEMMA4.quote,
    "function-gemma": tagged_calls.FUNCTION_GEMMA.quote,
}
# A chat template has a style if it contains all of the style's texts; the first such style counts.
_SHOWN_BY: Sequence[tuple[str, tuple[str, ...]]] = (
    ("harmony", (harmony.CHANNEL, harmony.MESSAGE)),
    ("kimi", _AROUND_KIMI[:1]),
    ("deepseek-v3", (_BEGIN, "```json")),
    ("deepseek-v3.1", (_BEGIN,)),
    ("gemma4", (tagged_calls.GEMMA4.opening, tagged_calls.GEMMA4.closing)),
    ("function-gemma", (tagged_calls.FUNCTION_GEMMA.opening,)),
    ("lfm2", (pythonic_calls.OPEN, pythonic_calls.CLOSE)),
    ("glm", ("<arg_key>",)),
    ("qwen3-coder", ("<function=", "<parameter=")),
    ("granite", (json_calls.GRANITE_OPEN,)),
    ("mistral-args", (json_calls.MISTRAL_OPEN, json_calls.ARGS)),
    ("mistral", (json_calls.MISTRAL_OPEN,)),
    ("hermes", (json_calls.HERMES_OPEN,)),
    ("llama3", (json_calls.LLAMA_TAG,)),
    ("llama3", ("<|start_header_id|>", '"parameters"')),
)


def shown_style(template: str) -> str:
    """The style of the calls in a chat template; "generic" if it has none of the known styles."""
    for style, texts in _SHOWN_BY:
        if all(text in template for text in texts):
            return style
    return "generic"
