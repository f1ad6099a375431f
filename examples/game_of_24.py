"""The game of 24 as a tree of thoughts: combine the numbers two at a time until 24 is left.

    python examples/game_of_24.py [4 9 10 13] [--width 5] [--model demo]

A state is the numbers that are left, a thought is one step: "13 - 9 = 4 (left: 4 4 10)". The steps
are proposed by a script, and so is the value of a state: in how many ways 24 can still be made of
it, where a large model would be asked for its opinion. Between equal values the model decides, by
how likely it finds the path. All steps of a level are scored in one batch; what they share is
computed once.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cache
from itertools import combinations

from rich.console import Console

from radixserve import Branch, Runtime, search

GOAL = Fraction(24)
PROMPT = """\
Use each number once, with + - * and /, to make 24. Each step takes two of the numbers that are left
and puts their result in their place.
Numbers: {}
"""
Numbers = tuple[Fraction, ...]


# -- the search: what a user writes -----------------------------------------------------------


def left(node: search.Node) -> Numbers:
    """The numbers behind a thought, or in the prompt."""
    told = re.findall(r"(?:Numbers|left): ([\d/ -]+)", node.text)[-1]
    return tuple(map(Fraction, told.split()))


def propose(node: search.Node) -> list[str]:
    """Every step from here."""
    return [
        f"{step} = {rest[-1]} (left: {' '.join(map(str, sorted(rest)))})\n"
        for step, rest in moves(left(node))
    ]


class Value:
    """Ways to 24, -inf without any; the model's likelihood settles ties."""

    def values(self, nodes: Sequence[search.Node]) -> list[float]:
        alive = [node for node in nodes if ways(left(node))]
        liked = dict(zip(alive, search.Likelihood(per_token=True).values(alive), strict=True))
        return [ways(left(n)) + liked[n] / 1e3 if n in liked else float("-inf") for n in nodes]


def solve(root: Branch, count: int, width: int) -> search.SearchTree:
    """Depth by depth, keeping the `width` best states; ends with the first solution."""
    return search.beam(
        root,
        propose,
        Value(),
        width=width,
        depth=count - 1,
        is_done=lambda node: left(node) == (GOAL,),
        enough=1,
    )


# -- arithmetic -------------------------------------------------------------------------------


def moves(numbers: Numbers) -> Iterator[tuple[str, Numbers]]:
    """(the step, the numbers after it, its result last) of all steps."""
    for i, j in combinations(range(len(numbers)), 2):
        low, high = sorted((numbers[i], numbers[j]))
        rest = tuple(number for index, number in enumerate(numbers) if index not in (i, j))
        yield f"{low} + {high}", (*rest, low + high)
        yield f"{low} * {high}", (*rest, low * high)
        for left, other in {(high, low), (low, high)}:
            yield f"{left} - {other}", (*rest, left - other)
            if other:
                yield f"{left} / {other}", (*rest, left / other)


@cache
def ways(numbers: Numbers) -> int:
    """In how many orders of steps 24 can be made of them."""
    if len(numbers) == 1:
        return int(numbers[0] == GOAL)
    return sum(ways(tuple(sorted(rest))) for _, rest in moves(numbers))


def expression(path: Sequence[search.Node], numbers: Sequence[int]) -> str:
    """The steps of a solution put into one formula."""
    pool = [(Fraction(number), str(number)) for number in numbers]
    for node in path:
        left, sign, other = node.text.split(" = ")[0].split()
        parts = [_take(pool, Fraction(number)) for number in (left, other)]
        result = _compute(Fraction(left), sign, Fraction(other))
        pool.append((result, f"({parts[0]} {sign} {parts[1]})"))
    ((_, formula),) = pool
    return formula[1:-1]


def is_solution(formula: str, numbers: Sequence[int]) -> bool:
    """Whether it uses exactly the numbers and is 24, computed in fractions."""
    used = sorted(map(int, re.findall(r"\d+", formula)))
    exact = re.sub(r"(\d+)", r"Fraction(\1)", formula)
    return used == sorted(numbers) and eval(exact, {"Fraction": Fraction}) == GOAL


def _take(pool: list[tuple[Fraction, str]], number: Fraction) -> str:
    index = next(index for index, (value, _) in enumerate(pool) if value == number)
    return pool.pop(index)[1]


def _compute(left: Fraction, sign: str, other: Fraction) -> Fraction:
    results = {"+": left + other, "-": left - other, "*": left * other}
    return results[sign] if sign in results else left / other


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("numbers", nargs="*", type=int, metavar="N", help="default: 4 9 10 13")
    parser.add_argument("--width", type=int, default=5, help="states kept a level (default: 5)")
    parser.add_argument("--model", default="demo", help="checkpoint folder, hub id or demo")
    args = parser.parse_args(arguments)
    numbers = args.numbers or [4, 9, 10, 13]
    if not 2 <= len(numbers) <= 5 or min(numbers) < 0 or args.width < 1:
        parser.error("give two to five numbers, none below 0, and a width of at least 1")
    given, console = " ".join(map(str, numbers)), Console(highlight=False)
    with Runtime(args.model) as rt, rt.branch(PROMPT.format(given)) as root:
        tree = solve(root, len(numbers), args.width)
    console.print(tree.draw(width=console.width, shows_pruned=False))
    if not tree.done:
        console.print(f"\n24 cannot be made of {given}.")
        return 1
    formula = expression(tree.done[0].path[1:], numbers)
    assert is_solution(formula, numbers)
    usage = tree.usage
    console.print(f"\n{formula} = 24", style="bold green")
    console.print(
        f"Each of {len(tree) - 1:,} thoughts as a prompt of its own: {usage.prompt_tokens:,} "
        f"tokens. As branches of one tree: {usage.computed_tokens:,}."
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
