"""`Branch`: a live position in the tree that a program holds, forks, extends, and rolls back.

A branch is its token ids and a session in the cache, so that its K/V is evicted last. Evicted K/V
is computed again by the next answer, whose `usage` says so.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from radixserve.api.samples import check_single, sample_of, with_prompt_scores
from radixserve.api.scores import ScoreJob
from radixserve.api.session_handle import SessionHandle
from radixserve.arrays import IntArray
from radixserve.cache import Lookup
from radixserve.checks import check_int, shown
from radixserve.engine.worker import EngineThread
from radixserve.errors import InvalidRequest
from radixserve.output import Chunk, Completion, Score, Usage
from radixserve.request import Request, SamplingParams
from radixserve.text.prompts import PromptReader, params_for
from radixserve.text.tokenizer import TextStream, Tokenizer

Tokens = str | Sequence[int] | NDArray[np.integer[Any]]
_NOTHING = Usage(0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class BranchHost:
    """What branches need of their Runtime."""

    worker: EngineThread
    reader: PromptReader
    numbers: Iterator[int]  # for the names of sessions
    request: Callable[[IntArray, SamplingParams], Request]  # checked; raises InvalidRequest
    end_ids: frozenset[int]  # the model's
    complete: Callable[[list[Request]], list[Completion]]  # of requests sent together
    score: Callable[[Sequence[ScoreJob]], list[list[Score]]]  # all of them side by side
    stream: Callable[[Request], Generator[Chunk, None, None]]
    astream: Callable[[Request], AsyncGenerator[Chunk, None]]


class Branch:
    """Made by `Runtime.branch` or `fork`; ends with `release`, or when nobody refers to it.

        with rt.branch("Once upon a time") as root:
            kids = root.fork(4)
            answers = [kid.generate(params) for kid in kids]

    `generate`, `stream` and `extend` move it forward, `truncate` moves it back. One of these runs
    at a time: another one meanwhile raises InvalidRequest. `fork` and what only reads may be called
    from any thread at any time; while a stream runs they see the tokens handed out so far, while
    `generate` runs those from before.

    What acts raises InvalidRequest after `release`, EngineDead after the Runtime was closed; the
    tokens, the text and the length can be read for ever.
    """

    def __init__(
        self, host: BranchHost, tokens: IntArray, namespace: str, parent: Branch | None = None
    ) -> None:
        """`tokens` are not to be changed any more. Costs the same however many they are."""
        tokens.flags.writeable = False
        self._host = host
        self._tokens = tokens
        self._namespace = namespace
        self._parent = None if parent is None else weakref.ref(parent)
        self._turn = threading.Lock()  # of whoever moves the branch
        self._usage = _NOTHING
        self._counting = threading.Lock()  # of whoever adds to `_usage`
        self._is_released = False
        above: SessionHandle | None = None if parent is None else parent._session_handle
        self._session_handle: SessionHandle = SessionHandle(
            host.worker, next(host.numbers), tokens, namespace, above
        )
        self._finalizer = weakref.finalize(self, self._session_handle.close)
        self._finalizer.atexit = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        state = ", released" if self._is_released else ""
        return f"Branch(length={self.length}{state})"

    # -- knowing ------------------------------------------------------------------------------

    @property
    def tokens(self) -> IntArray:
        """[length] int32: prompt, extensions and answers. It stays as it is when the branch moves
        on, and cannot be written."""
        return self._tokens[:]

    @property
    def length(self) -> int:
        """In tokens."""
        return len(self._tokens)

    @property
    def text(self) -> str:
        """The tokens as text, without special tokens. InvalidRequest if there is no tokenizer."""
        return self._tokenizer().decode(self._tokens.tolist())

    def text_from(self, length: int) -> str:
        """What the tokens behind the first `length` add to the text. O(those tokens)."""
        start = check_int("length", length, 0, self.length)
        stream = TextStream(self._tokenizer(), self._tokens[:start].tolist())
        return stream.push(self._tokens[start:].tolist()) + stream.finish()

    @property
    def namespace(self) -> str:
        return self._namespace

    @property
    def parent(self) -> Branch | None:
        """What it was forked from; None for a root, and when nobody refers to that any more."""
        return None if self._parent is None else self._parent()

    @property
    def is_released(self) -> bool:
        return self._is_released

    @property
    def room(self) -> int:
        """Tokens that can still be added: `max_seq_len` less its length."""
        return self._host.reader.max_seq_len - self.length

    @property
    def has_ended(self) -> bool:
        """Whether its last token is one with which the model ends its text."""
        return self.length > 0 and int(self._tokens[-1]) in self._host.end_ids

    @property
    def usage(self) -> Usage:
        """What its answers and scores took so far, added up; an answer left early is not known."""
        return self._usage

    @property
    def cached_len(self) -> int:
        """Tokens whose K/V is in the cache now: at most `length` - 1, the last one is always
        computed by the next answer."""
        return self.lookup().cached_len

    def lookup(self) -> Lookup:
        """How much of it is cached now, and why not more. Changes nothing."""
        self._check()
        tokens, namespace = self._tokens, self._namespace
        return self._host.worker.call(lambda engine: engine.lookup(tokens, namespace))

    def score(self, candidates: Sequence[str | Sequence[int]]) -> list[Score]:
        """How likely the model finds each continuation, see `Runtime.score`. Does not move."""
        return score_all([Ask(self, candidates)])[0]

    # -- moving -------------------------------------------------------------------------------

    def fork(self, n: int = 1) -> list[Branch]:
        """`n` branches that stand where this one stands.

        Microseconds each at any length: no K/V is copied, no model step runs, the engine is not
        asked. A fork takes its own hold of the cache with its first answer, or when this branch
        lets go.
        """
        count = check_int("n", n, 1)
        self._check()
        tokens = self._tokens
        return [Branch(self._host, tokens, self._namespace, self) for _ in range(count)]

    def extend(self, tokens: Tokens) -> None:
        """Append text or token ids. Nothing is computed before the next answer.

        Text is tokenised on its own, without the special tokens that begin a prompt. Raises
        InvalidRequest, and changes nothing, where the branch would be longer than `max_seq_len`.
        """
        with self._moving():
            self._place(self._joined(self._host.reader.read_more(tokens)))

    def truncate(self, length: int) -> None:
        """Roll back to the first `length` tokens.

        The cache lets go of what was cut off before anything that a branch still holds.
        """
        with self._moving():
            self._place(self._tokens[: check_int("length", length, 0, self.length)].copy())

    def generate(self, params: SamplingParams | None = None) -> Completion:
        """Continue from here and move to the end of what was generated.

        The branch grows by exactly `completion.token_ids`: an end token that ended the answer and
        the tokens of a stop string are among them; `truncate` takes them back. The K/V of the very
        last token is computed by the next answer. After an error the branch is where it was.
        """
        with self._moving():
            (completion,) = self._host.complete([self._request(params)])
            self._answered(completion)
            return completion

    def stream(self, params: SamplingParams | None = None) -> Generator[Chunk, None, None]:
        """`generate` piece by piece; the branch grows by the tokens of each chunk handed out.

        Checked now, begun with the first iteration. Leaving the loop aborts the request; the branch
        stays where the last chunk ended.
        """
        self._check()
        self._host.request(self._tokens, self._checked(params))
        return self._stream(params)

    async def agenerate(self, params: SamplingParams | None = None) -> Completion:
        """`generate` for asyncio. A task that is cancelled leaves the branch where it was."""
        with self._moving():
            completion = None
            async with contextlib.aclosing(self._host.astream(self._request(params))) as chunks:
                async for chunk in chunks:
                    completion = chunk.completion
            assert completion is not None, "the last chunk carries the completion"
            self._answered(completion)
            return completion

    def astream(self, params: SamplingParams | None = None) -> AsyncGenerator[Chunk, None]:
        """`stream` for asyncio."""
        self._check()
        self._host.request(self._tokens, self._checked(params))
        return self._astream(params)

    def release(self) -> None:
        """Give up the lease: what only this branch reached is dropped first from now on.

        Returns at once and never raises; a second call does nothing. An answer that is under way
        goes on to its end.
        """
        self._is_released = True
        if self._turn.acquire(blocking=False):
            self._end_turn()

    # -- inside -------------------------------------------------------------------------------

    def _tokenizer(self) -> Tokenizer:
        if self._host.reader.tokenizer is None:
            raise InvalidRequest("the model has no tokenizer: a branch has tokens but no text")
        return self._host.reader.tokenizer

    def _check(self) -> None:
        if self._is_released:
            raise InvalidRequest("this branch was released; fork another one")
        self._host.worker.check_alive()

    @contextlib.contextmanager
    def _moving(self) -> Iterator[None]:
        self._check()
        if not self._turn.acquire(blocking=False):
            raise InvalidRequest(
                "this branch is being moved: wait for its answer, leave its stream, or fork it"
            )
        try:
            self._check()
            yield
        finally:
            self._end_turn()

    def _end_turn(self) -> None:
        """Whoever sees the release last closes the lease, so that no request can reopen it."""
        self._turn.release()
        if self._is_released:
            self._session_handle.close()

    def _request(self, params: SamplingParams | None) -> Request:
        """The next answer's, in the name of the lease."""
        request = self._host.request(self._tokens, self._checked(params))
        return replace(request, session=self._session_handle.take())

    def _checked(self, params: SamplingParams | None) -> SamplingParams:
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"params must be SamplingParams, got {shown(params)}")
        check_single(params, "a branch")
        if params.namespace == self._namespace:
            return params
        if params.namespace:
            raise InvalidRequest(
                f"the branch is in namespace {self._namespace!r}, not {params.namespace!r}"
            )
        return replace(params, namespace=self._namespace)

    def _stream(self, params: SamplingParams | None) -> Generator[Chunk, None, None]:
        stream = self._host.stream
        with self._moving(), contextlib.closing(stream(self._request(params))) as chunks:
            for chunk in chunks:
                self._heard(chunk)
                yield chunk

    async def _astream(self, params: SamplingParams | None) -> AsyncGenerator[Chunk, None]:
        with self._moving():
            async with contextlib.aclosing(self._host.astream(self._request(params))) as chunks:
                async for chunk in chunks:
                    self._heard(chunk)
                    yield chunk

    def _joined(self, more: IntArray | list[int]) -> IntArray:
        limit = self._host.reader.max_seq_len
        if len(self._tokens) + len(more) > limit:
            raise InvalidRequest(
                f"{len(more)} tokens more make {len(self._tokens) + len(more)}; at most {limit} "
                f"are allowed ({self._host.reader.limit_name})"
            )
        return np.concatenate([self._tokens, np.asarray(more, np.int32)])

    def _answered(self, completion: Completion) -> None:
        self._count(completion.usage)
        self._place(self._joined(completion.token_ids), is_answer=True)

    def _heard(self, chunk: Chunk) -> None:
        if chunk.completion is not None:
            self._count(chunk.completion.usage)
        self._place(self._joined(chunk.token_ids), is_answer=True)

    def _count(self, *usages: Usage) -> None:
        with self._counting:
            self._usage = add_usages([self._usage, *usages])

    def _place(self, tokens: IntArray, *, is_answer: bool = False) -> None:
        tokens.flags.writeable = False
        self._tokens = tokens
        self._session_handle.move(tokens, is_reached=is_answer)


