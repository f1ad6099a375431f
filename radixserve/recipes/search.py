"""Search on top of branches: the best of several answers, and a beam over thoughts.

    from radixserve import search

    best = search.best_of(rt, "The json module", 8, score=lambda out: -len(out.text))[0]

    with rt.branch("The json module") as root:
        tree = search.beam(root, search.Sample(4, params), search.Likelihood(), width=2, depth=3)
    print(tree)

The prefix that candidates share is computed once; those of a level run side by side.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np

from radixserve.api.branch import Branch, BranchQuery, Tokens, generate_all, score_all
from radixserve.api.request_builder import NUM_SEEDS, check_single
from radixserve.api.tree_view import draw_below, escape, shorten
from radixserve.arrays import IntArray
from radixserve.checks import check_int, check_str, shown
from radixserve.completion import Completion
from radixserve.errors import InvalidRequest
from radixserve.output import Usage, add_usages
from radixserve.request import MAX_SAMPLES, SamplingParams
from radixserve.text.prompts import Prompt

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text
    from rich.tree import Tree

    from radixserve.api.runtime import Runtime


State = Literal["open", "expanded", "end", "done", "pruned", "duplicate"]

_LEAST_LINE = 56  # least columns for a node, if the width allows
_LEAST_TEXT = 12  # least columns for its text
_FULL = 120  # most nodes of a tree whose drawing shows pruned nodes by default
_STYLES = {"done": "bold green", "end": "green", "pruned": "dim", "duplicate": "dim"}


class Node:
    """A thought: one step from its parent. The root is the prompt.

    number       in order of creation; the root is 0
    tokens       [k] int32, its own; `path_tokens` has everything from the prompt on
    text         its own, as proposed or generated, stop strings included; "" without a tokenizer
    completion   the model's, if it was sampled
    logprob      of its tokens given all before them, once the model has scored them
    score        the value of the search's `score`; None for the root and for duplicates
    state        "open" while its path may continue; then "expanded", "end" (kept to the end, not
                 expanded), "done" (complete), "pruned", or "duplicate" (of a path of its level)
    """

    __slots__ = (
        "_branch",
        "_usage",
        "completion",
        "logprob",
        "number",
        "parent",
        "score",
        "state",
        "text",
        "tokens",
    )

    def __init__(self, number: int, parent: Node | None, branch: Branch) -> None:
        """`branch`: the node's own, at the position where the thought begins."""
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
        """Set tokens and text of the thought, at whose end the branch is now. `text`: the text as
        proposed; None: decode the tokens. `completion`: of a sampled thought."""
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
        """The branch at the node's end. It may be read and forked while it is open, but not moved.

        Raises InvalidRequest once the search has released it.
        """
        if self._branch is None:
            raise InvalidRequest(
                "the search has released this node: continue it by rt.branch(node.path_tokens)"
            )
        return self._branch

    @property
    def path(self) -> list[Node]:
        """The nodes from the root to this one, both included."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

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
        """The nodes that were kept to the end and are not complete, best first."""
        return self._ranked("end")

    @property
    def best(self) -> Node | None:
        """The best complete node, else the best end; None if every path was pruned."""
        return next(iter([*self.done, *self.ends]), None)

    @property
    def usage(self) -> Usage:
        """The sum over all nodes. Without sharing all `prompt_tokens` would be computed; the tree
        saved `cached_tokens` of them."""
        return add_usages([node.usage for node in self.nodes])

    def children(self, node: Node) -> list[Node]:
        """Returns the children of a node, in order of creation."""
        return [other for other in self.nodes if other.parent is node]

    def describe(self) -> dict[str, Any]:
        """Returns {"best", "usage", "nodes"} as plain data."""
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
        """Returns a drawing with one thought per line and the best path marked. `shows_pruned`:
        whether pruned thoughts are drawn or only counted; None: drawn in small trees."""
        from rich.text import Text
        from rich.tree import Tree

        shows_pruned = len(self) <= _FULL if shows_pruned is None else shows_pruned
        best = () if self.best is None else tuple(self.best.path)
        below: defaultdict[int | None, list[Node]] = defaultdict(list)
        for node in self.nodes:
            below[None if node.parent is None else node.parent.number].append(node)

        def children(node: Node | int) -> list[Node | int]:
            """Returns the shown children; a number among them counts pruned ones."""
            if isinstance(node, int):
                return []
            kids = below[node.number]
            shown = [kid for kid in kids if shows_pruned or not _is_pruned(kid)]
            num_hidden = len(kids) - len(shown)
            return [num_hidden, *shown] if num_hidden else [*shown]

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
        nodes = [node for node in self.nodes if node.state == state]
        return sorted(nodes, key=_rank)


def _rank(node: Node) -> tuple[float, int]:
    """Returns a sort key: best score first, of equal scores the earlier node. The root has no
    score."""
    return (-np.inf if node.score is None else -node.score, node.number)


def _is_pruned(node: Node) -> bool:
    return node.state in ("pruned", "duplicate")


def _totals(tree: SearchTree, width: int) -> list[str]:
    """Returns the first lines of a drawing: the prompt, thoughts by state, token counts."""
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
    """Returns a node's text on one line, shortened in the middle; its token ids without a text."""
    if not node.text and node.completion is not None and node.completion.finish_reason == "stop":
        return shorten("(the end of the text)", width)
    if not node.text:
        return shorten(f"ids {' '.join(map(str, node.tokens[:width]))}", width)
    return f"'{shorten(escape(node.text), max(1, width - 2))}'"


