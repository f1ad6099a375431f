"""STYLES: how each family of models writes tool calls: its parser, its marks, its grammar.

The parsers are in `tool_parsers/`: `json_calls.py` (Hermes, Qwen, Llama 3, Mistral, Granite,
Command R, Nemotron, Hunyuan, DeepSeek, Kimi), `tagged_calls.py` (Qwen3-Coder, MiniMax,
DeepSeek V3.2, GLM, Gemma), `pythonic_calls.py` (LFM2, Olmo 3) and `harmony.py` (gpt-oss). To add a
style, add an entry here and its name to `server.config.TOOL_CALL_PARSERS`.
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
(_KIMI_END,) = json_calls.KIMI.closings
_DSML = "\uff5cDSML\uff5c"


class ToolStyle(NamedTuple):
    """How a family of models writes tool calls.

    make      makes the parser of one answer, for the given functions
    marks     the texts that the parser recognises
    around    texts before and after all calls, which are removed from the answer
    certain   marks that can only be calls: they end reasoning
    call      grammar of one call, as pieces; NAME, JSON_NAME, ARGUMENTS and INDEX are replaced
    between   pieces between two calls
    head      pieces before the first call
    tail      pieces after the last call
    notation  of the arguments: "json", or a notation of tool_grammar.py
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
    certain: tuple[str, ...] = ()
    notation: str = "json"
    thought: tuple[Sequence[str], Sequence[str]] | None = None
    answer: Sequence[str] = ()


def _schemas(functions: Functions) -> dict[str, Mapping[str, Any]]:
    return {function["name"]: function.get("parameters") or {} for function in functions}


def _gemma(marks: tagged_calls.GemmaMarks, notation: str) -> ToolStyle:
    return ToolStyle(
        lambda functions: tagged_calls.GemmaParser(marks, _schemas(functions)),
        tuple(marks),
        (marks.opening, "call:", NAME, ARGUMENTS, marks.closing),
        certain=(marks.opening,),
        notation=notation,
    )


def _list(opening: str, closing: str = "", **more: Any) -> ToolStyle:
    """A list of JSON objects after a mark, and before another if there is `closing`."""
    is_text = bool(closing)
    marks = (opening, closing) if closing else (opening,)
    return ToolStyle(
        lambda _: json_calls.JsonParser((opening,), closing, is_closed=is_text),
        marks,
        _OBJECT,
        (", ",),
        (opening, "["),
        ("]", *marks[1:]),
        certain=() if is_text else (opening,),
        **more,
    )


def _tagged(tags: tagged_calls.Tags, *marks: str, notation: str) -> ToolStyle:
    """Calls between tags, all in a block. `marks`: those that may be special tokens."""
    return ToolStyle(
        lambda functions: tagged_calls.TaggedParser(tags, _schemas(functions)),
        marks,
        (f'{tags.call_head}"', NAME, '">\n', ARGUMENTS, f"{tags.call_end}\n"),
        head=(tags.block, "\n"),
        tail=(tags.block_end,),
        notation=notation,
    )


def _deepseek(*call: str, between: Sequence[str]) -> ToolStyle:
    return ToolStyle(
        lambda functions: json_calls.FramedParser(
            json_calls.DEEPSEEK, json_calls.deepseek_bare(_schemas(functions))
        ),
        (_BEGIN, _SEP, _END),
        call,
        between,
        _AROUND_DEEPSEEK[:1],
        _AROUND_DEEPSEEK[1:],
        around=_AROUND_DEEPSEEK,
        certain=(_AROUND_DEEPSEEK[0], _BEGIN),
    )


