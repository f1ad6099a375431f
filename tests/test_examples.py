"""The examples run, and what they claim is true."""

from __future__ import annotations

import importlib.util
import itertools
import operator
import random
import re
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from radixserve import Runtime

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def game() -> Any:
    return load("game_of_24")


@pytest.fixture(scope="module")
def rt() -> Iterator[Runtime]:
    with Runtime("demo") as rt:
        yield rt
        assert rt.cache_stats()["sessions"] == 0
        rt.check()


def can_make_24(numbers: tuple[Fraction, ...]) -> bool:
    """Another way to find out: all formulas over all orders."""
    if len(numbers) == 1:
        return numbers[0] == 24
    for one, other, *rest in itertools.permutations(numbers):
        signs = [operator.add, operator.sub, operator.mul, *([operator.truediv] if other else [])]
        if any(can_make_24((sign(one, other), *rest)) for sign in signs):
            return True
    return False


@pytest.mark.parametrize("numbers", ["", "3 3 8 8", "1 5 5 5", "24 1", "2 3 4"])
def test_game_of_24(game: Any, capsys: pytest.CaptureFixture[str], numbers: str) -> None:
    assert game.main(numbers.split()) == 0
    out = capsys.readouterr().out
    formula = out.split(" = 24\nEach of ")[0].splitlines()[-1]
    assert game.is_solution(formula, [int(one) for one in (numbers or "4 9 10 13").split()])
    assert "├── " in out
    assert "★" in out


@pytest.mark.parametrize("numbers", ["1 1 1 1", "1 1 1 1 1", "3 3"])
def test_game_of_24_without_a_solution(
    game: Any, capsys: pytest.CaptureFixture[str], numbers: str
) -> None:
    assert game.main(numbers.split()) == 1
    assert f"24 cannot be made of {numbers}." in capsys.readouterr().out


def test_game_of_24_is_right_and_computes_once(game: Any, rt: Runtime) -> None:
    rng = random.Random(0)
    for number in range(12):
        numbers = [rng.randint(0, 13) for _ in range(4)]
        rt.flush_cache()
        with rt.branch(game.PROMPT.format(" ".join(map(str, numbers)))) as root:
            tree = game.solve(root, 4, width=1 + number % 4)
        assert bool(tree.done) == can_make_24(tuple(map(Fraction, numbers)))
        for node in tree.done:
            assert game.is_solution(game.expression(node.path[1:], numbers), numbers)
        asked = [node for node in tree if node.usage.prompt_tokens]
        prefixes = set()  # thoughts that begin alike share their first tokens, too
        for node in asked:
            tokens = node.path_tokens.tolist()
            ends = range(len(tokens) - len(node.tokens) + 1, len(tokens) + 1)
            prefixes |= {tuple(tokens[:end]) for end in ends}
        expected = len(tree.root.tokens) - 1 + len(prefixes) if asked else 0
        assert tree.usage.computed_tokens == expected


@pytest.mark.parametrize("arguments", ["7", "1 2 3 4 5 6", "-1 2", "1 2 --width 0", "x 1"])
def test_game_of_24_refuses(game: Any, capsys: pytest.CaptureFixture[str], arguments: str) -> None:
    with pytest.raises(SystemExit) as leaving:
        game.main(arguments.split())
    assert leaving.value.code == 2
    assert "error" in capsys.readouterr().err


def test_what_is_no_solution(game: Any) -> None:
    for formula, is_one in (("4 * 6", True), ("6 * 4", True), ("4 + 6", False), ("24", False),
                            ("4 * 6 * 1", False)):  # fmt: skip
        assert game.is_solution(formula, [4, 6]) == is_one


def test_the_search_of_the_example_is_short(game: Any) -> None:
    source = Path(game.__file__).read_text()
    search = source.split("what a user writes")[1].split("# -- arithmetic")[0].splitlines()[1:]
    assert len([line for line in search if line.strip()]) < 40


def test_numpy_engine(capsys: pytest.CaptureFixture[str]) -> None:
    load("numpy_engine").main()
    lines = capsys.readouterr().out.splitlines()
    computed = [int(re.search(r"(\d+) tokens computed", line)[1]) for line in lines[:3]]  # type: ignore[index]
    assert computed[0] < computed[1] / 3
    assert re.search(r"[1-9]\d* preemptions", lines[2])
    assert lines[3] == "the answers are the same"
    assert "RadixCache(16 pages of 8 tokens: 0 in use, " in lines[2]
