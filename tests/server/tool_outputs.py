"""Outputs of models in every style of tool calls, whole and damaged.

No character of an output may be lost or doubled: each is content, reasoning, a part of a call's
name or arguments, a mark that was consumed, or white space next to one. The header of a message in
harmony is a mark, with its recipient. To check this, each word of an output that is not of a mark
is there once.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from radixserve.server.answer.output_parser import OutputParser, OutputParserConfig, ParsedAnswer
from radixserve.server.answer.reasoning import THINK, THOUGHTS, ThoughtMarks
from radixserve.server.answer.tool_parsers.base import Thought
from radixserve.server.answer.tool_styles import STYLES

TYPED = [
    {"name": "f", "parameters": {"type": "object", "properties": {
        "a": {"type": "integer"}, "s": {"type": "string"}, "o": {"type": ["string", "null"]},
        "l": {"$ref": "#/$defs/list"}, "b": {"anyOf": [{"type": "boolean"}, {"type": "string"}]},
    }, "$defs": {"list": {"type": "array"}}}},
    {"name": "g"},
]  # fmt: skip
Calls = list[tuple[str, dict[str, Any]]]
DS = "<｜tool▁"
DSML = "｜DSML｜"


def config_of(style: str, **fields: Any) -> OutputParserConfig:
    """The parsers of a style for the functions TYPED. Calls have no ids but the model's own."""
    made = STYLES[style]
    fields = {"hidden": made.around, "call_marks": made.certain, "new_id": str, **fields}
    return OutputParserConfig(calls=partial(made.make, TYPED), **fields)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _object(name: str, arguments: Any, member: str = "arguments") -> str:
    return f'{{"name": {json.dumps(name)}, "{member}": {json.dumps(arguments)}}}'


def _objects(calls: Calls) -> str:
    return ", ".join(_object(*call) for call in calls)


def _each(write: Callable[[str, Any], str], between: str = "") -> Callable[[Calls], str]:
    return lambda calls: between.join(write(*call) for call in calls)


def _tags(opening: str, key: str, value_end: str, closing: str) -> Callable[[str, Any], str]:
    def write(name: str, arguments: Any) -> str:
        values = "".join(f"{key % k}{_text(v)}{value_end}" for k, v in arguments.items())
        return f"{opening % name}{values}{closing}"

    return write


def _gemma(opening: str, closing: str, quote: str) -> Callable[[str, Any], str]:
    def write(name: str, arguments: Any) -> str:
        pairs = (
            f"{k}:{quote + v + quote if isinstance(v, str) else json.dumps(v)}"
            for k, v in arguments.items()
        )
        return f"{opening}call:{name}{{{','.join(pairs)}}}{closing}"

    return write


def _pythonic(name: str, arguments: Any) -> str:
    pairs = (f"{k}={v!r}" for k, v in arguments.items())
    return f"{name}({', '.join(pairs)})"


_CODER = _tags("<tool_call>\n<function=%s>\n", "<parameter=%s>\n", "\n</parameter>\n",
               "</function>\n</tool_call>")  # fmt: skip
_MINIMAX = _tags('<invoke name="%s">\n', '<parameter name="%s">', "</parameter>\n", "</invoke>\n")
_GLM = _tags("<tool_call>%s\n", "<arg_key>%s</arg_key>\n<arg_value>", "</arg_value>\n",
             "</tool_call>")  # fmt: skip


def _around(opening: str, write: Callable[[Calls], str], closing: str) -> Callable[[Calls], str]:
    return lambda calls: f"{opening}{write(calls)}{closing}"


def _command_r(name: str, arguments: Any) -> str:
    return f'{{"tool_name": "{name}", "parameters": {json.dumps(arguments)}}}'


def _action(name: str, arguments: Any) -> str:
    return f'{{"tool_call_id": "0", "tool_name": "{name}", "parameters": {json.dumps(arguments)}}}'


def _v32(name: str, arguments: Any) -> str:
    values = "".join(
        f'<{DSML}parameter name="{key}" string="{json.dumps(isinstance(value, str))}">'
        f"{_text(value)}</{DSML}parameter>\n"
        for key, value in arguments.items()
    )
    return f'<{DSML}invoke name="{name}">\n{values}</{DSML}invoke>\n'


def _harmony(name: str, arguments: Any) -> str:
    header = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return f"{header}{json.dumps(arguments)}<|call|>"


def _kimi(name: str, arguments: Any) -> str:
    head = f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>"
    return f"{head}{json.dumps(arguments)}<|tool_call_end|>"


