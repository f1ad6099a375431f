"""Cases A to E, G and H: what a prefix costs. Each yields a figure a contender and line.

Prompts are made before the clock starts, in each contender's own form. Everything that a contender
does inside one operation is timed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from cache.contenders import Contender, Tree, radix
from cache.timing import Figure, interleaved, micros

from radixserve.arrays import IntArray

VOCAB = 32_000
PROMPT = 4_096
TURN = 150  # tokens that a chat grows by
SHARED, OWN = 512, 60  # tokens of a request of the churn
LEAF = 16  # tokens of a small leaf
PAGE_SIZES = (1, 16, 64, 256)
_LARGEST_PAGE = PAGE_SIZES[-1]  # a cache of whole blocks may fall short by so many tokens


@dataclass(frozen=True)
class Sizes:
    """How much of each case is run."""

    repeats: int
    prompts: int  # cached ones in A and B
    sessions: int  # chats, and their turns
    turns: int
    requests: int  # of the churn
    leaves: tuple[int, ...]
    long_prompt: int
    waiting: tuple[int, ...]


FULL = Sizes(
    repeats=9,
    prompts=2_000,
    sessions=200,
    turns=30,
    requests=20_000,
    leaves=(1_000, 10_000, 100_000, 1_000_000),
    long_prompt=131_072,
    waiting=(128, 2_000),
)
QUICK = Sizes(
    repeats=3,
    prompts=200,
    sessions=20,
    turns=10,
    requests=2_000,
    leaves=(1_000, 2_000),
    long_prompt=131_072,
    waiting=(128, 500),
)


@dataclass(frozen=True)
class Bench:
    """A run: contenders, sizes, and the source of random tokens."""

    contenders: tuple[Contender, ...]
    sizes: Sizes
    rng: np.random.Generator

    def tokens(self, *shape: int, low: int = 0, vocab: int = VOCAB) -> IntArray:
        return self.rng.integers(low, low + vocab, shape, np.int32)


def serve(tree: Tree, rows: Iterable[IntArray]) -> None:
    for row in rows:
        tree.request(tree.prompt(row))


def miss_and_hit(bench: Bench) -> Iterator[Figure]:
    """An unknown prompt, and one that lies in one edge, beside many others."""
    rows = bench.tokens(bench.sizes.prompts, 512)
    unknown = bench.tokens(PROMPT, low=VOCAB)
    known = bench.tokens(PROMPT + 1, low=2 * VOCAB)  # the last token is always computed
    trees = {}
    for contender in bench.contenders:
        tree = trees[contender.name] = contender.tree(*[512] * len(rows), 2 * PROMPT)
        serve(tree, [*rows, known])
    for case, name, row in (("A", "miss", unknown), ("B", "hit in one edge", known)):
        prompts = {who: tree.prompt(row) for who, tree in trees.items()}
        for verb, what in (("lookup", "look-up"), ("take", "acquire, release")):
            operations = {who: partial(getattr(t, verb), prompts[who]) for who, t in trees.items()}
            title = f"{name}: {what}"
            yield from interleaved(f"{case}.{verb}", title, operations, bench.sizes.repeats)


def chat(bench: Bench) -> Iterator[Figure]:
    """Sessions in turn, each request longer than the last by a turn."""
    sizes = bench.sizes
    said = bench.tokens(sizes.sessions, sizes.turns * TURN)
    samples: dict[str, list[float]] = {contender.name: [] for contender in bench.contenders}
    for _ in range(sizes.repeats):
        for contender in bench.contenders:
            samples[contender.name].append(_talk(contender.tree(*map(len, said)), said))
    what = f"request, {sizes.sessions} sessions x {sizes.turns} turns of {TURN}"
    yield from (Figure.of("C.request", what, who, values) for who, values in samples.items())


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
    room = sizes.requests // 10
    shared, own = bench.tokens(SHARED), bench.tokens(room + sizes.requests, OWN)
    rows = [np.concatenate((shared, row)) for row in own]
    trees = {c.name: c.tree(SHARED, *[OWN] * room) for c in bench.contenders}
    for tree in trees.values():
        serve(tree, rows[:room])  # now it is full
    samples: dict[str, list[float]] = {who: [] for who in trees}
    rounds = max(10, sizes.repeats)
    for part in range(rounds):
        for who, tree in trees.items():
            prompts = [tree.prompt(row) for row in rows[room + part :: rounds]]
            spent = micros(partial(_request_all, tree, prompts))
            samples[who].append(spent / len(prompts))
            assert tree.lookup(prompts[-1]) > SHARED - _LARGEST_PAGE
    what = f"request, {SHARED} shared + {OWN} own, always evicting"
    yield from (Figure.of("D.request", what, who, values) for who, values in samples.items())


def _request_all(tree: Tree, prompts: list[Any]) -> None:
    for prompt in prompts:
        tree.request(prompt)


def eviction(bench: Bench) -> Iterator[Figure]:
    """Out of trees of small leaves; what was evicted grows again before the next sample."""
    for leaves in bench.sizes.leaves:
        able = tuple(c for c in bench.contenders if leaves <= c.max_leaves)
        part = Bench(able, bench.sizes, bench.rng)
        yield from evict_from(part, leaves, LEAF, (("page", 1), ("1000", 1_000)))


def evict_from(
    bench: Bench, leaves: int, length: int, amounts: tuple[tuple[str, int], ...]
) -> Iterator[Figure]:
    """`amounts`: (name, tokens) to evict from `leaves` leaves of `length` tokens."""
    rows = bench.tokens(leaves, length, vocab=2**31 - 1)
    trees = {}
    for contender in bench.contenders:
        tree = trees[contender.name] = contender.tree(*[length] * leaves)
        serve(tree, rows)
    for name, amount in amounts:
        samples: dict[str, list[float]] = {who: [] for who in trees}
        calls = 50 if amount < length else 5
        for _ in range(bench.sizes.repeats):  # some take whole leaves: enough grows for those
            fresh = bench.tokens(calls * (amount // length + 1), length, vocab=2**31 - 1)
            for who, tree in trees.items():
                serve(tree, fresh)
                samples[who].append(micros(partial(tree.evict, amount), calls))
        what = f"{'a page' if name == 'page' else f'{amount:,} tokens'} of {leaves:,} leaves"
        key = f"E.{name}.{leaves}"
        yield from (Figure.of(key, what, who, values) for who, values in samples.items())


def long_lookup(bench: Bench) -> Iterator[Figure]:
    """A long prompt over a path of 16 nodes: others leave it at every sixteenth."""
    length, parts = bench.sizes.long_prompt, 16
    known, other = bench.tokens(length + 1), bench.tokens(parts, LEAF, low=VOCAB)
    cuts = [length * part // parts for part in range(1, parts)]
    rows = [known, *(np.concatenate((known[:cut], other[at])) for at, cut in enumerate(cuts))]
    trees, prompts = {}, {}
    for contender in bench.contenders:
        who = contender.name
        trees[who] = contender.tree(length + 1, *[length // parts + 512] * parts)
        serve(trees[who], rows)
        prompts[who] = trees[who].prompt(known)
        assert trees[who].lookup(prompts[who]) == length
    for verb, what in (("lookup", "look-up"), ("take", "acquire, release")):
        operations = {who: partial(getattr(t, verb), prompts[who]) for who, t in trees.items()}
        title = f"{what} of {length:,} tokens over {parts} nodes"
        yield from interleaved(f"H.{verb}", title, operations, bench.sizes.repeats)


def page_sizes(bench: Bench) -> Iterator[Figure]:
    """Case G: cases A to E at larger pages, each as a ratio to page size 1.

    The leaves of E are as long as the largest page, so that all evict the same tokens.
    """
    columns = {size: f"page {size}" for size in PAGE_SIZES}
    part = replace(bench, contenders=tuple(radix(size, name) for size, name in columns.items()))
    leaf, leaves = PAGE_SIZES[-1], min(10_000, bench.sizes.leaves[-1])
    figures = [*miss_and_hit(part), *chat(part), *churn(part)]
    figures += evict_from(part, leaves, leaf, ((str(leaf), leaf), ("1024", 1_024)))
    bases = {figure.key: figure.value for figure in figures if figure.contender == columns[1]}
    for figure in figures:
        base = bases[figure.key]
        yield replace(
            figure,
            key=f"G.{figure.key}",
            what=f"{figure.key[0]} {figure.what}",
            value=figure.value / base,
            low=figure.low / base,
            high=figure.high / base,
            unit="x",
        )
