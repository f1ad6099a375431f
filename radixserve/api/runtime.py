"""`Runtime`: a model and its engine, for callers of any thread and for asyncio.

A call builds requests (`RequestBuilder`), submits them through an `EngineClient`, and waits on a
`RequestHandle`, which raises the errors of its requests. `EngineThread` runs the engine; when it
ends, open calls get EngineDead. The methods that generate, look at the cache and give hints are in
runtime_generation.py, runtime_cache.py, runtime_hints.py and runtime_weights.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack, get_args

from radixserve.adapters.extension import InstallAdapter, UnloadAdapter
from radixserve.adapters.loading import load
from radixserve.adapters.table import AdapterInfo, AdapterTable, check_name
from radixserve.api.arguments import check_path, check_type
from radixserve.api.branch import Branch
from radixserve.api.chat import ChatSession
from radixserve.api.client import EngineClient
from radixserve.api.engine_factory import make_engine
from radixserve.api.request_builder import RequestBuilder, sequence_limit
from radixserve.api.runtime_cache import RuntimeCache
from radixserve.api.runtime_generation import RuntimeGeneration
from radixserve.api.runtime_hints import RuntimeHints
from radixserve.api.runtime_weights import RuntimeWeights
from radixserve.api.scores import ScoreQuery, ascore, score
from radixserve.api.settings import ChatSettings, chat_options
from radixserve.arrays import IntArray
from radixserve.checks import check_choice, check_int, check_str, shown
from radixserve.completion import Score
from radixserve.config import EngineConfig, EngineSettings, parse_bytes
from radixserve.decisions import Decision, Question
from radixserve.drafts.extension import AddDraftSource
from radixserve.drafts.source import DraftSource
from radixserve.engine import messages
from radixserve.engine.core_client import EngineCoreClient, EngineFacts
from radixserve.engine.engine_thread import AddExtension, EngineThread
from radixserve.engine.extension import EngineExtension
from radixserve.engine.output_notifier import OutputNotifier
from radixserve.errors import InvalidRequest
from radixserve.images.processor import PictureProcessor
from radixserve.images.reader import PictureReader
from radixserve.images.table import PictureTable
from radixserve.models.names import check_model_name
from radixserve.request import MAX_TOKEN_IDS, SamplingParams, TruncationSide
from radixserve.sampling_defaults import NO_SAMPLING, SamplingDefault, in_force
from radixserve.structured_outputs import StructuredOutput, as_structured_output
from radixserve.text.prompts import Prompt, PromptReader
from radixserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from radixserve.models.base import ModelInfo
    from radixserve.runner.base import MemoryPlan, ResolvedConfig

DEMO = Path(__file__).parent.parent / "models" / "demo"


class Runtime(RuntimeGeneration, RuntimeCache, RuntimeHints, RuntimeWeights):
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
            if (finalizer := getattr(self, "_finalizer", None)) is not None:
                finalizer()
            runner.close()
            raise

    no_pictures = "replicas in other processes take no pictures"  # why; "": they are taken

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
        adapters = AdapterTable()
        table = None
        if runner.pictures is not None:
            table = PictureTable(parse_bytes(self.config.image_memory, "image_memory"))
        engine = make_engine(runner, self.config, adapters=adapters, pictures=table)
        core = EngineThread(engine, notifier)
        self._pack_adapter = runner.pack_adapter
        self._finalizer: Any = weakref.finalize(self, _close, core, runner)
        pictures = None
        if table is not None:
            pictures = PictureReader(
                *(PictureProcessor(runner.model_path), table),
                see_each_other=runner.pictures.see_each_other,
            )
        self.no_pictures = runner.no_pictures
        self._use(facts, core, notifier, adapters, pictures)
        for name, folder in (self.config.adapters or {}).items():
            self.load_adapter(name, folder)

    def _use(
        self,
        facts: EngineFacts,
        core: EngineCoreClient,
        notifier: OutputNotifier,
        adapters: AdapterTable | None = None,
        pictures: PictureReader | None = None,
    ) -> None:
        """Set up the tokenizer, the request builder and the client for an engine `core`.
        `adapters`: those that it computes with; None: it has none. `pictures`: reads those of
        prompts; None: it takes none."""
        self.pictures = pictures
        self._adapters = AdapterTable() if adapters is None else adapters
        self.tokenizer: Tokenizer | None = Tokenizer.load(
            facts.model_path, parses_special=self.config.parse_special_tokens
        )
        if self.tokenizer is not None:
            vocab_size = facts.model.vocab_size
            self.tokenizer.check_size(vocab_size)
            self.tokenizer.pictures = pictures
            end_ids = (token_id for token_id in self.tokenizer.end_ids if token_id < vocab_size)
            eos_ids = tuple(sorted({*facts.model.eos_ids, *end_ids}))
            facts = facts._replace(model=replace(facts.model, eos_ids=eos_ids))
        self.facts = facts
        self.max_seq_len: int
        self.max_seq_len, limit = sequence_limit(self.config, facts.model, facts.capacity)
        reader = PromptReader(
            *(self.tokenizer, facts.model.vocab_size, self.max_seq_len, limit), pictures=pictures
        )
        tracing: dict[str, Any] = {}
        if self.config.otlp_traces_endpoint is not None:
            from radixserve.spans.context import current_headers

            tracing["trace_headers"] = current_headers
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
            adapters=self._adapters,
            **tracing,
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

    # -- adapters -----------------------------------------------------------------------------

    _pack_adapter: Any = None  # the runner's

    @property
    def adapters(self) -> dict[str, AdapterInfo]:
        """The loaded adapters by name."""
        return {name: adapter.info for name, adapter in self._adapters.named.items()}

    def load_adapter(
        self, name: str, path: str | os.PathLike[str], *, load_inplace: bool = False
    ) -> AdapterInfo:
        """Load a LoRA adapter from a folder as PEFT saves it; from then on requests may name it, in
        `SamplingParams.adapter`. Others run meanwhile. load_inplace: also where an adapter has that
        name. New requests then get the new one, open ones keep the old one to their end.

        Raises InvalidRequest for a name that is loaded and a folder that is no adapter,
        ModelNotSupported naming what of it is not computed. See docs/adapters.md.
        """
        folder = check_path("path", path)
        if self._pack_adapter is None:
            raise InvalidRequest("adapters are not built for replicas in other processes")
        if check_name(name) in self._adapters.named and not load_inplace:
            raise InvalidRequest(f"the adapter {shown(name)} is loaded: unload it first")
        loaded = load(name, folder, self._pack_adapter)
        if loaded.info.invocation and self.model.vocab_size > MAX_TOKEN_IDS:
            raise InvalidRequest(f"activated adapters need at most {MAX_TOKEN_IDS} token ids")
        self._core.call(InstallAdapter(*loaded, replaces=load_inplace))
        return loaded.info

    def unload_adapter(self, name: str) -> None:
        """Take an adapter from new requests at once, wait until the open ones have ended, and drop
        its K/V. Raises InvalidRequest for a name that is not loaded."""
        self._core.call(UnloadAdapter(check_name(name)))

    # -- scoring ------------------------------------------------------------------------------

    def score(
        self,
        prompt: Prompt,
        candidates: Sequence[str | Sequence[int]],
        *,
        adapter: str = "",
        namespace: str = "",
    ) -> list[Score]:
        """Returns how likely the model, with `adapter`, finds each of `candidates`, texts or token
        ids, after `prompt`.

        The prompt is computed once, or taken from the cache; the candidates then run side by side.
        Text is tokenised on its own, without the special tokens that begin a prompt. Log-
        probabilities are of the model's own distribution, natural logarithms.
        """
        self._core.check_alive()
        ids, space = self._builder.reader.read(prompt), self._client.namespace(namespace, adapter)
        return score(self._client, [ScoreQuery(ids, candidates, space)])[0]

    async def ascore(
        self,
        prompt: Prompt,
        candidates: Sequence[str | Sequence[int]],
        *,
        adapter: str = "",
        namespace: str = "",
    ) -> list[Score]:
        """`score` for asyncio. Cancelling the task aborts it."""
        ids, space = self._builder.reader.read(prompt), self._client.namespace(namespace, adapter)
        return (await ascore(self._client, [ScoreQuery(ids, candidates, space)]))[0]

    def decide(
        self,
        input: str | Sequence[Mapping[str, Any]],  # noqa: A002
        questions: Question | str | Sequence[Question | str],
        *,
        adapter: str = "",
        namespace: str = "",
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Decision]:
        """Returns for each of 1 to 400 questions which of its given answers the model finds
        likeliest, with `adapter`.

        `input`: text, or chat messages. A question follows it in the user's last message; a
        question that is a text is a statement, answered by yes or no. The input is computed once
        for all questions, or taken from the cache, and nothing is generated. A model with reasoning
        answers without it.
        """
        self._core.check_alive()
        space = self._client.namespace(namespace, adapter)
        decisions: list[Decision] = _decisions(
            self.client, input, questions, space, chat_template_kwargs
        ).run()
        return decisions

    async def adecide(
        self,
        input: str | Sequence[Mapping[str, Any]],  # noqa: A002
        questions: Question | str | Sequence[Question | str],
        *,
        adapter: str = "",
        namespace: str = "",
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Decision]:
        """`decide` for asyncio. Cancelling the task aborts it."""
        self._core.check_alive()
        space = self._client.namespace(namespace, adapter)
        decisions: list[Decision] = await _decisions(
            self.client, input, questions, space, chat_template_kwargs
        ).arun()
        return decisions

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
        if keep_last is not None:
            check_int("keep_last", keep_last, 1)
        check_choice("truncation_side", truncation_side, get_args(TruncationSide))
        return self._builder.reader.read(
            prompt, keep_last=keep_last, truncation_side=truncation_side
        )

    def check_length(self, text: str, *, num_before: int = 0, is_prompt: bool = True) -> None:
        """Raise PromptTooLong if a text after `num_before` tokens is certainly too long for a
        prompt. With `is_prompt` False raise InvalidRequest for more than four contexts. Takes
        little memory for a text of any length. `tokenize` checks texts itself.
        """
        check_str("text", text)
        check_int("num_before", num_before, 0)
        self._builder.reader.check_length(text, num_before=num_before, is_prompt=is_prompt)

    def compile_grammar(self, structured: StructuredOutput | Mapping[str, Any]) -> None:
        """Compile a grammar, or its fields, now, so that its first request does not wait.

        Takes about a millisecond; the first grammar of a Runtime takes seconds for a large
        vocabulary. The last 256 are kept. Raises InvalidRequest for a grammar that cannot be used.
        """
        self._builder.grammars.compile(as_structured_output(structured))

    def has_grammar(self, structured: StructuredOutput | Mapping[str, Any]) -> bool:
        """Whether a grammar is compiled already."""
        return self._builder.grammars.has(as_structured_output(structured))

    # -- sessions -----------------------------------------------------------------------------

    def branch(
        self,
        prompt: Prompt,
        *,
        adapter: str = "",
        namespace: str = "",
        **chat: Unpack[ChatSettings],
    ) -> Branch:
        """Returns a position after `prompt`, to fork, extend, continue and roll back, all with
        `adapter`.

        Computes nothing yet. Release it, or use it as a context manager: until then its K/V is
        evicted after that of requests without a session. Raises InvalidRequest.
        """
        self._core.check_alive()
        ids = self._builder.reader.read(prompt, options=chat_options(chat))
        return Branch(self._client, ids, self._client.namespace(namespace, adapter))

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
        name = check_path("path", path)
        return ChatSession.load(self._client, self._identity, name, params)

    def extend(self, extension: EngineExtension) -> None:
        """Plug an extension into the engine, see `radixserve.engine.extension`. It lives until the
        engine ends."""
        self._core.call(AddExtension(check_type("extension", extension, EngineExtension)))

    def add_draft_source(self, source: DraftSource) -> None:
        """Let `source` guess next tokens, before the sources that are there. A wrong guess changes
        no answer. See docs/drafts.md."""
        self._core.call(AddDraftSource(source))

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
    given = check_type("config", config, EngineConfig)
    if settings:
        raise InvalidRequest(f"give config or {', '.join(settings)}, not both")
    return given


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
