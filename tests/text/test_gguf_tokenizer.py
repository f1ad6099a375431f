"""Tokenizers from GGUF files: how text is split, and SentencePiece's merges."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
import transformers

from radixserve.gguf_file import GgufFile
from radixserve.text.gguf_tokenizer import PRE_TOKENIZERS, gguf_tokenizer
from tests.checkpoints import make_checkpoint

gguf = pytest.importorskip("gguf", reason='pip install "radixserve[gguf]"')
from tests.models.gguf_files import write_gguf  # noqa: E402

SPACE = "\u2581"
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
WORDS = ("the", "then", "hen", "her", "here", "re", "er", "st", "te", "test", "est", "ing", "in")


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "a 12 b", ["a", "Ġ12", "Ġb"]),
        ("smollm", "a 12 b", ["a", "Ġ", "1", "2", "Ġb"]),
        ("llama-bpe", "a 12345 DON'T", ["a", "Ġ", "123", "45", "ĠDON", "'T"]),
        ("lfm2", "a 12345 DON'T", ["a", "Ġ", "123", "45", "ĠDON", "'T"]),
        ("qwen2", "a 12\n\nb", ["a", "Ġ", "1", "2", "ĊĊ", "b"]),
        ("qwen35", "e\u0301a 1", ["eÌģa", "Ġ", "1"]),
        ("deepseek-llm", "a b, 12\nc", ["a", "Ġb", ",", "Ġ", "12", "Ċ", "c"]),
        ("deepseek-coder", "a b, 12\nc", ["a", "Ġb", ",", "Ġ", "1", "2", "Ċ", "c"]),
        ("deepseek-v3", "a.b 12345!\n", ["a", ".b", "Ġ", "123", "45", "!Ċ"]),
        ("falcon", "a+b 12345", ["a", "+", "b", "Ġ", "123", "45"]),
        ("tekken", "helloWorld ABc 12", ["hello", "World", "ĠABc", "Ġ", "1", "2"]),
        ("gpt-4o", "I'll doIt 1234", ["I'll", "Ġdo", "It", "Ġ", "123", "4"]),
    ],
)
def test_text_is_split_as_the_file_says(
    tmp_path: Path, pre: str, text: str, pieces: list[str]
) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama", with_tokenizer=True)
    file = GgufFile(write_gguf(tmp_path / "model.gguf", folder, pre=pre))
    splitter = gguf_tokenizer(file).backend_tokenizer.pre_tokenizer
    assert [piece for piece, _ in splitter.pre_tokenize_str(text)] == pieces


def write_sentencepiece(path: Path) -> dict[str, float]:
    """A file with a vocabulary alone; its pieces and their scores."""
    letters = [SPACE, *"ehinrstg"]
    pieces = [*letters, *WORDS, *(SPACE + word for word in WORDS), *(SPACE + c for c in "tih")]
    scores = {piece: -float(at) for at, piece in enumerate(sorted(pieces, key=len, reverse=True))}
    special = ["<unk>", "<s>", "</s>"]
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*special, *bytes_, *pieces])
    writer.add_token_scores([0.0] * 259 + [scores[piece] for piece in pieces])
    writer.add_token_types([UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return scores


def merged(text: str, scores: dict[str, float]) -> list[str]:
    """The pair whose token has the highest score becomes that token, again and again."""
    found = list(SPACE + text.replace(" ", SPACE))
    while True:
        pairs = [(scores.get(a + b), -at) for at, (a, b) in enumerate(pairwise(found))]
        best = max((pair for pair in pairs if pair[0] is not None), default=None)
        if best is None:
            break
        at = -best[1]
        found[at : at + 2] = [found[at] + found[at + 1]]
    return [token for piece in found for token in ([piece] if piece in scores else _bytes(piece))]


def _bytes(piece: str) -> list[str]:
    return [f"<0x{value:02X}>" for value in piece.encode()]


def test_sentencepiece(tmp_path: Path) -> None:
    """Merges in the order of scores, bytes for what has no token, a space before the text."""
    scores = write_sentencepiece(tmp_path / "model.gguf")
    tokenizer = gguf_tokenizer(GgufFile(tmp_path / "model.gguf"))

    def names_of(ids: list[int]) -> list[str | None]:
        return [tokenizer.backend_tokenizer.id_to_token(token_id) for token_id in ids]

    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choice([*"ehinrstg", *WORDS, " ", "é", "日", "z"]) for _ in range(12))
        ids = tokenizer(text)["input_ids"]
        assert names_of(ids) == ["<s>", *merged(text, scores)]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert names_of(tokenizer("test</s>test")["input_ids"]) == [
        *("<s>", SPACE + "test", "</s>", SPACE + "test")
    ]


def test_merges_of_gemma_4(tmp_path: Path) -> None:
    """The file's merges over characters, with bytes where there is no token: as the model's own
    tokenizer, which is made here with the same merges."""
    from tokenizers import Tokenizer, models, normalizers

    merges = [("t", "h"), ("th", "e"), (SPACE, "the"), ("\n", "\n"), (SPACE, SPACE), ("i", "n")]
    special, bytes_ = ["<pad>", "<eos>", "<bos>", "<unk>"], [f"<0x{i:02X}>" for i in range(256)]
    tokens = [*special, *bytes_, SPACE, "\n", *"ehint", *(a + b for a, b in merges)]
    marks = ["<|turn>", "<turn|>"]
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "gemma4")
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list([*tokens, *marks])
    writer.add_token_types(
        [CONTROL] * 3 + [UNKNOWN] + [BYTE] * 256 + [NORMAL] * (len(tokens) - 260) + [CONTROL] * 2
    )
    writer.add_token_merges([f"{a} {b}" for a, b in merges])
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = gguf_tokenizer(GgufFile(path))
    own = Tokenizer(
        models.BPE(
            {token: number for number, token in enumerate(tokens)},
            merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    own.normalizer = normalizers.Replace(" ", SPACE)
    for text in ("the then  in\n\nthe", "\n the é", "  t", "in the thin"):
        ids = tokenizer.backend_tokenizer.encode(text).ids
        assert ids == [2, *own.encode(text).ids]
        assert tokenizer.decode(ids[1:]) == text
    assert tokenizer.backend_tokenizer.encode("<|turn>in").ids[1:] == [
        len(tokens),
        tokens.index("in"),
    ]


COMPOSING = (
    "qwen2",
    "qwen35",
    "deepseek-r1-qwen",
    "stablelm2",
    "hunyuan",
    "command-r",
    "mpt",
    "olmo",
)


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_text_is_composed_where_the_models_tokenizer_does(tmp_path: Path, pre: str) -> None:
    """The Angstrom sign becomes a letter with a ring, and a letter and an accent become one."""
    folder = make_checkpoint(tmp_path / "model", "llama", with_tokenizer=True)
    file = GgufFile(write_gguf(tmp_path / "model.gguf", folder, pre=pre))
    encode = gguf_tokenizer(file).backend_tokenizer.encode
    for text, composed in (
        ("\u212b", "\u00c5"),
        ("e\u0301a", "\u00e9a"),
        ("\u1100\u1161", "\uac00"),
    ):
        assert (encode(text).ids == encode(composed).ids) == (pre in COMPOSING)


@pytest.mark.parametrize(
    ("pre", "name"), [("qwen2", "Qwen2Tokenizer"), ("qwen35", "Qwen3_5Tokenizer")]
)
def test_the_ids_of_the_models_own_tokenizer(tmp_path: Path, pre: str, name: str) -> None:
    """Random text of letters, signs, accents that can be composed, digits and spaces."""
    folder = make_checkpoint(tmp_path / "model", "llama", with_tokenizer=True)
    described = json.loads((folder / "tokenizer.json").read_text())["model"]
    merges = [tuple(merge) for merge in described["merges"]]
    own = getattr(transformers, name)(vocab=described["vocab"], merges=merges)
    file = GgufFile(write_gguf(tmp_path / "model.gguf", folder, pre=pre))
    encode = gguf_tokenizer(file).backend_tokenizer.encode
    rng = random.Random(0)
    letters = [
        *"aeinrst thE09.,'\n",
        "\u212b",
        "\u0301",
        "\u0308",
        "\u2126",
        "\u1100",
        "\u1161",
        "日",
    ]
    for _ in range(2_000):
        text = "".join(rng.choices(letters, k=rng.randint(1, 24)))
        assert encode(text, add_special_tokens=False).ids == own.encode(
            text, add_special_tokens=False
        )
