"""Search: the right path, every token computed once, every branch let go."""

from __future__ import annotations

import gc
import io
import json
import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from radixserve import EngineDead, InvalidRequest, Runtime, SamplingParams, search
from radixserve.api.search import Likelihood, Node, Sample, SearchTree, Verdict, beam, best_of
from tests.checkpoints import EOS_ID, make_checkpoint
from tests.pacing import held, wait_until

PROMPT = "start:"
WORDS = ["a", "bc", "def", "zz", "q"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("search")
    return make_checkpoint(path, "llama", with_tokenizer=True, eos_ids=[EOS_ID])


@pytest.fixture(scope="module")
def shared_rt(folder: Path) -> Iterator[Runtime]:
    with Runtime(str(folder), num_pages=4096) as rt:
        yield rt


@pytest.fixture
def rt(shared_rt: Runtime) -> Iterator[Runtime]:
    shared_rt.flush_cache()
    yield shared_rt
    check_let_go(shared_rt)


def check_let_go(rt: Runtime) -> None:
    rt.check()
    stats = rt.cache_stats()
    names = ("sessions", "pages_private", "pages_locked", "running", "waiting")
    assert {name: stats[name] for name in names} == dict.fromkeys(names, 0)


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


def test_a_level_is_one_batch(rt: Runtime) -> None:
    with rt.branch(PROMPT) as root:
        before = rt.cache_stats()["steps"]
        tree = beam(root, Sample(4, params(10)), Likelihood(), width=4, depth=2)
        assert len(tree) == 1 + 4 + 16
        assert rt.cache_stats()["steps"] - before <= 2 * 11
        before = rt.cache_stats()["steps"]
        beam(root, lambda _: WORDS, Verdict("?"), width=5, depth=2)
        assert rt.cache_stats()["steps"] - before <= 2 * 4


def outline(tree: SearchTree) -> list[tuple[Any, ...]]:
    return [(n.parent and n.parent.number, n.tokens.tolist(), n.state) for n in tree]


@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("cache", ["radix", "hash"])
def test_a_small_cache_gives_the_same_tree(folder: Path, page_size: int, cache: str) -> None:
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
    """Random trees of drawn and proposed thoughts in a cache that is too small for them."""

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


# -- nothing is held ------------------------------------------------------------------------------


class Boom(Exception):
    pass


@pytest.mark.parametrize("place", ["expand", "score", "is_done"])
@pytest.mark.parametrize("at", [1, 3, 6])
@pytest.mark.parametrize("kind", [Boom, KeyboardInterrupt])
def test_errors_let_go_of_everything(
    rt: Runtime, place: str, at: int, kind: type[BaseException]
) -> None:
    calls = {"expand": 0, "score": 0, "is_done": 0}

    def count(name: str) -> None:
        calls[name] += 1
        if name == place and calls[name] == at:
            raise kind

    def expand(node: Node) -> Sample | list[str]:
        count("expand")
        return ["a", "b"] if node.number % 2 else Sample(3, params(3))

    def score(node: Node) -> float:
        count("score")
        return node.branch.score(["y"])[0].logprob

    def is_done(node: Node) -> bool:
        count("is_done")
        return node.depth > 9

    with rt.branch(PROMPT) as root:
        with pytest.raises(kind) as caught:
            beam(root, expand, score, width=3, depth=4, is_done=is_done)
        frames = caught.traceback  # its frames refer to the search: nothing was left to collect
        assert frames
        assert rt.cache_stats()["sessions"] <= 1  # the root holds what its forks have computed
        assert root.generate(params(2)).token_ids


def test_an_abort_ends_the_search(rt: Runtime) -> None:
    for start in (
        lambda root: beam(root, Sample(4, params(400)), Likelihood(), width=2, depth=2),
        lambda root: best_of(root, "", 4, len, params(400)),
    ):
        with rt.branch(PROMPT) as root, held(rt):
            thread = threading.Thread(target=wait_until, args=(lambda: rt.abort() > 0,))
            thread.start()
            with pytest.raises(InvalidRequest, match="aborted"):
                start(root)
            thread.join()


def test_a_closed_runtime(folder: Path) -> None:
    with Runtime(str(folder), num_pages=512) as rt:

        def score(node: Node) -> float:
            rt.close()
            return node.depth

        with rt.branch(PROMPT) as root, pytest.raises(EngineDead):
            beam(root, Sample(2, params(3)), score, width=2, depth=2)


def test_a_tree_is_freed_without_a_collection(rt: Runtime) -> None:
    """It has no ring: nobody's memory waits for the garbage collector."""
    with rt.branch(PROMPT) as root:
        gc.collect()
        gc.disable()
        try:
            tree = beam(root, Sample(3, params(3)), Likelihood(), width=2, depth=2)
            del tree
            assert not [thing for thing in gc.get_objects() if type(thing) is Node]
        finally:
            gc.enable()


# -- best of --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_branch", [False, True])
def test_best_of(rt: Runtime, is_branch: bool) -> None:
    samples = rt.generate(PROMPT, params(8, n=6))
    rt.flush_cache()
    with rt.branch(PROMPT[:3]) as branch:
        where = (branch, PROMPT[3:]) if is_branch else (rt, PROMPT)
        found = best_of(*where, 6, lambda out: -out.token_ids[0], params(8))
        assert branch.length == 3
    expected = sorted(samples, key=lambda out: out.token_ids[0])
    assert [one.completion.token_ids for one in found] == [out.token_ids for out in expected]
    assert [one.score for one in found] == [-out.token_ids[0] for out in expected]
    assert sum(one.completion.usage.computed_tokens for one in found) == len(PROMPT) + 5
    assert best_of(rt, [1, 2, 3], 1, lambda _: True)[0].score == 1.0


def test_best_of_a_chat_prompt_and_a_namespace(rt: Runtime) -> None:
    found = best_of(rt, [{"role": "user", "content": "hi"}], 2, len_of, params(4, namespace="x"))
    assert found[0].completion.usage.completion_tokens == 4
    assert rt.lookup([{"role": "user", "content": "hi"}], "x").cached_len > 0


def len_of(completion: Any) -> float:
    return len(completion.token_ids)


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"width": 0}, "width must be >= 1"),
        ({"width": True}, "width"),
        ({"depth": 0}, "depth must be >= 1"),
        ({"enough": 0}, "enough must be >= 1"),
        ({"root": "hello"}, "root must be a branch"),
        ({"expand": ["a"]}, "expand must be a Sample or a function"),
        ({"score": 3}, "score must be a function or a judge"),
        ({"expand": lambda _: "abc"}, "expand must return a list of thoughts"),
        ({"expand": lambda _: None}, "expand must return a list of thoughts"),
        ({"expand": lambda _: ["a", ""]}, "a thought has no tokens"),
        ({"expand": lambda _: [[]]}, "a thought has no tokens"),
        ({"expand": lambda _: [3]}, "tokens are text or a list"),
        ({"score": lambda _: math.nan}, "score must return a number, got nan"),
        ({"score": lambda _: "1"}, "score must return a number"),
        ({"score": lambda _: None}, "score must return a number, got None"),
    ],
)
def test_wrong_searches(rt: Runtime, fields: dict[str, Any], message: str) -> None:
    with rt.branch(PROMPT) as root:
        given = {"root": root, "expand": lambda _: ["a"], "score": lambda _: 0, "width": 1,
                 "depth": 2, **fields}  # fmt: skip
        with pytest.raises(InvalidRequest, match=message):
            beam(**given)


