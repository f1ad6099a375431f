"""`Branch`: a position in the tree that a program forks, extends, continues and rolls back.

A branch consists of its token ids and a cache session; it has no pages of its own. `fork` copies
the reference to the token ids. A fork shares its parent's K/V because the next request of each
branch finds the common tokens in the cache by prefix matching, like any other prompt. While a
branch is open, its K/V is evicted last; evicted K/V is computed again by the next answer and
counted in its `usage`.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from radixserve.api.client import EngineClient, RequestHandle
from radixserve.api.request_builder import (
    check_single,
    sample_of,
    with_prompt_scores,
)
from radixserve.api.scores import ScoreQuery, ascore, score
from radixserve.arrays import IntArray
from radixserve.cache import Lookup
from radixserve.cache.namespace import DEFAULT_NAMESPACE, Namespace, as_namespace
from radixserve.checks import check_int, shown
from radixserve.completion import Chunk, Completion, Score
from radixserve.engine.messages import CloseSession, SessionClaim
from radixserve.engine.output_collector import Event
from radixserve.errors import BranchBusy, InvalidRequest
from radixserve.logits_digest import with_digest
from radixserve.output import Usage, add_usages
from radixserve.picture import Picture
from radixserve.request import Request, SamplingParams

_LEAST_PRUNED = 16  # minimum number of forks of a branch before dead references are pruned


class SessionHandle:
    """A branch's session in the engine, opened by the first request that names it.

    A session claims the cached tokens that its own requests reached. On close it passes its claims
    to the nearest open ancestor and descendants, so that an open branch keeps tokens that others
    computed. May be called from any thread, `close` also from the garbage collector; no call
    blocks.
    """

    __slots__ = (
        "__weakref__",
        "_below",
        "_claimed_len",
        "_client",
        "_is_known",
        "_namespace",
        "_parent",
        "_prune_at",
        "_reached_len",
        "is_open",
        "name",
        "tokens",
    )

    def __init__(
        self,
        client: EngineClient,
        tokens: IntArray,
        namespace: str,
        parent: SessionHandle | None,
    ) -> None:
        """`parent`: the open session of the branch that was forked."""
        self.name = f"branch {next(client.session_numbers)}"
        self.tokens = tokens  # of the branch, prompt and output
        self.is_open = True
        self._client = client
        self._namespace = namespace
        self._parent = parent
        self._below: list[weakref.ref[SessionHandle]] = []
        self._prune_at = _LEAST_PRUNED
        self._reached_len = 0  # tokens that its own requests reached
        self._claimed_len = 0  # most tokens that the session claims
        self._is_known = False  # whether the engine may have a session of that name
        if parent is not None:
            parent._adopt(self)

    def take(self) -> str:
        """Returns the name for a request, which opens the session."""
        self._is_known = True
        return self.name

    def move(self, tokens: IntArray, *, is_reached: bool) -> None:
        """Set the branch's tokens; `is_reached`: a request of the session computed them."""
        self.tokens = tokens
        if is_reached:
            self._reached_len = self._claimed_len = len(tokens)
        elif len(tokens) < self._claimed_len:  # rolled back: give up what was cut off
            successors = list(self._forks())
            claims = _claims(successors)
            self._reached_len = self._claimed_len = 0
            self._client.core.post(CloseSession(self.name, claims, self._claim()))
            self._close_again(successors)

    def close(self) -> None:
        """Idempotent."""
        if not self.is_open:
            return
        self.is_open = False
        parent = self._nearest_open_parent()
        successors = list(self._forks())
        for fork in successors:
            fork._parent = parent
            if parent is not None:
                parent._adopt(fork)
        if not self._is_known:
            return
        if parent is not None:
            successors.append(parent)
        self._client.core.post(CloseSession(self.name, _claims(successors)))
        self._close_again(successors)

    def _claim(self) -> SessionClaim | None:
        """Returns a claim of the branch's tokens; None if its own requests claimed them or it is
        closed."""
        tokens = self.tokens
        if self._reached_len >= len(tokens):
            return None
        self._is_known = True  # before looking whether it is open: `close` looks in that order, too
        if not self.is_open:
            return None
        self._claimed_len = max(self._claimed_len, len(tokens))
        with contextlib.suppress(InvalidRequest):  # its adapter was unloaded, and its K/V dropped
            return SessionClaim(self.name, *self._client.cache_place(tokens, self._namespace))
        return None

    def _close_again(self, successors: Sequence[SessionHandle]) -> None:
        """Close the sessions that were closed in another thread just before a claim of theirs was
        posted: the claim has opened them again."""
        for successor in successors:
            if not successor.is_open:
                self._client.core.post(CloseSession(successor.name))

    # -- related sessions ---------------------------------------------------------------------

    def _adopt(self, fork: SessionHandle) -> None:
        if len(self._below) >= self._prune_at:
            self._below = [weakref.ref(fork) for fork in self._forks()]
            self._prune_at = max(_LEAST_PRUNED, 2 * len(self._below))
        self._below.append(weakref.ref(fork))

    def _forks(self) -> Iterator[SessionHandle]:
        """Yields the nearest open descendants, one per path."""
        for reference in list(self._below):
            fork = reference()
            if fork is not None and fork.is_open:
                yield fork

    def _nearest_open_parent(self) -> SessionHandle | None:
        parent = self._parent
        while parent is not None and not parent.is_open:
            parent = parent._parent
        self._parent = parent  # keeps chains of forks of forks short
        return parent


