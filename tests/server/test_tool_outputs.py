"""Outputs of models in every style, sound and damaged: marks left out, doubled, out of order, cut.

The answer is the same however the output is cut into pieces, and no character is lost or there
twice (`tool_outputs.py` says what that means).
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.tool_outputs import (
    WRITERS,
    check_output,
    config_of,
    make_output,
    parsed,
    thoughts_of,
)


def check_example(style: str, seed: int) -> Counter[str]:
    """Make an output and check it. The number of its parts by kind."""
    rng = random.Random(f"{style}{seed}")
    tokens = make_output(style, rng)
    is_thinking = thoughts_of(style) is not None and rng.random() < 0.2
    return Counter(check_output(style, tokens, rng, is_thinking=is_thinking))


@pytest.mark.parametrize("style", sorted(WRITERS))
@settings(max_examples=25)
@given(seed=st.integers(0, 1 << 40))
def test_nothing_is_lost_or_doubled(style: str, seed: int) -> None:
    check_example(style, seed)


@pytest.mark.parametrize("style", sorted(WRITERS))
def test_what_a_style_writes_is_read(style: str) -> None:
    """With text before, between the marks of a thought, and after a call of an unknown function."""
    calls = [("f", {"a": 1, "s": "é <b> {"}), ("g", {}), ("h", {"k": "v"})]
    wanted = [("call", 'f{"a": 1, "s": "é <b> {"}'), ("call", "g{}"), ("call", 'h{"k": "v"}')]
    if style == "llama3":  # without a mark, a call names a known function
        calls, wanted = calls[:2], wanted[:2]
    text = WRITERS[style](calls)
    assert parsed(config_of(style), list(text)) == wanted
    marks = thoughts_of(style)
    if marks is None:
        return
    thought = f"{marks.opening}{marks.label}Hm.{marks.closing}\n"
    config = config_of(style, thoughts=marks)
    assert parsed(config, list(thought + text)) == [("reasoning", "Hm."), *wanted]
    unclosed = thought.replace(marks.closing, "") + text
    if style != "llama3":
        assert parsed(config, list(unclosed)) == [("reasoning", "Hm."), *wanted]


@pytest.mark.long
@pytest.mark.parametrize("style", sorted(WRITERS))
def test_many_outputs(style: str, capsys: pytest.CaptureFixture[str]) -> None:
    num_outputs, kinds = 10_000, Counter[str]()
    for seed in range(num_outputs):
        kinds += check_example(style, seed)
    with capsys.disabled():
        print(f"\n{style}: {num_outputs} outputs, {dict(kinds)}")
