# mypy: disable-error-code="overload-overlap"
"""`Runtime`: a model and its engine, for callers of any thread and for asyncio.

A call builds requests (`RequestBuilder`), submits them through an `EngineClient`, and waits on a
`RequestHandle`, which raises the errors of its requests. `EngineThread` runs the engine; when it
ends, open calls get EngineDead.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, overload

from radixserve.api.beam_search import read_options
from radixserve.api.branch import Branch
from radixserve.api.chat import ChatSession
from radixserve.api.client import EngineClient, RequestHandle
from radixserve.api.engine_factory import make_engine
from radixserve.api.progress import BatchProgress
from radixserve.api.request_builder import (
    RequestBuilder,
    check_params,
    gather,
    sequence_limit,
)
from radixserve.api.scores import ScoreQuery, ascore, score
from radixserve.api.settings import (
    BeamSearchSettings,
    ChatSettings,
    GenerateSettings,
    Params,
    chat_options,
)
from radixserve.api.tree_view import flat_tree
from radixserve.arrays import IntArray
from radixserve.cache import Lookup, SnapshotView
from radixserve.checks import check_int, check_str, check_text, shown
from radixserve.config import EngineConfig, EngineSettings
from radixserve.decisions import Decision, Question
from radixserve.drafts.extension import AddDraftSource
from radixserve.drafts.source import DraftSource
from radixserve.engine import messages
from radixserve.engine.core_client import EngineCoreClient, EngineFacts
from radixserve.engine.engine_thread import AddExtension, EngineThread
from radixserve.engine.extension import EngineExtension
from radixserve.engine.messages import GetStats
from radixserve.engine.output_notifier import OutputNotifier
from radixserve.errors import InvalidRequest
from radixserve.hints.hint import Hint, HintAnswer, check_hint
from radixserve.hints.messages import ApplyHints, GetHeld
from radixserve.models.names import check_model_name
from radixserve.completion import Chunk, Completion, Score
from radixserve.reports import EngineStatus
from radixserve.reports import (
    EngineStats,
    EvictionCandidate,
    FlatTreeDump,
    HeldByHints,
    TreeDump,
)
from radixserve.request import BeamParams, Request, SamplingParams, TruncationSide
from radixserve.sampling_defaults import NO_SAMPLING, SamplingDefault, in_force
from radixserve.store import messages as store_messages
from radixserve.structured_outputs import StructuredOutput
from radixserve.text.prompts import Prompt, PromptReader, as_prompts
from radixserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from radixserve.models.base import ModelInfo
    from radixserve.runner.base import MemoryPlan, ResolvedConfig

DEMO = Path(__file__).parent.parent / "models" / "demo"
_IDLE_POLL_S = 0.02  # until an engine that is busy is asked again


class Runtime:
    """A model with its engine, running until `close`.

        with Runtime("demo") as rt:
            print(rt.generate("Once upon a time", SamplingParams(max_tokens=20)).text)

    `model` is a checkpoint folder, a GGUF file, a hub id ("owner/name", or "owner/name:Q4_K_M" for
    one of its GGUF files), "demo" for the small model that ships with the package, or "random:" and
    a name of models/sizes.py, such as "random:llama-3-8b": that shape with weights drawn from
    `seed`, whose prompts are token ids and whose answers have no text.
    Settings are an `EngineConfig`, or its fields as keyword arguments. Every method may be called
    from several threads at once. Raises InvalidRequest for bad settings, ModelNotSupported for
    models that cannot be run. An `async with` block closes it, too.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        config: EngineConfig | None = None,
        **settings: Unpack[EngineSettings],
    ) -> None:
        self.config: EngineConfig = _read_config(config, settings)
        runner = self._make_runner(_model_path(model))
        try:
            self._start(runner)
        except BaseException:
            runner.close()
            raise

    def _make_runner(self, model_path: str) -> Any:
        """Returns the model runner, which computes the steps. A subclass may return another one."""
        from radixserve.runner.factory import make_runner

        return make_runner(model_path, self.config)

    def _start(self, runner: Any) -> None:
        facts = EngineFacts(
            runner.model_path,
            runner.info,
            runner.memory_plan(),
            runner.backend_name,
            runner.resolved_config,
            runner.num_pages * self.config.page_size,
        )
        notifier = OutputNotifier()
        core = EngineThread(make_engine(runner, self.config), notifier)
        self._use(facts, core, notifier)
        self._finalizer: Any = weakref.finalize(self, _close, core, runner)

    def _use(self, facts: EngineFacts, core: EngineCoreClient, notifier: OutputNotifier) -> None:
        """Set up the tokenizer, the request builder and the client for an engine `core`."""
        self.tokenizer: Tokenizer | None = Tokenizer.load(
            facts.model_path, parses_special=self.config.parse_special_tokens
        )
        if self.tokenizer is not None:
            vocab_size = facts.model.vocab_size
            self.tokenizer.check_size(vocab_size)
            end_ids = (token_id for token_id in self.tokenizer.end_ids if token_id < vocab_size)
            eos_ids = tuple(sorted({*facts.model.eos_ids, *end_ids}))
            facts = facts._replace(model=replace(facts.model, eos_ids=eos_ids))
        self.facts = facts
        self.max_seq_len: int
        self.max_seq_len, limit = sequence_limit(self.config, facts.model, facts.capacity)
        reader = PromptReader(self.tokenizer, facts.model.vocab_size, self.max_seq_len, limit)
        self._builder = RequestBuilder(
            reader,
            frozenset(facts.model.eos_ids),
            self.config.seed,
            in_force(
                self.config.override_generation_config,
                facts.model.sampling if self.config.generation_config == "auto" else NO_SAMPLING,
            ),
            keeps_guidance_options=self.config.allow_guidance_options,
            marks_turns=bool(facts.model.states),
        )
        self._core = core
        self._client = EngineClient(core, self._builder, notifier)

    @property
    def client(self) -> EngineClient:
        """Builds requests and submits them: for programs that need more than the methods here."""
        return self._client

    @property
    def model(self) -> ModelInfo:
        """Its architecture and sizes."""
        return self.facts.model

    @property
    def memory(self) -> MemoryPlan:
        """Bytes of the weights and of the cache."""
        return self.facts.memory

    @property
    def attention_backend(self) -> str:
        return self.facts.attention_backend

    @property
    def resolved_config(self) -> ResolvedConfig:
        """The settings in use where the config says "auto"."""
        return self.facts.resolved_config

    @property
    def sampling_defaults(self) -> dict[str, SamplingDefault]:
        """{field: (value, source)} of sampling fields that requests leave out: from
        `set_default_sampling_params`, the config's `override_generation_config`, or the model, in
        this order; else neutral."""
        return dict(self._builder.sampling_defaults)

    @property
    def default_sampling_params(self) -> SamplingParams:
        """The parameters of a call without params. In a SamplingParams that is given to a call,
        fields in `sampling_defaults` that it leaves out have these values too."""
        return self._builder.default_params

    def set_default_sampling_params(self, **fields: Any) -> None:
        """Change fields of `default_sampling_params`, for calls from now on. Raises
        InvalidRequest."""
        self._builder.set_defaults(self.sampling_params(**fields), fields)

    def sampling_params(self, **fields: Any) -> SamplingParams:
        """Returns `default_sampling_params` with these fields changed. Raises InvalidRequest."""
        default = self.default_sampling_params
        known = {field.name: getattr(default, field.name) for field in dataclasses.fields(default)}
        return SamplingParams(**{**known, **fields})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def __repr__(self) -> str:
        sizes = f"{self.model.num_parameters / 1e6:,.1f}M parameters"
        room = f"{self.memory.pool_tokens:,} tokens of cache"
        state = "" if self._finalizer.alive else ", closed"
        return f"Runtime({self.model.architecture}, {sizes}, {self.resolved_config}, {room}{state})"

    def close(self) -> None:
        """Stop the engine. Calls that still wait raise EngineDead. Can be called again."""
        self._finalizer()

    # -- generating ---------------------------------------------------------------------------
    # For a type checker a text is an iterable of texts, so the two overloads of a call overlap. It
    # takes the first that fits, the one for a single prompt.

    @overload
    def generate(
        self,
        prompts: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[GenerateSettings],
    ) -> Completion: ...

    @overload
    def generate(
        self, prompts: Iterable[Prompt], params: Params = None, **options: Unpack[GenerateSettings]
    ) -> list[Completion]: ...

    def generate(
        self,
        prompts: Any,
        params: Params = None,
        *,
        progress: bool | None = None,
        request_id: str | None = None,
        **chat: Unpack[ChatSettings],
    ) -> Any:
        """Complete one prompt (-> Completion) or several (-> list, in order).

        A prompt is text, a list of token ids, or a list of chat messages; the answer continues the
        last message if that is the assistant's. Several prompts are any iterable of these. All are
        checked before any is started; an error of one of several names its index. With n > 1 in
        its params a prompt has a list of n Completions, and is computed once: the first one's usage
        counts it, the others count all but its last token as cached.

        `progress` shows a bar, by default for batches on a terminal. `request_id` names a single
        request for `abort`. `chat`: tools and chat_template_kwargs, see `ChatSettings`. Raises
        InvalidRequest, RequestFailed and EngineDead.
        """
        handle, is_list = self._generate(prompts, params, request_id, chat)
        core = self._client.core
        bar = _progress_bar(handle, is_list, progress, lambda: core.call(GetStats()))
        if bar is None:
            return handle.get()
        with bar:
            return handle.get(bar.add)

    @overload
    async def agenerate(
        self,
        prompts: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[GenerateSettings],
    ) -> Completion: ...

    @overload
    async def agenerate(
        self, prompts: Iterable[Prompt], params: Params = None, **options: Unpack[GenerateSettings]
    ) -> list[Completion]: ...

    async def agenerate(
        self,
        prompts: Any,
        params: Params = None,
        *,
        progress: bool | None = None,
        request_id: str | None = None,
        **chat: Unpack[ChatSettings],
    ) -> Any:
        """`generate` for asyncio. Cancelling the task aborts its requests."""
        await self._compile_grammars(params)
        handle, is_list = self._generate(prompts, params, request_id, chat)
        core = self._client.core  # its status does not wait: nothing blocks the loop
        bar = _progress_bar(handle, is_list, progress, lambda: core.status().stats)
        if bar is None:
            return await handle.aget()
        with bar:
            return await handle.aget(bar.add)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **chat: Unpack[ChatSettings],
    ) -> Iterator[Chunk]:
        """Yields the answer in chunks; the last Chunk has the whole Completion.

        The request is checked now and starts with the first iteration; leaving the loop aborts it.
        """
        return self._stream(self._single(prompt, params, request_id, chat))

    def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **chat: Unpack[ChatSettings],
    ) -> AsyncIterator[Chunk]:
        """`stream` for asyncio. Leaving the loop or cancelling the task aborts the request."""
        return self._astream(self._single(prompt, params, request_id, chat))

    @overload
    def beam_search(
        self,
        prompts: Prompt,
        beam_width: int | None = None,
        max_tokens: int | None = None,
        **fields: Unpack[BeamSearchSettings],
    ) -> list[Completion]: ...

    @overload
    def beam_search(
        self,
        prompts: Iterable[Prompt],
        beam_width: int | None = None,
        max_tokens: int | None = None,
        **fields: Unpack[BeamSearchSettings],
    ) -> list[list[Completion]]: ...

    def beam_search(
        self,
        prompts: Any,
        beam_width: int | None = None,
        max_tokens: int | None = None,
        **fields: Any,
    ) -> Any:
        """Returns the `width` best answers that a beam search finds, best first, with their scores.

        -> a list of Completions, or a list of these for a list of prompts. `beams` has the width
        and the rules of the search; `params` has the end of an answer, penalties, logprobs,
        priority and namespace. Or give the fields of both as keywords: `beam_width` (4),
        `length_penalty`, `early_stopping`, `max_tokens` (64), `min_tokens`, `repetition_penalty`,
        `stop`, ...

        Answers and scores are those of transformers' beam search: `score` is the sum of the tokens'
        log-probabilities, changed by the penalties and not normalised again, divided by (number of
        tokens) ** length_penalty; `cumulative_logprob` is the sum of the model's own. `min_tokens`
        forbids end tokens; a stop string ends a beam at any length.

        The prompt is computed once and the beams share all that they have in common. The first
        answer's usage counts the prompt, the others' count it as cached. An aborted search returns
        the best answers so far, at least one.
        """
        return self._beam_search(
            prompts, beam_width=beam_width, max_tokens=max_tokens, **fields
        ).get()

    @overload
    async def abeam_search(
        self,
        prompts: Prompt,
        beam_width: int | None = None,
        max_tokens: int | None = None,
        **fields: Unpack[BeamSearchSettings],
    ) -> list[Completion]: ...

    @overload
    async def abeam_search(
        self,
        prompts: Iterable[Prompt],
        beam_width: int | None = None,
        max_tokens: int | None = None,
        **fields: Unpack[BeamSearchSettings],
    ) -> list[list[Completion]]: ...

    async def abeam_search(
        self,
        prompts: Any,
        beam_width: int | None = None,
        max_tokens: int | None = None,
        **fields: Any,
    ) -> Any:
        """`beam_search` for asyncio. Cancelling the task aborts it."""
        await self._compile_grammars(fields.get("params"))
        handle = self._beam_search(prompts, beam_width=beam_width, max_tokens=max_tokens, **fields)
        return await handle.aget()

    def abort(self, request_id: str | None = None) -> int:
        """End one request, or all. Their callers get the tokens so far, with finish_reason "abort".

        Returns how many were still running.
        """
        ids = None if request_id is None else [check_str("request_id", request_id)]
        return self._client.core.abort(ids)

    # -- scoring ------------------------------------------------------------------------------

    def score(
        self, prompt: Prompt, candidates: Sequence[str | Sequence[int]], *, namespace: str = ""
    ) -> list[Score]:
        """Returns how likely the model finds each of `candidates`, texts or token ids, after
        `prompt`.

        The prompt is computed once, or taken from the cache; the candidates then run side by side.
        Text is tokenised on its own, without the special tokens that begin a prompt. Log-
        probabilities are of the model's own distribution, natural logarithms.
        """
        self._core.check_alive()
        ids = self._builder.reader.read(prompt)
        return score(self._client, [ScoreQuery(ids, candidates, namespace)])[0]

    async def ascore(
        self, prompt: Prompt, candidates: Sequence[str | Sequence[int]], *, namespace: str = ""
    ) -> list[Score]:
        """`score` for asyncio. Cancelling the task aborts it."""
        ids = self._builder.reader.read(prompt)
        return (await ascore(self._client, [ScoreQuery(ids, candidates, namespace)]))[0]

    def decide(
        self,
        input: str | Sequence[Mapping[str, Any]],  # noqa: A002
        questions: Question | str | Sequence[Question | str],
        *,
        namespace: str = "",
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Decision]:
        """Returns for each of 1 to 400 questions which of its given answers the model finds
        likeliest.

        `input`: text, or chat messages. A question follows it in the user's last message; a
        question that is a text is a statement, answered by yes or no. The input is computed once
        for all questions, or taken from the cache, and nothing is generated. A model with reasoning
        answers without it.
        """
        self._core.check_alive()
        decisions: list[Decision] = _decisions(
            self.client, input, questions, namespace, chat_template_kwargs
        ).run()
        return decisions

    async def adecide(
        self,
        input: str | Sequence[Mapping[str, Any]],  # noqa: A002
        questions: Question | str | Sequence[Question | str],
        *,
        namespace: str = "",
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Decision]:
        """`decide` for asyncio. Cancelling the task aborts it."""
        self._core.check_alive()
        decisions: list[Decision] = await _decisions(
            self.client, input, questions, namespace, chat_template_kwargs
        ).arun()
        return decisions

    def submit(
        self,
        prompts: Sequence[Prompt],
        params: Params = None,
        *,
        streams: bool = False,
        session: str = "",
        beams: BeamParams | None = None,
        max_in_flight: int | None = None,
    ) -> RequestHandle[Any]:
        """Returns the requests of a list of prompts as a handle, see `RequestHandle`.

        The requests are in order of their prompts, `num_samples` per prompt; `get` and `aget`
        return one entry per prompt, as `generate` does. With `streams` the handle yields Chunks.
        `session` names a cache session that claims their cached tokens until `close_session`.
        `beams`: each prompt is a beam search, whose answers come together as a tuple; not streamed.
        `max_in_flight`: most requests in the engine at a time; the others follow as these end.
        """
        if beams is not None:
            given = SamplingParams() if params is None else check_params(params)
            own, _ = read_options(given, None, {})
            requests = self._builder.beam_search(prompts, own, beams, None)
            requests = [
                replace(request, session=check_str("session", session)) for request in requests
            ]
            return self._client.submit(requests, max_in_flight=max_in_flight)
        requests, each = self._builder.build(prompts, params)
        if check_str("session", session):
            requests = [replace(request, session=session) for request in requests]
        finish = None if streams else lambda completions: gather(completions, each)
        return self._client.submit(requests, finish, streams=streams, max_in_flight=max_in_flight)

    def close_session(self, name: str) -> None:
        """Release the claims of the session of that name; an unknown name does nothing."""
        self._core.post(messages.CloseSession(check_str("name", name)))

    def tokenize(
        self,
        prompt: Prompt,
        *,
        keep_last: int | None = None,
        truncation_side: TruncationSide = "left",
    ) -> IntArray:
        """Returns [n] int32: the token ids of a prompt as `generate` reads it, or with `keep_last`
        the last ones, see `truncation_side`. Raises InvalidRequest.
        """
        return self._builder.reader.read(
            prompt, keep_last=keep_last, truncation_side=truncation_side
        )

    def check_length(self, text: str, *, num_before: int = 0, is_prompt: bool = True) -> None:
        """Raise PromptTooLong if a text after `num_before` tokens is certainly too long for a
        prompt. With `is_prompt` False raise InvalidRequest for more than four contexts. Takes
        little memory for a text of any length. `tokenize` checks texts itself.
        """
        self._builder.reader.check_length(text, num_before=num_before, is_prompt=is_prompt)

    def compile_grammar(self, structured: StructuredOutput) -> None:
        """Compile a grammar now, so that its first request does not wait.

        Takes about a millisecond; the first grammar of a Runtime takes seconds for a large
        vocabulary. The last 256 are kept. Raises InvalidRequest for a grammar that cannot be used.
        """
        self._builder.grammars.compile(structured)

    def has_grammar(self, structured: StructuredOutput) -> bool:
        """Whether a grammar is compiled already."""
        return self._builder.grammars.has(structured)

    # -- sessions -----------------------------------------------------------------------------

    def branch(
        self, prompt: Prompt, *, namespace: str = "", **chat: Unpack[ChatSettings]
    ) -> Branch:
        """Returns a position after `prompt`, to fork, extend, continue and roll back.

        Computes nothing yet. Release it, or use it as a context manager: until then its K/V is
        evicted after that of requests without a session. Raises InvalidRequest.
        """
        self._core.check_alive()
        ids = self._builder.reader.read(prompt, options=chat_options(chat))
        check_text("namespace", namespace)
        return Branch(self._client, ids, namespace)

    def chat(
        self,
        system: str | None = None,
        *,
        template: str | None = None,
        params: SamplingParams | None = None,
        **chat: Unpack[ChatSettings],
    ) -> ChatSession:
        """Returns a conversation whose turns compute only new tokens, see `ChatSession`.

        `chat`: tools and chat_template_kwargs, see `ChatSettings`. `template`: a Jinja template
        instead of the tokenizer's. `params`: for turns without params; their namespace is the
        chat's. Close it, or use it as a context manager. Raises InvalidRequest.
        """
        self._core.check_alive()
        if template is not None:
            check_str("template", template)
        options = replace(chat_options(chat), template=template)
        return ChatSession.start(self._client, self._identity, system, options, params)

    def load_chat(
        self, path: str | os.PathLike[str], *, params: SamplingParams | None = None
    ) -> ChatSession:
        """Returns a conversation that `ChatSession.save` wrote, with its exact token ids.

        Nothing is computed before its next turn. Raises InvalidRequest for a chat of another model.
        """
        self._core.check_alive()
        return ChatSession.load(self._client, self._identity, path, params)

    # -- the cache ----------------------------------------------------------------------------

    def lookup(
        self,
        prompt: Prompt,
        namespace: str = "",
        *,
        compare_namespaces: bool = True,
        **chat: Unpack[ChatSettings],
    ) -> Lookup:
        """Returns how much of `prompt` is cached now, and why not more. Changes nothing.

        With `compare_namespaces` False the answer does not depend on other namespaces.
        """
        self._core.check_alive()
        reader = self._builder.reader
        options = reader.at_its_start(prompt, chat_options(chat), is_noted=False)
        ids = reader.read(prompt, options=options)
        name = check_text("namespace", namespace)
        answer = self._client.lookup(ids, name, compare_namespaces=compare_namespaces)
        if answer.reason == "diverged" and reader.is_in_date(prompt, answer.position, options):
            return answer._replace(reason="date")
        return answer

    def status(self) -> EngineStatus:
        """Returns the engine's load and statistics. Never waits for the engine."""
        return self._core.status()

    def cache_stats(self) -> EngineStats:
        """Returns counters and gauges of cache and scheduler, and the seconds spent by part of a
        step, see `EngineStats`."""
        return self._core.call(messages.GetStats())

    @overload
    def cache_tree(
        self, max_nodes: int = ..., namespace: str | None = ..., *, flat: Literal[False] = False
    ) -> TreeDump: ...

    @overload
    def cache_tree(
        self, max_nodes: int = ..., namespace: str | None = ..., *, flat: Literal[True]
    ) -> FlatTreeDump: ...

    @overload
    def cache_tree(
        self, max_nodes: int = ..., namespace: str | None = ..., *, flat: bool
    ) -> TreeDump | FlatTreeDump: ...

    def cache_tree(
        self, max_nodes: int = 10_000, namespace: str | None = None, *, flat: bool = False
    ) -> TreeDump | FlatTreeDump:
        """Returns the prefix tree as nested dicts, see `PrefixCache.dump`; with cache="hash" the
        blocks. "sequences" has the page tables of running requests, with "request_id". `flat`:
        returns one list of nodes, see `flat_tree`; needed to print a deep tree or write it as
        JSON."""
        count = check_int("max_nodes", max_nodes, 0)
        dump = self._core.call(messages.DumpTree(count, namespace))
        return flat_tree(dump) if flat else dump

    def eviction_preview(self, n: int = 10) -> list[EvictionCandidate]:
        """Returns the next evictions and their reasons, see `PrefixCache.eviction_preview`."""
        return self._core.call(messages.PreviewEviction(check_int("n", n, 0)))

    def cache_snapshot(self, view: SnapshotView | None = None) -> dict[str, Any]:
        """Returns a bounded snapshot of the cache and its requests, cheap for a tree of any size.

        See `PrefixCache.snapshot` and `RequestSnapshots.take`. "counters" are those of all requests
        and pages; "at" is its time on the monotonic clock; "engine_s" the processor time that the
        engine's thread took for it.
        """
        return self._core.call(messages.TakeSnapshot(view or SnapshotView()))

    def flush_cache(self, namespace: str | None = None) -> None:
        """Drop the cached prefixes of one namespace, or of all; running requests continue."""
        if namespace is not None:
            check_text("namespace", namespace)
        self._core.call(messages.ResetCache(namespace))

    def stored_len(self, prompt: Prompt, *, namespace: str = "") -> int:
        """Returns how many leading tokens of a prompt are in the `kv_store`, cached or not; 0
        without one. Raises InvalidRequest as `lookup` does."""
        tokens = self._builder.reader.read(prompt)
        return self._core.call(store_messages.FindStored(tokens, check_text("namespace", namespace)))

    def save_cache(
        self,
        folder: str | os.PathLike[str],
        *,
        namespace: str | None = None,
        prompts: Sequence[Prompt] | None = None,
    ) -> int:
        """Write cached K/V into a folder, for `load_cache` or for another process with that folder
        as `kv_store`. K/V that the folder has already is not written again.

        prompts    write only the cached parts of these prompts, in `namespace` or ""; None: write
                   all cached prefixes
        namespace  write only this namespace; None: all

        Returns the tokens written. Other requests continue between runs of up to 512 tokens. Raises
        InvalidRequest if K/V cannot be stored, see `EngineConfig.kv_store`; OSError.
        """
        name = os.fspath(folder)
        if prompts is None:
            prefixes = self._core.call(messages.ListPrefixes(namespace))
        else:
            prefixes = [(namespace or "", self._builder.reader.read(prompt)) for prompt in prompts]
        prefixes.reverse()  # the last used is written last
        self._core.call(store_messages.OpenStore(name))
        num_written = 0
        for namespace, tokens in prefixes:
            self._core.call(store_messages.FindStored(tokens, namespace, name))
            while count := self._core.call(store_messages.SavePrefix(name, namespace, tokens)):
                num_written += count
        return num_written

    def load_cache(self, folder: str | os.PathLike[str], *, while_idle: bool = False) -> int:
        """Fill free pages with the K/V that a folder has for this model, the last used first, until
        no page is free. Other requests continue between runs of up to 512 tokens.

        while_idle  wait before each run until no request is open

        Returns the tokens loaded. Damaged files are left out. Raises what `save_cache` raises.
        """
        name, num_loaded = os.fspath(folder), 0
        count: int | None = 0
        loads: list[store_messages.LoadPrefix] = []
        self._core.call(store_messages.OpenStore(name))
        for namespace, tokens in self._core.call(store_messages.ListStored(name)):
            loads.append(store_messages.LoadPrefix(name, namespace, tokens))
            while count := self._load_run(loads[-1], while_idle=while_idle):
                num_loaded += count
            if count is None:
                break
        for load in reversed(loads):  # so that what was used last is evicted last
            self._load_run(load, while_idle=while_idle)
        return num_loaded

    def _load_run(self, load: store_messages.LoadPrefix, *, while_idle: bool) -> int | None:
        while while_idle and (status := self.status()).is_alive and not status.is_idle:
            time.sleep(_IDLE_POLL_S)
        return self._core.call(load)

    def extend(self, extension: EngineExtension) -> None:
        """Plug an extension into the engine, see `radixserve.engine.extension`. It lives until the
        engine ends."""
        self._core.call(AddExtension(extension))

    def add_draft_source(self, source: DraftSource) -> None:
        """Let `source` guess next tokens, before the sources that are there. A wrong guess changes
        no answer. See docs/drafts.md."""
        self._core.call(AddDraftSource(source))

    def check(self) -> None:
        """Audit the cache, the scheduler and the kv_store. Raises AssertionError, which names the
        first broken invariant."""
        self._core.call(messages.CheckCache())

    # -- hints --------------------------------------------------------------------------------

    def hint(
        self,
        verb: str,
        prompt: Prompt | None = None,
        *,
        session: str = "",
        seconds: float | None = None,
        max_tokens: int | None = None,
        namespace: str = "",
        **chat: Unpack[ChatSettings],
    ) -> HintAnswer:
        """Steer how long the K/V of a prompt, or of a session, stays in the cache.

        retain    evict it after everything else, for `seconds`
        pin       the same, and locked: it makes way only for a request that fits in no other way
        demote    evict it first, with all that continues it; ends pins and retains of it
        prefetch  compute it while no other request is open
        share     let other namespaces copy it instead of computing it, while it is cached

        `seconds` is cut to the config's `max_hint_seconds`; 0 ends the hints of the same verb.
        `max_tokens`: apply the hint to so many of the prompt's first tokens only. `session`: a name
        given to `submit`, for retain, pin and demote; demote closes the session. Whole pages count.
        With cache="hash" all but prefetch are rejected, with cache="off" all are.

        O(prompt), for retain and pin also O(retained nodes). Only prefetch computes tokens. Raises
        InvalidRequest.
        """
        made = self._hint(verb, prompt, session, seconds, max_tokens, namespace, chat)
        return self.apply_hints([made])[0]

    async def ahint(
        self,
        verb: str,
        prompt: Prompt | None = None,
        *,
        session: str = "",
        seconds: float | None = None,
        max_tokens: int | None = None,
        namespace: str = "",
        **chat: Unpack[ChatSettings],
    ) -> HintAnswer:
        """`hint` for asyncio."""
        made = self._hint(verb, prompt, session, seconds, max_tokens, namespace, chat)
        return (await self.aapply_hints([made]))[0]

    def apply_hints(self, hints: Sequence[Hint]) -> list[HintAnswer]:
        """Apply several hints between two steps of the engine. Returns one answer per hint, in
        order. Their token ids are those of `tokenize`; an owner's budget counts all hints that it
        was granted."""
        self._client.core.check_alive()
        return self._client.core.call(ApplyHints(tuple(map(self._checked, hints))))

    async def aapply_hints(self, hints: Sequence[Hint]) -> list[HintAnswer]:
        """`apply_hints` for asyncio."""
        self._client.core.check_alive()
        reply = self._client.core.ask(ApplyHints(tuple(map(self._checked, hints))))
        return await asyncio.wrap_future(reply)

    def held_by_hints(self, owner: str = "") -> HeldByHints:
        """Returns {"pins", "retains", "held_tokens"} of an owner now. "held_tokens" are the cached
        tokens that its pins and retains keep; a token that two of them keep counts once."""
        self._client.core.check_alive()
        return self._client.core.call(GetHeld(check_str("owner", owner)))

    # -- inside -------------------------------------------------------------------------------

    def _generate(
        self, prompts: Any, params: Params, request_id: str | None, chat: Mapping[str, Any]
    ) -> tuple[RequestHandle[Completion], bool]:
        """Returns the handle of the requests, not submitted yet, and whether several prompts were
        given."""
        self._client.core.check_alive()
        given, is_list = as_prompts(prompts)
        requests, each = self._client.builder.build(
            given, params, request_id, chat_options(chat), is_batch=is_list
        )

        def finish(completions: list[Completion]) -> Any:
            entries = gather(completions, each)
            return entries if is_list else entries[0]

        prompt_indices = [
            index for index, own_params in enumerate(each) for _ in range(own_params.num_samples)
        ]
        return self._client.submit(requests, finish, prompt_indices if is_list else None), is_list

    async def _compile_grammars(self, params: Params) -> None:
        """Compile the grammars of `params` that are new, outside the event loop."""
        several = params if isinstance(params, list | tuple) else [params]
        grammars = self._client.builder.grammars
        for own_params in several:
            structured_outputs = (
                own_params.structured_outputs if isinstance(own_params, SamplingParams) else None
            )
            if structured_outputs is not None and not grammars.has(structured_outputs):
                await asyncio.to_thread(grammars.compile, structured_outputs)

    def _single(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None,
        chat: Mapping[str, Any],
    ) -> Request:
        self._client.core.check_alive()
        return self._client.builder.single(prompt, params, request_id, chat_options(chat))

    def _beam_search(
        self,
        prompts: Any,
        params: SamplingParams | None = None,
        beams: BeamParams | None = None,
        request_id: str | None = None,
        **fields: Any,
    ) -> RequestHandle[tuple[Completion, ...]]:
        """Returns the handle of the searches, not submitted yet."""
        self._client.core.check_alive()
        params, beams = read_options(params, beams, fields)
        given, is_list = as_prompts(prompts)
        requests = self._client.builder.beam_search(
            given, params, beams, request_id, is_batch=is_list
        )

        def finish(answers: list[tuple[Completion, ...]]) -> Any:
            return list(map(list, answers)) if is_list else list(answers[0])

        prompt_indices = list(range(len(requests))) if is_list else None
        return self._client.submit(requests, finish, prompt_indices)

    def _stream(self, request: Request) -> Iterator[Chunk]:
        with self._client.stream(request) as chunks:
            yield from chunks

    async def _astream(self, request: Request) -> AsyncIterator[Chunk]:
        with self._client.stream(request) as chunks:
            async for chunk in chunks:
                yield chunk

    def _hint(
        self,
        verb: str,
        prompt: Prompt | None,
        session: str,
        seconds: float | None,
        max_tokens: int | None,
        namespace: str,
        chat: ChatSettings,
    ) -> Hint:
        self._client.core.check_alive()
        options = chat_options(chat)
        ids = None if prompt is None else self._client.reader.read(prompt, options=options)
        return Hint(verb, ids, session, namespace, seconds, max_tokens)

    def _checked(self, hint: Hint) -> Hint:
        """Returns a checked copy of a hint. Raises InvalidRequest."""
        if not isinstance(hint, Hint):
            raise InvalidRequest(f"a hint must be a Hint, got {shown(hint)}")
        check_hint(hint.verb, hint.seconds, hint.max_tokens)
        check_text("namespace", hint.namespace)
        check_str("owner", hint.owner)
        if hint.budget_tokens is not None:
            check_int("budget_tokens", hint.budget_tokens, 0)
        ids = hint.token_ids
        if (ids is None) == (not check_str("session", hint.session)):
            raise InvalidRequest("a hint takes a prompt or a session, one of the two")
        seconds = None if hint.seconds is None else float(hint.seconds)
        if ids is not None:
            ids = self._client.reader.read(ids)
        return replace(hint, token_ids=ids, seconds=seconds)

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """Facts of the model that must be equal for token ids to have the same meaning. Raises
        InvalidRequest without a tokenizer."""
        names = ("architecture", "num_layers", "hidden_size", "vocab_size", "num_parameters")
        sizes = {name: getattr(self.model, name) for name in names}
        return {**sizes, "tokenizer": self._client.tokenizer.fingerprint()}


