"""How a search ends: errors, aborts, what is refused, its picture and its data."""

from __future__ import annotations

import gc
import io
import json
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from radixserve import EngineDead, InvalidRequest, Runtime, search
from radixserve.recipes.search import Likelihood, Node, Sample, Verdict, beam, best_of
from tests.checkpoints import make_checkpoint
from tests.pacing import held, wait_until
from tests.recipes.test_search import PROMPT, params


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