def best_first(nodes: Sequence[Node]) -> list[Node]:
    """Returns the nodes by score, best first; of equal scores the earlier node first."""
    return sorted(nodes, key=_rank)


__all__ = [
    "Judge",
    "Likelihood",
    "Node",
    "Sample",
    "Scored",
    "SearchTree",
    "Verdict",
    "beam",
    "best_of",
]


@dataclass(frozen=True)
class Sample:
    """Expands a node by `n` continuations that the model samples, each with its own random stream.

    With a seed in `params` continuation i of a search samples with the seed + i. `stop` strings end
    a thought; the model's end token ends the path.
    """

    n: int
    params: SamplingParams = field(default_factory=SamplingParams)

    def __post_init__(self) -> None:
        check_int("n", self.n, 1, MAX_SAMPLES)
        _check_params(self.params)


Expand = Sample | Callable[[Node], "Sample | Sequence[Tokens]"]


class Judge(Protocol):
    """Scores all new nodes of a level together, for instance in one batch."""

    def values(self, nodes: Sequence[Node]) -> Sequence[float]:
        """Returns one value per node. Higher is better; -inf prunes the path."""
        ...


Score = Judge | Callable[[Node], float]


@dataclass(frozen=True)
class Likelihood:
    """A judge by a path's log-probability under the model, given the prompt. `per_token`: divided
    by the number of tokens.

    Sampled thoughts have their log-probability already; proposed thoughts of a level are scored in
    one batch.
    """

    per_token: bool = False

    def values(self, nodes: Sequence[Node]) -> list[float]:
        asks: list[tuple[Node, BranchQuery]] = []
        for node in nodes:
            start = len(node.path[0].tokens)
            for thought in node.path[1:]:
                if thought.logprob is None:
                    candidates = [thought.tokens.tolist()]
                    asks.append((thought, BranchQuery(node.branch, candidates, start)))
                start += len(thought.tokens)
        for (thought, _), (score,) in zip(asks, score_all([ask for _, ask in asks]), strict=True):
            thought.logprob = score.logprob
        return [self._value(node.path[1:]) for node in nodes]

    def _value(self, thoughts: Sequence[Node]) -> float:
        total = math.fsum(thought.logprob or 0.0 for thought in thoughts)
        count = sum(len(thought.tokens) for thought in thoughts)
        return total / count if self.per_token else total


@dataclass(frozen=True)
class Verdict:
    """A judge by how much likelier the model finds `good` than `bad` after the path and `question`.

    The value is the difference of log-probabilities, computed in one batch per level.
    """

    question: str
    good: str = " yes"
    bad: str = " no"

    def __post_init__(self) -> None:
        for name in ("question", "good", "bad"):
            check_str(name, getattr(self, name))

    def values(self, nodes: Sequence[Node]) -> list[float]:
        answers = [self.good, self.bad]
        queries = [BranchQuery(node.branch, answers, more=self.question) for node in nodes]
        scores = score_all(queries)
        return [good.logprob - bad.logprob for good, bad in scores]


