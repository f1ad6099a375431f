"""`FastTokenizer`: reads a checkpoint's tokenizer.json without transformers, with equal results.

`load_fast_tokenizer` loads a file that transformers would use unchanged, in less time than the
import of transformers takes. It leaves other checkpoints to transformers: classes that build their
own tokenizer, tokens that are still to be added, several chat templates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

_NAMED = (  # the special tokens that templates know by name
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
)
_GENERIC = ("PreTrainedTokenizer", "TokenizersBackend")  # transformers takes the file as it is
_QWEN_STEPS = {
    "type": "Sequence",
    "pretokenizers": [
        {
            "type": "Split",
            "pattern": {
                "Regex": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            },
            "behavior": "Isolated",
            "invert": False,
        },
        {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
    ],
}
_QWEN_END = "<|endoftext|>"  # which Qwen2Tokenizer has as eos, unk and pad by default
_BPE_OPTIONS = (
    *("dropout", "unk_token", "fuse_unk", "byte_fallback", "ignore_merges"),
    *("continuing_subword_prefix", "end_of_word_suffix"),
)
_UNUSUAL = (  # fields of tokenizer_config.json
    *("auto_map", "fast_tokenizer_files", "split_special_tokens", "model_specific_special_tokens"),
    *("init_inputs", "fix_mistral_regex"),
)
_OTHER_FILES = ("additional_chat_templates", "tekken.json")


class FastTokenizer:
    """The interface of a transformers tokenizer that `Tokenizer` needs. Any number of threads."""

    def __init__(
        self, backend: Backend, chat_template: str | None, special_tokens: Mapping[str, str]
    ) -> None:
        """special_tokens: "bos_token" and other names -> the token's text."""
        backend.no_truncation()
        backend.no_padding()
        self.backend_tokenizer, self.chat_template = backend, chat_template
        self.special_tokens_map = dict(special_tokens)

    def __deepcopy__(self, memo: dict[int, Any]) -> FastTokenizer:
        return self  # nothing in it changes

    def __call__(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        verbose: bool = False,  # noqa: ARG002  # of transformers, about long texts
    ) -> dict[str, list[int]]:
        backend = self.backend_tokenizer  # whose `encode` would hold Python's lock
        (encoded,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return {"input_ids": encoded.ids}

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        assert not clean_up_tokenization_spaces, "the text is the tokens' own"
        return self.backend_tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens
        )

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def get_chat_template(
        self,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,  # noqa: ARG002  # other classes choose
    ) -> str | None:
        return chat_template or self.chat_template


def load_fast_tokenizer(folder: Path) -> FastTokenizer | None:
    """Returns the tokenizer of a checkpoint folder; None if transformers has to load it."""
    file = folder / "tokenizer.json"
    if not file.is_file() or any((folder / name).exists() for name in _OTHER_FILES):
        return None
    try:
        text = file.read_text(encoding="utf-8")
        described = json.loads(text)
        settings = _object(folder / "tokenizer_config.json")
        model_type = _object(folder / "config.json").get("model_type")
        is_plain = _is_taken_as_it_is(described, settings, text, model_type)
        if _builds_qwen(settings.get("tokenizer_class", "").removesuffix("Fast"), model_type):
            ends = dict.fromkeys(("eos_token", "unk_token", "pad_token"), _QWEN_END)
            settings = {**ends, **settings}
        special = _special_tokens(folder, described, settings) if is_plain else None
        template = _template(folder, settings)
        if special is None or not isinstance(template, str | None):
            return None
        return FastTokenizer(Backend.from_str(text), template, special)
    except Exception:  # tokenizers raises Exception itself; transformers says what is wrong
        return None


def add_missing(backend: Backend, special_tokens: Mapping[str, str]) -> None:
    """Make those of the named tokens special that are not."""
    from tokenizers import AddedToken

    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = [token for token in special_tokens.values() if token not in known]
    backend.add_special_tokens([AddedToken(token, special=True) for token in missing])


def _object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return value


def _is_taken_as_it_is(
    described: Mapping[str, Any], settings: Mapping[str, Any], text: str, model_type: object
) -> bool:
    """Whether transformers uses the file itself, or builds the same from its vocabulary."""
    name = settings.get("tokenizer_class")
    if any(settings.get(field) for field in _UNUSUAL) or not isinstance(name, str):
        return False
    name = name.removesuffix("Fast")
    if _builds_qwen(name, model_type):
        return _is_qwen(described, settings)
    if model_type not in ("llama", "qwen3"):
        return False
    return name in _GENERIC or (name == "LlamaTokenizer" and '"ByteLevel"' in text)


def _builds_qwen(name: str, model_type: object) -> bool:
    """Whether transformers makes its own Qwen2Tokenizer of the vocabulary and merges."""
    if name == "Qwen2Tokenizer":
        return model_type in ("qwen2", "qwen3")
    return model_type == "qwen2" and name in _GENERIC


def _is_qwen(described: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Whether the file describes the same tokenizer as transformers' Qwen2Tokenizer."""
    model, decoder = described.get("model", {}), described.get("decoder") or {}
    added = sorted(token["id"] for token in described.get("added_tokens", ()))
    first = len(model.get("vocab", ()))
    listed = settings.get("added_tokens_decoder")
    return (
        _without_offsets(described.get("pre_tokenizer")) == _QWEN_STEPS
        and described.get("normalizer") == {"type": "NFC"}
        and decoder.get("type") == "ByteLevel"
        and model.get("type") == "BPE"
        and not any(model.get(name) for name in _BPE_OPTIONS)
        and added == list(range(first, first + len(added)))
        and (listed is None or sorted(map(int, listed)) == added)
        and not settings.get("add_prefix_space")
    )


def _without_offsets(described: Any) -> Any:
    """Returns a description without `trim_offsets`, which does not change token ids."""
    if isinstance(described, list):
        return [_without_offsets(item) for item in described]
    if not isinstance(described, dict):
        return described
    return {
        name: _without_offsets(value) for name, value in described.items() if name != "trim_offsets"
    }


def _special_tokens(
    folder: Path, described: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, str] | None:
    """Returns {name: text} of the special tokens that a template knows by name; None if a special
    token of the settings differs from tokenizer.json, so that transformers would add or change
    it."""
    named = {name: settings[name] for name in _NAMED if settings.get(name) is not None}
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    added = {token["content"]: token for token in described.get("added_tokens", ())}
    others = [name for name in settings if name.endswith("_token") and name not in _NAMED]
    if any(isinstance(settings[name], str | dict) for name in others) or isinstance(extra, dict):
        return None
    if "added_tokens_decoder" in settings:
        for token_id, token in settings["added_tokens_decoder"].items():
            if added.get(token.get("content")) != {"id": int(token_id), **token}:
                return None
    elif (folder / "added_tokens.json").exists():
        return None
    else:
        mapped = _object(folder / "special_tokens_map.json")
        extra = [*extra, *mapped.pop("additional_special_tokens", ())]
        if not set(mapped) <= set(_NAMED):
            return None
        named |= mapped
    for token in [*named.values(), *extra]:
        content = token.get("content") if isinstance(token, dict) else token
        flags = {name: flag for name, flag in added.get(content, {}).items() if name != "id"}
        if flags.pop("content", None) is None or not flags.pop("special") or any(flags.values()):
            return None
    return {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in named.items()
    }


def _template(folder: Path, settings: Mapping[str, Any]) -> Any:
    file = folder / "chat_template.jinja"
    return file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template")
