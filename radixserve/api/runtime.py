"""`Runtime`: the way in. Text meets tokens here, and calls of many threads meet one engine."""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import random
import threading
import weakref
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, overload

from radixserve.api.beam_search import BeamTicket, as_search, read_options
from radixserve.api.branch import Branch, BranchHost
from radixserve.api.chat import ChatHost, ChatSession
from radixserve.api.progress import BatchProgress
from radixserve.api.samples import check_single, fan_out, gather
from radixserve.api.scores import (
    ScoreJob,
    as_score,
    check_finished,
    params_of,
    read_candidates,
    scoring,
)
from radixserve.cache import Lookup
from radixserve.checks import check_int, check_str, shown
from radixserve.config import EngineConfig
from radixserve.engine.engine import Engine
from radixserve.engine.ticket import Event, Ticket
from radixserve.engine.trace_recorder import TraceRecorder
from radixserve.engine.worker import EngineThread
from radixserve.errors import InvalidRequest
from radixserve.output import Chunk, Completion, Score
from radixserve.request import BeamParams, Request, SamplingParams
from radixserve.text.prompts import Prompt, PromptReader, is_batch, params_for
from radixserve.text.tokenizer import Tokenizer

_OWN_ID = "#"  # begins the ids that are not the caller's
DEMO = Path(__file__).parent.parent / "models" / "demo"