class Scored(NamedTuple):
    """An answer and its score."""

    score: float
    completion: Completion


def best_of(
    start: Runtime | Branch,
    prompt: Prompt,
    n: int,
    score: Callable[[Completion], float],
    params: SamplingParams | None = None,
) -> list[Scored]:
    """Returns `n` completions of `prompt`, which is computed once, best first by `score`.

    If `start` is a branch, `prompt` follows its tokens and may be ""; the branch does not move.
    Raises InvalidRequest.
    """
    count = check_int("n", n, 1, MAX_SAMPLES)
    if params is None:
        params = getattr(start, "default_sampling_params", None) or SamplingParams()
    _check_params(params)
    if not callable(score):
        raise InvalidRequest(f"score must be a function of a completion, got {shown(score)}")
    with contextlib.ExitStack() as stack:
        if isinstance(start, Branch):
            root = stack.enter_context(start.fork()[0])
            root.extend(prompt)  # type: ignore[arg-type]  # refuses chat messages
        elif hasattr(start, "branch"):
            branch = start.branch(prompt, adapter=params.adapter, namespace=params.namespace)
            root = stack.enter_context(branch)
        else:
            raise InvalidRequest(f"start must be a Runtime or a branch, got {shown(start)}")
        kids = [stack.enter_context(kid) for kid in root.fork(count)]
        completions = generate_all(kids, params)
    _check_not_aborted(completions)
    scored = [Scored(_as_score(score(completion)), completion) for completion in completions]
    return sorted(scored, key=lambda completion: -completion.score)


def beam(
    root: Branch,
    expand: Expand,
    score: Score,
    *,
    width: int,
    depth: int,
    is_done: Callable[[Node], bool] | None = None,
    enough: int | None = None,
) -> SearchTree:
    """Beam search over thoughts after `root`, which does not move.

    Level by level, `depth` of them at most: every path of the beam is expanded, all new nodes are
    scored, the `width` best continue, the others are released at once.

    expand    `Sample(n, params)`, or a function of a node that returns the thoughts which may come
              next, as texts or token ids, or a `Sample`; an empty list ends the path
    score     a function of a node that returns a number, higher is better, or a judge:
              `Likelihood()`, `Verdict(question)`, or your own; -inf prunes the path
    is_done   tells whether a node is complete: it then leaves the beam and is a result. Without
              this function a path is complete when the model ends its text
    enough    end the search as soon as so many nodes are complete

    A path is not expanded if no token fits after it. Raises InvalidRequest and the errors of the
    given functions; all branches of the search are released in any case.
    """
    check_int("width", width, 1)
    check_int("depth", depth, 1)
    if enough is not None:
        check_int("enough", enough, 1)
    if not isinstance(root, Branch):
        raise InvalidRequest(f"root must be a branch, see Runtime.branch; got {shown(root)}")
    if not isinstance(expand, Sample) and not callable(expand):
        raise InvalidRequest(f"expand must be a Sample or a function, got {shown(expand)}")
    if not callable(score) and not callable(getattr(score, "values", None)):
        raise InvalidRequest(f"score must be a function or a judge, got {shown(score)}")
    search = _Search(root, expand, score, is_done)
    try:
        for _ in range(depth):
            children = search.expand()
            search.score(children)
            search.select(children, width)
            if not search.beam or (enough is not None and search.num_done >= enough):
                break
    finally:
        search.release()
    return SearchTree(tuple(search.nodes))