def _deepseek_v3(name: str, arguments: Any) -> str:
    code = f"\n```json\n{json.dumps(arguments)}\n```"
    return f"{DS}call▁begin｜>function{DS}sep｜>{name}{code}{DS}call▁end｜>"


def _deepseek_v31(name: str, arguments: Any) -> str:
    return f"{DS}call▁begin｜>{name}{DS}sep｜>{json.dumps(arguments)}{DS}call▁end｜>"


_AROUND_DS = (f"{DS}calls▁begin｜>", f"{DS}calls▁end｜>")
WRITERS: dict[str, Callable[[Calls], str]] = {
    "hermes": _each(lambda *call: f"<tool_call>\n{_object(*call)}\n</tool_call>", "\n"),
    "llama3": _each(lambda *call: _object(*call, "parameters"), "; "),
    "mistral": _around("[TOOL_CALLS][", _objects, "]"),
    "mistral-args": _each(lambda name, a: f"[TOOL_CALLS]{name}[ARGS]{json.dumps(a)}"),
    "granite": _around("<|tool_call|>[", _objects, "]"),
    "nemotron": _around("<TOOLCALL>[", _objects, "]</TOOLCALL>"),
    "hunyuan": _around("<tool_calls>[", _objects, "]</tool_calls>"),
    "command-r": _around("Action: ```json\n[\n", _each(_command_r, ",\n"), "\n]\n```"),
    "command-r7b": _around("<|START_ACTION|>[\n", _each(_action, ",\n"), "\n]<|END_ACTION|>"),
    "deepseek-v3": _around(_AROUND_DS[0], _each(_deepseek_v3, "\n"), _AROUND_DS[1]),
    "deepseek-v3.1": _around(_AROUND_DS[0], _each(_deepseek_v31), _AROUND_DS[1]),
    "deepseek-v3.2": _around(f"<{DSML}function_calls>\n", _each(_v32), f"</{DSML}function_calls>"),
    "kimi": _around("<|tool_calls_section_begin|>", _each(_kimi), "<|tool_calls_section_end|>"),
    "qwen3-coder": _each(_CODER, "\n"),
    "minimax": _around("<minimax:tool_call>\n", _each(_MINIMAX), "</minimax:tool_call>"),
    "glm": _each(_GLM, "\n"),
    "gemma4": _each(_gemma("<|tool_call>", "<tool_call|>", '<|"|>')),
    "function-gemma": _each(_gemma("<start_function_call>", "<end_function_call>", "<escape>")),
    "lfm2": _around("<|tool_call_start|>[", _each(_pythonic, ", "), "]<|tool_call_end|>"),
    "olmo3": _around("<function_calls>\n", _each(_pythonic, "\n"), "\n</function_calls>"),
    "harmony": _each(_harmony, "<|start|>assistant"),
}
assert {*WRITERS, "generic"} == set(STYLES)
OWN_THOUGHTS = {"mistral": "mistral", "mistral-args": "mistral", "gemma4": "gemma4",
                "command-r7b": "command-r7b"}  # fmt: skip


def thoughts_of(style: str) -> ThoughtMarks | None:
    if style == "harmony":
        return None
    return THOUGHTS[OWN_THOUGHTS[style]] if style in OWN_THOUGHTS else THINK


# A mark, a recipient, a tag's name and the like, a word, white space, or a single character.
_TOKENS = re.compile(r"<[^<>\s]*>|\[[A-Z_]+\]|to=[\w.]+|\w+|\s+|.", re.DOTALL)
WORD = re.compile(r"(?:w|9)\d{4}")  # of an output; all others are of its form
RECIPIENT = re.compile(r"to=[\w.]+")  # in a header of harmony: damage may move a word into it


def words() -> Iterator[str]:
    return (f"w{number}" for number in itertools.count(1000))


