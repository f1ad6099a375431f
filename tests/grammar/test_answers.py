"""Structured answers of the demo model: they have the form, and what stands beside it holds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from radixserve import InvalidRequest, RequestFailed, Runtime, SamplingParams, StructuredOutput

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def rt() -> Iterator[Runtime]:
    with Runtime("demo", num_pages=3_000) as runtime:
        yield runtime


def params(max_tokens: int = 200, seed: int = 1, **fields: Any) -> SamplingParams:
    names = ("json", "regex", "choice", "grammar", "json_object", "disable_any_whitespace")
    form = {name: fields.pop(name) for name in names if name in fields}
    return SamplingParams(
        max_tokens=max_tokens, seed=seed, structured=StructuredOutput(**form), **fields
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_schema_is_kept(rt: Runtime, temperature: float) -> None:
    found = rt.generate("Once upon a time", params(json=SCHEMA, temperature=temperature, n=3))
    assert isinstance(found, list)
    for one in found:
        assert one.finish_reason == "stop"
        value = json.loads(one.text)
        assert list(value) == ["name", "age", "kind"]
        assert len(value["name"]) <= 12
        assert 0 <= value["age"] <= 150


def test_an_answer_ends_when_nothing_can_follow(rt: Runtime) -> None:
    """Also where no token could say so, and before min_tokens."""
    for more in ({}, {"ignore_eos": True}, {"min_tokens": 50}, {"logprobs": 2}):
        one = rt.generate("Hello", params(regex="[a-c]{3}[0-9]", **more))
        assert re.fullmatch("[a-c]{3}[0-9]", one.text)
        assert one.finish_reason == "stop"
        assert one.token_ids[-1] not in rt.model.eos_ids


def test_where_an_answer_may_end_an_end_token_ends_it(rt: Runtime) -> None:
    (end_id, *_) = rt.model.eos_ids
    wish = params(regex="a+", logit_bias={end_id: 100.0})
    one = rt.generate("Hello", wish)
    assert one.text.strip("a") == ""
    assert one.text
    assert one.token_ids[-1] == end_id
    wish = params(regex="a+", logit_bias={end_id: 100.0}, ignore_eos=True, max_tokens=9)
    one = rt.generate("Hello", wish)
    assert (one.finish_reason, len(one.token_ids)) == ("length", 9)
    assert end_id not in one.token_ids
    wish = params(regex="a+", logit_bias={end_id: 100.0}, min_tokens=5)
    assert len(rt.generate("Hello", wish).token_ids) == 6, "min_tokens forbids the end token"


def test_special_tokens_of_a_grammar(rt: Runtime) -> None:
    one = rt.generate(
        "Hello", params(grammar='start: <|user|> "hi" <[5]>', skip_special_tokens=False)
    )
    assert one.text == "<|user|>hi<|assistant|>"
    assert (one.token_ids[0], one.token_ids[-1]) == (4, 5)
    inside = 'start: "f(" args ")"\nargs: %json {"type": "object", "maxProperties": 0}'
    assert re.fullmatch(r"f\(\{\s*\}\)", rt.generate("Hello", params(grammar=inside)).text)
    assert rt.generate("Hello", params(grammar='root ::= "x" | "y"')).text in ("x", "y")


def test_other_changes_hold_within_the_grammar(rt: Runtime) -> None:
    yes, no = (rt.generate("Hello", params(choice=[one])).token_ids for one in ("yes", "no"))
    wish = {"choice": ["yes", "no"], "temperature": 0.0}
    for wanted, bias in (("yes", {yes[0]: 100.0}), ("no", {no[0]: 100.0})):
        assert rt.generate("Hello", params(logit_bias=bias, **wish)).text == wanted
    assert rt.generate("Hello", params(regex="[ab]{4}", bad_words=["a"])).text == "bbbb"
    one = rt.generate("Hello", params(regex="[a-z]{40}", stop=["e"]))
    assert one.finish_reason == "stop"
    assert one.stop_reason == "e" or len(one.text) == 40

    def raise_all(_: list[int], logits: Any) -> Any:
        return logits * 0 + 5.0

    assert re.fullmatch(
        "[0-9]{3}",
        rt.generate("Hello", params(regex="[0-9]{3}", logits_processors=[raise_all])).text,
    )


def test_what_leaves_no_token_fails_alone(rt: Runtime) -> None:
    good = params(regex="[a-c]{3}")
    bad = params(regex="[a-c]{3}", allowed_token_ids=[6])
    with pytest.raises(RequestFailed, match="all tokens are forbidden"):
        rt.generate(["Hello", "Hello"], [good, bad])
    assert re.fullmatch("[a-c]{3}", rt.generate("Hello", good).text)
    rt.check()


def test_beams_keep_the_form(rt: Runtime) -> None:
    form = StructuredOutput(regex="(cat|dog) [a-z]{2,5}")
    found = rt.beam_search("Once", beam_width=3, max_tokens=20, structured=form)
    assert len({one.text for one in found}) == 3
    for one in found:
        assert re.fullmatch("(cat|dog) [a-z]{2,5}", one.text)
        assert one.finish_reason == "stop"
    with pytest.raises(InvalidRequest, match="needs an end token"):
        rt.beam_search("Once", beam_width=3, ignore_eos=True, structured=form)


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"regex": "(a"}, "regex cannot be used: .*unclosed group"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"json": {"type": "strin"}}, "json cannot be used: Invalid type: strin"),
        ({"json": {"unevaluatedItems": False}}, "Unimplemented keys"),
        ({"grammar": "start: foo"}, 'unknown name: "foo"'),
        ({"grammar": "root ::= ("}, "grammar cannot be used: Expected"),
    ],
)
def test_what_cannot_be_compiled_is_refused(rt: Runtime, form: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        rt.generate("Hello", params(**form))


def test_a_model_without_a_tokenizer_has_no_structured_output() -> None:
    with (
        Runtime("random:tiny-llama", num_pages=200) as runtime,
        pytest.raises(InvalidRequest, match="no tokenizer"),
    ):
        runtime.generate([1, 2, 3], params(regex="a"))
