"""What is asked of the engines: prompts of token ids, in rounds, and what an ideal cache computes.

A round is what may be sent at the same moment; a session's next prompt is its last prompt, the
tokens generated for it, and new ones. Lengths are exact and end tokens are ignored, so every engine
does the same work whatever its tokens are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LOWEST_ID = 8  # ids below are special tokens


@dataclass(frozen=True)
class Workload:
    """`rounds[r][s]`: the tokens that session s adds in round r; one round and one session a
    request where nothing is continued."""

    name: str
    what: str
    rounds: tuple[tuple[tuple[int, ...], ...], ...]
    num_new: int  # tokens generated for each request
    num_shared: int  # tokens that all prompts begin with

    @property
    def num_requests(self) -> int:
        return sum(len(sessions) for sessions in self.rounds)


@dataclass(frozen=True)
class Work:
    """One request as an ideal cache leaves it: tokens [cached, prompt) are computed."""

    cached: int
    prompt: int

    @property
    def computed(self) -> int:
        return self.prompt - self.cached


@dataclass(frozen=True)
class IdealRound:
    """The requests of a round; `num_distinct`: tokens of their prompts, shared ones once."""

    works: tuple[Work, ...]
    num_distinct: int


@dataclass(frozen=True)
class Conversation:
    """What was said so far in each session, and what an engine sees next."""

    histories: list[list[int]]

    @staticmethod
    def start(workload: Workload) -> Conversation:
        return Conversation([[] for _ in workload.rounds[0]])

    def ask(self, additions: Sequence[Sequence[int]]) -> list[list[int]]:
        """The prompts of a round."""
        for history, added in zip(self.histories, additions, strict=True):
            history.extend(added)
        return [list(history) for history in self.histories]

    def answer(self, outputs: Sequence[Sequence[int]]) -> None:
        for history, output in zip(self.histories, outputs, strict=True):
            history.extend(output)


def make_workload(name: str, vocab: int, seed: int, *, is_quick: bool = False) -> Workload:
    """One of WORKLOADS; the same seed gives the same tokens."""
    rng = np.random.default_rng([seed, sum(name.encode())])
    return _MAKERS[name](_Tokens(rng, vocab), is_quick)


class _Tokens:
    """Random tokens; `distinct` ones do not repeat, so that prompts differ where they should."""

    def __init__(self, rng: np.random.Generator, vocab: int) -> None:
        self._rng, self._vocab = rng, vocab

    def row(self, length: int) -> tuple[int, ...]:
        return tuple(self._rng.integers(LOWEST_ID, self._vocab, length).tolist())

    def rows(
        self, count: int, length: int, head: tuple[int, ...] = ()
    ) -> tuple[tuple[int, ...], ...]:
        """Rows that begin with `head` and whose next tokens are distinct."""
        first = self._rng.permutation(np.arange(LOWEST_ID, self._vocab))[:count].tolist()
        return tuple((*head, token, *self.row(length - 1)) for token in first)


def _system(tokens: _Tokens, is_quick: bool) -> Workload:
    shared, own, count, new = (64, 8, 4, 4) if is_quick else (512, 32, 32, 16)
    rows = tokens.rows(count, own, tokens.row(shared))
    what = f"system prompt: {shared} shared + {own} own tokens, {count} requests"
    return Workload("W1", what, (rows,), new, shared)


def _chat(tokens: _Tokens, is_quick: bool) -> Workload:
    sessions, turns, own, new = (2, 3, 12, 4) if is_quick else (8, 6, 96, 32)
    rounds = tuple(tokens.rows(sessions, own) for _ in range(turns))
    what = f"chat: {sessions} sessions x {turns} turns, {own} tokens a turn"
    return Workload("W2", what, rounds, new, 0)


def _few_shot(tokens: _Tokens, is_quick: bool) -> Workload:
    shared, own, count, new = (128, 8, 4, 4) if is_quick else (2_048, 64, 16, 8)
    rows = tokens.rows(count, own, tokens.row(shared))
    what = f"few-shot: {shared:,} shared + {own} own tokens, {count} requests"
    return Workload("W3", what, (rows,), new, shared)


def _unshared(tokens: _Tokens, is_quick: bool) -> Workload:
    own, count, new = (64, 4, 4) if is_quick else (512, 16, 16)
    what = f"nothing shared: {own} tokens, {count} requests"
    return Workload("W4", what, (tokens.rows(count, own),), new, 0)


def _branches(tokens: _Tokens, is_quick: bool) -> Workload:
    shared, count, new = (64, 4, 8) if is_quick else (1_024, 16, 32)
    rows = tokens.rows(count, 1, tokens.row(shared))
    what = f"branches: {count} of one prompt of {shared:,} tokens, one token apart"
    return Workload("W5", what, (rows,), new, shared)


_MAKERS = {"W1": _system, "W2": _chat, "W3": _few_shot, "W4": _unshared, "W5": _branches}
WORKLOADS = tuple(_MAKERS)


def ideal_rounds(workload: Workload) -> list[IdealRound]:
    """What is left to compute when no token whose keys and values exist is computed again.

    Everything asked before, in the same round too, is remembered to the token; a prompt's last
    token is always computed, and the last token generated has no keys and values yet.
    """
    known: set[int] = set()
    talk = Conversation.start(workload)
    unheard = 1 << 40  # stands for generated tokens, which nobody else says
    rounds = []
    for additions in workload.rounds:
        works, outputs, distinct = [], [], set()
        for prompt in talk.ask(additions):
            heads = _heads(prompt)
            cached = next((i for i, head in enumerate(heads) if head not in known), len(heads))
            works.append(Work(min(cached, len(prompt) - 1), len(prompt)))
            outputs.append(list(range(unheard, unheard + workload.num_new)))
            unheard += workload.num_new
            known.update(_heads(prompt + outputs[-1][:-1]))
            distinct.update(heads)
        talk.answer(outputs)
        rounds.append(IdealRound(tuple(works), len(distinct)))
    return rounds


def _heads(tokens: Sequence[int]) -> list[int]:
    """A name for each prefix: [:1], [:2], ..."""
    names, name = [], 0
    for token in tokens:
        name = hash((name, token))
        names.append(name)
    return names