def make_output(style: str, rng: random.Random) -> list[str]:
    """The tokens of an answer in a style, sound or damaged."""
    word = words()
    numbers = itertools.count(91_000)

    def value() -> Any:
        kind = rng.randrange(6)
        if kind == 0:
            return next(numbers)
        if kind == 1:
            return [next(word), {next(word): next(numbers)}]
        if kind == 2:  # text that looks like a part of a call
            marks = [*STYLES[style].marks, "</parameter>", "<parameter=a>", "{", "}", "<b>", "é"]
            return f"{next(word)} {rng.choice(marks)} {next(word)}"
        return f"{next(word)} {next(word)}" if kind == 3 else next(word)

    def some_calls() -> Calls:
        return [
            (
                rng.choice(["f", "g", "h" if style == "harmony" else next(word)]),
                {key: value() for key in rng.sample(["a", "s", "o", "k", next(word)],
                                                     rng.randint(0, 3))},
            )
            for _ in range(rng.randint(1, 3))
        ]  # fmt: skip

    def said() -> str:
        return " ".join(itertools.islice(word, rng.randint(1, 3)))

    parts: list[str] = []
    marks = thoughts_of(style)
    if style == "harmony":
        if rng.random() < 0.5:
            parts.append(f"<|channel|>analysis<|message|>{said()}<|end|><|start|>assistant")
        if rng.random() < 0.3:
            parts.append(f"<|channel|>commentary<|message|>{said()}<|end|><|start|>assistant")
        if rng.random() < 0.2:
            to = rng.choice(["bash", "f", "python", "functions.h"])
            parts.append(
                f" to={to}<|channel|>commentary<|message|>{said()}<|end|><|start|>assistant"
            )
    elif marks is not None and rng.random() < 0.6:
        inside = said()
        if rng.random() < 0.3:
            inside += f"\n{WRITERS[style](some_calls())}\n" + (said() if rng.random() < 0.5 else "")
        closing = marks.closing if rng.random() < 0.7 else ""
        parts.append(f"{marks.opening}{marks.label}{inside}{closing}\n")
    if style != "harmony" and rng.random() < 0.5:
        parts.append(said() + "\n")
    parts.append(WRITERS[style](some_calls()))
    if style == "harmony" and rng.random() < 0.3:
        parts.append(f"<|start|>assistant<|channel|>final<|message|>{said()}<|return|>")
    elif rng.random() < 0.3:
        parts.append(f" {said()}")
    tokens = _TOKENS.findall("".join(parts))
    for _ in range(rng.choice([0, 0, 1, 1, 2, 3, 6])):
        damage(tokens, rng)
    return tokens


def damage(tokens: list[str], rng: random.Random) -> None:
    """Leave a mark out, double it, move it, or cut the answer. Words are never doubled."""
    if not tokens:
        return
    kind, at = rng.randrange(5), rng.randrange(len(tokens))
    marks = [i for i, token in enumerate(tokens) if not WORD.search(token) and not token.isspace()]
    at = rng.choice(marks) if marks and kind < 4 else at
    if kind == 0:
        del tokens[at]
    elif kind == 1 and not WORD.search(tokens[at]):
        tokens.insert(at, tokens[at])
    elif kind == 2:
        other = rng.randrange(len(tokens))
        tokens[at], tokens[other] = tokens[other], tokens[at]
    elif kind == 3 and not WORD.search(tokens[at]):
        tokens.insert(rng.randrange(len(tokens) + 1), tokens[at])
    elif kind == 4:
        del tokens[at:]


def parsed(config: OutputParserConfig, pieces: list[str]) -> list[tuple[str, str]]:
    """The answer's parts, each as its kind and text; neighbours of one kind are joined."""
    parser = OutputParser(config)
    for piece in pieces:
        parser.feed(piece)
    parser.finish()
    return parts_of(parser.answer())


def parts_of(answer: ParsedAnswer) -> list[tuple[str, str]]:
    parts: list[tuple[str, str]] = []
    for part in answer.parts:
        if isinstance(part, str | Thought):
            kind, text = ("content", part) if isinstance(part, str) else ("reasoning", part.text)
            if parts and parts[-1][0] == kind:
                text = parts.pop()[1] + text
            parts.append((kind, text))
        else:
            arguments = json.dumps(json.loads(part.arguments), ensure_ascii=False)
            call_id = "" if part.name in part.id else part.id  # Kimi's ids begin with the name
            parts.append(("call", f"{call_id}{part.name}{arguments}"))
    return parts


def check_output(
    style: str, tokens: list[str], rng: random.Random, *, is_thinking: bool
) -> list[str]:
    """Check that an answer's parts are the same however it is cut, and that each of its words is
    there once. Returns the kinds of the parts."""
    config = config_of(style, thoughts=thoughts_of(style), is_thinking=is_thinking)
    text = "".join(tokens)
    whole = parsed(config, [text])
    least = Counter(WORD.findall(RECIPIENT.sub("", text)))
    found = Counter(WORD.findall(" ".join(part for _, part in whole)))
    assert least <= found <= Counter(WORD.findall(text)), (style, text, whole)
    cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for streamed in (list(text), pieces, tokens):
        assert parsed(config, streamed) == whole, (style, streamed, whole)
    return [kind for kind, _ in whole]