class _Search:
    """A search in progress: its nodes, and the beam, the last nodes of paths that may continue."""

    def __init__(
        self, root: Branch, expand: Expand, score: Score, is_done: Callable[[Node], bool] | None
    ) -> None:
        self.nodes: list[Node] = []
        self.num_done = 0
        self._expand, self._score, self._is_done = expand, score, is_done
        self._num_sampled = 0
        start = self._add(None, root)
        start.place()
        self.beam = [start]

    def release(self) -> None:
        """End the search: nodes that are still in the beam become ends."""
        for node in self.beam:
            node.state = "end"
        for node in self.nodes:
            node.release()

    def expand(self) -> list[Node]:
        """Returns the children of all nodes of the beam. Sampled ones are computed in one batch."""
        children: list[Node] = []
        sampled: list[tuple[Node, SamplingParams]] = []
        for node in self.beam:
            wanted = self._wanted(node)
            if isinstance(wanted, Sample):
                params = self._params(wanted)
                kids = [self._add(node, node.branch) for _ in range(wanted.n)]
                sampled += [(kid, params) for kid in kids]
            else:
                kids = [self._propose(node, thought) for thought in wanted]
            node.state = "expanded" if kids else "end"
            children += kids
        done = generate_all([kid.branch for kid, _ in sampled], [params for _, params in sampled])
        _check_not_aborted(done)
        for (kid, _), completion in zip(sampled, done, strict=True):
            kid.place(completion=completion)
        return children

    def score(self, children: Sequence[Node]) -> None:
        """Score the children, except duplicates of a path of this level."""
        fresh: dict[bytes, Node] = {}
        for node in children:
            if fresh.setdefault(node.branch.tokens.tobytes(), node) is not node:
                node.state = "duplicate"
                node.release()
        nodes = list(fresh.values())
        judge = self._score
        if hasattr(judge, "values"):
            values = list(judge.values(nodes))
        else:
            values = [judge(node) for node in nodes]
        if len(values) != len(nodes):
            raise InvalidRequest(f"the judge gave {len(values)} scores for {len(nodes)} nodes")
        for node, value in zip(nodes, values, strict=True):
            node.score = _as_score(value)

    def select(self, children: Sequence[Node], width: int) -> None:
        """Make the best children the new beam; release the others and the parents."""
        going = []
        for node in children:
            if node.state == "duplicate":
                continue
            if node.score == -math.inf:
                node.state = "pruned"
            elif self._is_complete(node):
                node.state = "done"
                self.num_done += 1
            else:
                going.append(node)
        parents, ranked = self.beam, best_first(going)
        self.beam = ranked[:width]
        for node in ranked[width:]:
            node.state = "pruned"
        for node in (*parents, *children):
            if node.state != "open":
                node.release()

    def _add(self, parent: Node | None, branch: Branch) -> Node:
        self.nodes.append(Node(len(self.nodes), parent, branch.fork()[0]))
        return self.nodes[-1]

    def _wanted(self, node: Node) -> Sample | Sequence[Tokens]:
        """Returns a node's next thoughts: none if its text has ended or has its greatest length."""
        if node.branch.room < 1 or _has_ended(node):
            return []
        wanted = self._expand if isinstance(self._expand, Sample) else self._expand(node)
        is_list = isinstance(wanted, Sequence) and not isinstance(wanted, str)
        if not is_list and not isinstance(wanted, Sample):
            raise InvalidRequest(
                f"expand must return a list of thoughts or a Sample, got {shown(wanted)}"
            )
        return wanted

    def _propose(self, parent: Node, thought: Tokens) -> Node:
        node = self._add(parent, parent.branch)
        node.branch.extend(thought)
        if node.branch.length == parent.branch.length:
            raise InvalidRequest(f"a thought has no tokens: {shown(thought)}")
        node.place(thought if isinstance(thought, str) else None)
        return node

    def _params(self, sample: Sample) -> SamplingParams:
        params, first = sample.params, self._num_sampled
        self._num_sampled += sample.n
        if params.seed is not None:
            params = replace(params, seed=(params.seed + first) % NUM_SEEDS)
        return params if params.logprobs is not None else replace(params, logprobs=0)

    def _is_complete(self, node: Node) -> bool:
        return _has_ended(node) if self._is_done is None else bool(self._is_done(node))


def _has_ended(node: Node) -> bool:
    """Whether the model has ended the text, so that no thought follows."""
    out = node.completion
    return out is not None and out.finish_reason == "stop" and node.branch.has_ended


def _as_score(value: object) -> float:
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        number = math.nan if isinstance(value, str | bytes) else float(value)  # type: ignore[arg-type]
        if not math.isnan(number):
            return number
    raise InvalidRequest(f"score must return a number, got {shown(value)}")


def _check_params(params: object) -> None:
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(f"params must be SamplingParams, got {shown(params)}")
    check_single(params, "a search")


def _check_not_aborted(completions: Sequence[Completion]) -> None:
    if any(completion.finish_reason == "abort" for completion in completions):
        raise InvalidRequest("the search was aborted")
