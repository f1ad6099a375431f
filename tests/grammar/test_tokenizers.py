"""Grammars over the tokens of every kind of tokenizer: bytes, pieces, and special tokens."""

from __future__ import annotations

import copy
import random
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from radixserve import InvalidRequest, StructuredOutput
from radixserve.api.runtime import DEMO
from radixserve.grammar import bitmask_workers, matcher
from radixserve.grammar import compiler as compiler_module
from radixserve.grammar.backend import TokenTable, compile_matcher
from radixserve.grammar.compiler import GrammarCompiler
from radixserve.grammar.matcher import BitmaskFuture
from radixserve.text.tokenizer import IncrementalDetokenizer, Tokenizer
from tests.checkpoints import make_tokenizer
from tests.grammar.forms import random_regex
from tests.pacing import PATIENCE_S
from tests.text.test_byte_fallback import llama2_tokenizer

pytest.importorskip("llguidance")

END = 2  # </s> of the first two kinds


def sentencepiece_of_llama() -> Tokenizer:
    return Tokenizer(llama2_tokenizer())


def sentencepiece_of_gguf(folder: Path) -> Tokenizer:
    pytest.importorskip("gguf")
    from tests.text.test_gguf_tokenizer import write_sentencepiece

    write_sentencepiece(folder / "model.gguf")
    found = Tokenizer.load(folder / "model.gguf")
    assert found is not None
    return found


def bytes_only(folder: Path) -> Tokenizer:
    return Tokenizer(make_tokenizer(folder))


def end_of(tokenizer: Tokenizer) -> int:
    found: int = tokenizer.backend.token_to_id("</s>") or tokenizer.backend.token_to_id("<|eos|>")
    return found


