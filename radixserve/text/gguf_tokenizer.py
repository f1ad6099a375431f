"""Builds the tokenizer that a GGUF file describes, from its tokens, merges and pre-tokenizer.

`tokenizer.ggml.pre` names how text is split before merges are applied; a wrong split gives tokens
that the model was never trained on, so an unknown name is refused. The expressions are those of the
models' own tokenizers, as llama.cpp names them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

from radixserve.errors import InvalidRequest, ModelNotSupported, RadixServeError
from radixserve.gguf_file import GgufFile
from radixserve.text.fast_tokenizer import FastTokenizer, add_missing

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type
_SPACE = "\u2581"  # a space in SentencePiece's tokens

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_SUFFIX = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORDS = _SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _WORDS + r"|\p{N}{1,3}" + _REST
_QWEN2 = _WORDS + r"|\p{N}" + _REST
_QWEN35 = (
    _SUFFIX + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = r"[^\r\n\p{L}\p{N}]?%s*%s+{0}|[^\r\n\p{L}\p{N}]?%s+%s*{0}" % ((_UPPER, _LOWER) * 2)
_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = _CASED.replace("{0}", "") + r"|\p{N}" + _CASED_REST
_GPT4O = _CASED.replace("{0}", _SUFFIX + "?") + r"|\p{N}{1,3}" + _CASED_REST
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class PreTokenizer(NamedTuple):
    """How text is split before merges are applied."""

    expressions: tuple[str, ...]  # each splits the pieces that the expression before left
    takes_whole_words: bool = False  # a piece that is a token is used without merges
    adds_bos: bool = False  # the default where tokenizer.ggml.add_bos_token is not set
    composes: bool = False  # text is brought to NFC first, which no field of a file says


PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(("gpt-2", "phi-2", "exaone4"), PreTokenizer((_GPT2,))),
    **dict.fromkeys(("mpt", "olmo"), PreTokenizer((_GPT2,), composes=True)),  # as GPT-NeoX's
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "codeshell", "exaone"),
        PreTokenizer((r"\p{N}", _GPT2)),
    ),
    "command-r": PreTokenizer((r"\p{N}", _GPT2), composes=True),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2", "pixtral"),
        PreTokenizer((_LLAMA3,), takes_whole_words=True, adds_bos=True),
    ),
    **dict.fromkeys(("glm4", "chatglm-bpe"), PreTokenizer((_LLAMA3,), takes_whole_words=True)),
    **dict.fromkeys(("smaug-bpe", "dbrx"), PreTokenizer((_LLAMA3,))),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan"),
        PreTokenizer((_QWEN2,), composes=True),
    ),
    "megrez": PreTokenizer((_QWEN2,)),
    "qwen35": PreTokenizer((_QWEN35,), composes=True),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            # cased letters, but for Armenian and Georgian small ones and mathematical ones
            "\\s?[\\p{Lu}\\p{Ll}\\p{Lt}&&[^\u0560-\u0588\u10d0-\u10ff\U0001d400-\U0001d7ff]]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _CJK,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u30ff]+", _DEEPSEEK3)),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "tekken": PreTokenizer((_TEKKEN,), takes_whole_words=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), PreTokenizer((_GPT4O,))),
}


def gguf_tokenizer(file: GgufFile) -> FastTokenizer:
    """Returns the tokenizer of a GGUF file. Raises ModelNotSupported if its kind or pre-tokenizer
    is unknown, and InvalidRequest if its fields make no tokenizer."""
    try:
        return _read_tokenizer(file)
    except RadixServeError:
        raise
    except Exception as error:  # tokenizers raises Exception itself
        reason = " ".join(repr(error).split())[:200]
        raise InvalidRequest(f"the tokenizer of {file.path} cannot be read: {reason}") from error


def _read_tokenizer(file: GgufFile) -> FastTokenizer:
    from tokenizers import AddedToken, processors

    fields = {
        name.removeprefix("tokenizer.ggml."): value
        for name, value in file.fields.items()
        if name.startswith("tokenizer.")
    }
    kind, pre = fields.get("model"), fields.get("pre")
    if kind == "llama":
        bpe, adds_bos = _sentencepiece(fields), True
        fields = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **fields}
    elif kind == "gemma4":
        bpe, adds_bos = _pieces(fields, _merges_of(fields, fields.get("tokens", ()))), True
    elif kind == "gpt2" and pre in PRE_TOKENIZERS:
        bpe, adds_bos = _byte_level(fields, PRE_TOKENIZERS[pre]), PRE_TOKENIZERS[pre].adds_bos
    else:
        raise ModelNotSupported(
            f"{file.path} has a tokenizer of the kind {kind!r} with the pre-tokenizer {pre!r}; "
            f"possible are llama, gemma4, and gpt2 with {', '.join(PRE_TOKENIZERS)}"
        )
    tokens = fields.get("tokens", [])
    types = fields.get("token_type") or [1] * len(tokens)
    for token, token_type in zip(tokens, types, strict=True):
        if token_type in (_CONTROL, _USER_DEFINED):
            added = AddedToken(token, special=token_type == _CONTROL, normalized=False)
            bpe.add_special_tokens([added]) if added.special else bpe.add_tokens([added])
    special = _special_tokens(fields, tokens)
    if fields.get("add_bos_token", adds_bos) and "bos_token" in special:
        bos = special["bos_token"]
        bpe.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, fields["bos_token_id"])]
        )
    add_missing(bpe, special)
    return FastTokenizer(bpe, fields.get("tokenizer.chat_template"), special)


def _byte_level(fields: dict[str, Any], split: PreTokenizer) -> Any:
    """Returns a tokenizer that merges the bytes of each piece, as GPT-2's."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocabulary = {token: token_id for token_id, token in enumerate(fields.get("tokens", ()))}
    merges = _merges_of(fields, vocabulary)
    bpe = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=split.takes_whole_words))
    if split.composes:
        bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(
                pre_tokenizers.Split(Regex(expression), "isolated")
                for expression in split.expressions
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    return bpe


def _merges_of(fields: dict[str, Any], tokens: Iterable[str]) -> list[tuple[str, str]]:
    """Returns the file's merges, in order. A part may begin with a space."""
    merges = fields.pop("merges", ())
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if all(len(pair) == 2 and pair[0] for pair in pairs):
        return cast(list[tuple[str, str]], pairs)  # no part has a space
    own = {token: token for token in tokens}  # a merge's parts are not kept a second time
    cuts = ((merge, merge.index(" ", 1)) for merge in merges)
    parts = ((merge[:cut], merge[cut + 1 :]) for merge, cut in cuts)
    return [(own.get(left, left), own.get(right, right)) for left, right in parts]


def _sentencepiece(fields: dict[str, Any]) -> Any:
    """Returns a tokenizer that merges characters in the order of the tokens' scores. Characters
    without a token become bytes."""
    merges = _merges_of_scores(fields.get("tokens", []), fields.get("scores", ()))
    return _pieces(fields, merges, has_prefix=fields.get("add_space_prefix", True))


def _pieces(
    fields: dict[str, Any], merges: list[tuple[str, str]], *, has_prefix: bool = False
) -> Any:
    """Returns a tokenizer of SentencePiece's tokens by merges. Characters without a token become
    bytes. has_prefix: the tokenizer puts a space before each text."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens, types = fields.get("tokens", []), fields.get("token_type") or ()
    kinds = zip(tokens, types, strict=False)
    unknown = next((token for token, kind in kinds if kind == _UNKNOWN), None)
    bpe = Tokenizer(
        models.BPE(
            {token: token_id for token_id, token in enumerate(tokens)},
            merges,
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[Any] = [normalizers.Prepend(_SPACE)] if has_prefix else []
    bpe.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    ends: list[Any] = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    bpe.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    )
    return bpe


def _merges_of_scores(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Returns every pair of tokens that joins into a token, the highest score of the joined token
    first."""
    known = {token: token_id for token_id, token in enumerate(tokens)}
    order = sorted(range(len(tokens)), key=lambda token_id: -scores[token_id])
    return [
        (left, right)
        for token in (tokens[token_id] for token_id in order)
        for left, right in ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        if left in known and right in known
    ]


def _special_tokens(fields: dict[str, Any], tokens: list[str]) -> dict[str, str]:
    """Returns {name: text} of the begin, end, unknown and padding tokens, by transformers'
    names."""
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    ids = {ours: fields.get(f"{theirs}_token_id") for theirs, ours in names.items()}
    return {
        f"{name}_token": tokens[token_id]
        for name, token_id in ids.items()
        if isinstance(token_id, int)
    }
