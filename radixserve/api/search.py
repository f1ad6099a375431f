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
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from radixserve.api.branch import Branch, BranchQuery, Tokens, generate_all, score_all
from radixserve.api.samples import NUM_SEEDS, check_single
from radixserve.api.search_tree import Node, SearchTree, best_first
from radixserve.checks import check_int, check_str, shown
from radixserve.errors import InvalidRequest
from radixserve.output import Completion
from radixserve.request import MAX_SAMPLES, SamplingParams
from radixserve.text.prompts import Prompt

if TYPE_CHECKING:
    from radixserve.api.runtime import Runtime

__all__ = ["Judge", "Likelihood", "Node", "Sample", "Scored", "SearchTree", "Verdict", "beam",
           "best_of"]  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """Expand by `n` continuations that the model samples, each with a random stream of its own.

    With a seed in `params` continuation number i of a search samples with the seed + i. `stop`
    strings end a thought; the model's own end token ends the path.
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
        """One a node, higher is better; -inf prunes the path."""
        ...


Score = Judge | Callable[[Node], float]


@dataclass(frozen=True)
class Likelihood:
    """A path's log-probability under the model, given the prompt; `per_token`: their mean.

    Sampled thoughts have theirs already; proposed ones of a level are scored in one batch.
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
    """How much likelier the model finds `good` than `bad` after the path and `question`.

    A difference of log-probabilities, computed for all nodes of a level in one batch.
    """

    question: str
    good: str = " yes"
    bad: str = " no"

    def __post_init__(self) -> None:
        for name in ("question", "good", "bad"):
            check_str(name, getattr(self, name))

    def values(self, nodes: Sequence[Node]) -> list[float]:
        answers = [self.good, self.bad]
        scores = score_all([BranchQuery(n.branch, answers, more=self.question) for n in nodes])
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
    """`n` completions of `prompt`, which is computed once, best first by your `score`.

    On a branch `prompt` follows there, "" for nothing; the branch does not move.
    """
    count, params = check_int("n", n, 1, MAX_SAMPLES), params or SamplingParams()
    _check_params(params)
    if not callable(score):
        raise InvalidRequest(f"score must be a function of a completion, got {shown(score)}")
    with contextlib.ExitStack() as stack:
        if isinstance(start, Branch):
            root = stack.enter_context(start.fork()[0])
            root.extend(prompt)  # type: ignore[arg-type]  # refuses chat messages
        elif hasattr(start, "branch"):
            root = stack.enter_context(start.branch(prompt, namespace=params.namespace))
        else:
            raise InvalidRequest(f"start must be a Runtime or a branch, got {shown(start)}")
        kids = [stack.enter_context(kid) for kid in root.fork(count)]
        completions = generate_all(kids, params)
    _check_not_aborted(completions)
    scored = [Scored(_as_score(score(one)), one) for one in completions]
    return sorted(scored, key=lambda one: -one.score)


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
    is_done   whether a node is complete; it leaves the beam then and stays a result. Without it a
              path is complete when the model ends its text
    enough    end as soon as so many are complete

    A path is not expanded where there is no room for another token. Raises InvalidRequest, and
    any error of your functions; every branch of the search is released in any case.
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
    """A search under way: all its nodes, and the beam, the paths that may continue."""

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
        """The search is over: what is still in the beam is an end."""
        for node in self.beam:
            node.state = "end"
        for node in self.nodes:
            node.release()

    def expand(self) -> list[Node]:
        """The children of all nodes of the beam, those that the model samples in one batch."""
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
        """All of them, except those whose path this level has already."""
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
        """Continue the best; release the others and the parents."""
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
        """A node's next thoughts: none where its text has ended or has the greatest length."""
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
    """Whether the model has ended the text: then no thought follows."""
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
    if any(one.finish_reason == "abort" for one in completions):
        raise InvalidRequest("the search was aborted")
