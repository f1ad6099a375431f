"""`Node` and `SearchTree`: the thoughts of a search, their states, and their token counts.

Both draw themselves: `print(tree)`, or `rich.print(tree)` in colour.
"""

from __future__ import annotations

import contextlib
import io
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from radixserve.api.branch import Branch
from radixserve.api.tree_view import draw_below, escape, shorten
from radixserve.arrays import IntArray
from radixserve.errors import InvalidRequest
from radixserve.output import Completion, Usage, add_usages

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text
    from rich.tree import Tree

State = Literal["open", "expanded", "end", "done", "pruned", "duplicate"]

_LEAST_LINE = 56  # columns left for a node, as far as the width allows
_LEAST_TEXT = 12  # of them for its text
_FULL = 120  # nodes up to which a drawing shows also those that were pruned
_STYLES = {"done": "bold green", "end": "green", "pruned": "dim", "duplicate": "dim"}


class Node:
    """A thought: one step from its parent. The root is the prompt.

    number       in order of creation; the root is 0
    tokens       [k] int32, its own; `path_tokens` has everything from the prompt on
    text         its own, as proposed or generated, stop strings included; "" without a tokenizer
    completion   the model's, if it was sampled
    logprob      of its tokens given all before them, once the model has said it
    score        the value of the search's `score`; None for the root and for duplicates
    state        "open" while its path may go on; then "expanded", "end" (kept to the last and not
                 expanded), "done" (complete), "pruned", or "duplicate" (of a path of its level)
    """

    __slots__ = ("_branch", "_usage", "completion", "logprob", "number", "parent", "score",
                 "state", "text", "tokens")  # fmt: skip

    def __init__(self, number: int, parent: Node | None, branch: Branch) -> None:
        """`branch` is the node's own; it stands where the thought begins."""
        self.number: int = number
        self.parent: Node | None = parent
        self.tokens: IntArray = branch.tokens
        self.text: str = ""
        self.completion: Completion | None = None
        self.logprob: float | None = None
        self.score: float | None = None
        self.state: State = "open"
        self._branch: Branch | None = branch
        self._usage: Usage | None = None

    def place(self, text: str | None = None, completion: Completion | None = None) -> None:
        """The branch stands at the end of the thought now. `text`: as proposed."""
        above = 0 if self.parent is None else self.parent.branch.length
        self.tokens = self.branch.tokens[above:]
        with contextlib.suppress(InvalidRequest):  # a model without a tokenizer
            self.text = self.branch.text_from(above) if text is None else text
        if completion is not None:
            self.completion = completion
            self.logprob = completion.cumulative_logprob

    def __repr__(self) -> str:
        score = "" if self.score is None else f", score={self.score:.6g}"
        return f"Node({self.number}, {self.text!r}{score}, {self.state})"

    @property
    def branch(self) -> Branch:
        """Where it stands, to be asked and forked while it is open; not to be moved.

        InvalidRequest once the search has released it.
        """
        if self._branch is None:
            raise InvalidRequest(
                "the search has released this node; rt.branch(node.path_tokens) goes on from it"
            )
        return self._branch

    @property
    def path(self) -> list[Node]:
        """From the root to this one, both included."""
        found: list[Node] = []
        node: Node | None = self
        while node is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    @property
    def depth(self) -> int:
        """Thoughts after the prompt."""
        return len(self.path) - 1

    @property
    def path_text(self) -> str:
        """The text of all thoughts, without the prompt."""
        return "".join(node.text for node in self.path[1:])

    @property
    def path_tokens(self) -> IntArray:
        """[n] int32: the prompt and all thoughts."""
        return np.concatenate([node.tokens for node in self.path])

    @property
    def usage(self) -> Usage:
        """Token counts of making it and of scoring it through `branch`."""
        return self._usage if self._usage is not None else self.branch.usage

    def release(self) -> None:
        """Release its branch; a second call does nothing."""
        if self._branch is not None:
            self._usage = self._branch.usage
            self._branch.release()
            self._branch = None


