"""`run_demo`: runs and times the requests of `radixserve demo`.

They are conversations of two turns with the same long system prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from radixserve.errors import InvalidRequest
from radixserve.reports import TreeDump
from radixserve.request import SamplingParams

if TYPE_CHECKING:
    from radixserve.api.runtime import Runtime
    from radixserve.completion import Completion

Messages = list[dict[str, str]]
_NUM_RUNNING = 2  # requests that run while the tree is dumped

SYSTEM_PROMPT = """\
You are a helpful assistant for the Python standard library. Keep your answers short. Name the \
module a function is in. Use the wording of the documentation. Do not invent functions that do \
not exist. Write code in backquotes. If you do not know the answer, say so.

Notes on list.sort:
Sort the list in place, using only comparisons between items with `<`. The argument `key` is a \
function of one argument that is called once for each item; the default value of `None` means that \
the items are compared directly. If `reverse` is true, the items are sorted as if each comparison \
were reversed. The method returns `None` to remind users that it works by side effect; the \
built-in function `sorted()` returns a new list. The sort is stable: items that compare equal \
keep their order.

Notes on functools.cache:
A decorator that wraps a function with a simple unbounded memo. Because it never needs to evict \
old values, it is smaller and faster than `functools.lru_cache()` with a size limit. The arguments \
of the function must be hashable. The cache is thread-safe, but the wrapped function may be called \
more than once if another thread makes the same call before the first one is done.

Notes on shutil.copy:
Copy the file `src` to the file or directory `dst`. Both should be path-like objects or strings. \
If `dst` is a directory, the file is copied into it under the base name of `src`; if it is a file \
that exists, it is replaced. The contents and the permission bits are copied; other metadata, \
such as the times of creation and modification, is not. Use `shutil.copy2()` to keep it.

Notes on itertools.islice:
Make an iterator that returns selected elements from the iterable. It works like slicing a \
sequence, but negative values are not supported for start, stop or step. If start is zero or \
`None`, iteration begins at the first element; elements before it are consumed and dropped. \
Generators can be sliced this way without computing the values that follow the last one.

Notes on str.split:
Return a list of the words in the string, using `sep` as the delimiter. If `maxsplit` is given, \
at most that many splits are done, so that the list has at most one element more. If `sep` is not \
given or is `None`, runs of white space count as a single separator, and the result has no empty \
strings at its start or end. Splitting an empty string with a given separator returns `['']`. \
The method `str.join()` does the opposite.

Notes on json.loads:
Deserialize a `str`, `bytes` or `bytearray` that contains a JSON document to a Python object. \
Objects become dictionaries, arrays become lists, and `null` becomes `None`. The optional function \
`object_hook` is called with each dictionary and its return value is used in place of it. If the \
data is not a valid JSON document, a `json.JSONDecodeError` is raised, which tells the line and \
the column where the document could not be read."""

# (first question, second question)
CONVERSATIONS = (
    ("How do I sort a list?", "What is a lambda?"),
    ("What is a decorator?", "What is a class?"),
    ("How do I copy a file?", "How do I delete a file?"),
    ("What is a generator?", "What is an iterator?"),
    ("How do I split a string?", "How do I join strings?"),
    ("How do I parse JSON?", "What is a dictionary?"),
)

UNRELATED = "warm up " * 200  # a prompt to warm up with, whose K/V is dropped before timing


@dataclass(frozen=True, slots=True)
class DemoAnswer:
    """A question of the demo with its completion."""

    question: str
    completion: Completion

    @property
    def verdict(self) -> str:
        """HIT: at least half of the prompt was reused; PARTIAL: less; MISS: nothing."""
        usage = self.completion.usage
        if not usage.cached_tokens:
            return "MISS"
        return "HIT" if 2 * usage.cached_tokens >= usage.prompt_tokens else "PARTIAL"

    @property
    def adds_up(self) -> bool:
        """Whether reused and computed tokens together are the prompt's tokens."""
        usage = self.completion.usage
        return usage.cached_tokens + usage.computed_tokens == usage.prompt_tokens


