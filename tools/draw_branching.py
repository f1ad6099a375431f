"""Draws docs/img/branching.svg: the tree that a small program with branches leaves in the cache.

    python tools/draw_branching.py [--output FILE]

The program runs on the demo model, and the tree is that of `Runtime.cache_tree`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from radixserve import Runtime, SamplingParams
from radixserve.api.branch import generate_all
from radixserve.api.tree_view import escape as one_line
from radixserve.api.tree_view import shorten

OUTPUT = Path(__file__).parent.parent / "docs" / "img" / "branching.svg"
PROMPT = "The json module of Python's standard library"
QUESTIONS = (" reads text: `json.loads(", " writes text: `json.dumps(")
LETTER = 6.7  # pixels of a character
BOX, GAP, ROW, EDGE = 40, 46, 52, 18  # heights and distances in pixels
COLOURS = {1: "#e8eef7", 2: "#a9c7f0", 4: "#5b8fd6"}  # by the number of paths through a node


@dataclass
class Box:
    """A node of the tree and its place in the picture."""

    text: str
    num_tokens: int
    children: list[Box] = field(default_factory=list)
    x: float = 0.0
    y: float = 0.0

    @property
    def num_paths(self) -> int:
        return sum(child.num_paths for child in self.children) or 1

    @property
    def facts(self) -> str:
        many = "" if self.num_tokens == 1 else "s"
        shared = f", shared by {self.num_paths}" if self.num_paths > 1 else ""
        return f"{self.num_tokens} token{many}{shared}"

    @property
    def width(self) -> float:
        return LETTER * (max(len(self.text), len(self.facts)) + 2)

    def walk(self) -> Iterator[Box]:
        yield self
        for child in self.children:
            yield from child.walk()


def grow() -> tuple[Box, int]:
    """Run the program. Returns its tree, and the sum of its branches' tokens of context."""
    params = SamplingParams(max_tokens=7, temperature=0.8, ignore_eos=True, seed=7)
    with Runtime("demo") as rt, rt.branch(PROMPT) as root:
        children = root.fork(2)
        for child, question in zip(children, QUESTIONS, strict=True):
            child.extend(question)
        ends = [fork for child in children for fork in child.fork(2)]
        generate_all(ends, params)
        dump = rt.cache_tree()
        assert rt.tokenizer is not None
        (top,) = dump["namespaces"][""]["children"]
        return make_box(top, rt.tokenizer.decode), sum(end.length - 1 for end in ends)


def make_box(node: Mapping[str, Any], decode: Any) -> Box:
    text = shorten(one_line(decode(node["tokens"])), 44)
    return Box(text, node["num_tokens"], [make_box(child, decode) for child in node["children"]])


def place(box: Box, x: float, top: float) -> float:
    """Place a box and those below it in the tree. Returns the y below all of them."""
    box.x, below = x, top
    for child in box.children:
        below = place(child, x + box.width + GAP, below)
    if box.children:
        box.y = (box.children[0].y + box.children[-1].y) / 2
        return below
    box.y = top
    return top + ROW


def svg(root: Box, num_sent: int) -> str:
    """The picture as text."""
    place(root, EDGE, 64)
    boxes = list(root.walk())
    num_kept = sum(box.num_tokens for box in boxes)
    width = max(box.x + box.width for box in boxes) + EDGE
    height = max(box.y for box in boxes) + BOX + EDGE
    title = f"{root.num_paths} branches, {num_sent} tokens of context: {num_kept} in the cache"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" font-family="monospace" font-size="11">',
        '<rect width="100%" height="100%" rx="8" fill="white"/>',
        f'<text x="{EDGE}" y="26" font-size="14" font-weight="bold">{escape(title)}</text>',
        f'<text x="{EDGE}" y="44" fill="#555">attention can read a box once for all the '
        "branches that go through it</text>",
    ]
    for box in boxes:
        parts += [*_lines(box), *_box(box)]
    return "\n".join([*parts, "</svg>\n"])


def _lines(box: Box) -> Iterator[str]:
    """The lines from a box to its children."""
    start, y = box.x + box.width, box.y + BOX / 2
    for child in box.children:
        end, middle = child.y + BOX / 2, start + GAP / 2
        yield (
            f'<path d="M{start:.0f} {y:.0f} C{middle:.0f} {y:.0f} {middle:.0f} {end:.0f} '
            f'{child.x:.0f} {end:.0f}" fill="none" stroke="#888" stroke-width="1.5"/>'
        )


def _box(box: Box) -> Iterator[str]:
    yield (
        f'<rect x="{box.x:.0f}" y="{box.y:.0f}" width="{box.width:.0f}" height="{BOX}" rx="5" '
        f'fill="{COLOURS[box.num_paths]}" stroke="#456"/>'
    )
    for row, (text, colour) in enumerate(((box.text, "black"), (box.facts, "#333"))):
        yield (
            f'<text x="{box.x + 7:.0f}" y="{box.y + 16 + 15 * row:.0f}" fill="{colour}" '
            f'xml:space="preserve">{escape(text)}</text>'
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    args.output.write_text(svg(*grow()))


if __name__ == "__main__":
    main()
