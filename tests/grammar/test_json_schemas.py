"""Classes of characters that leave quotes or backslashes out: no answer has them escaped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from radixserve import StructuredOutput
from radixserve.grammar.compiler import GrammarCompiler
from radixserve.grammar.json_schemas import narrowed, narrowed_pattern
from radixserve.text.tokenizer import Tokenizer
from tests.checkpoints import make_tokenizer

NO_CONTROLS = r"&&[^\x00-\x1f]]"


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("[a-z]+", "[a-z]+"),
        (r"^\S+$", r"^\S+$"),
        (r"[^\s]", r"[^\s]"),
        ('^[^"]*$', '^[[^"]' + NO_CONTROLS + "*$"),
        (r"[^\\]x", r"[[^\\]" + NO_CONTROLS + "x"),
        (r"[\x00-\x1f]", r"[[\x00-\x1f]" + NO_CONTROLS),
        (r'[]^"]', r'[]^"]'),
        (r'[^]"]x', r'[[^]"]' + NO_CONTROLS + "x"),
        (r'\[^"\]', r'\[^"\]'),
        (r"\p{L}+[\p{L}\p{N} _-]", r"\p{L}+[\p{L}\p{N} _-]"),
        (r"[^\p{P}]", r"[[^\p{P}]" + NO_CONTROLS),
        (r"\P{L}\PL", r"[\P{L}" + NO_CONTROLS + r"[\PL" + NO_CONTROLS),
        (r"\p{Cc}", r"[\p{Cc}" + NO_CONTROLS),
        ("[a-z&&[^b]]", "[[a-z&&[^b]]" + NO_CONTROLS),
        ("[", "["),
        ("\\", "\\"),
    ],
)
def test_narrowed_patterns(pattern: str, wanted: str) -> None:
    assert narrowed_pattern(pattern) == wanted


def test_only_patterns_are_changed() -> None:
    pattern = '[^"]'
    wide = {
        "properties": {"pattern": {"type": "string", "pattern": pattern}},
        "patternProperties": {pattern: {"const": {"pattern": pattern}}},
        "anyOf": [{"enum": [{"pattern": pattern}]}, True],
    }
    narrow = narrowed_pattern(pattern)
    assert narrowed(wide, closes=False) == {
        "properties": {"pattern": {"type": "string", "pattern": narrow}},
        "patternProperties": {narrow: {"const": {"pattern": pattern}}},
        "anyOf": [{"enum": [{"pattern": pattern}]}, True],
    }


def test_the_parser_follows(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    tokenizer = Tokenizer(make_tokenizer(tmp_path))
    compiler = GrammarCompiler(lambda: tokenizer.backend)

    def takes(pattern: str, value: str) -> bool:
        form = StructuredOutput(json={"type": "string", "pattern": pattern})
        matcher = compiler.compile(form).matcher(frozenset())
        for token_id in tokenizer.encode_more(json.dumps(value, ensure_ascii=False)):
            matcher.accept(token_id)
        return matcher.error is None and matcher.is_complete

    for pattern, value, is_match in (
        ('^[^"]$', '"', False),
        ('^[^"]$', "\\", True),
        (r"^[^\\]$", "\\", False),
        (r"^[^\\]$", '"', True),
        ("^[^a]$", '"', True),
        ("^[^a]$", "\n", True),
        (r'^[^"\\]$', "ü", True),
        (r'^[^"\\]$', "\n", False),
        (r"^\P{L}$", '"', True),
        (r"^\P{P}$", '"', False),
        (r"^[^!-~]$", '"', False),
    ):
        assert takes(pattern, value) == is_match, (pattern, value)