@dataclass(frozen=True, slots=True)
class Part:
    """Requests that belong together, and the wall time of all of them."""

    title: str
    answers: tuple[DemoAnswer, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class DemoRun:
    """All requests of the demo on one Runtime."""

    parts: tuple[Part, ...]
    tree: TreeDump  # after the second turns

    @property
    def answers(self) -> list[DemoAnswer]:
        return [answer for part in self.parts for answer in part.answers]


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the answers of some parts."""

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    mean_ttft_s: float
    seconds: float


def totals(parts: Sequence[Part]) -> Totals:
    answers = [answer for part in parts for answer in part.answers]
    usages = [answer.completion.usage for answer in answers]
    waits = [answer.completion.metrics.ttft_s for answer in answers]
    return Totals(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        computed_tokens=sum(usage.computed_tokens for usage in usages),
        mean_ttft_s=fmean(wait for wait in waits if wait is not None),
        seconds=sum(part.seconds for part in parts),
    )


def count_same(cached: DemoRun, uncached: DemoRun) -> int:
    """The number of answers with the same tokens in both runs."""
    pairs = zip(cached.answers, uncached.answers, strict=True)
    return sum(on.completion.token_ids == off.completion.token_ids for on, off in pairs)


def count_same_bits(cached: DemoRun, uncached: DemoRun) -> int:
    """The number of answers whose logits have the same bits in both runs."""
    pairs = zip(cached.answers, uncached.answers, strict=True)
    digests = [(on.completion.digest, off.completion.digest) for on, off in pairs]
    return sum(on is not None and on == off for on, off in digests)


def run_demo(
    runtime: Runtime,
    params: SamplingParams,
    max_nodes: int,
    *,
    on_part: Callable[[str], object] = lambda _: None,
    on_answer: Callable[[DemoAnswer], object] = lambda _: None,
) -> DemoRun:
    """Run the first and second turns one after another, dump the tree, then run the first turns
    again, all at once.

    Every answer has a digest. `on_part` is called with a part's title before it starts, `on_answer`
    with each answer; their time is not counted. Raises InvalidRequest without a tokenizer.
    """
    params = replace(params, digest=True)
    if runtime.tokenizer is None:
        raise InvalidRequest("the demo needs a model with a tokenizer and a chat template")
    runtime.generate(UNRELATED, replace(params, max_tokens=2, min_tokens=0), progress=False)
    runtime.flush_cache()

    def run_part(title: str, batches: Sequence[Sequence[tuple[str, Messages]]]) -> Part:
        on_part(title)
        answers, seconds = [], 0.0
        for batch in batches:
            start = time.perf_counter()
            prompts = [prompt for _, prompt in batch]
            completions = runtime.generate(prompts, params, progress=False)
            seconds += time.perf_counter() - start
            for (question, _), completion in zip(batch, completions, strict=True):
                answers.append(DemoAnswer(question, completion))
                on_answer(answers[-1])
        return Part(title, tuple(answers), seconds)

    system = {"role": "system", "content": SYSTEM_PROMPT}
    openings = [(first, [system, _message("user", first)]) for first, _ in CONVERSATIONS]
    first_turn = run_part("First questions, one after another", [[opening] for opening in openings])
    followups = [
        (
            second,
            [*opening, _message("assistant", answer.completion.text), _message("user", second)],
        )
        for (_, second), (_, opening), answer in zip(
            CONVERSATIONS, openings, first_turn.answers, strict=True
        )
    ]
    title = "Second turn of each conversation, one after another"
    second_turn = run_part(title, [[followup] for followup in followups])
    tree = _dump_tree(
        runtime, [prompt for _, prompt in followups[:_NUM_RUNNING]], params, max_nodes
    )
    runtime.flush_cache()
    title = "The first questions again, all at once, into an emptied cache"
    return DemoRun((first_turn, second_turn, run_part(title, [openings])), tree)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _dump_tree(
    runtime: Runtime, prompts: Sequence[Messages], params: SamplingParams, max_nodes: int
) -> TreeDump:
    """A dump of the tree while some requests are running, so that it shows their locks."""
    long = replace(params, max_tokens=1024, ignore_eos=True)
    with ExitStack() as stack:
        for prompt in prompts:
            stream: Any = runtime.stream(prompt, long)
            next(stack.enter_context(closing(stream)))
        return runtime.cache_tree(max_nodes)
