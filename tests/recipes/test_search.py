"""Search: the right path, every token computed once, every branch let go."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from radixserve import InvalidRequest, Runtime, SamplingParams
from radixserve.recipes.search import Likelihood, Node, Sample, SearchTree, Verdict, beam
from tests.api.conftest import check_let_go
from tests.checkpoints import EOS_ID, make_checkpoint

PROMPT = "start:"
WORDS = ["a", "bc", "def", "zz", "q"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("search")
    return make_checkpoint(path, "llama", with_tokenizer=True, eos_ids=[EOS_ID])


def params(count: int = 5, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, **{"ignore_eos": True, "seed": 3, **fields})


def taste(seed: int) -> Callable[[str], float]:
    """A score that only the path decides, different for every path."""
    return lambda path: random.Random(f"{seed} {path}").random()


def by_path(value: Callable[[str], float]) -> Callable[[Node], float]:
    return lambda node: value(node.path_text)


# -- the answer -----------------------------------------------------------------------------------


class Oracle:
    """The beam once more, on strings."""

    def __init__(self, seed: int) -> None:
        self.value = taste(seed)
        self._seed = seed

    def proposals(self, path: str) -> list[str]:
        rng = random.Random(f"proposals {self._seed} {path}")
        return [rng.choice(WORDS) for _ in range(rng.randint(0, 4))]

    def is_done(self, path: str) -> bool:
        return random.Random(f"done {self._seed} {path}").random() < 0.2

    def score(self, path: str) -> float:
        value = self.value(path)
        return -math.inf if value < 0.15 else round(value, 1)  # there are ties

    def best(self, width: int, depth: int, enough: int | None) -> str | None:
        paths, ends, done = [""], [], []
        for _ in range(depth):
            fresh: list[str] = []
            for path in paths:
                more = [path + word for word in self.proposals(path)]
                fresh += [one for one in dict.fromkeys(more) if one not in fresh]
                ends += [] if more else [path]
            alive = [path for path in fresh if self.score(path) > -math.inf]
            done += [path for path in alive if self.is_done(path)]
            going = [path for path in alive if path not in done]
            paths = sorted(going, key=lambda path: -self.score(path))[:width]
            if not paths or (enough is not None and len(done) >= enough):
                break
        ranked = sorted(done, key=self._rank) or sorted([*ends, *paths], key=self._rank)
        return ranked[0] if ranked else None

    def _rank(self, path: str) -> float:
        return -self.score(path) if path else math.inf


@pytest.mark.parametrize("seed", range(60))
def test_the_best_path(rt: Runtime, seed: int) -> None:
    oracle, rng = Oracle(seed), random.Random(seed)
    width, depth, enough = rng.randint(1, 4), rng.randint(1, 4), rng.choice([None, 1, 2])
    with rt.branch(PROMPT) as root:
        tree = beam(
            root,
            lambda node: oracle.proposals(node.path_text),
            lambda node: oracle.score(node.path_text),
            width=width,
            depth=depth,
            is_done=lambda node: oracle.is_done(node.path_text),
            enough=enough,
        )
        assert root.length == len(PROMPT)
    best = oracle.best(width, depth, enough)
    assert (None if tree.best is None else tree.best.path_text) == best
    check_shape(tree, width, depth)


def check_shape(tree: SearchTree, width: int, depth: int) -> None:
    """What holds of every tree."""
    assert [node.number for node in tree] == list(range(len(tree)))
    assert all(node.parent is None or node.parent.number < node.number for node in tree)
    assert all(node.state != "open" for node in tree)
    for node in tree:
        assert (node.state == "expanded") == bool(tree.children(node))
        assert (node.score is None) == (node.parent is None or node.state == "duplicate")
        assert node.depth <= depth
        with pytest.raises(InvalidRequest, match="released"):
            _ = node.branch
    for level in range(1, depth + 1):
        kept = [n for n in tree if n.depth == level and n.state in ("expanded", "end")]
        assert len(kept) <= width


def test_a_path_in_detail(rt: Runtime) -> None:
    with rt.branch(PROMPT) as root:
        tree = beam(
            root,
            lambda _: ["one, ", rt.tokenizer.encode("two, ")],  # type: ignore[union-attr]
            lambda node: node.path_text.count("two"),
            width=1,
            depth=2,
        )
    best = tree.best
    assert best is not None
    assert (best.text, best.path_text, best.score, best.state) == ("two, ", "two, two, ", 2, "end")
    assert [node.number for node in best.path] == [0, 2, 4]
    assert bytes((best.path_tokens + ord("!")).tolist()[: len(PROMPT)]).decode() == PROMPT
    assert rt.branch(best.path_tokens).text == PROMPT + "two, two, "
    assert tree.root.text == PROMPT
    assert [node.state for node in tree] == ["expanded", "pruned", "expanded", "pruned", "end"]
    assert tree.children(tree.root) == [tree.nodes[1], tree.nodes[2]]


def test_duplicates_do_not_fill_the_beam(rt: Runtime) -> None:
    seen = []

    def score(node: Node) -> float:
        seen.append(node.text)
        return {"a": 3, "b": 2, "c": 1}[node.text]

    with rt.branch(PROMPT) as root:
        tree = beam(root, lambda _: ["a", "a", "b", "a", "c"], score, width=2, depth=1)
    assert seen == ["a", "b", "c"]
    assert [node.text for node in tree.ends] == ["a", "b"]
    assert [n.state for n in tree] == [
        "expanded", "end", "duplicate", "end", "duplicate", "pruned",
    ]  # fmt: skip


def test_complete_paths_leave_the_beam(rt: Runtime) -> None:
    with rt.branch(PROMPT) as root:
        tree = beam(
            root,
            lambda _: ["x", "y", "."],
            lambda node: -len(node.path_text) + node.path_text.count("x") / 10,
            width=1,
            depth=3,
            is_done=lambda node: node.text == ".",
        )
    assert [node.path_text for node in tree.done] == [".", "x.", "xx."]
    assert [node.path_text for node in tree.ends] == ["xxx"]
    assert tree.best is tree.done[0]


def test_every_path_given_up(rt: Runtime) -> None:
    with rt.branch(PROMPT) as root:
        tree = beam(root, lambda _: ["a", "b"], lambda _: -math.inf, width=3, depth=5)
        none = beam(root, lambda _: [], lambda _: 0, width=3, depth=5)
    assert tree.best is None
    assert (len(tree), len(none)) == (3, 1)
    assert none.best is none.root
    assert "2 pruned" in str(tree)


def test_the_end_of_a_text_completes_a_path(rt: Runtime) -> None:
    """No continuation follows the model's end token; one of stop strings goes on."""
    stop = next(c for c in rt.generate(PROMPT, params(40)).text if c.isascii())
    with rt.branch(PROMPT) as root:
        going = beam(root, Sample(1, params(40, stop=stop)), Likelihood(), width=1, depth=2)
    assert [node.state for node in going] == ["expanded", "expanded", "end"]
    first = going.nodes[1]
    assert first.completion is not None
    assert first.completion.finish_reason == "stop"
    assert first.text == first.completion.text + stop  # it is a part of the path
    wanted = Sample(12, params(40, temperature=3.0, ignore_eos=False))
    with rt.branch(PROMPT) as root:
        tree = beam(root, wanted, lambda node: node.completion.finish_reason == "stop",  # type: ignore[union-attr]
                    width=12, depth=2)  # fmt: skip
        ended = [node for node in tree if node.tokens[-1] == EOS_ID]
        assert ended
        assert tree.done == sorted(ended, key=lambda node: node.number)
        kept = beam(root, wanted, lambda _: 0, width=200, depth=2, is_done=lambda _: False)
    assert not kept.done
    assert {n.state for n in kept if n.tokens[-1] == EOS_ID} == {"end"}