@pytest.fixture(params=["llama", "gguf", "bytes"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    if request.param == "llama":
        return sentencepiece_of_llama()
    return sentencepiece_of_gguf(tmp_path) if request.param == "gguf" else bytes_only(tmp_path)


def walk(
    compiler: GrammarCompiler, form: StructuredOutput, rng: random.Random, end: int = END
) -> list[int]:
    """The tokens of an answer, sampled from what each mask allows."""
    place = compiler.compile(form).matcher(frozenset([end]))
    ids: list[int] = []
    while not place.is_complete and len(ids) < 400:
        answer = np.array(ids, np.int32)
        (row,) = BitmaskFuture([place], [answer], 1).get()
        assert place.error is None
        bits = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
        chosen = rng.choice(bits)
        if chosen == end:
            break
        ids.append(chosen)
        place.accept(chosen)
        assert place.error is None
    return ids


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    """As an answer's text is made: after a prompt."""
    stream = IncrementalDetokenizer(tokenizer, tokenizer.encode("x"))
    return stream.push(ids) + stream.finish()


def test_random_walks_match(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    compiler = GrammarCompiler(lambda: tokenizer.backend)
    num_tried, end = 0, end_of(tokenizer)
    while num_tried < 40:
        regex = random_regex(rng) + rng.choice(["", " (?:the|test|é) ?(?:日|hen)?"])
        if re.fullmatch(regex, ""):
            continue
        num_tried += 1
        text = text_of(tokenizer, walk(compiler, StructuredOutput(regex=regex), rng, end))
        assert re.fullmatch(regex, text), (regex, text)


def test_a_matcher_goes_wherever_an_answer_goes(tokenizer: Tokenizer) -> None:
    """Rolled back, forked and moved to other tokens it stands where a new one would."""
    rng = random.Random(1)
    compiler = GrammarCompiler(lambda: tokenizer.backend)
    form = StructuredOutput(regex="(?:[a-c]{2,4}|the [0-9]{3}|é日+)(?:-[a-z]{1,5}){2}")
    end = end_of(tokenizer)
    answers = [walk(compiler, form, rng, end) for _ in range(6)]
    grammar = compiler.compile(form)
    moved = grammar.matcher(frozenset([end]))
    for _ in range(60):
        ids = rng.choice(answers)
        ids = ids[: rng.randrange(len(ids) + 1)]
        if rng.random() < 0.3:
            moved = moved.fork()
        fresh = grammar.matcher(frozenset([end]))
        answer = np.array(ids, np.int32)
        mine, theirs = BitmaskFuture([moved, fresh], [answer, answer], 1).get()
        assert mine.tolist() == theirs.tolist()
        assert (moved.is_complete, moved.error) == (fresh.is_complete, fresh.error)


@pytest.mark.parametrize("num_words", [1, 9, 20])
def test_models_may_have_more_tokens_than_their_tokenizer(
    tokenizer: Tokenizer, num_words: int
) -> None:
    """Their vocabularies are padded; an end token may lie there, all others are forbidden."""
    grammar = GrammarCompiler(lambda: tokenizer.backend).compile(StructuredOutput(regex="[a-c]*"))
    last = 32 * max(num_words, grammar.table.num_words) - 1
    assert BitmaskFuture([], [], num_words).get().shape == (0, num_words)
    places = [grammar.matcher(frozenset([last])) for _ in range(3)]
    rows = BitmaskFuture(places, [np.empty(0, np.int32)] * 3, num_words).get()
    assert rows.shape[1] == max(num_words, grammar.table.num_words)
    bits = np.unpackbits(rows.view(np.uint8), axis=1, bitorder="little")
    assert [place.error for place in places] == [None] * 3
    assert bits[:, last].all()
    size = tokenizer.backend.get_vocab_size()
    assert bits[:, :size].any(axis=1).all()
    assert not bits[:, size:last].any()


def test_special_tokens_by_name_and_number() -> None:
    made = tokenizers.Tokenizer.from_str(llama2_tokenizer().backend_tokenizer.to_str())
    made.add_special_tokens(["<|tool|>", "[TOOL_CALLS]"])
    made.add_tokens(["<tool_call>"])  # of the vocabulary, but not special
    names = ("<|tool|>", "[TOOL_CALLS]", "<tool_call>")
    ids = {name: made.token_to_id(name) for name in names}
    compiler = GrammarCompiler(lambda: made)
    number = ids["[TOOL_CALLS]"]
    form = StructuredOutput(grammar=f'start: <|tool|> "a" <[{number}]>')
    found = walk(compiler, form, random.Random(0))
    assert (found[0], found[-1]) == (ids["<|tool|>"], number)
    for grammar in ("start: <|none|>", f"start: <[{made.get_vocab_size() + 5}]>"):
        with pytest.raises(InvalidRequest, match="grammar cannot be used"):
            compiler.compile(StructuredOutput(grammar=grammar))
    plain = walk(compiler, StructuredOutput(grammar='start: "<tool_call>"'), random.Random(0))
    assert made.decode(plain, skip_special_tokens=False).strip() == "<tool_call>"


def test_a_tokenizer_of_another_make_is_refused() -> None:
    class Slow:
        chat_template = None

        def __deepcopy__(self, memo: Any) -> Slow:
            return self

    slow = Tokenizer(Slow())
    with pytest.raises(InvalidRequest, match="needs a fast tokenizer; the model has a Slow"):
        GrammarCompiler(lambda: slow.backend).compile(StructuredOutput(regex="a"))


def test_compiled_grammars_are_kept_and_slow_ones_refused(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    compiler = GrammarCompiler(lambda: tokenizer.backend)
    form = StructuredOutput(regex="a")
    assert not compiler.has(form)
    assert compiler.compile(form) is compiler.compile(StructuredOutput(regex="a"))
    for number in range(300):
        compiler.compile(StructuredOutput(choice=[str(number)]))
    assert not compiler.has(form), "the oldest ones go"
    done = threading.Event()
    monkeypatch.setattr(compiler_module, "compile_matcher", lambda *_, **__: done.wait())
    monkeypatch.setattr(compiler_module, "COMPILE_TIMEOUT_S", 0.05)
    try:
        with pytest.raises(InvalidRequest, match="takes longer than"):
            compiler.compile(StructuredOutput(regex="b"))
    finally:
        done.set()


@pytest.mark.parametrize("regex", ["(a{999}){999}", "a{1000000}", "(a|aa){50000}"])
def test_expressions_that_cost_too_much_are_refused(tokenizer: Tokenizer, regex: str) -> None:
    """Their first token would take the lexer seconds, or end the answer with an error."""
    compiler = GrammarCompiler(lambda: tokenizer.backend)
    with pytest.raises(InvalidRequest, match="more than 200,000 expressions of the lexer"):
        compiler.compile(StructuredOutput(regex=regex))


def test_large_forms_are_within_the_limits(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(lambda: tokenizer.backend)
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=50)) for _ in range(4_096)]
    pattern = {"type": "string", "pattern": "^[a-z]{3,60}(-[0-9]{4}){2,8}$", "maxLength": 900}
    fields = {f"f{at}": pattern for at in range(100)}
    for form in (
        StructuredOutput(choice=words),
        StructuredOutput(json={"properties": fields, "required": [*fields]}),
        StructuredOutput(regex="[a-z]{1,200000}"),
        StructuredOutput(json={"type": "string", "minLength": 20_000}),
    ):
        assert compiler.compile(form).matcher(frozenset([END])).error is None


def test_rules_that_name_one_another_a_thousandfold(tokenizer: Tokenizer) -> None:
    """They are compiled recursively, in a thread with room for it."""
    rules = "".join(f'a{at}: a{at + 1} "x"\n' for at in range(5_000))
    compiler = GrammarCompiler(lambda: tokenizer.backend)
    compiler.compile(StructuredOutput(grammar=f'start: a0\n{rules}a5000: "y"\n'))
    defs = {f"a{at}": {"$ref": f"#/$defs/a{at + 1}"} for at in range(5_000)}
    compiler.compile(StructuredOutput(json={"$ref": "#/$defs/a0", "$defs": {**defs, "a5000": {}}}))


def test_a_mask_that_takes_too_long_ends_its_answer_only(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    compiler = GrammarCompiler(lambda: tokenizer.backend)
    form = StructuredOutput(regex="[a-c]{9}")
    matchers = [compiler.compile(form).matcher(frozenset([END])) for _ in range(5)]
    monkeypatch.setattr(bitmask_workers, "MASK_TIMEOUT_S", 0.3)
    monkeypatch.setattr(matcher, "_workers", lambda: bitmask_workers.BitmaskWorkers(2))
    plain = matcher.GrammarMatcher.compute
    gate = threading.Event()

    def compute(self: matcher.GrammarMatcher, row: Any) -> None:
        if self is matchers[1]:
            gate.wait(PATIENCE_S)
        plain(self, row)

    monkeypatch.setattr(matcher.GrammarMatcher, "compute", compute)
    rows = BitmaskFuture(matchers, [np.empty(0, np.int32)] * 5, 1).get()
    gate.set()
    assert [bool(row.any()) for row in rows] == [True, False, True, True, True]
    assert matchers[1].error == "the grammar cannot be followed: it takes too long"
    assert all(one.error is None for one in matchers if one is not matchers[1])


def test_slices_of_the_vocabulary_change_no_mask() -> None:
    """Strings that are cut short, strings without a bound, keys, and what stands between them."""
    words = Tokenizer.load(DEMO)
    assert words is not None
    strings = {"type": "array", "items": {"type": "string", "maxLength": 7}, "minItems": 3}
    properties = {"all": strings, "name": {"type": "string"}}
    form = StructuredOutput(
        json={"type": "object", "properties": properties, "required": [*properties]}
    )
    table = TokenTable(words.backend)
    plain = copy.copy(table)
    plain.native = table.native.with_slices([])
    rng = random.Random(0)
    for _ in range(8):
        sliced, unsliced = (compile_matcher(form, one) for one in (table, plain))
        for _ in range(40):
            mask = sliced.compute_bitmask()
            assert mask == unsliced.compute_bitmask()
            bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
            token_id = int(rng.choice(np.flatnonzero(bits)))
            if token_id == table.end_id:
                break
            assert sliced.consume_token(token_id)
            assert unsliced.consume_token(token_id)