class Ask(NamedTuple):
    """How likely is each of `candidates` behind a branch, or behind a part of it?"""

    branch: Branch  # its usage counts what the answer took
    candidates: Sequence[str | Sequence[int]]
    length: int | None = None  # behind so many of its tokens; None: all
    more: Tokens = ()  # and behind these, which the branch is not extended by


def score_all(asks: Sequence[Ask]) -> list[list[Score]]:
    """`Branch.score` of several branches of one Runtime, in one batch."""
    jobs = []
    for branch, candidates, length, more in asks:
        branch._check()
        tokens = branch._tokens
        if length is not None:
            tokens = tokens[: check_int("length", length, 0, len(tokens))]
        joined = np.concatenate([tokens, branch._host.reader.read_more(more)])
        jobs.append(ScoreJob(joined, candidates, branch.namespace))
    if not asks:
        return []
    scores = _common_host([ask.branch for ask in asks]).score(jobs)
    for ask, found in zip(asks, scores, strict=True):
        ask.branch._count(*(score.usage for score in found))
    return scores


def generate_all(
    branches: Sequence[Branch], params: SamplingParams | Sequence[SamplingParams] | None = None
) -> list[Completion]:
    """`Branch.generate` of several branches of one Runtime, in one batch.

    Forks that stand where they were made and have equal params are computed like the samples of
    `n`: what they share once, but for its last token, and number i draws with the seed + i. All
    move, or after an error none. `params`: for all, or one each.
    """
    each = params_for(params, len(branches))
    if not branches:
        return []
    host = _common_host(branches)
    with contextlib.ExitStack() as turns:
        for branch in branches:
            turns.enter_context(branch._moving())
        requests, firsts = _as_samples(branches, each)
        done = host.complete(requests)
        for at, first in enumerate(firsts):
            if each[at].prompt_logprobs is not None and first != at:
                done[at] = with_prompt_scores(done[at], done[first])
        for branch, completion in zip(branches, done, strict=True):
            branch._answered(completion)
        return done


def add_usages(usages: Sequence[Usage]) -> Usage:
    """Their sum."""
    return Usage(
        sum(one.prompt_tokens for one in usages),
        sum(one.cached_tokens for one in usages),
        sum(one.computed_tokens for one in usages),
        sum(one.completion_tokens for one in usages),
    )


def _common_host(branches: Sequence[Branch]) -> BranchHost:
    host = branches[0]._host
    if any(branch._host.worker is not host.worker for branch in branches):
        raise InvalidRequest("branches that run together must be of the same Runtime")
    return host


def _as_samples(
    branches: Sequence[Branch], params: Sequence[SamplingParams]
) -> tuple[list[Request], list[int]]:
    """The requests, and the index of the first one of each group of equal tokens and params."""
    groups: dict[tuple[int, str, SamplingParams], list[int]] = {}
    requests: list[Request] = []
    firsts = []
    for at, (branch, one) in enumerate(zip(branches, params, strict=True)):
        request = branch._request(one)
        group = groups.setdefault((id(branch._tokens), branch.namespace, one), [])
        if group:
            request = sample_of(requests[group[0]], request, len(group))
        group.append(at)
        requests.append(request)
        firsts.append(group[0])
    return requests, firsts