def _claims(successors: Sequence[SessionHandle]) -> tuple[SessionClaim, ...]:
    claims = (successor._claim() for successor in successors)
    return tuple(claim for claim in claims if claim is not None)


Tokens = str | Sequence[int] | NDArray[np.integer[Any]]


class Branch:
    """Made by `Runtime.branch` or `fork`; ends with `release`, or with the last reference to it.

        with rt.branch("Once upon a time") as root:
            kids = root.fork(4)
            answers = [kid.generate(params) for kid in kids]

    `generate`, `stream` and `extend` move it forward, `truncate` moves it back. One of these runs
    at a time: another one meanwhile raises BranchBusy. `fork` and properties may be used from any
    thread at any time. During a stream they see the tokens of the chunks so far, during `generate`
    the tokens from before.

    Methods raise InvalidRequest after `release`, and EngineDead after the Runtime was closed. The
    tokens, the text and the length can always be read.
    """

    def __init__(
        self, client: EngineClient, tokens: IntArray, namespace: str, parent: Branch | None = None
    ) -> None:
        """`tokens` must not be changed any more. The cost does not depend on their number."""
        tokens.flags.writeable = False
        self._client = client
        self._tokens = tokens
        self._namespace = namespace
        # They are kept as long as it may have to compute their rows again.
        self._pictures: tuple[Picture, ...] = (
            client.reader.pictures_in(tokens) if parent is None else parent._pictures
        )
        self._parent = None if parent is None else weakref.ref(parent)
        self._move_lock = threading.Lock()
        self._usage = Usage(0, 0, 0, 0)
        self._usage_lock = threading.Lock()
        self._is_released = False
        above: SessionHandle | None = None if parent is None else parent._session
        self._session: SessionHandle = SessionHandle(client, tokens, namespace, above)
        self._finalizer = weakref.finalize(self, self._session.close)
        self._finalizer.atexit = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        state = ", released" if self._is_released else ""
        return f"Branch(length={self.length}{state})"

    # -- reading ------------------------------------------------------------------------------

    @property
    def tokens(self) -> IntArray:
        """[length] int32: prompt, extensions and answers. Read-only; it does not change when the
        branch moves."""
        return self._tokens[:]

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self._tokens)

    @property
    def text(self) -> str:
        """The tokens as text, without special tokens. Raises InvalidRequest without a tokenizer."""
        return self._client.tokenizer.decode(self._tokens.tolist())

    def text_from(self, length: int) -> str:
        """Returns the text that the tokens after the first `length` add. O(these tokens)."""
        start = check_int("length", length, 0, self.length)
        stream = self._client.tokenizer.detokenizer(self._tokens[:start].tolist())
        return stream.push(self._tokens[start:].tolist()) + stream.finish()

    @property
    def namespace(self) -> str:
        return self._namespace

    @property
    def parent(self) -> Branch | None:
        """The branch it was forked from; None for a root, and if that branch was garbage
        collected."""
        return None if self._parent is None else self._parent()

    @property
    def is_released(self) -> bool:
        return self._is_released

    @property
    def room(self) -> int:
        """Tokens that can still be added: `max_seq_len` less its length."""
        return self._client.reader.max_seq_len - self.length

    @property
    def has_ended(self) -> bool:
        """Whether its last token is one of the model's end tokens."""
        return self.length > 0 and int(self._tokens[-1]) in self._client.builder.end_ids

    @property
    def usage(self) -> Usage:
        """The sum of the usages of its answers and scores so far, without streams that were left
        early."""
        return self._usage

    @property
    def cached_len(self) -> int:
        """Tokens whose K/V is in the cache now: at most `length` - 1, the last one is always
        computed by the next answer."""
        return self.lookup().cached_len

    def lookup(self) -> Lookup:
        """Returns how much of the branch is cached now, and why not more. Changes nothing."""
        self._check()
        return self._client.lookup(self._tokens, self._namespace)

    def score(self, candidates: Sequence[str | Sequence[int]]) -> list[Score]:
        """Returns how likely the model finds each continuation, see `Runtime.score`. The branch
        does not move."""
        return score_all([BranchQuery(self, candidates)])[0]

    async def ascore(self, candidates: Sequence[str | Sequence[int]]) -> list[Score]:
        """`score` for asyncio. Cancelling the task aborts it."""
        self._check()
        query = ScoreQuery(self._tokens, candidates, self._namespace)
        (scores,) = await ascore(self._client, [query])
        self._count(*(candidate_score.usage for candidate_score in scores))
        return scores

    # -- moving -------------------------------------------------------------------------------

    def fork(self, n: int = 1) -> list[Branch]:
        """Returns `n` branches at this branch's position. Takes microseconds each at any length: no
        K/V is copied, no model step runs, the engine is not called. A fork opens its own session
        with its first answer, or when this branch is released.
        """
        count = check_int("n", n, 1)
        self._check()
        tokens = self._tokens
        return [Branch(self._client, tokens, self._namespace, self) for _ in range(count)]

    def extend(self, tokens: Tokens) -> None:
        """Append text or token ids. Nothing is computed before the next answer.

        Text is tokenised on its own, without the special tokens that begin a prompt. Raises
        InvalidRequest, and changes nothing, where the branch would be longer than `max_seq_len`.
        """
        with self._moving():
            joined = self._joined(self._client.reader.read_more(tokens))
            self._pictures = self._client.reader.pictures_in(joined)
            self._move_to(joined)

    def truncate(self, length: int) -> None:
        """Roll back to the first `length` tokens.

        What was cut off is evicted before anything that an open branch reaches.
        """
        with self._moving():
            self._move_to(self._tokens[: check_int("length", length, 0, self.length)].copy())

    def generate(self, params: SamplingParams | None = None) -> Completion:
        """Continue from here and move to the end of the answer.

        The branch grows by exactly `completion.token_ids`, including the end token or the tokens of
        a stop string; `truncate` removes them. The K/V of the last token is computed by the next
        answer. After an error the branch has not moved.
        """
        with self._moving():
            completion: Completion = self._submit(params).get()
            return completion

    async def agenerate(self, params: SamplingParams | None = None) -> Completion:
        """`generate` for asyncio. If the task is cancelled, the branch does not move."""
        with self._moving():
            await self._client.compile_grammars(params)
            completion: Completion = await self._submit(params).aget()
            return completion

    def stream(self, params: SamplingParams | None = None) -> Generator[Chunk, None, None]:
        """`generate` in chunks; the branch grows by the tokens of each chunk.

        The request is checked now and starts with the first iteration. Leaving the loop aborts it;
        the branch stays at the end of the last chunk.
        """
        self._check()
        self._request(params)
        return self._stream(params)

    def astream(self, params: SamplingParams | None = None) -> AsyncGenerator[Chunk, None]:
        """`stream` for asyncio."""
        self._check()
        self._request(params)
        return self._astream(params)

    def submit(
        self, params: SamplingParams | None = None, *, streams: bool = False
    ) -> BranchHandle:
        """`generate`, or `stream` with `streams`, as a handle to be entered and iterated over.

        The request is checked now. The branch moves with each output that the handle yields; other
        moves are refused inside the handle's `with` block.
        """
        self._check()
        return BranchHandle(self, self._request(params), streams=streams)

    def release(self) -> None:
        """Close its session: K/V that no other open branch reaches is evicted first from now on.

        Returns at once and never raises; a second call does nothing. A running answer continues to
        its end.
        """
        self._is_released = True
        if self._move_lock.acquire(blocking=False):
            self._end_move()

    # -- inside -------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._is_released:
            raise InvalidRequest("this branch was released; fork another one")
        self._client.core.check_alive()

    @contextlib.contextmanager
    def _moving(self) -> Iterator[None]:
        self._check()
        if not self._move_lock.acquire(blocking=False):
            raise BranchBusy(
                "this branch is being moved: wait for its answer, leave its stream, or fork it"
            )
        try:
            self._check()
            yield
        finally:
            self._end_move()

    def _end_move(self) -> None:
        """End a move. If the branch was released, close its session: no request can reopen it."""
        self._move_lock.release()
        if self._is_released:
            self._session.close()

    @property
    def default_sampling_params(self) -> SamplingParams:
        """The parameters of a call without params; see `Runtime.default_sampling_params`."""
        return self._client.builder.default_params

    def _request(self, params: SamplingParams | None) -> Request:
        """Returns the checked request of the next answer, without its session."""
        params = self._client.builder.params(params)
        check_single(params, "a branch")
        if params.truncate_prompt_tokens is not None:
            raise InvalidRequest(
                "a branch and a chat keep all their tokens: truncate_prompt_tokens cannot be given"
            )
        if params.namespace != self._namespace:
            self._check_namespace(as_namespace(params.namespace))
            params = replace(params, namespace=self._namespace)
        return self._client.builder.single(self._tokens, params)

    def _check_namespace(self, given: Namespace) -> None:
        """Raise InvalidRequest for another adapter or namespace than the branch's; "": the same."""
        own = as_namespace(self._namespace)
        if given.adapter not in ("", own.adapter):
            adapter = f"the adapter {shown(own.adapter)}" if own.adapter else "the model alone"
            raise InvalidRequest(f"the branch is of {adapter}, not of {shown(given.adapter)}")
        own, given = own._replace(adapter=""), given._replace(adapter="")
        if given not in (DEFAULT_NAMESPACE, own):
            raise InvalidRequest(f"the branch is in namespace {str(own)!r}, not {str(given)!r}")

    def _next_request(self, params: SamplingParams | None) -> Request:
        """Returns `_request` with the branch's session."""
        return replace(self._request(params), session=self._session.take())

    def _submit(self, params: SamplingParams | None) -> RequestHandle[Completion]:
        request = self._next_request(params)
        return self._client.submit([request], lambda outputs: self._finish(*outputs))

    def _stream(self, params: SamplingParams | None) -> Generator[Chunk, None, None]:
        with self._moving(), self._client.stream(self._next_request(params)) as chunks:
            for chunk in chunks:
                self._advance(chunk.token_ids, chunk.completion)
                yield chunk

    async def _astream(self, params: SamplingParams | None) -> AsyncGenerator[Chunk, None]:
        with self._moving(), self._client.stream(self._next_request(params)) as chunks:
            async for chunk in chunks:
                self._advance(chunk.token_ids, chunk.completion)
                yield chunk

    def _joined(self, more: IntArray | list[int]) -> IntArray:
        reader = self._client.reader
        length = len(self._tokens) + len(more)
        if length > reader.max_seq_len:
            raise InvalidRequest(
                f"{len(more)} tokens more make {length}; at most {reader.max_seq_len} "
                f"are allowed ({reader.limit_name})"
            )
        return np.concatenate([self._tokens, np.asarray(more, np.int32)])

    def _finish(self, completion: Completion) -> Completion:
        self._advance(completion.token_ids, completion)
        return completion

    def _advance(self, token_ids: list[int], completion: Completion | None) -> None:
        if completion is not None:
            self._count(completion.usage)
        self._move_to(self._joined(token_ids), is_answer=True)

    def _count(self, *usages: Usage) -> None:
        with self._usage_lock:
            self._usage = add_usages([self._usage, *usages])

    def _move_to(self, tokens: IntArray, *, is_answer: bool = False) -> None:
        tokens.flags.writeable = False
        self._tokens = tokens
        self._session.move(tokens, is_reached=is_answer)