class Runtime:
    """A model with its engine, running until `close`.

        with Runtime("demo") as rt:
            print(rt.generate("Once upon a time", SamplingParams(max_tokens=20)).text)

    `model` is a checkpoint folder, a hub id, "demo" for the small model that ships with the
    package, or "random:" and a name of models/sizes.py, such as "random:llama-3-8b": that shape
    with weights drawn from `seed`, whose prompts are token ids and whose answers have no text.
    Keyword arguments are the fields of `EngineConfig`. Every method may be called from
    several threads at once. Raises InvalidRequest for bad settings, ModelNotSupported for models
    that cannot be run.
    """

    def __init__(self, model: str | os.PathLike[str], **settings: Any) -> None:
        self.config = EngineConfig(**settings)
        runner = self._make_runner(_model_path(model))
        try:
            self._start(runner)
        except BaseException:
            runner.close()
            raise

    def _start(self, runner: Any) -> None:
        self.model = runner.info
        self.memory = runner.memory_plan()
        self.attention_backend = runner.backend_name
        self.choices = runner.choices
        self.tokenizer = Tokenizer.load(runner.folder)
        capacity = runner.num_pages * self.config.page_size
        self.max_seq_len, limit_name = _sequence_limit(self.config, self.model, capacity)
        self._reader = PromptReader(
            self.tokenizer, self.model.vocab_size, self.max_seq_len, limit_name
        )
        self._end_ids = frozenset(self.model.eos_ids)
        self._random = random.Random(self.config.seed)
        self._random_lock = threading.Lock()
        self._next_id = itertools.count()
        self._worker = EngineThread(Engine(runner, self.config), _recorder(self.config))
        self._branch_numbers = itertools.count()
        self._finalizer = weakref.finalize(self, _close, self._worker, runner)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine. Calls that still wait get EngineDead. Can be called again."""
        self._finalizer()

    # -- generating ---------------------------------------------------------------------------

    @overload
    def generate(
        self,
        prompts: str,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        request_id: str | None = None,
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompts: Any,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        request_id: str | None = None,
    ) -> Any: ...

    def generate(
        self,
        prompts: Any,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        request_id: str | None = None,
    ) -> Any:
        """Complete one prompt (-> Completion) or a list of them (-> list, in order).

        A prompt is text, a list of token ids, or a list of chat messages. All prompts are checked
        before any is started. With n > 1 in its params a prompt has a list of n Completions, and is
        computed once: the first one's usage counts it, the others count all but its last token as
        cached. `progress` shows a bar: by default for batches on a terminal. `request_id` names a
        single request for `abort`.
        """
        batch = is_batch(prompts)
        given = list(prompts) if batch else [prompts]
        requests, each = self._requests(given, params, request_id)
        if progress is not None and not isinstance(progress, bool):
            raise InvalidRequest(f"progress must be True, False or None, got {shown(progress)}")
        bar = BatchProgress(len(requests), wanted=progress if batch else progress is True)
        completions = gather(self._complete(requests, bar), each)
        return completions if batch else completions[0]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> Iterator[Chunk]:
        """The answer piece by piece; the last Chunk carries the whole Completion.

        The request is checked now and starts with the first iteration; leaving the loop aborts it.
        """
        return self._stream(self._single(prompt, params, request_id))

    async def agenerate(
        self,
        prompts: Any,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        request_id: str | None = None,
    ) -> Any:
        """`generate` for asyncio. Cancelling the task aborts its requests."""
        batch = is_batch(prompts)
        given = list(prompts) if batch else [prompts]
        requests, each = self._requests(given, params, request_id)
        completions = gather([_completion(e) for e in await self._aevents(requests)], each)
        return completions if batch else completions[0]

    def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> AsyncIterator[Chunk]:
        """`stream` for asyncio. Leaving the loop or cancelling the task aborts the request."""
        return self._astream(self._single(prompt, params, request_id))

    def beam_search(
        self,
        prompts: Any,
        beam_width: int = 4,
        max_tokens: int = 64,
        length_penalty: float = 1.0,
        early_stopping: bool | str = False,
        *,
        min_tokens: int = 0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        stop: str | Iterable[str] = (),
        stop_token_ids: Iterable[int] = (),
        ignore_eos: bool = False,
        logprobs: int | None = None,
        priority: int = 0,
        namespace: str = "",
        request_id: str | None = None,
    ) -> Any:
        """The `beam_width` best answers that a beam search finds, best first, each with its score.

        -> a list of Completions, or a list of these for a list of prompts. Answers and scores are
        those of transformers' beam search: `score` is the sum of the tokens' log-probabilities,
        changed by the penalties and not normalised again, divided by (number of tokens) **
        length_penalty; `cumulative_logprob` is the sum of the model's own. `early_stopping` True
        ends with beam_width finished answers, False when the best beam does not look better than
        the worst of them, "never" when none could become so. `min_tokens` forbids end tokens; a
        stop string ends a beam at any length. What the others mean: `SamplingParams`.

        The prompt is computed once and the beams share all that they have in common. The first
        answer's usage counts the prompt, the others' count it as cached. An aborted search returns
        the best of what there is, at least one.
        """
        params, beams = read_options(
            beam_width,
            max_tokens,
            length_penalty,
            early_stopping,
            min_tokens=min_tokens,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            stop=stop,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
            logprobs=logprobs,
            priority=priority,
            namespace=namespace,
        )
        batch = is_batch(prompts)
        requests = self._searches(prompts, batch, params, beams, request_id)
        answers = [_answers(event) for event in self._events(requests)]
        return answers if batch else answers[0]

    async def abeam_search(
        self, prompts: Any, *options: Any, request_id: str | None = None, **more: Any
    ) -> Any:
        """`beam_search` for asyncio, with the same options. Cancelling the task aborts it."""
        params, beams = read_options(*options, **more)
        batch = is_batch(prompts)
        requests = self._searches(prompts, batch, params, beams, request_id)
        answers = [_answers(event) for event in await self._aevents(requests)]
        return answers if batch else answers[0]

    def abort(self, request_id: str | None = None) -> int:
        """End one request, or all; their callers get what there is, finish_reason "abort".

        Returns how many were still running.
        """
        if request_id is None:
            return self._worker.abort(None)
        return self._worker.abort([check_str("request_id", request_id)])

    def score(
        self, prompt: Prompt, candidates: Sequence[str | Sequence[int]], *, namespace: str = ""
    ) -> list[Score]:
        """How likely the model finds each of `candidates`, texts or token ids, behind `prompt`.

        The prompt is computed once, or taken from the cache; the candidates then run side by side.
        Text is tokenised on its own, without the special tokens that begin a prompt. Log-
        probabilities are of the model's own distribution, natural logarithms.
        """
        ids = self._reader.read(prompt)
        return self._score([ScoreJob(ids, candidates, namespace)])[0]

    # -- staying ------------------------------------------------------------------------------

    def branch(self, prompt: Prompt, *, namespace: str = "") -> Branch:
        """A live position behind `prompt`, to fork, extend, continue and roll back.

        Computes nothing yet. Release it, or use it as a context manager: until then the cache keeps
        its K/V before that of others.
        """
        ids = self._reader.read(prompt)
        check_str("namespace", namespace)
        self._worker.check_alive()
        return Branch(self._branch_host, ids, namespace)

    def chat(
        self,
        system: str | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        params: SamplingParams | None = None,
    ) -> ChatSession:
        """A conversation that computes only what is new, the model's own words included.

        `tools`: JSON schemas of functions for the chat template. `template`: a Jinja template
        instead of the tokenizer's. `params` are those of turns that bring none, and their namespace
        is the chat's. Close it, or use it as a context manager.
        """
        return ChatSession.start(self._chat_host, system, tools, template, params)

    def load_chat(
        self, path: str | os.PathLike[str], *, params: SamplingParams | None = None
    ) -> ChatSession:
        """A conversation that `ChatSession.save` wrote, with its exact token ids.

        Nothing is computed before its next turn. InvalidRequest for that of another model.
        """
        return ChatSession.load(self._chat_host, path, params)

    # -- knowing ------------------------------------------------------------------------------

    def lookup(self, prompt: Prompt, namespace: str = "") -> Lookup:
        """How much of `prompt` is cached now, and why not more. Changes nothing."""
        ids = self._reader.read(prompt)
        check_str("namespace", namespace)
        return self._worker.call(lambda engine: engine.lookup(ids, namespace))

    def cache_stats(self) -> dict[str, Any]:
        """Counters and gauges of cache and scheduler, and the seconds spent by part of a step."""
        return self._worker.call(lambda engine: engine.stats())

    def cache_tree(self, max_nodes: int = 10_000) -> dict[str, Any]:
        """The prefix tree as nested dicts, see `RadixCache.dump`; with cache="hash" its blocks."""
        count = check_int("max_nodes", max_nodes, 0)
        return self._worker.call(lambda engine: engine.tree(count))

    def flush_cache(self, namespace: str | None = None) -> None:
        """Forget what is cached, in one namespace or in all; running requests are not disturbed."""
        if namespace is not None:
            check_str("namespace", namespace)
        self._worker.call(lambda engine: engine.reset_cache(namespace))

    def check(self) -> None:
        """Audit the cache's pages; AssertionError names the first one that is wrong."""
        self._worker.call(lambda engine: engine.check())

    # -- inside -------------------------------------------------------------------------------

    def _make_runner(self, model_path: str) -> Any:
        """What computes the steps; a subclass may have another one."""
        from radixserve.runner.ranks import make_runner

        return make_runner(model_path, self.config)

    def _requests(
        self, prompts: Sequence[Any], params: object, request_id: str | None
    ) -> tuple[list[Request], list[SamplingParams]]:
        """Checked requests, num_samples of them a prompt, and the params of each prompt.

        Raises InvalidRequest before anything is allocated.
        """
        each = params_for(params, len(prompts))
        _check_request_id(request_id, sum(one.num_samples for one in each))
        ids = [self._reader.read(prompt) for prompt in prompts]
        for one in each:
            if one.stop and self.tokenizer is None:
                raise InvalidRequest("the model has no tokenizer: stop strings cannot be found")
            self._check_ends(one)
            outside = [t for t in one.stop_token_ids if t >= self.model.vocab_size]
            if outside:
                raise InvalidRequest(
                    f"stop_token_ids {outside} are out of range: "
                    f"allowed are 0 to {self.model.vocab_size - 1}"
                )
        requests: list[Request] = []
        for token_ids, one in zip(ids, each, strict=True):
            first = self._request(token_ids, one, request_id)
            others = [self._new_id() for _ in range(one.num_samples - 1)]
            requests += fan_out(first, others)
        return requests, each

    def _single(self, prompt: Prompt, params: object, request_id: str | None) -> Request:
        requests, each = self._requests([prompt], params, request_id)
        check_single(each[0], "stream")
        return requests[0]

    def _searches(
        self,
        prompts: Any,
        batch: bool,
        params: SamplingParams,
        beams: BeamParams,
        request_id: str | None,
    ) -> list[Request]:
        given = list(prompts) if batch else [prompts]
        requests, _ = self._requests(given, params, request_id)
        vocab_size = self.model.vocab_size
        return [as_search(one, beams, self.tokenizer, vocab_size) for one in requests]

    def _score(self, jobs: Sequence[ScoreJob]) -> list[list[Score]]:
        targets = [read_candidates(self._reader, job.prompt, job.candidates) for job in jobs]
        requests = [
            scoring(self._request(job.prompt, params_of(job.namespace), None), ids)
            for job, found in zip(jobs, targets, strict=True)
            for ids in found
        ]
        done = self._complete(requests, BatchProgress(len(requests), wanted=False))
        check_finished(done)
        rest = iter(done)
        return [[as_score(next(rest), ids) for ids in found] for found in targets]

    @property
    def _branch_host(self) -> BranchHost:
        return BranchHost(
            worker=self._worker,
            reader=self._reader,
            numbers=self._branch_numbers,
            request=lambda ids, params: self._single(ids, params, None),
            end_ids=self._end_ids,
            complete=lambda requests: self._complete(
                requests, BatchProgress(len(requests), wanted=False)
            ),
            score=self._score,
            stream=self._stream,
            astream=self._astream,
        )

    @property
    def _chat_host(self) -> ChatHost:
        if self.tokenizer is None:
            raise InvalidRequest("the model has no tokenizer: chats need one")
        self._worker.check_alive()
        return ChatHost(self._branch_host, self.tokenizer, self._end_ids, self._identity)

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """What has to be the same for token ids to mean the same."""
        assert self.tokenizer is not None
        names = ("architecture", "num_layers", "hidden_size", "vocab_size", "num_parameters")
        sizes = {name: getattr(self.model, name) for name in names}
        return {**sizes, "tokenizer": self.tokenizer.fingerprint()}

    def _new_id(self) -> str:
        return f"{_OWN_ID}{next(self._next_id)}"

    def _ends(self, params: SamplingParams) -> frozenset[int]:
        """Tokens that end a request: the model's, unless ignored, and its own."""
        model_ends: frozenset[int] = frozenset() if params.ignore_eos else self._end_ids
        return model_ends | frozenset(params.stop_token_ids)

    def _check_ends(self, params: SamplingParams) -> None:
        if params.min_tokens and len(self._ends(params)) >= self.model.vocab_size:
            raise InvalidRequest("min_tokens cannot hold when every token ends the request")

    def _request(self, ids: Any, params: SamplingParams, request_id: str | None) -> Request:
        seed = params.seed
        if seed is None:
            with self._random_lock:
                seed = self._random.getrandbits(63)
        scores_prompt = params.prompt_logprobs is not None and len(ids) > 1
        return Request(
            request_id=request_id or self._new_id(),
            token_ids=ids,
            params=params,
            seed=seed,
            end_ids=self._ends(params),
            max_len=self.max_seq_len,
            logprob_targets=ids[1:] if scores_prompt else None,
            also_generate=scores_prompt,
        )

    def _tickets(
        self, requests: Sequence[Request], notify: Callable[[int, Event], None], *, streams: bool
    ) -> list[Ticket]:
        """Their way back: `notify(index, event)` is called in the engine's thread."""
        return [
            Ticket(request, self.tokenizer, partial(notify, at), streams=streams)
            if request.beams is None
            else BeamTicket(request, self.tokenizer, partial(notify, at))
            for at, request in enumerate(requests)
        ]

    def _complete(self, requests: list[Request], bar: BatchProgress) -> list[Completion]:
        with bar:
            events = self._events(requests, lambda event: bar.add(_completion(event)))
        return [_completion(event) for event in events]

    def _events(
        self, requests: Sequence[Request], note: Callable[[Event], object] | None = None
    ) -> list[Event]:
        """How each of them ended, in order; `note` is told of each when it does. The first error
        is raised at once."""
        events: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        done: dict[int, Event] = {}
        tickets = self._tickets(requests, lambda *item: events.put(item), streams=False)
        try:
            self._worker.submit(tickets)
            for _ in requests:
                at, event = events.get()
                done[at] = _checked(event)
                if note is not None:
                    note(event)
        except BaseException:  # Ctrl-C too: nobody waits for the rest any more
            self._worker.abandon(tickets)
            raise
        return [done[at] for at in range(len(requests))]

    async def _aevents(self, requests: Sequence[Request]) -> list[Event]:
        """`_events` for asyncio."""
        events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        done: dict[int, Event] = {}
        tickets = self._tickets(
            requests, lambda at, event: _post(loop, events, (at, event)), streams=False
        )
        try:
            self._worker.submit(tickets)
            for _ in requests:
                at, event = await events.get()
                done[at] = _checked(event)
        except BaseException:
            self._worker.abandon(tickets)
            raise
        return [done[at] for at in range(len(requests))]

    def _stream(self, request: Request) -> Generator[Chunk, None, None]:
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        tickets = self._tickets([request], lambda _, event: events.put(event), streams=True)
        is_open = True
        try:
            self._worker.submit(tickets)
            while is_open:
                chunk = _chunk(events.get())
                is_open = chunk.completion is None
                yield chunk
        finally:
            if is_open:
                self._worker.abandon(tickets)

    async def _astream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        events: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        tickets = self._tickets(
            [request], lambda _, event: _post(loop, events, event), streams=True
        )
        is_open = True
        try:
            self._worker.submit(tickets)
            while is_open:
                chunk = _chunk(await events.get())
                is_open = chunk.completion is None
                yield chunk
        finally:
            if is_open:
                self._worker.abandon(tickets)


