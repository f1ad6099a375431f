"""What is asked of the engines: prompts of token ids, in rounds, and what an ideal cache computes.

A round is what may be sent at the same moment; a session's next prompt is its last prompt, the
tokens generated for it, and new ones. Lengths are exact and end tokens are ignored, so every engine
does the same work whatever its tokens are.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LOWEST_ID = 8  # ids below are special tokens
Prompt = tuple[int, ...]


@dataclass(frozen=True)
class Size:
    """Requests of a workload: each round has `count` of them, every one with `own` tokens after
    the `shared` ones, and generates `new` tokens."""

    shared: int
    own: int
    count: int
    new: int
    rounds: int = 1


TITLES = {
    "W1": "system prompt: {shared:,} shared + {own} own tokens, {count} requests",
    "W2": "chat: {count} sessions x {rounds} turns, {own} tokens a turn",
    "W3": "few-shot: {shared:,} shared + {own} own tokens, {count} requests",
    "W4": "nothing shared: {own:,} tokens, {count} requests",
    "W5": "branches: {count} of one prompt of {shared:,} tokens, one token apart",
}
FULL = {
    "W1": Size(512, 32, 32, 16),
    "W2": Size(0, 96, 8, 32, rounds=6),
    "W3": Size(2_048, 64, 16, 8),
    "W4": Size(0, 512, 16, 16),
    "W5": Size(1_024, 1, 16, 32),
}
QUICK = {
    "W1": Size(64, 8, 4, 4),
    "W2": Size(0, 12, 2, 4, rounds=3),
    "W3": Size(128, 8, 4, 4),
    "W4": Size(0, 64, 4, 4),
    "W5": Size(64, 1, 4, 8),
}


@dataclass(frozen=True)
class Workload:
    """`rounds[r][s]`: the tokens that session s adds in round r; one round and one session a
    request where nothing is continued."""

    name: str
    what: str
    rounds: tuple[tuple[Prompt, ...], ...]
    num_new: int  # tokens generated for each request
    num_shared: int  # tokens that all prompts begin with

    @property
    def num_requests(self) -> int:
        return sum(len(sessions) for sessions in self.rounds)

    @property
    def num_tokens(self) -> int:
        """Prompts and outputs of all requests: the size of a cache that shares nothing."""
        total, length = 0, 0
        for sessions in self.rounds:
            length += len(sessions[0]) + self.num_new
            total += length * len(sessions)
        return total


def make_workload(name: str, size: Size, vocab: int, seed: int) -> Workload:
    """A workload of TITLES; the same seed gives the same tokens.

    The first own tokens of a round's requests are distinct, so that prompts differ there.
    """
    rng = np.random.default_rng([seed, sum(name.encode())])

    def row(length: int) -> Prompt:
        return tuple(rng.integers(LOWEST_ID, vocab, length).tolist())

    head = row(size.shared)
    rounds = []
    for _ in range(size.rounds):
        first = rng.permutation(np.arange(LOWEST_ID, vocab))[: size.count].tolist()
        rounds.append(tuple((*head, token, *row(size.own - 1)) for token in first))
    what = TITLES[name].format(**vars(size))
    return Workload(name, what, tuple(rounds), size.new, size.shared)


def random_prompts(count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(LOWEST_ID, vocab, length).tolist() for _ in range(count)]


@dataclass(frozen=True)
class IdealRound:
    """The requests of a round with an ideal cache."""

    requests: list[tuple[int, int]]  # tokens cached, tokens of the prompt
    num_distinct: int  # tokens of their prompts, shared ones once


def ideal_rounds(workload: Workload) -> list[IdealRound]:
    """What is left to compute when no token whose keys and values exist is computed again.

    All earlier requests, those of the same round too, are cached to the token; a prompt's last
    token is always computed, and the last token generated has no keys and values yet.
    """
    known: set[int] = set()
    histories: list[Prompt] = [()] * len(workload.rounds[0])
    unique = itertools.count(1 << 40)  # generated tokens, which no other request contains
    rounds = []
    for additions in workload.rounds:
        requests, distinct = [], set()
        for session, added in enumerate(additions):
            prompt = (*histories[session], *added)
            prefixes = _prefix_hashes(prompt)
            cached = next(
                (i for i, prefix in enumerate(prefixes) if prefix not in known), len(prompt)
            )
            requests.append((min(cached, len(prompt) - 1), len(prompt)))
            histories[session] = (*prompt, *itertools.islice(unique, workload.num_new))
            known.update(_prefix_hashes(histories[session][:-1]))
            distinct.update(prefixes)
        rounds.append(IdealRound(requests, len(distinct)))
    return rounds


def ideal_computed(workload: Workload) -> int:
    """Prompt tokens that an ideal cache leaves to compute."""
    rounds = ideal_rounds(workload)
    return sum(prompt - cached for ideal in rounds for cached, prompt in ideal.requests)


def _prefix_hashes(tokens: Sequence[int]) -> list[int]:
    """A hash of each prefix: [:1], [:2], ..."""
    hashes, last = [], 0
    for token in tokens:
        last = hash((last, token))
        hashes.append(last)
    return hashes
