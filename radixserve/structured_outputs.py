"""`StructuredOutput`, a constraint on an answer, and the interfaces of its compiled grammar.

The scheduler passes grammars and matchers to the sampler. `radixserve.grammar` implements them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from radixserve.checks import MAX_NESTING, StrictFields, check_text, shown
from radixserve.errors import InvalidRequest

MAX_GRAMMAR_LENGTH = 256 * 1024  # characters of a schema, an expression, a grammar or all choices
MAX_CHOICES = 4_096
_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_ANY_OBJECT = '{"type": "object"}'


@dataclass(frozen=True, kw_only=True, repr=False)
class StructuredOutput(StrictFields):
    """A constraint on an answer; the names are vLLM's. Checked when made (InvalidRequest).

    Exactly one of the first five is given.

    json            a JSON schema, as a mapping or as JSON text; kept as JSON text
    regex           a regular expression that the whole answer matches (syntax of Rust's regex
                    crate: no look-around, no back-references)
    choice          the answer is one of these strings
    grammar         a Lark grammar as llguidance reads it, whose special tokens are <|name|> or
                    <[token id]>; GBNF (EBNF with ::=) is converted
    json_object     True: any JSON object
    whitespace_pattern      a regular expression of the white space between two parts of JSON;
                            None: up to 32 blanks, tabs and newlines
    disable_any_whitespace  JSON without white space
    disable_additional_properties   of JSON: close the objects whose schema has properties and does
                            not say more, see docs/structured-output.md; False: they are open, as
                            JSON Schema says
    strict          of JSON: refuse a `uniqueItems` that a grammar cannot enforce; False: leave it
                    out, so that an array may repeat an item
    jump_forward    text without an alternative is split as the tokenizer splits it, and these
                    tokens are computed in one step. The model might have split it otherwise: later
                    tokens may differ from those of an answer without it
    """

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: Iterable[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = True
    strict: bool = True
    jump_forward: bool = False

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)
        self._check_bools(
            "json_object",
            "disable_any_whitespace",
            "disable_additional_properties",
            "strict",
            "jump_forward",
        )
        values = {name: getattr(self, name) for name in _KINDS}
        values["json_object"] = values["json_object"] or None
        given = [name for name, value in values.items() if value is not None]
        if len(given) != 1:
            names = ", ".join(given) or "none"
            raise InvalidRequest(
                f"structured output must have exactly one of {', '.join(_KINDS)}, got {names}"
            )
        if self.json is not None:
            put("json", _schema_text(self.json))
        if self.choice is not None:
            put("choice", _choices(self.choice))
        for name in ("regex", "grammar", "whitespace_pattern"):
            if getattr(self, name) is not None:
                _check_grammar_text(name, getattr(self, name))
        if self.whitespace_pattern is not None or self.disable_any_whitespace:
            if self.kind != "json":
                raise InvalidRequest(
                    "whitespace_pattern and disable_any_whitespace are for json and json_object"
                )
            if self.whitespace_pattern is not None and self.disable_any_whitespace:
                raise InvalidRequest(
                    "whitespace_pattern must be None with disable_any_whitespace=True, "
                    f"got {shown(self.whitespace_pattern)}"
                )

    @property
    def kind(self) -> str:
        """The form of `source`: "json", "regex", "choice" or "grammar"."""
        if self.json_object:
            return "json"
        return next(name for name in _KINDS if getattr(self, name) is not None)

    @property
    def source(self) -> str:
        """The schema, the expression, the choices as a JSON list, or the grammar."""
        if self.json_object:
            return _ANY_OBJECT
        if self.choice is not None:
            return json.dumps(self.choice)
        return str(getattr(self, self.kind))


def as_structured_output(value: object) -> StructuredOutput:
    """Returns a StructuredOutput as it is, or made of its fields. Raises InvalidRequest."""
    if isinstance(value, StructuredOutput):
        return value
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return StructuredOutput(**value)
    raise InvalidRequest(
        'structured must be a StructuredOutput or its fields, such as {"regex": "[0-9]+"}, '
        f"got {shown(value)}"
    )


def _schema_text(schema: object) -> str:
    what = "json must be a JSON schema: a mapping or its JSON text"
    try:
        document = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(document, allow_nan=False, ensure_ascii=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"{what}: {error}") from None
    if not isinstance(document, Mapping):
        raise InvalidRequest(f"{what}, got {shown(schema)}")
    _check_length("json", check_text("json", text))
    return text


def _choices(given: object) -> tuple[str, ...]:
    what = "choice must be a list of non-empty strings"
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
        raise InvalidRequest(f"{what}, got {shown(given)}")
    choices = tuple(given)
    for choice in choices:
        if not isinstance(choice, str) or not choice:
            raise InvalidRequest(f"{what}, got {shown(choice)} in it")
        check_text("choice", choice)
    if not choices:
        raise InvalidRequest(f"{what}, got none")
    if len(choices) > MAX_CHOICES:
        raise InvalidRequest(f"choice takes at most {MAX_CHOICES} strings, got {len(choices)}")
    _check_length("choice", "".join(choices))
    return tuple(dict.fromkeys(choices))


def _check_grammar_text(name: str, value: object) -> None:
    text = check_text(name, value)
    if not text:
        raise InvalidRequest(f"{name} must be a non-empty string, got ''")
    _check_length(name, text)
    depth = 0
    for character in text:  # escaped and quoted ones count, too: a bound, not a parser
        depth += (character in "([{") - (character in ")]}")
        depth = max(0, depth)
        if depth > MAX_NESTING:
            raise InvalidRequest(f"{name} must nest at most {MAX_NESTING} brackets")


def _check_length(name: str, text: str) -> None:
    if len(text) > MAX_GRAMMAR_LENGTH:
        raise InvalidRequest(
            f"{name} must have at most {MAX_GRAMMAR_LENGTH} characters, got {len(text)}"
        )


class Matcher(Protocol):
    """One answer's position in its grammar."""

    def fork(self) -> Matcher:
        """Returns the matcher of another answer with the same tokens so far."""
        ...

    def must_follow(self, token_ids: Sequence[int]) -> bool:
        """Whether no other tokens can follow the answer so far, which goes on after them: they need
        not be sampled."""
        ...


class Grammar(Protocol):
    """A `StructuredOutput` compiled for the model's tokens."""

    def matcher(self, end_ids: frozenset[int]) -> Matcher:
        """Returns the matcher of a new answer. `end_ids`: tokens that end its request."""
        ...
