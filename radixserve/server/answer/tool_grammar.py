"""`tool_grammar`: the grammar of an answer with tool calls in the model's style, JSON of a schema,
or both, after optional reasoning."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from radixserve.errors import InvalidRequest
from radixserve.grammar.backend import whitespace_options
from radixserve.grammar.formats import PATTERNS
from radixserve.grammar.json_schemas import narrowed, narrowed_pattern
from radixserve.server.answer.reasoning import THINK, ThoughtMarks
from radixserve.server.answer.tool_parsers.pythonic_calls import KEY, as_olmo, as_pythonic
from radixserve.server.answer.tool_parsers.tagged_calls import (
    allowed_types,
    as_bare,
    resolved,
)
from radixserve.server.answer.tool_styles import (
    ARGUMENTS,
    GEMMA_QUOTES,
    INDEX,
    JSON_NAME,
    NAME,
    STYLES,
    Functions,
)
from radixserve.structured_outputs import StructuredOutput

_MAX_RULES = 2_000  # of the arguments of a function
MAX_CALLS = 16  # of one answer
# The white space of arguments, as templates render them when the call is in a later prompt.
_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_TEXT_KEYWORDS = frozenset(
    """
    $comment $ref anyOf default deprecated description enum examples format maxLength minLength
    oneOf pattern title type
    """.split()
)
_TAGS = {  # around a key and around a value
    "function": ("<parameter=", ">\n", "\n</parameter>\n"),
    "glm": ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    "minimax": ('<parameter name="', '">', "</parameter>\n"),
    "deepseek-v3.2": (
        '<\uff5cDSML\uff5cparameter name="',
        '" string="%s">',
        "</\uff5cDSML\uff5cparameter>\n",
    ),
}


def tool_grammar(
    style: str,
    functions: Functions,
    special: Mapping[str, int],
    *,
    parallel: bool,
    thinking: str,
    thoughts: ThoughtMarks | None = None,
    schema: Mapping[str, Any] | None = None,
    text: str | None = None,
    may_speak: bool = False,
) -> str:
    """A Lark grammar of answers that call one of the functions or match `schema` or `text`. Raises
    InvalidRequest for parameters that it cannot express.

    style      a name of STYLES
    functions  those that may be called; with a `schema`, there may be none
    special    the marks that are special tokens, with their ids
    parallel   allow up to MAX_CALLS calls instead of one
    thinking   "open": reasoning has begun in the prompt; "may": it may come first; "none"
    thoughts   the marks around reasoning, if the style does not have its own; default: THINK
    schema     a JSON schema with its options, see `annotated_schema`
    text       a Lark terminal, see `text_terminal`
    may_speak  allow any text before or instead of the calls; only a call that has begun must match
    """
    pieces = STYLES[style]
    rules: list[str] = []
    answers = []
    for index, function in enumerate(functions):
        own = {NAME: function["name"], JSON_NAME: json.dumps(function["name"])}
        rules.append(f"f{index}: {_sequence(pieces.call, special, own, f'a{index}')}")
        parameters = function.get("parameters") or _NO_ARGUMENTS
        rules += _arguments(pieces.notation, parameters, special, f"a{index}")
    if functions:
        more = f"({_sequence(pieces.between, special)} call){{0,{MAX_CALLS - 1}}}"
        head, tail = _sequence(pieces.head, special), _sequence(pieces.tail, special)
        rules.append("call: " + " | ".join(f"f{index}" for index in range(len(functions))))
        rules.append(f"calls: {head} call {more if parallel and style != 'harmony' else ''} {tail}")
        answers.append("calls")
    if schema is not None:
        rules.append(f"json: {_sequence(pieces.answer, special)} json_value")
        rules.append(f"json_value: %json {json.dumps(schema)}")
        answers.append("json")
    if text is not None:
        rules += [f"form: {_sequence(pieces.answer, special)} FORM", f"FORM: {text}"]
        answers.append("form")
    if may_speak:
        return "\n".join([*rules, *_speech(pieces.call, functions, special)]) + "\n"
    thought = {"open": "thought", "may": "(thought)?", "none": ""}[thinking]
    rules.append(f"start: {thought} ({' | '.join(answers)})")
    if thinking != "none":
        own_marks = thoughts or THINK
        opening, closing = pieces.thought or (
            (own_marks.opening, own_marks.label),
            (own_marks.closing,),
        )
        begin = _sequence(opening, special) if thinking == "may" else ""
        rules += _thought(begin, closing, special)
    return "\n".join(rules) + "\n"


def annotated_schema(structured_outputs: StructuredOutput) -> dict[str, Any] | None:
    """The JSON schema of a constraint, with options for white space; None for other constraints."""
    if structured_outputs.kind != "json":
        return None
    schema = narrowed(
        json.loads(structured_outputs.source),
        strict=structured_outputs.strict,
        closes=structured_outputs.disable_additional_properties,
    )
    return {**schema, "x-guidance": whitespace_options(structured_outputs)}


def text_terminal(structured_outputs: StructuredOutput) -> str | None:
    """A regular expression or choices as a Lark terminal; None for other constraints."""
    source = structured_outputs.source
    if structured_outputs.kind == "choice":
        return " | ".join(map(json.dumps, json.loads(source)))
    if structured_outputs.kind != "regex":
        return None
    escaped = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", source, flags=re.DOTALL)
    return "/" + escaped.replace("\n", r"\n") + "/"


def _sequence(
    pieces: Sequence[str],
    special: Mapping[str, int],
    own: Mapping[str, str] | None = None,
    arguments: str = "",
) -> str:
    """A Lark sequence of texts and special tokens. Adjacent texts are joined. `own`: replacements
    of placeholders; `arguments`: the rule in place of ARGUMENTS."""
    sequence: list[str] = []
    text = ""
    marks = "|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)"
    for piece in pieces:
        if own is not None and piece in own:
            text += own[piece]
            continue
        placed = {ARGUMENTS: arguments, INDEX: "/[0-9]{1,2}/"}.get(piece)
        for part in [piece] if placed else re.split(f"({marks})", piece):
            if placed or part in special:
                sequence += [json.dumps(text)] if text else []
                sequence.append(placed or f"<[{special[part]}]>")
                text = ""
            else:
                text += part
    return " ".join([*sequence, *([json.dumps(text)] if text else [])])


def _thought(begin: str, closing: Sequence[str], special: Mapping[str, int]) -> list[str]:
    """The rules of reasoning, up to its closing mark and the white space after that."""
    blank = r"BLANK: /\s{0,4}/"
    first, rest = closing[0], _sequence(closing[1:], special)
    if first in special:
        end = f"<[{special[first]}]>"
        return [f"thought: {begin} TEXT {end} {rest} BLANK", r"TEXT: /(?s:.*)/", blank]
    text = f"text[suffix={json.dumps(first)}]: /(?s:.*)/"
    return [f"thought: {begin} text {rest} BLANK", text, blank]


def _speech(call: Sequence[str], functions: Functions, special: Mapping[str, int]) -> list[str]:
    """The rules of an answer of text and calls, in which each opening mark begins a call."""
    opening = call[0]
    if opening in special:
        start = f"start: TEXT | TEXT call (BLANK call){{0,{MAX_CALLS - 1}}} BLANK"
        return [start, r"TEXT: /(?s:.*)/", r"BLANK: /\s{0,4}/"]
    mark = json.dumps(opening)
    rest = []
    for index, function in enumerate(functions):
        own = {NAME: function["name"], JSON_NAME: json.dumps(function["name"])}
        rest.append(_sequence(call[1:], special, own, f"a{index}"))
    return [
        f"after_mark: {' | '.join(rest)}",
        f"start: SPOKEN | until_call after_mark (BLANK call){{0,{MAX_CALLS - 1}}} BLANK",
        f"until_call[suffix={mark}]: /(?s:.*)/",
        f"SPOKEN: /(?s:.*)/ & ~/(?s:.*){_escaped(opening)}(?s:.*)/",
        r"BLANK: /\s{0,4}/",
    ]


def _escaped(text: str) -> str:
    """The text as a regular expression that may stand between slashes."""
    return re.sub(r"([\\/.^$|()\[\]{}*+?])", r"\\\1", text)


def _arguments(
    notation: str, schema: Mapping[str, Any], special: Mapping[str, int], rule: str
) -> list[str]:
    """The rules of a function's arguments, in the style's notation. `rule`: the name of theirs."""
    if notation == "json":
        return [f"{rule}: %json {json.dumps({**narrowed(schema), 'x-guidance': _JSON})}"]
    if notation in GEMMA_QUOTES:
        return _GemmaRules(schema, GEMMA_QUOTES[notation], special).rules(rule)
    if notation in ("pythonic", "olmo3"):
        return _pythonic_rules(schema, rule, as_pythonic if notation == "pythonic" else as_olmo)
    opening, middle, closing = _TAGS[notation]
    required = schema.get("required", ())
    parts, rules = [], []
    for index, (name, property_schema) in enumerate(schema.get("properties", {}).items()):
        value = f"{rule}v{index}"
        is_text = "string" in allowed_types(property_schema, schema)
        between = middle.replace("%s", "true" if is_text else "false")
        before = _sequence([f"{opening}{name}{between}"], special)
        parts.append(f"({before} {value})" + ("" if name in required else "?"))
        rules += _value_rules(value, property_schema, schema, closing, special)
    return [f"{rule}: {' '.join(parts) if parts else json.dumps('')}", *rules]


def _value_rules(
    rule: str, schema: Any, root: Mapping[str, Any], closing: str, special: Mapping[str, int]
) -> list[str]:
    """The rules of a value and its closing tag: text if the schema allows a string, else JSON."""
    end = _sequence([closing], special)
    choices = schema.get("enum") if isinstance(schema, Mapping) else None
    if choices is None and isinstance(schema, Mapping) and "const" in schema:
        choices = [schema["const"]]
    if choices is not None:
        return [f"{rule}: ({' | '.join(json.dumps(as_bare(c)) for c in choices)}) {end}"]
    if "string" not in allowed_types(schema, root):
        return [f"{rule}: {_json(schema, root)} {end}"]
    expression = _text_expression(schema)
    if expression is None:
        return _text_rules(rule, closing, special)
    return [f"{rule}: /{expression}/ {end}"]


def _json(schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    """A Lark term for JSON of `schema`, a part of `root`, which has the definitions."""
    definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
    options = {**narrowed({**schema, **definitions}), "x-guidance": _JSON}
    return f"%json {json.dumps(options)}"


def _text_expression(schema: Any) -> str | None:
    """The regular expression for a text by its schema; None: any text. Raises InvalidRequest for
    keywords that cannot be expressed."""
    if not isinstance(schema, Mapping):
        return None
    unknown = sorted(set(schema).difference(_TEXT_KEYWORDS))
    if unknown or ("pattern" in schema and {"minLength", "maxLength"} & set(schema)):
        names = json.dumps(unknown or ["pattern", "minLength", "maxLength"])
        raise InvalidRequest(
            f"tools: arguments in this model's form: Unimplemented keys: {names}", param="tools"
        )
    pattern = schema.get("pattern")
    if pattern is None and not {"minLength", "maxLength"} & set(schema):
        pattern = PATTERNS.get(str(schema.get("format")))
    if pattern is not None:
        expression = narrowed_pattern(pattern).replace("/", r"\/")
        head, tail = expression.startswith("^"), expression.endswith("$")
        expression = expression[head : len(expression) - tail]
        return f"{'' if head else '(?s:.*)'}({expression}){'' if tail else '(?s:.*)'}"
    if "minLength" in schema or "maxLength" in schema:
        return f"(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})"
    return None


def _text_rules(rule: str, closing: str, special: Mapping[str, int]) -> list[str]:
    """The rule of any text up to `closing`."""
    places = [at for mark in special if (at := closing.find(mark)) >= 0]
    if places:  # the lexeme takes the text before the special token, too
        before, rest = closing[: min(places)], closing[min(places) :]
        return [f"{rule}: /(?s:.*){_escaped(before)}/ {_sequence([rest], special)}"]
    return [f"{rule}[suffix={json.dumps(closing)}]: /(?s:.*)/"]


def _list_rules(rule: str, items: Sequence[tuple[str, bool]], comma: str) -> list[str]:
    """The rules of a list of items in this order, with commas between them. Each item is a term and
    whether it is required. The rule of the whole list is `rule` + "s0"."""
    rules = []
    for index, (item, is_required) in enumerate(items):
        first, later = f"{rule}s{index + 1}", f"{rule}r{index + 1}"
        skips = ("", "") if is_required else (f" | {first}", f" | {later}")
        rules.append(f"{rule}s{index}: {item} {later}{skips[0]}")
        rules.append(f"{rule}r{index}: {json.dumps(comma)} {item} {later}{skips[1]}")
    end = len(items)
    return [*rules, f'{rule}s{end}: ""', f'{rule}r{end}: ""']


def _pythonic_rules(root: Mapping[str, Any], rule: str, write: Callable[[Any], str]) -> list[str]:
    """The rules of Python keyword arguments in the order of the schema. `write`: how constants are
    written."""
    required = root.get("required", ())
    items, rules = [], []
    for index, (name, schema) in enumerate(root.get("properties", {}).items()):
        if KEY.fullmatch(name) is None:
            raise InvalidRequest(
                f"tools: an argument's name cannot be written in this model's form: {name!r}",
                param="tools",
            )
        value = f"{rule}v{index}"
        items.append((f"{json.dumps(name + '=')} {value}", name in required))
        rules += _pythonic_value(value, resolved(schema, root), root, write)
    return [*rules, *_list_rules(rule, items, ", "), f"{rule}: {rule}s0"]


_PLAIN = r"[^'\\\n\r]"  # a character that is not escaped in a string in single quotes
_ANY_CHARACTER = rf"({_PLAIN}|\\[\\'nr])"


def _pythonic_value(
    rule: str, schema: Any, root: Mapping[str, Any], write: Callable[[Any], str]
) -> list[str]:
    """The rules of an argument: a string in single quotes if the schema allows one."""
    if isinstance(schema, Mapping) and ("enum" in schema or "const" in schema):
        choices = schema["enum"] if "enum" in schema else [schema["const"]]
        return [f"{rule}: {' | '.join(json.dumps(write(choice)) for choice in choices)}"]
    kinds = allowed_types(schema, root)
    if "string" in kinds:
        expression = _text_expression(schema)
        name = rule.upper()
        if expression is None:
            text = f"{name}: /{_ANY_CHARACTER}*/"
        elif "pattern" in schema:  # only characters without an escape
            text = f"{name}: /{expression}/ & /{_PLAIN}*/"
        else:
            limits = f"{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"
            text = f"{name}: /{_ANY_CHARACTER}{limits}/"
        return [f'{rule}: "\'" {name} "\'"', text]
    quoted = {constant: json.dumps(write(constant)) for constant in (True, False, None)}
    constants = {"boolean": f"{quoted[True]} | {quoted[False]}", "null": quoted[None]}
    choices = [constants[kind] for kind in sorted(kinds) if kind in constants]
    if kinds - set(constants):
        choices.append(_json(schema, root))
    return [f"{rule}: {' | '.join(choices)}"]


class _GemmaRules:
    """Makes the rules of an object in Gemma's notation."""

    def __init__(self, root: Mapping[str, Any], quote: str, special: Mapping[str, int]) -> None:
        self._root = root
        self._quote = quote
        self._special = special
        self._rules: list[str] = []

    def rules(self, rule: str) -> list[str]:
        self._object(rule, self._root)
        return self._rules

    def _object(self, rule: str, schema: Mapping[str, Any]) -> None:
        """Add the rules of an object, whose members are sorted by name, as templates write them."""
        properties = sorted(schema.get("properties", {}).items())
        required = schema.get("required", ())
        pairs = []
        for index, (name, member) in enumerate(properties):
            self._value(f"{rule}x{index}", member)
            pairs.append((f"{json.dumps(name + ':')} {rule}x{index}", name in required))
        self._rules += _list_rules(rule, pairs, ",")
        self._rules.append(f'{rule}: "{{" {rule}s0 "}}"')

    def _value(self, rule: str, schema: Any) -> None:
        schema = resolved(schema, self._root)
        if len(self._rules) > _MAX_RULES:
            raise InvalidRequest("tools: the schema is too large, or recursive", param="tools")
        kinds = allowed_types(schema, self._root)
        quote = _sequence([self._quote], self._special)
        choices = schema.get("enum") if isinstance(schema, Mapping) else None
        if choices is not None:
            texts = [
                f"{quote} {json.dumps(choice)} {quote}"
                if isinstance(choice, str)
                else json.dumps(json.dumps(choice))
                for choice in choices
            ]
            self._rules.append(f"{rule}: {' | '.join(texts)}")
        elif "string" in kinds and (expression := _text_expression(schema)) is not None:
            self._rules.append(f"{rule}: {quote} /{expression}/ {quote}")
        elif "string" in kinds:
            self._rules += _text_rules(f"{rule}t", self._quote, self._special)
            self._rules.append(f"{rule}: {quote} {rule}t")
        elif kinds == {"object"}:
            self._object(rule, schema)
        elif kinds == {"array"}:
            self._value(f"{rule}i", schema.get("items"))
            self._rules.append(f'{rule}: "[" ({rule}i ("," {rule}i)*)? "]"')
        else:
            self._rules.append(f"{rule}: {_json(schema, self._root)}")
