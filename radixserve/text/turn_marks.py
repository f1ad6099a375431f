"""Finds the tokens at which messages of a chat begin in the model's chat template.

Conversations branch there: a later prompt shares all messages, but not always the generation
prompt, after which a template may begin a thought that it leaves out of the history.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from functools import partial

import numpy as np

from radixserve.arrays import IntArray
from radixserve.errors import InvalidRequest
from radixserve.text.tokenizer import Tokenizer

_WORDS = ("quorzel", "vimbrat", "yestrok")  # sample texts


def turn_marks(tokenizer: Tokenizer | None, end_ids: Collection[int]) -> frozenset[int]:
    """Returns the ids of special tokens that begin a message or the generation prompt in the
    model's chat template; empty if it has no template or no such tokens. `end_ids`: tokens that end
    a message, which are left out. Renders three short conversations."""
    if tokenizer is None or not tokenizer.has_chat_template:
        return frozenset()
    first, second, third = _WORDS
    user, answer = _said("user", first), _said("assistant", second)
    render = partial(tokenizer.render_chat, now=datetime.now())
    try:
        chat = render([user], add_generation_prompt=False)
        prompt = render([user])
        longer = render([user, answer, _said("user", third)], add_generation_prompt=False)
    except InvalidRequest:
        return frozenset()
    texts = [prompt[len(chat) :]] if prompt.startswith(chat) else []
    texts.append(longer.partition(second)[2].partition(third)[0])
    special, ends = tokenizer.special_ids, {*end_ids, *tokenizer.end_ids}
    marks = [
        next((token for token in ids if token in special and token not in ends), None)
        for ids in map(tokenizer.encode_rendered, texts)
    ]
    return frozenset(mark for mark in marks if mark is not None)


def turn_starts(token_ids: IntArray, marks: Collection[int]) -> tuple[int, ...]:
    """Returns the positions > 0 of a prompt at which its messages and the generation prompt begin,
    ascending. O(tokens)."""
    if not marks:
        return ()
    starts: Sequence[int] = np.flatnonzero(np.isin(token_ids, list(marks))).tolist()
    return tuple(start for start in starts if start)


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
