"""`Runtime`: a model and its engine, for callers of any thread and for asyncio."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

from radixserve.api.branch import Branch
from radixserve.api.chat import ChatSession
from radixserve.api.client import EngineClient
from radixserve.api.generation_mixin import GenerationMixin
from radixserve.api.hints_mixin import HintsMixin
from radixserve.api.loop_waker import LoopWakers
from radixserve.api.request_builder import RequestBuilder, sequence_limit
from radixserve.api.request_handle import RequestHandle
from radixserve.api.samples import gather
from radixserve.api.scores import ScoreQuery, ascore, score
from radixserve.api.settings import ChatSettings, Params, chat_options
from radixserve.api.tree_view import flat_tree
from radixserve.arrays import IntArray
from radixserve.cache import Lookup, SnapshotView
from radixserve.checks import check_int, check_str, check_text, shown
from radixserve.config import EngineConfig, EngineSettings
from radixserve.engine import messages
from radixserve.engine.core_client import EngineCoreClient, EngineFacts
from radixserve.engine.engine import Engine
from radixserve.engine.engine_thread import EngineThread
from radixserve.engine.trace_recorder import TraceRecorder
from radixserve.errors import InvalidRequest
from radixserve.models.names import check_model_name
from radixserve.output import EngineStatus, Score
from radixserve.request import SamplingParams
from radixserve.structured_output import StructuredOutput
from radixserve.text.prompts import Prompt, PromptReader
from radixserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from radixserve.kv_events.publisher import KVEventPublisher

DEMO = Path(__file__).parent.parent / "models" / "demo"


class Runtime(GenerationMixin, HintsMixin):
    """A model with its engine, running until `close`.

        with Runtime("demo") as rt:
            print(rt.generate("Once upon a time", SamplingParams(max_tokens=20)).text)

    `model` is a checkpoint folder, a hub id, "demo" for the small model that ships with the
    package, or "random:" and a name of models/sizes.py, such as "random:llama-3-8b": that shape
    with weights drawn from `seed`, whose prompts are token ids and whose answers have no text.
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
        """The object that computes the steps; a subclass may have another one."""
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
        trace, block = self.config.trace, self.config.trace_hash_block
        recorder = None if trace is None else TraceRecorder(trace, block)
        wakers = LoopWakers()
        engine = Engine(runner, self.config)
        publisher = None if self.config.kv_events is None else _publish_events(engine, self.config)
        core = EngineThread(engine, recorder, wakers)
        self._use(facts, core, wakers)
        self._finalizer: Any = weakref.finalize(self, _close, core, publisher, runner)

    def _use(self, facts: EngineFacts, core: EngineCoreClient, wakers: LoopWakers) -> None:
        """Have `core` do what callers ask for."""
        self.facts = facts
        self.tokenizer: Tokenizer | None = Tokenizer.load(facts.model_path)
        self.max_seq_len: int
        self.max_seq_len, limit = sequence_limit(self.config, facts.model, facts.capacity)
        reader = PromptReader(self.tokenizer, facts.model.vocab_size, self.max_seq_len, limit)
        self._builder = RequestBuilder(reader, frozenset(facts.model.eos_ids), self.config.seed)
        self._core = core
        self._client = EngineClient(core, self._builder, wakers)

    @property
    def model(self) -> Any:
        """Its architecture and sizes: a `ModelInfo`."""
        return self.facts.model

    @property
    def memory(self) -> Any:
        """What it takes and what is left for the cache: a `MemoryPlan`."""
        return self.facts.memory

    @property
    def attention_backend(self) -> str:
        return self.facts.attention_backend

    @property
    def resolved_config(self) -> Any:
        """The settings in use where the config says "auto"."""
        return self.facts.resolved_config

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
        """Stop the engine. Calls that still wait get EngineDead. Can be called again."""
        self._finalizer()

    # -- scoring ------------------------------------------------------------------------------

    def score(
        self, prompt: Prompt, candidates: Sequence[str | Sequence[int]], *, namespace: str = ""
    ) -> list[Score]:
        """How likely the model finds each of `candidates`, texts or token ids, after `prompt`.

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

    def submit(
        self,
        prompts: Sequence[Prompt],
        params: Params = None,
        *,
        streams: bool = False,
        session: str = "",
    ) -> RequestHandle[Any]:
        """A list of prompts as a handle: to be entered, asked, iterated over, aborted.

        The requests are in order of their prompts, `num_samples` of them a prompt; `get` and `aget`
        return one entry a prompt, as `generate` does. With `streams` the handle yields Chunks.
        `session` names a cache session that claims what they leave cached, until `close_session`.
        """
        requests, each = self._builder.build(prompts, params)
        if check_str("session", session):
            requests = [replace(request, session=session) for request in requests]
        finish = None if streams else lambda completions: gather(completions, each)
        return self._client.submit(requests, finish, streams=streams)

    def close_session(self, name: str) -> None:
        """Let go what the session of that name claims; an unknown name does nothing."""
        self._core.post(messages.CloseSession(check_str("name", name)))

    def tokenize(self, prompt: Prompt, *, keep_last: int | None = None) -> IntArray:
        """[n] int32: the token ids of a prompt, as `generate` reads it, or the last ones of them.

        Raises InvalidRequest.
        """
        return self._builder.reader.read(prompt, keep_last=keep_last)

    def compile_grammar(self, structured: StructuredOutput) -> None:
        """Compile a grammar now, so that its first request need not wait.

        About a millisecond; the first one of a Runtime takes seconds where the vocabulary is large.
        The last 256 are kept. Raises InvalidRequest where it cannot be used.
        """
        self._builder.grammars.compile(structured)

    def has_grammar(self, structured: StructuredOutput) -> bool:
        """Whether it is compiled already."""
        return self._builder.grammars.has(structured)

    # -- sessions -----------------------------------------------------------------------------

    def branch(
        self, prompt: Prompt, *, namespace: str = "", **chat: Unpack[ChatSettings]
    ) -> Branch:
        """A live position after `prompt`, to fork, extend, continue and roll back.

        Computes nothing yet. Release it, or use it as a context manager: until then its K/V is
        evicted after that of requests without a session.
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
        """A conversation that computes only what is new, the model's own words included.

        `chat`: tools and chat_template_kwargs, see `ChatSettings`. `template`: a Jinja template
        instead of the tokenizer's. `params` are those of turns that bring none, and their namespace
        is the chat's. Close it, or use it as a context manager.
        """
        self._core.check_alive()
        if template is not None:
            check_str("template", template)
        options = replace(chat_options(chat), template=template)
        return ChatSession.start(self._client, self._identity, system, options, params)

    def load_chat(
        self, path: str | os.PathLike[str], *, params: SamplingParams | None = None
    ) -> ChatSession:
        """A conversation that `ChatSession.save` wrote, with its exact token ids.

        Nothing is computed before its next turn. InvalidRequest for that of another model.
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
        """How much of `prompt` is cached now, and why not more. Changes nothing.

        With `compare_namespaces` False the answer tells nothing of other namespaces.
        """
        self._core.check_alive()
        ids = self._builder.reader.read(prompt, options=chat_options(chat))
        name = check_text("namespace", namespace)
        return self._client.lookup(ids, name, compare_namespaces=compare_namespaces)

    def status(self) -> EngineStatus:
        """What the engine is doing, as its thread last said. Never waits for it."""
        return self._core.status()

    def cache_stats(self) -> dict[str, Any]:
        """Counters and gauges of cache and scheduler, and the seconds spent by part of a step."""
        return self._core.call(messages.GetStats())

    def cache_tree(
        self, max_nodes: int = 10_000, namespace: str | None = None, *, flat: bool = False
    ) -> dict[str, Any]:
        """The prefix tree as nested dicts, see `PrefixCache.dump`; with cache="hash" its blocks;
        "sequences" are the page tables of running requests, with "request_id". `flat`: one list of
        nodes, see `flat_tree`; a deep tree can be printed and written as JSON only so."""
        count = check_int("max_nodes", max_nodes, 0)
        dump = self._core.call(messages.DumpTree(count, namespace))
        return flat_tree(dump) if flat else dump

    def eviction_preview(self, n: int = 10) -> list[dict[str, Any]]:
        """What would be evicted next and why, see `PrefixCache.eviction_preview`."""
        return self._core.call(messages.PreviewEviction(check_int("n", n, 0)))

    def cache_snapshot(self, view: SnapshotView | None = None) -> dict[str, Any]:
        """A bounded snapshot of a cache in use and its requests, cheap for a tree of any size: see
        `PrefixCache.snapshot` and `RequestSnapshots.take`; "counters": of all requests and pages;
        "at": when, on the monotonic clock; "engine_s": processor time of the engine's thread."""
        return self._core.call(messages.TakeSnapshot(view or SnapshotView()))

    def flush_cache(self, namespace: str | None = None) -> None:
        """Forget what is cached, in one namespace or in all; running requests are not disturbed."""
        if namespace is not None:
            check_text("namespace", namespace)
        self._core.call(messages.ResetCache(namespace))

    def check(self) -> None:
        """Audit the cache's pages; AssertionError names the first one that is wrong."""
        self._core.call(messages.CheckCache())

    # -- inside -------------------------------------------------------------------------------

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """Facts that have to be equal for token ids to mean the same; InvalidRequest without a
        tokenizer."""
        names = ("architecture", "num_layers", "hidden_size", "vocab_size", "num_parameters")
        sizes = {name: getattr(self.model, name) for name in names}
        return {**sizes, "tokenizer": self._client.tokenizer.fingerprint()}


def _publish_events(engine: Engine, config: EngineConfig) -> KVEventPublisher:
    try:
        from radixserve.kv_events.publisher import KVEventPublisher
    except ImportError as error:
        raise InvalidRequest(
            f'kv_events needs more packages ({error}): pip install "radixserve[kv-events]"'
        ) from None
    assert config.kv_events is not None
    publisher = KVEventPublisher(
        engine.open_events(),
        *config.kv_events.split(","),
        topic=config.kv_events_topic,
        block_size=config.kv_events_block_size,
    )
    engine.call_after_change(publisher.publish)
    return publisher


def _close(core: EngineThread, publisher: KVEventPublisher | None, runner: Any) -> None:
    if not core.is_forked:  # else all are the parent process's
        core.close()
        if publisher is not None:
            publisher.close()
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
