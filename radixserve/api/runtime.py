"""`Runtime`: a model and its engine, for callers of any thread and for asyncio."""

from __future__ import annotations

import os
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from radixserve.api.beam_search import read_options
from radixserve.api.branch import Branch
from radixserve.api.chat import ChatSession
from radixserve.api.client import EngineClient
from radixserve.api.progress import BatchProgress
from radixserve.api.request_builder import RequestBuilder
from radixserve.api.request_handle import RequestHandle
from radixserve.api.samples import gather
from radixserve.api.scores import ScoreQuery, score
from radixserve.cache import Lookup
from radixserve.checks import check_int, check_str, shown
from radixserve.config import EngineConfig
from radixserve.engine.engine import Engine
from radixserve.engine.engine_thread import EngineThread
from radixserve.engine.messages import CheckCache, DumpTree, GetStats, ResetCache
from radixserve.engine.trace_recorder import TraceRecorder
from radixserve.errors import InvalidRequest
from radixserve.output import Chunk, Completion, Score
from radixserve.request import BeamParams, Request, SamplingParams
from radixserve.text.prompts import Prompt, PromptReader, is_batch
from radixserve.text.tokenizer import Tokenizer

Params = SamplingParams | Sequence[SamplingParams] | None
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

    def _make_runner(self, model_path: str) -> Any:
        """The object that computes the steps; a subclass may have another one."""
        from radixserve.runner.factory import make_runner

        return make_runner(model_path, self.config)

    def _start(self, runner: Any) -> None:
        self.model = runner.info
        self.memory = runner.memory_plan()
        self.attention_backend = runner.backend_name
        self.resolved_config = runner.resolved_config
        self.tokenizer = Tokenizer.load(runner.model_path)
        capacity = runner.num_pages * self.config.page_size
        self.max_seq_len, limit_name = _sequence_limit(self.config, self.model, capacity)
        reader = PromptReader(self.tokenizer, self.model.vocab_size, self.max_seq_len, limit_name)
        self._builder = RequestBuilder(reader, frozenset(self.model.eos_ids), self.config.seed)
        self._worker = EngineThread(Engine(runner, self.config), _recorder(self.config))
        self._client = EngineClient(self._worker, self._builder)
        self._finalizer = weakref.finalize(self, _close, self._worker, runner)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine. Calls that still wait get EngineDead. Can be called again."""
        self._finalizer()

    # -- generating ---------------------------------------------------------------------------

    def generate(
        self,
        prompts: Any,
        params: Params = None,
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
        if progress is not None and not isinstance(progress, bool):
            raise InvalidRequest(f"progress must be True, False or None, got {shown(progress)}")
        handle = self._generate(prompts, params, request_id)
        is_wanted = progress if is_batch(prompts) else progress is True
        with BatchProgress(len(handle), wanted=is_wanted) as bar:
            return handle.get(bar.add)

    async def agenerate(
        self, prompts: Any, params: Params = None, *, request_id: str | None = None
    ) -> Any:
        """`generate` for asyncio. Cancelling the task aborts its requests."""
        return await self._generate(prompts, params, request_id).aget()

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> Iterator[Chunk]:
        """The answer piece by piece; the last Chunk carries the whole Completion.

        The request is checked now and starts with the first iteration; leaving the loop aborts it.
        """
        return self._stream(self._builder.single(prompt, params, request_id))

    def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> AsyncIterator[Chunk]:
        """`stream` for asyncio. Leaving the loop or cancelling the task aborts the request."""
        return self._astream(self._builder.single(prompt, params, request_id))

    def beam_search(
        self,
        prompts: Any,
        beam_width: int | None = None,
        max_tokens: int | None = None,
        *,
        params: SamplingParams | None = None,
        beams: BeamParams | None = None,
        request_id: str | None = None,
        **fields: Any,
    ) -> Any:
        """The `width` best answers that a beam search finds, best first, each with its score.

        -> a list of Completions, or a list of these for a list of prompts. `beams` is the search's
        shape, `params` say when an answer ends, its penalties, logprobs, priority and namespace;
        or give the fields of both as keywords: `beam_width` (4), `length_penalty`,
        `early_stopping`, `max_tokens` (64), `min_tokens`, `repetition_penalty`, `stop`, ...

        Answers and scores are those of transformers' beam search: `score` is the sum of the tokens'
        log-probabilities, changed by the penalties and not normalised again, divided by (number of
        tokens) ** length_penalty; `cumulative_logprob` is the sum of the model's own. `min_tokens`
        forbids end tokens; a stop string ends a beam at any length.

        The prompt is computed once and the beams share all that they have in common. The first
        answer's usage counts the prompt, the others' count it as cached. An aborted search returns
        the best of what there is, at least one.
        """
        fields |= {"beam_width": beam_width, "max_tokens": max_tokens}
        return self._beam_search(prompts, params, beams, request_id, fields).get()

    async def abeam_search(
        self,
        prompts: Any,
        beam_width: int | None = None,
        max_tokens: int | None = None,
        *,
        params: SamplingParams | None = None,
        beams: BeamParams | None = None,
        request_id: str | None = None,
        **fields: Any,
    ) -> Any:
        """`beam_search` for asyncio. Cancelling the task aborts it."""
        fields |= {"beam_width": beam_width, "max_tokens": max_tokens}
        return await self._beam_search(prompts, params, beams, request_id, fields).aget()

    def abort(self, request_id: str | None = None) -> int:
        """End one request, or all; their callers get what there is, finish_reason "abort".

        Returns how many were still running.
        """
        ids = None if request_id is None else [check_str("request_id", request_id)]
        return self._worker.abort(ids)

    def score(
        self, prompt: Prompt, candidates: Sequence[str | Sequence[int]], *, namespace: str = ""
    ) -> list[Score]:
        """How likely the model finds each of `candidates`, texts or token ids, after `prompt`.

        The prompt is computed once, or taken from the cache; the candidates then run side by side.
        Text is tokenised on its own, without the special tokens that begin a prompt. Log-
        probabilities are of the model's own distribution, natural logarithms.
        """
        ids = self._builder.reader.read(prompt)
        return score(self._client, [ScoreQuery(ids, candidates, namespace)])[0]

    # -- sessions -----------------------------------------------------------------------------

    def branch(self, prompt: Prompt, *, namespace: str = "") -> Branch:
        """A live position after `prompt`, to fork, extend, continue and roll back.

        Computes nothing yet. Release it, or use it as a context manager: until then its K/V is
        evicted after that of requests without a session.
        """
        ids = self._builder.reader.read(prompt)
        check_str("namespace", namespace)
        self._worker.check_alive()
        return Branch(self._client, ids, namespace)

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
        self._worker.check_alive()
        return ChatSession.start(self._client, self._identity, system, tools, template, params)

    def load_chat(
        self, path: str | os.PathLike[str], *, params: SamplingParams | None = None
    ) -> ChatSession:
        """A conversation that `ChatSession.save` wrote, with its exact token ids.

        Nothing is computed before its next turn. InvalidRequest for that of another model.
        """
        self._worker.check_alive()
        return ChatSession.load(self._client, self._identity, path, params)

    # -- the cache ----------------------------------------------------------------------------

    def lookup(self, prompt: Prompt, namespace: str = "") -> Lookup:
        """How much of `prompt` is cached now, and why not more. Changes nothing."""
        ids = self._builder.reader.read(prompt)
        return self._client.lookup(ids, check_str("namespace", namespace))

    def cache_stats(self) -> dict[str, Any]:
        """Counters and gauges of cache and scheduler, and the seconds spent by part of a step."""
        return self._worker.call(GetStats())

    def cache_tree(self, max_nodes: int = 10_000) -> dict[str, Any]:
        """The prefix tree as nested dicts, see `RadixCache.dump`; with cache="hash" its blocks."""
        count = check_int("max_nodes", max_nodes, 0)
        return self._worker.call(DumpTree(count))

    def flush_cache(self, namespace: str | None = None) -> None:
        """Forget what is cached, in one namespace or in all; running requests are not disturbed."""
        if namespace is not None:
            check_str("namespace", namespace)
        self._worker.call(ResetCache(namespace))

    def check(self) -> None:
        """Audit the cache's pages; AssertionError names the first one that is wrong."""
        self._worker.call(CheckCache())

    # -- inside -------------------------------------------------------------------------------

    def _generate(
        self, prompts: Any, params: Params, request_id: str | None
    ) -> RequestHandle[Completion]:
        """The requests, not submitted yet."""
        is_list = is_batch(prompts)
        given = prompts if is_list else [prompts]
        requests, each = self._builder.build(given, params, request_id)

        def finish(completions: list[Completion]) -> Any:
            found = gather(completions, each)
            return found if is_list else found[0]

        return self._client.submit(requests, finish)

    def _beam_search(
        self,
        prompts: Any,
        params: SamplingParams | None,
        beams: BeamParams | None,
        request_id: str | None,
        fields: Mapping[str, Any],
    ) -> RequestHandle[tuple[Completion, ...]]:
        """The searches, not submitted yet."""
        params, beams = read_options(params, beams, fields)
        is_list = is_batch(prompts)
        given = prompts if is_list else [prompts]
        requests = self._builder.beam_search(given, params, beams, request_id)

        def finish(found: list[tuple[Completion, ...]]) -> Any:
            return list(map(list, found)) if is_list else list(found[0])

        return self._client.submit(requests, finish)

    def _stream(self, request: Request) -> Iterator[Chunk]:
        with self._client.stream(request) as chunks:
            yield from chunks

    async def _astream(self, request: Request) -> AsyncIterator[Chunk]:
        with self._client.stream(request) as chunks:
            async for chunk in chunks:
                yield chunk

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """Facts that have to be equal for token ids to mean the same; InvalidRequest without a
        tokenizer."""
        names = ("architecture", "num_layers", "hidden_size", "vocab_size", "num_parameters")
        sizes = {name: getattr(self.model, name) for name in names}
        return {**sizes, "tokenizer": self._client.tokenizer.fingerprint()}


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


def _sequence_limit(config: EngineConfig, model: Any, capacity: int) -> tuple[int, str]:
    """Most tokens of prompt and output together, and the name of that limit."""
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
