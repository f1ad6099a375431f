"""Log-probabilities in the formats of OpenAI's completions, its chats, and vLLM's prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from radixserve.output import Completion
from radixserve.server.token_texts import TokenTexts

Tops = Sequence[Mapping[int, float] | None]
_LEAST = -9999.0  # JSON has no infinity


def of_chat(
    texts: TokenTexts, ids: Sequence[int], logprobs: Sequence[float], tops: Tops | None
) -> dict[str, Any]:
    """`choices[].logprobs` of a chat: the tokens' own and the best ones in their places."""
    content = []
    for at, (token_id, logprob) in enumerate(zip(ids, logprobs, strict=True)):
        top = (tops[at] or {}) if tops else {}
        entry = _chat_entry(texts, token_id, logprob)
        entry["top_logprobs"] = [_chat_entry(texts, other, lp) for other, lp in top.items()]
        content.append(entry)
    return {"content": content, "refusal": None}


def of_completion(
    texts: TokenTexts,
    ids: Sequence[int],
    logprobs: Sequence[float | None],
    tops: Tops | None,
    *,
    start: int = 0,
    by_id: bool = False,
) -> dict[str, Any]:
    """`choices[].logprobs` of a completion. `tops` hold the best tokens; a token's own is added.

    `start`: the offset of the first one's text. `by_id`: tokens as "token_id:5", never twice.
    """
    names: list[str] = []
    offsets: list[int] = []
    best: list[dict[str, float] | None] = []
    for at, (token_id, logprob) in enumerate(zip(ids, logprobs, strict=True)):
        name = _name(texts, token_id, by_id)
        names.append(name)
        offsets.append(start)
        start += len(texts.text(token_id))
        if logprob is None:
            best.append(None)
            continue
        found: dict[str, float] = {}
        top = dict((tops[at] or {}) if tops else {})
        for other, value in {**top, token_id: logprob}.items():
            other_name = _name(texts, other, by_id)  # parts of characters share a name
            found[other_name] = max(value, found.get(other_name, _LEAST))
        best.append(found)
    return {
        "tokens": names,
        "token_logprobs": [None if one is None else max(one, _LEAST) for one in logprobs],
        "top_logprobs": best,
        "text_offset": offsets,
    }


def of_prompt(
    texts: TokenTexts, ids: Sequence[int], completion: Completion
) -> list[dict[str, Any] | None] | None:
    """`prompt_logprobs` as vLLM gives them: a map from token id a token, None for the first."""
    if completion.prompt_logprobs is None:
        return None
    tops = completion.prompt_top_logprobs or [None] * len(ids)
    found: list[dict[str, Any] | None] = []
    for token_id, logprob, top in zip(ids, completion.prompt_logprobs, tops, strict=True):
        if logprob is None:
            found.append(None)
            continue
        ranks = {other: rank for rank, other in enumerate(top or {}, 1)}
        entries = {int(token_id): logprob, **(top or {})}
        found.append(
            {
                str(other): {
                    "logprob": max(value, _LEAST),
                    "rank": ranks.get(other),
                    "decoded_token": texts.text(other),
                }
                for other, value in entries.items()
            }
        )
    return found


def _name(texts: TokenTexts, token_id: int, by_id: bool) -> str:
    return f"token_id:{token_id}" if by_id else texts.text(token_id)


def _chat_entry(texts: TokenTexts, token_id: int, logprob: float) -> dict[str, Any]:
    bytes_ = texts.bytes_of(token_id)
    return {"token": texts.text(token_id), "logprob": max(logprob, _LEAST), "bytes": bytes_}
