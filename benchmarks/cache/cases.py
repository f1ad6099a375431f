"""Cases A to E, G and H: what a prefix costs. Each yields a figure a contender and line.

Prompts are made before the clock starts, in each contender's own form. Everything that a contender
does inside one operation is timed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from cache.contenders import Contender, Tree, radix
from cache.timing import Figure, Samples, figures, interleaved, micros

from radixserve.arrays import IntArray

VOCAB = 32_000
PROMPT = 4_096
TURN = 150  # tokens that a chat grows by
SHARED, OWN = 512, 60  # tokens of a request of the churn
LEAF = 16  # tokens of a small leaf
PAGE_SIZES = (1, 16, 64, 256)
_LARGEST_PAGE = PAGE_SIZES[-1]  # a cache of whole blocks may fall short by so many tokens
_PARTS = 16  # nodes under a long prompt


@dataclass(frozen=True)
class Sizes:
    """How much of each case is run."""

    repeats: int = 9
    prompts: int = 2_000  # cached ones in A and B
    sessions: int = 200  # chats, and their turns
    turns: int = 30
    requests: int = 20_000  # of the churn
    leaves: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000)
    long_prompt: int = 131_072
    waiting: tuple[int, ...] = (128, 2_000)


FULL = Sizes()
QUICK = Sizes(3, 200, 20, 10, 1_000, (1_000, 2_000), waiting=(16, 64))


@dataclass(frozen=True)
class Bench:
    """A run: contenders, sizes, and the source of random tokens."""

    contenders: tuple[Contender, ...]
    sizes: Sizes
    rng: np.random.Generator

    def tokens(self, *shape: int, low: int = 0, vocab: int = VOCAB) -> IntArray:
        return self.rng.integers(low, low + vocab, shape, np.int32)

    def trees(self, *lengths: int) -> dict[str, Tree]:
        """An empty one of each contender, with room for branches of those lengths."""
        return {contender.name: contender.tree(*lengths) for contender in self.contenders}


def serve(tree: Tree, rows: Iterable[IntArray]) -> None:
    _request_all(tree, map(tree.prompt, rows))


def _request_all(tree: Tree, prompts: Iterable[Any]) -> None:
    for prompt in prompts:
        tree.request(prompt)


def _look_and_take(
    case: str, what: str, trees: Mapping[str, Tree], row: IntArray, repeats: int
) -> Iterator[Figure]:
    """Lines: a look-up of a prompt, its prefix locked and unlocked, and the same with its pages.
    `what` has a place for the operation."""
    prompts = {who: tree.prompt(row) for who, tree in trees.items()}
    names = {"lookup": "look-up", "lock": "acquire, release", "take": "acquire, pages, release"}
    for verb, name in names.items():
        operations = {who: partial(getattr(one, verb), prompts[who]) for who, one in trees.items()}
        yield from interleaved(f"{case}.{verb}", what.format(name), operations, repeats)


def miss_and_hit(bench: Bench) -> Iterator[Figure]:
    """An unknown prompt, and one that lies in one edge, beside many others."""
    rows = bench.tokens(bench.sizes.prompts, 512)
    unknown = bench.tokens(PROMPT, low=VOCAB)
    known = bench.tokens(PROMPT + 1, low=2 * VOCAB)  # the last token is always computed
    trees = bench.trees(*[512] * len(rows), 2 * PROMPT)
    for tree in trees.values():
        serve(tree, [*rows, known])
    yield from _look_and_take("A", "miss: {}", trees, unknown, bench.sizes.repeats)
    yield from _look_and_take("B", "hit in one edge: {}", trees, known, bench.sizes.repeats)


def chat(bench: Bench) -> Iterator[Figure]:
    """Sessions in turn, each request longer than the last by a turn."""
    sizes = bench.sizes
    said = bench.tokens(sizes.sessions, sizes.turns * TURN)
    samples: Samples = {contender.name: [] for contender in bench.contenders}
    for _ in range(sizes.repeats):
        for contender in bench.contenders:
            samples[contender.name].append(_talk(contender.tree(*map(len, said)), said))
    what = f"request, {sizes.sessions} sessions x {sizes.turns} turns of {TURN}"
    yield from figures("C.request", what, samples)


def _talk(tree: Tree, said: IntArray) -> float:
    """Microseconds a request."""
    lengths = range(TURN, said.shape[1] + 1, TURN)
    spent = 0.0
    for length in lengths:
        prompts = [tree.prompt(row[:length]) for row in said]
        spent += micros(partial(_request_all, tree, prompts))
    assert tree.lookup(tree.prompt(said[0])) > said.shape[1] - TURN - _LARGEST_PAGE
    return spent / (len(said) * len(lengths))


def churn(bench: Bench) -> Iterator[Figure]:
    """A shared head and an own tail each, with room for the tails of a tenth of the requests.

    Whole blocks longer than a tail never hold one: hash-256 keeps the head only and evicts nothing.
    """
    sizes = bench.sizes
    room, rounds = sizes.requests // 10, max(10, sizes.repeats)
    shared, own = bench.tokens(SHARED), bench.tokens(room + sizes.requests, OWN)
    rows = [np.concatenate((shared, row)) for row in own]
    trees = bench.trees(SHARED, *[OWN] * room)
    for tree in trees.values():
        serve(tree, rows[:room])  # now it is full
    samples: Samples = {who: [] for who in trees}
    for part in range(rounds):
        for who, tree in trees.items():
            prompts = [tree.prompt(row) for row in rows[room + part :: rounds]]
            spent = micros(partial(_request_all, tree, prompts))
            samples[who].append(spent / len(prompts))
            assert tree.lookup(prompts[-1]) > SHARED - _LARGEST_PAGE
    yield from figures(
        "D.request", f"request, {SHARED} shared + {OWN} own, always evicting", samples
    )


def eviction(bench: Bench) -> Iterator[Figure]:
    """Out of trees of small leaves; what was evicted grows again before the next sample."""
    for leaves in bench.sizes.leaves:
        able = tuple(c for c in bench.contenders if leaves <= c.max_leaves)
        amounts = {"page": 1, "1000": 1_000}
        yield from _evict_from(replace(bench, contenders=able), leaves, LEAF, amounts)


def _evict_from(
    bench: Bench, leaves: int, length: int, amounts: Mapping[str, int]
) -> Iterator[Figure]:
    """`amounts`: tokens to evict from `leaves` leaves of `length` tokens, by name."""
    rows = bench.tokens(leaves, length, vocab=2**31 - 1)
    trees = bench.trees(*[length] * leaves)
    for tree in trees.values():
        serve(tree, rows)
    for name, amount in amounts.items():
        samples: Samples = {who: [] for who in trees}
        calls = 50 if amount < length else 5
        for _ in range(bench.sizes.repeats):  # some take whole leaves: enough grows for those
            fresh = bench.tokens(calls * (amount // length + 1), length, vocab=2**31 - 1)
            for who, tree in trees.items():
                serve(tree, fresh)
                samples[who].append(micros(partial(tree.evict, amount), calls))
        what = f"{'a page' if name == 'page' else f'{amount:,} tokens'} of {leaves:,} leaves"
        yield from figures(f"E.{name}.{leaves}", what, samples)


def long_lookup(bench: Bench) -> Iterator[Figure]:
    """A long prompt over a path of 16 nodes: others leave it at every sixteenth."""
    length = bench.sizes.long_prompt
    known, other = bench.tokens(length + 1), bench.tokens(_PARTS, LEAF, low=VOCAB)
    cuts = [length * part // _PARTS for part in range(1, _PARTS)]
    rows = [known, *(np.concatenate((known[:cut], other[at])) for at, cut in enumerate(cuts))]
    trees = bench.trees(length + 1, *[length // _PARTS + 512] * _PARTS)
    for tree in trees.values():
        serve(tree, rows)
        assert tree.lookup(tree.prompt(known)) == length
    what = f"{{}} of {length:,} tokens over {_PARTS} nodes"
    yield from _look_and_take("H", what, trees, known, bench.sizes.repeats)


def page_sizes(bench: Bench) -> Iterator[Figure]:
    """Case G: cases A to E at larger pages, each as a ratio to page size 1.

    The leaves of E are as long as the largest page, so that all evict the same tokens.
    """
    part = replace(bench, contenders=tuple(radix(size, f"page {size}") for size in PAGE_SIZES))
    leaf, leaves = PAGE_SIZES[-1], min(10_000, bench.sizes.leaves[-1])
    found = [*miss_and_hit(part), *chat(part), *churn(part)]
    found += _evict_from(part, leaves, leaf, {str(leaf): leaf, "1024": 1_024})
    bases = {figure.key: figure.value for figure in found if figure.contender == "page 1"}
    for one in found:
        base = bases[one.key]
        ratios = {name: getattr(one, name) / base for name in ("value", "low", "high")}
        key, what = f"G.{one.key}", f"{one.key[0]} {one.what}"
        yield replace(one, key=key, what=what, unit="x", **ratios)
