"""Text that grows: whole characters only, and stop strings across token borders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import radixserve
from radixserve.errors import InvalidRequest
from radixserve.text.byte_level import ByteLevelDetokenizer
from radixserve.text.tokenizer import IncrementalDetokenizer, StopStringMatcher, Tokenizer
from tests.checkpoints import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token a byte: every character beyond ASCII spans several tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return load(folder)


def load(folder: Path) -> Tokenizer:
    found = Tokenizer.load(folder)
    assert found is not None
    return found


def stream(text: Any, ids: list[int], sizes: list[int]) -> list[str]:
    """The pieces that come out when the ids go in by groups of `sizes`."""
    pieces, at = [], 0
    for size in sizes:
        pieces.append(text.push(ids[at : at + size]))
        at += size
    pieces.append(text.push(ids[at:]))
    return [*pieces, text.finish()]


SIZES = st.lists(st.integers(0, 5), max_size=40)


Make = Callable[[Tokenizer, list[int]], Any]


@pytest.mark.parametrize("make", [IncrementalDetokenizer, Tokenizer.detokenizer])
class TestIncrementalDetokenizer:
    """By a window of tokens, as any tokenizer allows, and by bytes, as this one does too."""

    @settings(max_examples=300)
    @given(text=st.text(max_size=30), sizes=SIZES)
    def test_pieces_are_whole_characters_and_make_up_the_text(
        self, make: Make, tokenizer: Tokenizer, text: str, sizes: list[int]
    ) -> None:
        pieces = stream(make(tokenizer, []), tokenizer.encode(text), sizes)
        assert "".join(pieces) == text
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in pieces)

    @settings(max_examples=300)
    @given(data=st.binary(max_size=60), sizes=SIZES)
    def test_bytes_that_are_no_text_come_out_the_same_however_they_come(
        self, make: Make, tokenizer: Tokenizer, data: bytes, sizes: list[int]
    ) -> None:
        alphabet = [tokenizer.encode(chr(code)) for code in range(128)]
        high = tokenizer.encode("é")  # two tokens: bytes beyond ASCII
        ids = [alphabet[b][0] if b < 128 else high[b % 2] for b in data]
        whole = "".join(stream(make(tokenizer, []), ids, []))
        assert "".join(stream(make(tokenizer, []), ids, sizes)) == whole == tokenizer.decode(ids)

    def test_a_character_is_held_back_until_it_is_complete(
        self, make: Make, tokenizer: Tokenizer
    ) -> None:
        ids = tokenizer.encode("a😀b")
        assert len(ids) == 6
        text = make(tokenizer, tokenizer.encode("prompt"))
        assert [text.push([token]) for token in ids] == ["a", "", "", "", "😀", "b"]

    def test_endless_rubbish_is_let_through(self, make: Make, tokenizer: Tokenizer) -> None:
        lead = tokenizer.encode("é")[0]
        text = make(tokenizer, [])
        shown = "".join(text.push([lead]) for _ in range(100))
        assert len(shown) > 80

    def test_a_prompt_that_ends_inside_a_character(self, make: Make, tokenizer: Tokenizer) -> None:
        first, second = tokenizer.encode("é")
        text = make(tokenizer, [first])
        assert text.push([second, *tokenizer.encode("x")]).endswith("x")


DEMO_TOKENIZER = load(Path(radixserve.__file__).parent / "models" / "demo")


@settings(max_examples=300)
@given(
    ids=st.lists(st.one_of(st.integers(0, 6), st.integers(0, 4_200)), max_size=60),
    sizes=SIZES,
    keeps=st.one_of(st.booleans(), st.lists(st.integers(0, 9))),
)
def test_any_ids_of_the_demo_vocabulary(
    ids: list[int], sizes: list[int], keeps: bool | list[int]
) -> None:
    """Bytes, special tokens and ids that the vocabulary does not have."""
    assert DEMO_TOKENIZER.special_ids == set(range(7))
    text = DEMO_TOKENIZER.detokenizer([], keep_special=keeps)
    assert isinstance(text, ByteLevelDetokenizer)
    assert "".join(stream(text, ids, sizes)) == DEMO_TOKENIZER.decode(ids, keep_special=keeps)


class TestStopStringMatcher:
    @given(
        text=st.text("ab", max_size=30),
        stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
        sizes=st.lists(st.integers(0, 4), max_size=40),
    )
    def test_cuts_at_the_stop_string_that_is_complete_first(
        self, text: str, stops: list[str], sizes: list[int]
    ) -> None:
        stop = StopStringMatcher(stops)
        out, at = [], 0
        for size in [*sizes, len(text)]:
            out.append(stop.push(text[at : at + size]))
            at += size
            if stop.is_stopped:
                break
        out.append(stop.finish())
        seen = text[:at]
        places = [seen.find(s) for s in stops if s in seen]
        assert stop.is_stopped == bool(places)
        assert "".join(out) == (seen[: min(places)] if places else text)

    def test_nothing_is_held_without_stop_strings(self) -> None:
        assert StopStringMatcher(()).push("abc") == "abc"

    def test_may_stop_lets_pass_what_ends_before(self) -> None:
        stop = StopStringMatcher(["xy"])
        assert stop.push("a xy b", may_stop=False) == "a xy "
        assert stop.push("c x") == "bc "
        assert stop.push("y d") == ""
        assert stop.is_stopped


class TestChat:
    def test_messages_go_through_the_template(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
        assert len(ids) == 5  # <|user|> h i newline <|assistant|>

    def test_a_template_error_is_a_bad_request(self, tokenizer: Tokenizer) -> None:
        template = "{{ raise_exception('roles must alternate') }}"
        with pytest.raises(InvalidRequest, match="roles must alternate"):
            tokenizer.render_chat([{"role": "user", "content": "hi"}], template=template)

    def test_no_template(self, tmp_path: Path) -> None:
        wrapped = make_tokenizer(tmp_path)
        wrapped.chat_template = None
        for file in tmp_path.iterdir():
            file.unlink()
        wrapped.save_pretrained(tmp_path)
        with pytest.raises(InvalidRequest, match="no chat template"):
            load(tmp_path).encode_chat([{"role": "user", "content": "hi"}])

    def test_no_tokenizer(self, tmp_path: Path) -> None:
        assert Tokenizer.load(tmp_path) is None