class BranchHandle(RequestHandle[Any]):
    """The answer of a branch as a handle. Refuses other moves inside its `with` block."""

    def __init__(self, branch: Branch, request: Request, *, streams: bool) -> None:
        client = branch._client
        request = replace(request, session=branch._session.take())
        super().__init__(
            client.core,
            client.reader.tokenizer,
            [with_digest(request)],
            streams=streams,
            notifier=client.notifier,
        )
        self._branch = branch
        self._begins_at = branch._tokens
        self._moving = branch._moving()

    def __enter__(self) -> Self:
        self._moving.__enter__()
        try:
            if self._branch._tokens is not self._begins_at:
                raise BranchBusy("this branch was moved before its answer began: ask again")
            return super().__enter__()
        except BaseException:
            self._moving.__exit__(None, None, None)
            raise

    def __exit__(self, *error: object) -> None:
        try:
            super().__exit__(*error)
        finally:
            self._moving.__exit__(None, None, None)

    def _take(self, index: int, event: Event) -> Any:
        output = super()._take(index, event)
        completion = output.completion if isinstance(output, Chunk) else output
        self._branch._advance(output.token_ids, completion)
        return output


class BranchQuery(NamedTuple):
    """Asks how likely each of `candidates` is after a branch, or after a part of it."""

    branch: Branch  # its usage counts the score's
    candidates: Sequence[str | Sequence[int]]
    length: int | None = None  # number of the branch's first tokens to use; None: all
    more: Tokens = ()  # put between these tokens and the candidates; the branch does not move