_HERMES = ToolStyle(
    lambda _: json_calls.JsonParser(
        (json_calls.HERMES_OPEN,), json_calls.HERMES_CLOSE, is_closed=True
    ),
    (json_calls.HERMES_OPEN, json_calls.HERMES_CLOSE),
    (json_calls.HERMES_OPEN, "\n", *_OBJECT, "\n", json_calls.HERMES_CLOSE),
    ("\n",),
)
_MISTRAL = ToolStyle(
    lambda functions: json_calls.MistralParser(_schemas(functions)),
    (json_calls.MISTRAL_OPEN, json_calls.CALL_ID, json_calls.ARGS),
    _OBJECT,
    (", ",),
    (json_calls.MISTRAL_OPEN, "["),
    ("]",),
    certain=(json_calls.MISTRAL_OPEN,),
)
STYLES: dict[str, ToolStyle] = {
    "hermes": _HERMES,
    "generic": _HERMES,  # for templates without a place for tools
    "llama3": ToolStyle(
        lambda functions: json_calls.Llama3Parser(_schemas(functions)),
        (json_calls.LLAMA_TAG,),
        ('{"name": ', JSON_NAME, ', "parameters": ', ARGUMENTS, "}"),
        ("; ",),
        certain=(json_calls.LLAMA_TAG,),
    ),
    "mistral": _MISTRAL,
    "mistral-args": _MISTRAL._replace(
        call=(json_calls.MISTRAL_OPEN, NAME, json_calls.ARGS, ARGUMENTS),
        between=(),
        head=(),
        tail=(),
    ),
    "granite": _list(json_calls.GRANITE_OPEN),
    "nemotron": _list(json_calls.NEMOTRON_OPEN, json_calls.NEMOTRON_CLOSE),
    "hunyuan": _list(
        json_calls.HUNYUAN_OPEN, json_calls.HUNYUAN_CLOSE, around=("<answer>", "</answer>")
    ),
    "command-r": ToolStyle(
        lambda _: json_calls.JsonParser(json_calls.COMMAND_R_OPEN, "```", is_closed=True),
        (),
        ('    {\n        "tool_name": ', JSON_NAME, ',\n        "parameters": ', ARGUMENTS,
         "\n    }"),
        (",\n",),
        (json_calls.COMMAND_R_OPEN[0], "\n[\n"),
        ("\n]\n```",),
    ),
    "command-r7b": ToolStyle(
        lambda _: json_calls.JsonParser(
            (json_calls.ACTION_OPEN,), json_calls.ACTION_CLOSE, is_closed=False
        ),
        (json_calls.ACTION_OPEN, json_calls.ACTION_CLOSE),
        ('    {"tool_call_id": "', INDEX, '", "tool_name": ', JSON_NAME, ', "parameters": ',
         ARGUMENTS, "}"),
        (",\n",),
        (json_calls.ACTION_OPEN, "[\n"),
        ("\n]", json_calls.ACTION_CLOSE),
        around=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        certain=(json_calls.ACTION_OPEN,),
        answer=("<|START_RESPONSE|>",),
    ),
    "deepseek-v3": _deepseek(
        _BEGIN, "function", _SEP, NAME, "\n```json\n", ARGUMENTS, "\n```", _END, between=("\n",)
    ),
    "deepseek-v3.1": _deepseek(_BEGIN, NAME, _SEP, ARGUMENTS, _END, between=()),
    "deepseek-v3.2": _tagged(tagged_calls.DEEPSEEK_V32, _DSML, notation="deepseek-v3.2"),
    "kimi": ToolStyle(
        lambda functions: json_calls.FramedParser(
            json_calls.KIMI, json_calls.kimi_bare(_schemas(functions))
        ),
        (_KIMI_BEGIN, _KIMI_ARGUMENTS, _KIMI_END),
        (_KIMI_BEGIN, "functions.", NAME, ":", INDEX, _KIMI_ARGUMENTS, ARGUMENTS, _KIMI_END),
        (),
        _AROUND_KIMI[:1],
        _AROUND_KIMI[1:],
        around=_AROUND_KIMI,
        certain=(_AROUND_KIMI[0], _KIMI_BEGIN),
    ),
    "qwen3-coder": ToolStyle(
        lambda functions: tagged_calls.TaggedParser(tagged_calls.CODER, _schemas(functions)),
        (tagged_calls.CODER.block, tagged_calls.CODER.block_end),
        (tagged_calls.CODER.block, "\n<function=", NAME, ">\n", ARGUMENTS, "</function>\n",
         tagged_calls.CODER.block_end),
        ("\n",),
        notation="function",
    ),
    "minimax": _tagged(
        tagged_calls.MINIMAX, tagged_calls.MINIMAX.block, tagged_calls.MINIMAX.block_end,
        notation="minimax",
    ),
    "glm": ToolStyle(
        lambda functions: tagged_calls.TaggedParser(
            tagged_calls.GLM, _schemas(functions), tagged_calls.glm_bare(_schemas(functions))
        ),
        (tagged_calls.GLM.call_head, tagged_calls.GLM.call_end, "<arg_key>", "</arg_key>",
         "<arg_value>", "</arg_value>"),
        (tagged_calls.GLM.call_head, NAME, "\n", ARGUMENTS, tagged_calls.GLM.call_end),
        ("\n",),
        notation="glm",
    ),
    "gemma4": _gemma(tagged_calls.GEMMA4, "gemma4"),
    "function-gemma": _gemma(tagged_calls.FUNCTION_GEMMA, "function-gemma"),
    "lfm2": ToolStyle(
        lambda _: pythonic_calls.PythonicParser(
            pythonic_calls.OPEN, pythonic_calls.CLOSE, has_lines=False
        ),
        (pythonic_calls.OPEN, pythonic_calls.CLOSE),
        (NAME, "(", ARGUMENTS, ")"),
        (", ",),
        (pythonic_calls.OPEN, "["),
        ("]", pythonic_calls.CLOSE),
        certain=(pythonic_calls.OPEN,),
        notation="pythonic",
    ),
    "olmo3": ToolStyle(
        lambda _: pythonic_calls.PythonicParser(
            pythonic_calls.OLMO_OPEN, pythonic_calls.OLMO_CLOSE, has_lines=True
        ),
        (pythonic_calls.OLMO_OPEN, pythonic_calls.OLMO_CLOSE),
        (NAME, "(", ARGUMENTS, ")"),
        ("\n",),
        (pythonic_calls.OLMO_OPEN, "\n"),
        ("\n", pythonic_calls.OLMO_CLOSE),
        notation="olmo3",
    ),
    "harmony": ToolStyle(
        lambda functions: harmony.HarmonyParser(_schemas(functions)),
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
    ("deepseek-v3.2", (_DSML,)),
    ("deepseek-v3", (_BEGIN, "```json")),
    ("deepseek-v3.1", (_BEGIN,)),
    ("gemma4", (tagged_calls.GEMMA4.opening, tagged_calls.GEMMA4.closing)),
    ("function-gemma", (tagged_calls.FUNCTION_GEMMA.opening,)),
    ("lfm2", (pythonic_calls.OPEN, pythonic_calls.CLOSE)),
    ("glm", ("<arg_key>",)),
    ("minimax", (tagged_calls.MINIMAX.block,)),
    ("command-r7b", (json_calls.ACTION_OPEN,)),
    ("command-r", ("Action:", "```json", "tool_name")),
    ("olmo3", (pythonic_calls.OLMO_OPEN,)),
    ("nemotron", (json_calls.NEMOTRON_OPEN,)),
    ("hunyuan", (json_calls.HUNYUAN_OPEN,)),
    ("qwen3-coder", ("<function=", "<parameter=")),
    ("granite", (json_calls.GRANITE_OPEN,)),
    ("mistral-args", (json_calls.MISTRAL_OPEN, json_calls.ARGS)),
    ("mistral", (json_calls.MISTRAL_OPEN,)),
    ("hermes", (json_calls.HERMES_OPEN,)),
    ("llama3", (json_calls.LLAMA_TAG,)),
    ("llama3", ("<|start_header_id|>", '"parameters"')),
    ("llama3", ("<|header_start|>", '"parameters"')),
)


def shown_style(template: str) -> str:
    """The style of the calls in a chat template; "generic" if it has none of the known styles."""
    for style, texts in _SHOWN_BY:
        if all(text in template for text in texts):
            return style
    return "generic"