@dataclass(frozen=True)
class SearchTree:
    """All nodes of a search that has ended; their branches are released."""

    nodes: tuple[Node, ...]  # by number: parents first

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def root(self) -> Node:
        return self.nodes[0]

    @property
    def done(self) -> list[Node]:
        """The complete ones, best first."""
        return self._ranked("done")

    @property
    def ends(self) -> list[Node]:
        """Nodes that were kept to the last without being complete, best first."""
        return self._ranked("end")

    @property
    def best(self) -> Node | None:
        """The best complete one, else the best end; None when every path was pruned."""
        return next(iter([*self.done, *self.ends]), None)

    @property
    def usage(self) -> Usage:
        """The sum over all nodes. `prompt_tokens` would be computed if every request were a prompt
        of its own; the shared tree saved `cached_tokens` of them."""
        return add_usages([node.usage for node in self.nodes])

    def children(self, node: Node) -> list[Node]:
        """In order of creation."""
        return [other for other in self.nodes if other.parent is node]

    def describe(self) -> dict[str, Any]:
        """Nodes and totals as plain data."""
        nodes = [
            {
                "number": node.number,
                "parent": None if node.parent is None else node.parent.number,
                "text": node.text,
                "token_ids": node.tokens.tolist(),
                "score": node.score,
                "state": node.state,
                "usage": asdict(node.usage),
            }
            for node in self.nodes
        ]
        best = None if self.best is None else self.best.number
        return {"best": best, "usage": asdict(self.usage), "nodes": nodes}

    def draw(self, *, width: int, shows_pruned: bool | None = None) -> Tree:
        """A thought a line, best path marked. Pruned ones are only counted if there are many nodes
        (None) or always (False)."""
        from rich.text import Text
        from rich.tree import Tree

        shows_pruned = len(self) <= _FULL if shows_pruned is None else shows_pruned
        best = () if self.best is None else tuple(self.best.path)
        below: defaultdict[int | None, list[Node]] = defaultdict(list)
        for node in self.nodes:
            below[None if node.parent is None else node.parent.number].append(node)

        def children(node: Node | int) -> list[Node | int]:
            """A number stands for so many that are not shown."""
            if isinstance(node, int):
                return []
            kids = below[node.number]
            shown = [kid for kid in kids if shows_pruned or not _is_pruned(kid)]
            return [*([len(kids) - len(shown)] if len(shown) < len(kids) else []), *shown]

        def label(node: Node | int, mark: str, columns: int) -> Text:
            if isinstance(node, int):
                return Text(f"… {node:,} pruned", "dim")
            return _line(mark, node, is_best=node in best, width=columns)

        drawing = Tree(Text("\n".join(_totals(self, width))))
        draw_below(drawing, children(self.root), label, children, width=width, least=_LEAST_LINE)
        return drawing

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Tree]:
        yield self.draw(width=options.max_width)

    def __str__(self) -> str:
        from rich.console import Console

        out = io.StringIO()
        Console(file=out, width=100, color_system=None, legacy_windows=False).print(self)
        return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())

    def _ranked(self, state: State) -> list[Node]:
        found = [node for node in self.nodes if node.state == state]
        return sorted(found, key=_rank)


def _rank(node: Node) -> tuple[float, int]:
    """Best first; of equal ones the one made first. The root alone has no score."""
    return (-np.inf if node.score is None else -node.score, node.number)


def _is_pruned(node: Node) -> bool:
    return node.state in ("pruned", "duplicate")


def _totals(tree: SearchTree, width: int) -> list[str]:
    """The first lines of a drawing: the prompt, thoughts by state, token counts."""
    usage = tree.usage
    states = [node.state for node in tree.nodes[1:]]
    pruned = sum(map(_is_pruned, tree.nodes))
    head = f"prompt of {len(tree.root.tokens):,} tokens "
    lines = [
        head + _quoted(tree.root, width - len(head)),
        f"{len(states):,} thoughts: {states.count('done'):,} done, "
        f"{states.count('end') + states.count('open'):,} kept to the end, {pruned:,} pruned",
    ]
    if usage.prompt_tokens:
        saved = 100 * usage.cached_tokens / usage.prompt_tokens
        lines.append(
            f"prompt tokens: {usage.computed_tokens:,} computed instead of "
            f"{usage.prompt_tokens:,}, {saved:.1f} % saved; {usage.completion_tokens:,} generated"
        )
    return lines


def _line(mark: str, node: Node, *, is_best: bool, width: int) -> Text:
    from rich.text import Text

    usage, count = node.usage, len(node.tokens)
    score = "" if node.score is None else f"{node.score:.4g}"
    state = "" if node.state == "expanded" else node.state
    head = " ".join(part for part in ("★" if is_best else "", score, state) if part)
    facts = (
        f"{mark}{head}  {count:,} token{'' if count == 1 else 's'}, "
        f"{usage.cached_tokens:,} reused + {usage.computed_tokens:,} computed  "
    )
    text = _quoted(node, max(_LEAST_TEXT, width - len(facts)))
    style = "bold" if is_best and node.state == "expanded" else _STYLES.get(node.state, "cyan")
    return Text(facts + text, style, no_wrap=True, overflow="ellipsis")


def _quoted(node: Node, width: int) -> str:
    """Its text on a line, the middle left out where it is too long; ids without a text."""
    if not node.text and node.completion is not None and node.completion.finish_reason == "stop":
        return shorten("(the end of the text)", width)
    if not node.text:
        return shorten(f"ids {' '.join(map(str, node.tokens[:width]))}", width)
    return f"'{shorten(escape(node.text), max(1, width - 2))}'"


def best_first(nodes: Sequence[Node]) -> list[Node]:
    """By score; of equal ones the one made first."""
    return sorted(nodes, key=_rank)
