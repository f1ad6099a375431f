"""The tokenizer that a GGUF file describes, built from its tokens, merges and pre-tokenizer.

`tokenizer.ggml.pre` names how text is split before merges are applied; a wrong split gives tokens
that the model was never trained on, so an unknown name is refused.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from radixserve.errors import ModelNotSupported
from radixserve.gguf_file import GgufFile

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
_WORDS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = _WORDS + r"|\p{N}{1,3}" + _REST
QWEN2 = _WORDS + r"|\p{N}" + _REST


class PreTokenizer(NamedTuple):
    """How text is split before merges are applied."""

    expression: str | None = None  # None: GPT-2's
    has_single_digits: bool = False
    takes_whole_words: bool = False  # a piece that is a token is not built from merges
    adds_bos: bool = False  # unless tokenizer.ggml.add_bos_token says otherwise


PRE_TOKENIZERS = {
    **dict.fromkeys(("gpt-2", "phi-2", "roberta-bpe"), PreTokenizer()),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), PreTokenizer(None, True)),
    **dict.fromkeys(("llama-bpe", "llama3"), PreTokenizer(LLAMA3, False, True, True)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), PreTokenizer(QWEN2)),
}


def gguf_tokenizer(file: GgufFile) -> Any:
    """A transformers tokenizer. ModelNotSupported where its kind or pre-tokenizer is unknown."""
    import transformers
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        processors,
    )

    fields = {
        name.removeprefix("tokenizer.ggml."): value
        for name, value in file.fields.items()
        if name.startswith("tokenizer.")
    }
    kind, pre = fields.get("model"), fields.get("pre")
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        raise ModelNotSupported(
            f"{file.path} has a tokenizer of the kind {kind!r} with the pre-tokenizer {pre!r}; "
            f"possible are gpt2 with {', '.join(PRE_TOKENIZERS)}"
        )
    split = PRE_TOKENIZERS[pre]
    tokens = fields.get("tokens", [])
    merges = [tuple(merge.split(" ", 1)) for merge in fields.get("merges", ())]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    bpe = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=split.takes_whole_words))
    steps: list[Any] = []
    if split.has_single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split.expression is not None:
        steps.append(pre_tokenizers.Split(Regex(split.expression), "isolated"))
    steps.append(
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.expression is None)
    )
    bpe.pre_tokenizer = pre_tokenizers.Sequence(steps)
    bpe.decoder = decoders.ByteLevel()
    types = fields.get("token_type") or [1] * len(tokens)
    for token, token_type in zip(tokens, types, strict=True):
        if token_type in (_CONTROL, _USER_DEFINED):
            added = AddedToken(token, special=token_type == _CONTROL, normalized=False)
            bpe.add_special_tokens([added]) if added.special else bpe.add_tokens([added])
    special = _special_tokens(fields, tokens)
    if fields.get("add_bos_token", split.adds_bos) and "bos_token" in special:
        bos = special["bos_token"]
        bpe.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, fields["bos_token_id"])]
        )
    fast_tokenizer: Any = transformers.PreTrainedTokenizerFast
    return fast_tokenizer(
        tokenizer_object=bpe,
        chat_template=fields.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **special,
    )


def _special_tokens(fields: dict[str, Any], tokens: list[str]) -> dict[str, str]:
    """Tokens that stand for the begin and end of text and for padding."""
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    ids = {ours: fields.get(f"{theirs}_token_id") for theirs, ours in names.items()}
    return {f"{name}_token": tokens[i] for name, i in ids.items() if isinstance(i, int)}
