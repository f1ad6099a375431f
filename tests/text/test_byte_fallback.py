"""Tokenizers with tokens of single bytes, as Llama 2's: the same ids are the same text, however
they come and wherever a character was cut."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from radixserve import Runtime, SamplingParams
from radixserve.text.tokenizer import IncrementalDetokenizer, Tokenizer
from tests.checkpoints import make_checkpoint

SPECIAL = ["<unk>", "<s>", "</s>"]
PIECES = ["\u2581", "a", "b", "\u2581a", "\u2581b", "ab", "\u2581ab", "é", "!", "\ufffd"]
BYTE = len(SPECIAL)  # id of byte 0
PIECE = BYTE + 256  # id of the first piece of text
EXTRA = PIECE + len(PIECES)  # a special token that the tokenizer's class does not know by a name
CUTS = [bytes(text.encode()[:n]) for text in ("é", "€", "😀", "\ufffd") for n in (1, 2, 3, 4)]


def llama2_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """As Llama 2's tokenizer.json describes it, with a vocabulary of letters."""
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    merges = [("\u2581", "a"), ("\u2581", "b"), ("a", "b"), ("\u2581a", "b")]
    made = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: at for at, token in enumerate(tokens)},
            merges=merges,
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    made.add_special_tokens([tokenizers.AddedToken("<extra>", special=True)])
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def wordpiece_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Its decoder changes the text before a token: "do", "n", "'", "t" become "don't"."""
    words = ["[UNK]", "do", "n", "'", "t", "##s", ".", ",", "we", "ve", "\u201c", "not"]
    made = tokenizers.Tokenizer(
        models.WordPiece({word: at for at, word in enumerate(words)}, unk_token="[UNK]")
    )
    made.decoder = decoders.WordPiece(cleanup=True)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(llama2_tokenizer())


def stream(tokenizer: Tokenizer, ids: list[int], sizes: list[int], prompt: list[int]) -> str:
    text = IncrementalDetokenizer(tokenizer, prompt)
    pieces, at = [], 0
    for size in sizes:
        pieces.append(text.push(ids[at : at + size]))
        at += size
    return "".join([*pieces, text.push(ids[at:]), text.finish()])


IDS = st.lists(
    st.one_of(
        st.sampled_from(CUTS).map(lambda data: [BYTE + byte for byte in data]),
        st.integers(0, 255).map(lambda byte: [BYTE + byte]),
        st.sampled_from([*range(len(SPECIAL)), *range(PIECE, EXTRA + 1)]).map(lambda one: [one]),
    ),
    max_size=12,
).map(lambda parts: [token_id for part in parts for token_id in part])


@settings(max_examples=150)
@given(ids=IDS, prompt=IDS, sizes=st.lists(st.integers(0, 5), max_size=40))
def test_the_same_text_however_the_tokens_come(
    tokenizer: Tokenizer, ids: list[int], prompt: list[int], sizes: list[int]
) -> None:
    whole = stream(tokenizer, ids, [], prompt)
    assert stream(tokenizer, ids, sizes, prompt) == whole
    assert stream(tokenizer, ids, [1] * len(ids), prompt) == whole


@settings(max_examples=150)
@given(parts=st.lists(st.one_of(st.binary(max_size=9), st.sampled_from(CUTS)), max_size=6))
def test_bytes_are_what_they_say(tokenizer: Tokenizer, parts: list[bytes]) -> None:
    """Whole characters stay, and what is none is a mark, as everywhere else."""
    data = b"".join(parts)
    text = data.decode("utf-8", errors="replace")
    ids = [BYTE + byte for byte in data]
    assert tokenizer.decode([PIECE + 1, *ids]) == "a" + text
    assert stream(tokenizer, ids, [1] * len(ids), [PIECE + 1]) == text
    between = [token for one in ids for token in (one, 2, EXTRA)]  # hidden ones cut nothing
    assert tokenizer.decode([PIECE + 1, *between]) == "a" + text


def test_special_tokens_that_are_kept_cut_a_character(tokenizer: Tokenizer) -> None:
    first, *rest = (BYTE + byte for byte in "é".encode())
    assert tokenizer.decode([PIECE + 1, first, 2, *rest], keep_special=True) == "a\ufffd</s>\ufffd"


def test_some_special_tokens_are_kept(tokenizer: Tokenizer) -> None:
    ids = [PIECE + 1, 2, EXTRA, PIECE + 2]
    assert tokenizer.special_ids == {0, 1, 2, EXTRA}
    for keep, text in (([EXTRA], "a<extra>b"), ([2, 1], "a</s>b"), ([], "ab")):
        assert tokenizer.decode(ids, keep_special=keep) == text
        found = tokenizer.detokenizer([], keep_special=keep)
        assert "".join([*(found.push([one]) for one in ids), found.finish()]) == text


def test_text_goes_through(tokenizer: Tokenizer) -> None:
    for text in ("ab a", "a € 😀b", "é"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_decoder_that_changes_what_was_before() -> None:
    tokenizer = Tokenizer(wordpiece_tokenizer())
    assert not tokenizer.decodes_by_appending
    rng = random.Random(0)
    for _ in range(300):
        ids = rng.choices(range(12), k=rng.randint(1, 12))
        prompt = rng.choices(range(12), k=rng.randint(0, 6))
        whole = stream(tokenizer, ids, [], prompt)
        sizes = rng.choices(range(5), k=8)
        assert stream(tokenizer, ids, sizes, prompt) == whole


@pytest.fixture(scope="module")
def rt(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    folder = make_checkpoint(tmp_path_factory.mktemp("llama2"), "llama", eos_ids=[2])
    llama2_tokenizer().save_pretrained(folder)
    with Runtime(Path(folder), num_pages=1024) as rt:
        yield rt


def test_generate_stream_and_stop_strings_give_one_text(rt: Runtime) -> None:
    """The ids are forced on the model: characters, cut ones among them."""
    rng = random.Random(1)
    texts = ["é", "€", "😀", "a", " b", "ab!", "\ufffd"]
    for number in range(24):
        ids: list[int] = []
        while len(ids) < 12:
            data = rng.choice(texts).encode()
            if rng.random() < 0.4:
                data = data[: rng.randint(1, len(data))]
            if rng.random() < 0.3:
                ids.append(rng.choice([EXTRA, PIECE, PIECE + 3]))
            ids += [BYTE + byte for byte in data]

        def force(output: list[int], logits: torch.Tensor, ids: list[int] = ids) -> torch.Tensor:
            logits[ids[len(output)]] = 1e4
            return logits

        def params(ids: list[int] = ids, force: Any = force, **fields: Any) -> SamplingParams:
            length = len(ids)
            return SamplingParams(
                temperature=0.0, max_tokens=length, logits_processors=[force], **fields
            )

        prompt = [PIECE + 1] if number % 2 else "ab é"
        whole = rt.generate(prompt, params())
        assert whole.token_ids == ids
        pieces = [chunk.text for chunk in rt.stream(prompt, params())]
        assert "".join(pieces) == whole.text
        assert rt.generate(prompt, params(stop="never")).text == whole.text
        with rt.branch(prompt) as branch:
            before = branch.length
            assert branch.generate(params()).text == branch.text_from(before) == whole.text
        stop = whole.text[rng.randrange(len(whole.text)) :][: rng.randint(1, 3)]
        cut = rt.generate(prompt, params(stop=stop))
        assert cut.text == whole.text[: whole.text.index(stop)]
        streamed = [chunk.text for chunk in rt.stream(prompt, params(stop=stop))]
        assert "".join(streamed) == cut.text