def test_wrong_parts(rt: Runtime) -> None:
    for make, message in (
        (lambda: Sample(0), "n must be"),
        (lambda: Sample(2, 3), "params must be SamplingParams"),  # type: ignore[arg-type]
        (lambda: Sample(2, params(n=2)), "n=1"),
        (lambda: Verdict(3), "question must be a string"),  # type: ignore[arg-type]
        (lambda: best_of(rt, PROMPT, 0, len_of), "n must be"),
        (lambda: best_of(rt, PROMPT, 2, 5), "score must be a function"),  # type: ignore[arg-type]
        (lambda: best_of(rt, PROMPT, 2, lambda _: math.nan, params(2)), "must return a number"),
        (lambda: best_of(PROMPT, PROMPT, 2, len_of), "a Runtime or a branch"),  # type: ignore[arg-type]
        (lambda: best_of(rt, "", 2, len_of), "empty"),
        (lambda: best_of(rt, PROMPT, 2, len_of, params(best_of=3)), "n=1"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            make()


# -- the picture ----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [60, 100, 160])
def test_the_picture(rt: Runtime, width: int) -> None:
    with rt.branch("[bold]a\nprompt[/x] " * 9) as root:
        tree = beam(root, lambda _: ["[red]long" * 12, "b"], lambda n: n.number, width=2, depth=2)
        deep = beam(root, lambda _: ["a"], lambda _: 0, width=1, depth=40)
        wide = beam(root, lambda _: [str(i) for i in range(200)], lambda n: n.number, width=1,
                    depth=1)  # fmt: skip
    for one, num_lines in ((tree, 3), (deep, 42), (wide, 4)):
        out = io.StringIO()
        Console(width=width, file=out).print(one)
        lines = out.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        assert len(lines) >= num_lines
    text = str(tree)
    assert r"'[bold]a\nprompt[/x] " in text.splitlines()[0]
    assert "6 thoughts: 0 done, 2 kept to the end, 2 pruned" in text
    assert "\n└── 2  1 token, 0 reused + 0 computed  'b'" in text
    assert "│   └── ★ 6 end  1 token, 0 reused + 0 computed  'b'" in text
    assert "… 199 pruned" in str(wide)
    assert "198" not in str(wide)
    assert len(str(deep).splitlines()) == 42


def test_an_end_without_text_is_named(rt: Runtime) -> None:
    class Sure:
        """Every path is complete, the model or not."""

        def values(self, nodes: Sequence[Node]) -> list[float]:
            return [0.0 for _ in nodes]

    with rt.branch(PROMPT) as root:
        first = Sample(80, params(1, temperature=5.0, ignore_eos=False))
        tree = beam(root, first, Sure(), width=1, depth=1)
    assert [node.text for node in tree.done] == [""]
    assert "done  1 token, 5 reused + 1 computed  (the end of the text)" in str(tree)
    assert "duplicate  1 token" in str(tree)


def test_plain_data(rt: Runtime) -> None:
    with rt.branch(PROMPT) as root:
        tree = beam(root, Sample(2, params(3)), Likelihood(), width=1, depth=2)
    data = json.loads(json.dumps(tree.describe()))
    assert data["best"] == tree.ends[0].number
    assert data["usage"]["completion_tokens"] == 12
    assert [node["token_ids"] for node in data["nodes"]] == [n.tokens.tolist() for n in tree]
    totals = [sum(node["usage"][name] for node in data["nodes"]) for name in data["usage"]]
    assert totals == list(data["usage"].values())
    assert "prompt tokens: 9 computed instead of 30, 70.0 % saved; 12 generated" in str(tree)
    assert repr(tree.nodes[1]).startswith("Node(1, ")


def test_without_a_tokenizer(tmp_path: Path) -> None:
    with Runtime(str(make_checkpoint(tmp_path, "llama")), num_pages=256) as rt:
        with rt.branch([1, 2, 3]) as root:
            tree = beam(root, Sample(2, params(3)), Likelihood(), width=1, depth=2)
            other = beam(root, lambda _: [[7], [8]], Likelihood(), width=1, depth=2)
        assert {node.text for node in (*tree, *other)} == {""}
        assert "ids 7" in str(other)


def test_names() -> None:
    assert search.__all__ == sorted(search.__all__)
    assert all(hasattr(search, name) for name in search.__all__)
