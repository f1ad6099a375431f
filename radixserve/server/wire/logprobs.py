"""Log-probabilities in the formats of OpenAI's completions and chats, and of vLLM's prompts."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any

from radixserve.completion import Completion
from radixserve.text.tokenizer import Tokenizer

Tops = Sequence[Mapping[int, float] | None]
_LEAST = -9999.0  # in place of minus infinity, which JSON does not have
_REPLACEMENT = "\ufffd"


class TokenTexts:
    """The texts of tokens. Each token is decoded once; memory: at most the vocabulary."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def text(self, token_id: int) -> str:
        """The token's text; a special token's name. An incomplete character is written as OpenAI
        does, "bytes:\\xe2\\x82"; without a tokenizer, the text is "token_id:5"."""
        text = self._texts.get(token_id)
        if text is None:
            text = f"token_id:{token_id}"
            if self._tokenizer is not None:
                text = self._tokenizer.text_of(token_id)
                raw = self.raw(token_id) if _REPLACEMENT in text else None
                if raw is not None and not _is_utf8(raw):
                    text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
            self._texts[token_id] = text
        return text

    def raw(self, token_id: int) -> bytes | None:
        """The token's UTF-8 bytes; None if they are not known."""
        if self._tokenizer is None:
            return self.text(token_id).encode()
        return self._tokenizer.bytes_of(token_id)

    def bytes_of(self, token_id: int) -> list[int] | None:
        """The token's UTF-8 bytes as a list for JSON; None if they are not known."""
        raw = self.raw(token_id)
        return None if raw is None else list(raw)


def of_chat(
    texts: TokenTexts,
    ids: Sequence[int],
    logprobs: Sequence[float],
    tops: Tops | None,
    *,
    are_named: bool = False,
    by_id: bool = False,
) -> dict[str, Any]:
    """`choices[].logprobs` of a chat. For the options see `chat_entries`."""
    content = chat_entries(texts, ids, logprobs, tops, are_named=are_named, by_id=by_id)
    return {"content": content, "refusal": None}


def chat_entries(
    texts: TokenTexts,
    ids: Sequence[int],
    logprobs: Sequence[float],
    tops: Tops | None,
    *,
    are_named: bool = False,
    by_id: bool = False,
) -> list[dict[str, Any]]:
    """An entry for each token: its log-probability, and those of other tokens at its position.

    tops       the best tokens at each position
    are_named  `tops` are tokens that the request names: the token itself comes first
    by_id      tokens are written as "token_id:5"
    """
    entries = []
    for index, (token_id, logprob) in enumerate(zip(ids, logprobs, strict=True)):
        top = (tops[index] or {}) if tops else {}
        if are_named:
            top = {token_id: logprob, **top}
        entry = _chat_entry(texts, token_id, logprob, by_id)
        entry["top_logprobs"] = [_chat_entry(texts, other, lp, by_id) for other, lp in top.items()]
        entries.append(entry)
    return entries


def of_completion(
    texts: TokenTexts,
    ids: Sequence[int],
    logprobs: Sequence[float | None],
    tops: Tops | None,
    *,
    start: int = 0,
    by_id: bool = False,
) -> dict[str, Any]:
    """`choices[].logprobs` of a completion. In `top_logprobs` the token itself comes first, then
    the others of `tops`.

    `start`: the text offset of the first token. `by_id`: tokens are written as "token_id:5", which
    is unique; their texts are not.
    """
    names: list[str] = []
    offsets: list[int] = []
    # Decodes characters that consist of several tokens.
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    best: list[dict[str, float] | None] = []
    for index, (token_id, logprob) in enumerate(zip(ids, logprobs, strict=True)):
        name = _name(texts, token_id, by_id)
        names.append(name)
        offsets.append(start)
        raw = texts.raw(token_id)
        is_part = raw is not None and not _is_utf8(raw)
        if raw is not None and (is_part or decoder.getstate()[0]):
            start += len(decoder.decode(raw))
        else:
            start += len(texts.text(token_id))
        if logprob is None:
            best.append(None)
            continue
        alternatives: dict[str, float] = {}
        top = dict((tops[index] or {}) if tops else {})
        for other, value in {token_id: logprob, **top}.items():
            other_name = _name(texts, other, by_id)  # of tokens with the same name, the best counts
            alternatives[other_name] = max(value, alternatives.get(other_name, _LEAST))
        best.append(alternatives)
    return {
        "tokens": names,
        "token_logprobs": [None if value is None else max(value, _LEAST) for value in logprobs],
        "top_logprobs": best,
        "text_offset": offsets,
    }


def of_prompt(
    texts: TokenTexts, ids: Sequence[int], completion: Completion
) -> list[dict[str, Any] | None] | None:
    """vLLM's `prompt_logprobs`: for each token a map from token ids to log-probabilities, None for
    the first token. None if they were not requested."""
    if completion.prompt_logprobs is None:
        return None
    tops = completion.prompt_top_logprobs or [None] * len(ids)
    own_ranks = completion.prompt_ranks or [None] * len(ids)
    prompt_logprobs: list[dict[str, Any] | None] = []
    for token_id, logprob, top, own_rank in zip(
        ids, completion.prompt_logprobs, tops, own_ranks, strict=True
    ):
        if logprob is None:
            prompt_logprobs.append(None)
            continue
        ranks = {int(token_id): own_rank}
        ranks |= {other: rank for rank, other in enumerate(top or {}, 1)}
        entries = {int(token_id): logprob, **(top or {})}
        prompt_logprobs.append(
            {
                str(other): {
                    "logprob": max(value, _LEAST),
                    "rank": ranks.get(other),
                    "decoded_token": texts.text(other),
                }
                for other, value in entries.items()
            }
        )
    return prompt_logprobs


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _name(texts: TokenTexts, token_id: int, by_id: bool) -> str:
    return f"token_id:{token_id}" if by_id else texts.text(token_id)


def _chat_entry(texts: TokenTexts, token_id: int, logprob: float, by_id: bool) -> dict[str, Any]:
    name, bytes_ = _name(texts, token_id, by_id), texts.bytes_of(token_id)
    return {"token": name, "logprob": max(logprob, _LEAST), "bytes": bytes_}
