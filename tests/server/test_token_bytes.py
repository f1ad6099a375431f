"""Log-probabilities of tokens that are parts of a character: names, bytes and offsets."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

from radixserve.api.runtime import DEMO
from radixserve.server.wire.logprobs import TokenTexts, of_chat, of_completion
from radixserve.text.tokenizer import Tokenizer
from tests.text.test_byte_fallback import llama2_tokenizer


@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
def test_parts_of_a_character(name: str) -> None:
    made = Tokenizer.load(DEMO) if name == "byte level" else Tokenizer(llama2_tokenizer())
    assert made is not None
    texts, text = TokenTexts(made), "a\U0001f642\u20acb"
    ids = made.encode_more(text)
    whole = b"".join(made.bytes_of(token) or b"" for token in ids)
    assert whole.decode().removeprefix(" ") == text
    parts = [token for token in ids if texts.text(token).startswith("bytes:")]
    assert parts
    chat = of_chat(texts, ids, [-1.0] * len(ids), None)["content"]
    assert all(entry["bytes"] is not None for entry in chat)
    best = {token: -float(at) for at, token in enumerate(dict.fromkeys(parts))}
    found = of_completion(texts, ids, [-9.0] * len(ids), [best] * len(ids), start=3)
    assert set(found["top_logprobs"][0]) == {texts.text(token) for token in [*best, ids[0]]}
    # A part stands where its character begins, and what follows where it does in the text.
    offsets = dict(zip(found["tokens"], found["text_offset"], strict=True))
    assert offsets["b"] - offsets[next(iter(offsets))] == len(whole.decode()) - 1
    assert sorted(found["text_offset"]) == found["text_offset"]


def test_a_token_keeps_the_space_before_it() -> None:
    """Also where a decoder strips that of the first token."""
    made = Tokenizer(llama2_tokenizer())
    text = "a ab  b"
    ids = made.encode_more(text)
    chat = of_chat(TokenTexts(made), ids, [-1.0] * len(ids), None)["content"]
    assert "".join(entry["token"] for entry in chat) == f" {text}"
    assert b"".join(bytes(entry["bytes"]) for entry in chat).decode() == f" {text}"
    offsets = of_completion(TokenTexts(made), ids, [-1.0] * len(ids), None)["text_offset"]
    assert offsets == [0, 2, 5, 6]