def test_a_path_as_long_as_may_be_ends(rt: Runtime) -> None:
    tokens = [5] * (rt.max_seq_len - 6)
    with rt.branch(tokens) as root:
        tree = beam(root, Sample(2, params(4)), Likelihood(), width=2, depth=9)
        with pytest.raises(InvalidRequest, match="at most"):
            beam(root, lambda _: [[1] * 4], lambda _: 0, width=1, depth=2)
    assert {len(node.path_tokens) for node in tree.ends} == {rt.max_seq_len}
    assert max(node.depth for node in tree) == 2


# -- what it costs --------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("seed", range(4))
def test_every_token_of_a_sampled_tree_is_computed_once(
    folder: Path, page_size: int, seed: int
) -> None:
    rng = random.Random(seed)
    width, depth, count = rng.randint(1, 3), rng.randint(1, 4), rng.randint(1, 4)
    prompt = [rng.randrange(256) for _ in range(rng.randint(1, 60))]
    with Runtime(str(folder), num_pages=4096 // page_size, page_size=page_size) as rt:
        with rt.branch(prompt) as root:
            value = by_path(taste(seed))
            tree = beam(root, Sample(count, params(seed=seed)), value, width=width, depth=depth)
        stats, usage = rt.cache_stats(), tree.usage
        check_let_go(rt)
    sampled = [node for node in tree if node.completion is not None]
    forwarded = usage.computed_tokens + sum(len(node.tokens) - 1 for node in sampled)
    leaves = sum(node.state != "expanded" for node in tree)
    distinct = sum(len(node.tokens) for node in tree)
    repeated = len(sampled) - len({id(node.parent) for node in sampled})  # last tokens of contexts
    assert forwarded == distinct - leaves + repeated  # a leaf's last token is no context yet
    assert forwarded == stats["prefilled_tokens"] + stats["decoded_tokens"]
    sent = sum(len(node.parent.path_tokens) for node in sampled if node.parent)
    assert usage.prompt_tokens == sent == usage.cached_tokens + usage.computed_tokens
    assert usage.completion_tokens == sum(len(node.tokens) for node in sampled)
    expanded = [node for node in tree if node.state == "expanded" and node.parent]
    assert usage.computed_tokens == len(prompt) + len(expanded) + repeated
    check_shape(tree, width, depth)


@pytest.mark.parametrize("page_size", [1, 16])
def test_every_token_of_a_proposed_tree_is_computed_once(folder: Path, page_size: int) -> None:
    words = ["first", "2nd", "third and more"]
    with Runtime(str(folder), num_pages=2048 // page_size, page_size=page_size) as rt:
        with rt.branch(PROMPT * 9) as root:
            tree = beam(root, lambda _: words, Likelihood(), width=2, depth=3)
        assert len(tree) == 1 + 3 + 6 + 6
        distinct = sum(len(node.tokens) for node in tree)
        assert tree.usage.computed_tokens == distinct - 1  # the root's last, then each behind it
        assert rt.cache_stats()["prefilled_tokens"] == distinct - 1
        check_let_go(rt)


def test_a_level_is_one_batch(folder: Path) -> None:
    with Runtime(str(folder), num_pages=4096) as rt, rt.branch(PROMPT) as root:
        before = rt.cache_stats()["steps"]
        tree = beam(root, Sample(4, params(10)), Likelihood(), width=4, depth=2)
        assert len(tree) == 1 + 4 + 16
        assert rt.cache_stats()["steps"] - before <= 2 * 11
        before = rt.cache_stats()["steps"]
        beam(root, lambda _: WORDS, Verdict("?"), width=5, depth=2)
        assert rt.cache_stats()["steps"] - before <= 2 * 4


def outline(tree: SearchTree) -> list[tuple[Any, ...]]:
    return [(n.parent and n.parent.number, n.tokens.tolist(), n.state) for n in tree]


@pytest.mark.parametrize(
    ("cache", "page_size"),
    [
        *(("radix", 1), ("hash", 2), ("radix", 16)),
        *(pytest.param(*pair, marks=pytest.mark.long) for pair in (("hash", 1), ("hash", 16))),
        pytest.param("radix", 2, marks=pytest.mark.long),
    ],
)
def test_a_small_cache_gives_the_same_tree(folder: Path, cache: str, page_size: int) -> None:
    prompt, trees, evicted = list(range(60)), [], []
    for num_tokens in (4096, 160):
        pages = num_tokens // page_size
        settings: dict[str, Any] = {"num_pages": pages, "page_size": page_size, "cache": cache}
        with Runtime(str(folder), max_seq_len=150, **settings) as rt:
            with rt.branch(prompt) as root:
                sampled = beam(root, Sample(5, params(12)), Likelihood(), width=3, depth=4)
                asked = beam(root, lambda _: WORDS, Verdict("so?"), width=3, depth=4)
                mixed = beam(
                    root,
                    lambda node: WORDS if node.depth % 2 else Sample(3, params(7)),
                    Likelihood(per_token=True),
                    width=3,
                    depth=4,
                )
            trees.append([sampled, asked, mixed])
            evicted.append(rt.cache_stats()["evicted_tokens"])
            check_let_go(rt)
    assert evicted[0] == 0 < evicted[1]
    for roomy, tight in zip(*trees, strict=True):
        assert outline(roomy) == outline(tight)
        scores = [[node.score for node in tree][1:] for tree in (roomy, tight)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-3)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(n, marks=pytest.mark.long)
                                               for n in range(3, 60))])  # fmt: skip
