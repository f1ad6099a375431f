"""Grammars of answers: calls in the style that the model's parser reads, JSON of a schema, and
thoughts before them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from radixserve.grammar.backend import whitespace_options
from radixserve.grammar.json_patterns import narrowed
from radixserve.server import reasoning
from radixserve.server.tool_parsers import hermes, mistral
from radixserve.structured_output import StructuredOutput

MAX_CALLS = 16  # of one answer
# Arguments are written as templates write them when the call comes back.
_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class _CallTemplate(NamedTuple):
    """Pieces of a grammar; NAME and ARGUMENTS stand in a call for its own."""

    call: Sequence[str]
    between: Sequence[str]
    head: Sequence[str] = ()  # before the first call
    tail: Sequence[str] = ()  # after the last one


NAME, ARGUMENTS = "the name", "the arguments"
_HERMES = ('{"name": ', NAME, ', "arguments": ', ARGUMENTS, "}")
_CALL_TEMPLATES = {
    "hermes": _CallTemplate((hermes.OPEN, "\n", *_HERMES, "\n", hermes.CLOSE), ("\n",)),
    "llama3": _CallTemplate(('{"name": ', NAME, ', "parameters": ', ARGUMENTS, "}"), ("; ",)),
    "mistral": _CallTemplate(_HERMES, (", ",), (mistral.OPEN, "["), ("]",)),
    "mistral-args": _CallTemplate((mistral.OPEN, NAME, mistral.ARGS, ARGUMENTS), ()),
}


def tool_grammar(
    style: str,
    functions: Sequence[Mapping[str, Any]],
    special: Mapping[str, int],
    *,
    parallel: bool,
    thinking: str,
    schema: Mapping[str, Any] | None = None,
) -> str:
    """A Lark grammar of one call or, where `parallel`, up to MAX_CALLS, of these functions; with
    `schema` of JSON instead, too, and of that alone where there are no functions.

    style     "hermes", "llama3", "mistral" (a list after the mark) or "mistral-args" (a mark and a
              name before each object)
    special   the marks that are special tokens, with their ids
    schema    a JSON schema, with its options: see `annotated_schema`
    thinking  "open": reasoning has begun in the prompt; "may": it may come first; "none"
    """
    pieces = _CALL_TEMPLATES[style]
    rules: list[str] = []
    for at, function in enumerate(functions):
        name = function["name"]
        own = {NAME: name if style == "mistral-args" else json.dumps(name), ARGUMENTS: f"a{at}"}
        rules.append(f"f{at}: {_sequence(pieces.call, special, own)}")
        parameters = narrowed(function.get("parameters") or _NO_ARGUMENTS)
        rules.append(f"a{at}: %json {json.dumps({**parameters, 'x-guidance': _JSON})}")
    answers = []
    if functions:
        more = f"({_sequence(pieces.between, special)} call){{0,{MAX_CALLS - 1}}}"
        head, tail = _sequence(pieces.head, special), _sequence(pieces.tail, special)
        rules.append("call: " + " | ".join(f"f{at}" for at in range(len(functions))))
        rules.append(f"calls: {head} call {more if parallel else ''} {tail}")
        answers.append("calls")
    if schema is not None:
        rules.append(f"json: %json {json.dumps(schema)}")
        answers.append("json")
    thought = {"open": "thought", "may": "(thought)?", "none": ""}[thinking]
    rules.append(f"start: {thought} ({' | '.join(answers)})")
    if thinking != "none":
        begin = _sequence((reasoning.OPEN,), special) if thinking == "may" else ""
        rules += _thought(begin, special)
    return "\n".join(rules) + "\n"


def annotated_schema(structured: StructuredOutput) -> dict[str, Any] | None:
    """The schema that an answer has to follow, with the options of its white space; None for
    constraints that are no JSON."""
    if structured.kind != "json":
        return None
    schema = narrowed(json.loads(structured.source))
    return {**schema, "x-guidance": whitespace_options(structured)}


def _sequence(
    pieces: Sequence[str], special: Mapping[str, int], own: Mapping[str, str] | None = None
) -> str:
    """Texts and special tokens one after the other; texts that follow each other are joined."""
    found: list[str] = []
    text = ""
    for piece in pieces:
        if own is not None and piece == NAME:
            text += own[NAME]
        elif piece in special or piece == ARGUMENTS:
            found += [json.dumps(text)] if text else []
            found.append(own[ARGUMENTS] if own and piece == ARGUMENTS else f"<[{special[piece]}]>")
            text = ""
        else:
            text += piece
    return " ".join([*found, *([json.dumps(text)] if text else [])])


def _thought(begin: str, special: Mapping[str, int]) -> list[str]:
    """Rules of reasoning up to its end tag and the white space after it."""
    blank = r"BLANK: /\s{0,4}/"
    if reasoning.CLOSE in special:
        end = f"<[{special[reasoning.CLOSE]}]>"
        return [f"thought: {begin} TEXT {end} BLANK", r"TEXT: /(?s:.*)/", blank]
    text = f"text[suffix={json.dumps(reasoning.CLOSE)}]: /(?s:.*)/"
    return [f"thought: {begin} text BLANK", text, blank]