def score_all(queries: Sequence[BranchQuery]) -> list[list[Score]]:
    """`Branch.score` of several branches of one Runtime, in one batch."""
    score_queries = []
    for branch, candidates, length, more in queries:
        branch._check()
        tokens = branch._tokens
        if length is not None:
            tokens = tokens[: check_int("length", length, 0, len(tokens))]
        prompt = np.concatenate([tokens, branch._client.reader.read_more(more)])
        score_queries.append(ScoreQuery(prompt, candidates, branch.namespace))
    if not queries:
        return []
    scores = score(_common_client([query.branch for query in queries]), score_queries)
    for query, several in zip(queries, scores, strict=True):
        query.branch._count(*(candidate_score.usage for candidate_score in several))
    return scores


def generate_all(
    branches: Sequence[Branch], params: SamplingParams | Sequence[SamplingParams] | None = None
) -> list[Completion]:
    """`Branch.generate` of several branches of one Runtime, in one batch.

    Forks that have not moved and have equal params are computed like the samples of `n`: their
    common tokens once, except the last one, and number i samples with the seed + i. All move, or
    after an error none. `params`: for all, or one each.
    """
    if not branches:
        return []
    client = _common_client(branches)
    each = client.builder.params_for(params, len(branches))
    with contextlib.ExitStack() as moves:
        for branch in branches:
            moves.enter_context(branch._moving())
        requests, firsts = _as_samples(branches, each)
        completions: list[Completion] = client.submit(requests).get()
        for index, first in enumerate(firsts):
            if each[index].prompt_logprobs is not None and first != index:
                completions[index] = with_prompt_scores(completions[index], completions[first])
        for branch, completion in zip(branches, completions, strict=True):
            branch._finish(completion)
        return completions


def _common_client(branches: Sequence[Branch]) -> EngineClient:
    client = branches[0]._client
    if any(branch._client is not client for branch in branches):
        raise InvalidRequest("branches that run together must be of the same Runtime")
    return client


def _as_samples(
    branches: Sequence[Branch], params: Sequence[SamplingParams]
) -> tuple[list[Request], list[int]]:
    """Returns one request per branch, and for each the index of the first branch with the same
    tokens and params. Requests of one group become samples of one prompt."""
    groups: dict[tuple[int, str, SamplingParams], list[int]] = {}
    requests: list[Request] = []
    firsts = []
    for index, (branch, own_params) in enumerate(zip(branches, params, strict=True)):
        request = branch._next_request(own_params)
        group = groups.setdefault((id(branch._tokens), branch.namespace, own_params), [])
        if group:
            request = sample_of(requests[group[0]], request, len(group))
        group.append(index)
        requests.append(request)
        firsts.append(group[0])
    return requests, firsts