def test_what_is_drawn_is_what_cold_requests_draw(folder: Path, page_size: int, seed: int) -> None:
    """Random trees of sampled and proposed thoughts in a cache that is too small for them."""

    def expand(node: Node) -> Sample | list[str]:
        rng = random.Random(f"{seed} {node.path_tokens.tolist()}")
        if rng.random() < 0.4:
            return [rng.choice(WORDS) * rng.randint(1, 9) for _ in range(rng.randint(0, 3))]
        return Sample(rng.randint(1, 4), params(rng.choice([1, 6, 20]), seed=2**63 - 5))

    rng = random.Random(seed)
    prompt = [rng.randrange(256) for _ in range(rng.randint(1, 50))]
    settings: dict[str, Any] = {"num_pages": 192 // page_size, "page_size": page_size}
    judge = rng.choice([Likelihood(), Verdict(" well?"), by_path(taste(seed))])
    with Runtime(str(folder), max_seq_len=180, **settings) as rt:
        with rt.branch(prompt) as root:
            tree = beam(root, expand, judge, width=rng.randint(1, 4), depth=4)
        check_let_go(rt)
    check_shape(tree, 4, 4)
    sampled = [node for node in tree if node.completion is not None]
    with Runtime(str(folder), max_seq_len=180, cache="off", num_pages=4096) as cold:
        for number, node in enumerate(sampled):
            assert node.parent is not None
            assert node.completion is not None
            usage = node.completion.usage
            assert usage.cached_tokens + usage.computed_tokens == len(node.parent.path_tokens)
            one = params(usage.completion_tokens, seed=(2**63 - 5 + number) % 2**63)
            assert cold.generate(node.parent.path_tokens, one).token_ids == node.tokens.tolist()


# -- judges ---------------------------------------------------------------------------------------


def test_likelihood_is_the_models_own(rt: Runtime, folder: Path) -> None:
    def expand(node: Node) -> Sample | list[str]:
        return ["xy", "z"] if node.depth == 1 else Sample(2, params(4))

    with rt.branch(PROMPT) as root:
        tree = beam(root, expand, Likelihood(), width=9, depth=3)
        mean = beam(root, expand, Likelihood(per_token=True), width=9, depth=3)
    with Runtime(str(folder), num_pages=2048, cache="off") as cold:
        for node in (*tree.nodes[1:], *mean.nodes[1:]):
            (said,) = cold.score(PROMPT, [node.path_tokens[len(PROMPT) :].tolist()])
            count = len(said.token_ids) if node in mean else 1
            assert node.score == pytest.approx(said.logprob / count, abs=1e-3)
            assert node.logprob == pytest.approx(sum(said.logprobs[-len(node.tokens) :]), abs=1e-3)


def test_a_verdict_is_the_models_own(rt: Runtime, folder: Path) -> None:
    judge = Verdict(" ok?", good="y", bad="n")
    with rt.branch(PROMPT) as root:
        tree = beam(root, lambda _: WORDS, judge, width=2, depth=2)
    with Runtime(str(folder), num_pages=2048, cache="off") as cold:
        for node in tree.nodes[1:]:
            good, bad = cold.score(PROMPT + node.path_text + " ok?", ["y", "n"])
            assert node.score == pytest.approx(good.logprob - bad.logprob, abs=1e-3)


def test_a_judge_of_ones_own(rt: Runtime) -> None:
    class Longest:
        def values(self, nodes: Sequence[Node]) -> list[float]:
            sizes = [len(node.text) for node in nodes]
            return [size / max(sizes) for size in sizes]

    class Lazy:
        def values(self, nodes: Sequence[Node]) -> list[float]:
            return [1.0 for _ in nodes[:1]]

    with rt.branch(PROMPT) as root:
        tree = beam(root, lambda _: WORDS, Longest(), width=2, depth=2)
        assert tree.best is not None
        assert tree.best.path_text == "defdef"
        with pytest.raises(InvalidRequest, match="1 scores for 5 nodes"):
            beam(root, lambda _: WORDS, Lazy(), width=2, depth=2)


def test_a_scorer_may_ask_the_model(rt: Runtime) -> None:
    """Through the node's branch, which then counts it, or through forks of it."""

    def score(node: Node) -> float:
        yes, no = node.branch.score(["y", "n"])
        with node.branch.fork()[0] as fork:
            fork.generate(params(2))
        return yes.logprob - no.logprob

    with rt.branch(PROMPT) as root:
        tree = beam(root, lambda _: WORDS, score, width=2, depth=1)
    assert all(node.usage.prompt_tokens == 2 * len(node.path_tokens) for node in tree.nodes[1:])


# -- best of --------------------------------------------------------------------------------------