def _close(worker: EngineThread, runner: Any) -> None:
    worker.close()
    runner.close()


def _model_path(model: object) -> str:
    if not isinstance(model, str | os.PathLike) or not os.fspath(model):
        raise InvalidRequest(
            'model must be a checkpoint folder, a hub id, "demo", or "random:" and the name of a '
            f"known size, got {shown(model)}"
        )
    path = os.fspath(model)
    if not isinstance(path, str):
        raise InvalidRequest(f"model must be a path of text, not bytes, got {shown(path)}")
    return str(DEMO) if path == "demo" else path


def _recorder(config: EngineConfig) -> TraceRecorder | None:
    return None if config.trace is None else TraceRecorder(config.trace, config.trace_hash_block)


def _check_request_id(request_id: object, num_requests: int) -> None:
    if request_id is None:
        return
    if num_requests != 1:
        raise InvalidRequest(
            "request_id names a single request, not a list of prompts, and not n > 1"
        )
    if not isinstance(request_id, str) or not request_id or request_id.startswith(_OWN_ID):
        raise InvalidRequest(
            f"request_id must be a non-empty string that does not begin with {_OWN_ID!r}, "
            f"got {shown(request_id)}"
        )


def _sequence_limit(config: EngineConfig, model: Any, capacity: int) -> tuple[int, str]:
    """Most tokens of prompt and output together, and what sets that limit."""
    limits = [(model.max_positions, "the model's context"), (capacity, "the cache's size")]
    if config.max_seq_len is not None:
        if config.max_seq_len > model.max_positions:
            raise InvalidRequest(
                f"max_seq_len must be at most the model's {model.max_positions} positions, "
                f"got {config.max_seq_len}"
            )
        limits.append((config.max_seq_len, "max_seq_len"))
    limit, name = min(limits)
    if limit < 2:
        raise InvalidRequest(f"{name} leaves room for {limit} tokens; at least 2 are needed")
    return limit, name


def _checked(event: Event) -> Event:
    if isinstance(event, BaseException):
        raise event
    return event


def _completion(event: Event) -> Completion:
    event = _checked(event)
    assert isinstance(event, Completion)
    return event


def _answers(event: Event) -> list[Completion]:
    event = _checked(event)
    assert isinstance(event, tuple)
    return list(event)


def _chunk(event: Event) -> Chunk:
    if isinstance(event, Chunk):
        return event
    assert isinstance(event, BaseException)
    raise event


def _post(loop: asyncio.AbstractEventLoop, events: asyncio.Queue[Any], item: Any) -> None:
    """Hand an event to a loop of another thread; one that was closed meanwhile gets nothing."""
    try:
        loop.call_soon_threadsafe(events.put_nowait, item)
    except RuntimeError:
        if not loop.is_closed():
            raise
