"""The work of the branch benchmark: samples, chats and beams, see `engine.base.Work`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import methodcaller

import numpy as np
from engine.base import Answer, Work
from harness.workloads import Prompt, random_prompts

_WARM_UP_TOKENS = 48  # of a prompt
_TEMPLATE_TOKENS = 64  # of a turn, at most


def samples(prompt: Prompt, count: int, num_new: int) -> Work:
    """`count` random continuations of one prompt."""
    run = methodcaller("sample", prompt, count, num_new)
    warm_up = methodcaller("sample", prompt[-_WARM_UP_TOKENS:], 2, 2)
    return Work(run, warm_up, count, count * (len(prompt) + num_new))


def beams(prompt: Prompt, width: int, num_new: int) -> Work:
    """The best `width` continuations of one prompt by beam search."""
    run = methodcaller("beam_search", prompt, width, num_new)
    warm_up = methodcaller("beam_search", prompt[-_WARM_UP_TOKENS:], width, 2)
    return Work(run, warm_up, width, len(prompt) + 2 * width * num_new)


def chats(said: Sequence[Sequence[str]], num_new: int) -> Work:
    """`said[turn][session]`; all sessions send their turn at the same moment."""
    count = sum(map(len, said))
    most = sum(len(text) for turn in said for text in turn)  # a token has a letter
    room = most + count * (num_new + _TEMPLATE_TOKENS)
    return Work(methodcaller("chat", said, num_new), methodcaller("chat", said[:1], 2), count, room)


def new_tokens(answers: Sequence[Answer], num_sessions: int, num_new: int) -> int:
    """Tokens of a chat's turns whose K and V no turn before has left: what was said, the template
    around it, and the last token of each answer. What the first turns share counts once."""
    prompts = [answer.prompt for answer in answers]
    turns = [
        prompts[first : first + num_sessions] for first in range(0, len(prompts), num_sessions)
    ]
    known = {prompt[:end] for prompt in turns[0] for end in range(1, len(prompt))}
    first = len(known) + num_sessions  # the last token of a prompt is always computed
    return first + sum(
        len(now) - (len(before) + num_new - 1)
        for last, turn in pairwise(turns)
        for before, now in zip(last, turn, strict=True)
    )


def random_prompt(length: int, vocab: int, seed: int) -> Prompt:
    return tuple(random_prompts(1, length, vocab, seed)[0])


def random_words(count: int, seed: int) -> str:
    """Words of the demo model's corpus, in random order."""
    rng = np.random.default_rng([seed, 7])
    words = "list tuple string value index error return module object class file name".split()
    return " ".join(rng.choice(words, count).tolist())
