"""Compiles grammars with llguidance. No other file imports it.

llguidance's parsers work on bytes; `TokenTable` gives them the bytes of a vocabulary's tokens. The
end of an answer is an extra token outside the model's vocabulary. The request defines which of the
model's tokens may end its answer, see matcher.py.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from radixserve.errors import InvalidRequest
from radixserve.grammar.json_schemas import narrowed
from radixserve.structured_outputs import StructuredOutput

_END = "<|radixserve:end of answer|>"
_BLANKS = r"[\x20\x0A\x0D\x09]{1,32}"
# With these limits a parser's step takes up to 50 ms, its compilation 100 ms, its states 50 MB.
MAX_EXPRESSIONS = 200_000  # derivatives that the lexer may take before the first token
_LIMITS = {
    "initial_lexer_fuel": MAX_EXPRESSIONS,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}
_TOO_LARGE = "too many expressions constructed"
# Sets of tokens that are allowed or forbidden together where a JSON string continues or, with a
# quote, begins, by the characters that it may still have. A mask walks the other tokens only.
_IN_STRING = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_IN_STRING}{{1,{count}}}" for count in (2, 4, 6, 8, 10, 12, 16, 30)),
    *(f'"{_IN_STRING}{{1,{count}}}' for count in (10, 30)),
    f"{_IN_STRING}+",
]


@cache
def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise InvalidRequest(
            'structured output needs llguidance: pip install "radixserve[grammar]"'
        ) from error
    return llguidance


def check_installed() -> None:
    """Raise InvalidRequest, which says what to install, if llguidance is missing."""
    _llguidance()


class TokenTable:
    """The bytes of every token, as a trie. Takes about 2 s to make for 131,072 tokens."""

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: a `tokenizers.Tokenizer`. Raises InvalidRequest if its tokens are not
        bytes."""
        own = type(tokenizer).from_str(tokenizer.to_str())
        own.add_special_tokens([_END])
        self.end_id: int = own.token_to_id(_END)  # the token of the answer's end
        try:
            self.native = _llguidance().LLTokenizer(
                own.to_str(), eos_token=[self.end_id], slices=_SLICES
            )
        except ValueError as error:
            raise InvalidRequest(
                f"structured output cannot be used with this tokenizer: {error}"
            ) from error
        self.num_words: int = -(-self.native.vocab_size // 32)  # int32 words of a row of a bitmask


def compile_matcher(
    structured_outputs: StructuredOutput, table: TokenTable, *, keeps_options: bool = False
) -> Any:
    """Returns an `LLMatcher` at the start of an answer. Raises InvalidRequest with llguidance's
    reason. `keeps_options`: keep `x-guidance`, options of llguidance, in a JSON schema.

    Also computes the first mask, which builds the states that all answers begin with, and one step
    after it, which finds whether the lexer's limits are exceeded.
    """
    module = _llguidance()
    limits = module.LLParserLimits(**_LIMITS)
    try:
        grammar = _grammar(structured_outputs, keeps_options)
    except ValueError as error:
        raise _refusal(structured_outputs, str(error)) from None
    matcher = module.LLMatcher(table.native, grammar, log_level=0, limits=limits)
    mask = b"" if matcher.is_error() else matcher.compute_bitmask()
    if matcher.is_error():
        raise _refusal(structured_outputs, matcher.get_error())
    if matcher.is_stopped():
        raise _refusal(structured_outputs, "it allows no token")
    step = matcher.deep_copy()
    if not step.consume_token(_first_token(mask)):
        raise _refusal(structured_outputs, step.get_error())
    return matcher


def _first_token(mask: bytes) -> int:
    """Returns the lowest token of a bitmask that has at least one."""
    index = next(index for index, byte in enumerate(mask) if byte)
    return 8 * index + (mask[index] & -mask[index]).bit_length() - 1


def _refusal(structured_outputs: StructuredOutput, reason: str) -> InvalidRequest:
    if _TOO_LARGE in reason:
        reason = (
            f"it needs more than {MAX_EXPRESSIONS:,} expressions of the lexer; "
            "make counted repeats such as {1000} smaller"
        )
    reason = reason.partition(" Enable 'coerce_one_of'")[0]  # an option that callers cannot set
    lines = [line for line in reason.splitlines() if not line.startswith("<")]
    return InvalidRequest(
        f"{structured_outputs.kind} cannot be used: {' '.join(' '.join(lines).split())}"
    )


def whitespace_options(structured_outputs: StructuredOutput) -> dict[str, Any]:
    """Returns llguidance's options for the white space in JSON."""
    if structured_outputs.disable_any_whitespace:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": structured_outputs.whitespace_pattern or _BLANKS}


def _grammar(structured_outputs: StructuredOutput, keeps_options: bool) -> str:
    """Returns a grammar in llguidance's own form."""
    module, source = _llguidance(), structured_outputs.source
    compiler = module.LLMatcher
    if structured_outputs.kind == "json":
        schema = json.dumps(
            narrowed(
                json.loads(source),
                keeps_options=keeps_options,
                strict=structured_outputs.strict,
                closes=structured_outputs.disable_additional_properties,
            )
        )
        options = whitespace_options(structured_outputs)
        return str(compiler.grammar_from_json_schema(schema, overrides=options))
    if structured_outputs.kind == "regex":
        return str(compiler.grammar_from_regex(source))
    if structured_outputs.kind == "choice":
        source = "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, json.loads(source)))
    else:
        source = _as_lark(source)
    return str(compiler.grammar_from_lark(source))


def _as_lark(grammar: str) -> str:
    """Returns a Lark grammar unchanged, and a GBNF grammar as Lark. Raises InvalidRequest."""
    _llguidance()
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(grammar))
    except (Exception, RecursionError) as error:  # its parser raises Exception itself
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InvalidRequest(f"grammar cannot be used: {reason}") from None