def _decisions(*questions: Any) -> Any:
    """Returns a `DecisionBatch`. Recipes are above the API, so this one is loaded when it is asked
    for."""
    return import_module("radixserve.recipes.decisions").DecisionBatch(*questions)


def _close(core: EngineThread, runner: Any) -> None:
    if not core.is_forked:  # else all are the parent process's
        core.close()
        runner.close()


def _read_config(config: object, settings: Mapping[str, Any]) -> EngineConfig:
    if config is None:
        return EngineConfig(**settings)
    if not isinstance(config, EngineConfig):
        raise InvalidRequest(f"config must be an EngineConfig, got {shown(config)}")
    if settings:
        raise InvalidRequest(f"give config or {', '.join(settings)}, not both")
    return config


def _model_path(model: object) -> str:
    if not isinstance(model, str | os.PathLike) or not os.fspath(model):
        raise InvalidRequest(
            'model must be a checkpoint folder, a hub id, "demo", or "random:" and the name of a '
            f"known size, got {shown(model)}"
        )
    path = os.fspath(model)
    if not isinstance(path, str):
        raise InvalidRequest(f"model must be a path of text, not bytes, got {shown(path)}")
    if path == "demo":
        return str(DEMO)
    check_model_name(path)
    return path


def _progress_bar(
    handle: RequestHandle[Any],
    is_list: bool,
    progress: bool | None,
    stats: Callable[[], Mapping[str, Any]],
) -> BatchProgress | None:
    """Returns the bar of a batch; None for a single prompt, unless a bar is requested. Raises
    InvalidRequest."""
    if progress is not None and not isinstance(progress, bool):
        raise InvalidRequest(f"progress must be True, False or None, got {shown(progress)}")
    if not is_list and not progress:
        return None
    return BatchProgress(len(handle), stats, wanted=progress)
