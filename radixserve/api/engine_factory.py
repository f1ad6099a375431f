"""`make_engine`: an engine with the parts and extensions that the settings name."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from radixserve.adapters.extension import AdapterExtension
from radixserve.adapters.loading import read_again
from radixserve.adapters.table import AdapterTable
from radixserve.admission_policies import make_admission
from radixserve.advice.extension import AdviceExtension
from radixserve.advice.worth import WorthExtension
from radixserve.beams.searches import BeamSearches
from radixserve.cache import HashBlockCache, PrefixCache, RadixCache
from radixserve.cache_layers import RecurrentLayers, WindowedLayers
from radixserve.config import EngineConfig, parse_bytes
from radixserve.drafts.extension import DraftExtension, most_drafts
from radixserve.engine.engine import Engine
from radixserve.engine.trace_recorder import TraceRecorder
from radixserve.epochs.extension import WeightEpochs
from radixserve.errors import InvalidRequest
from radixserve.hints.extension import HintExtension
from radixserve.hints.hint import HintLimits
from radixserve.images.extension import PictureExtension
from radixserve.images.table import PictureTable
from radixserve.scheduler import Scheduler
from radixserve.scores import KeptScores
from radixserve.store.connector import KVConnector, open_connector
from radixserve.store.saved_caches import SavedCaches
from radixserve.tenants import TenantShares

if TYPE_CHECKING:
    from radixserve.runner.base import ModelRunner

_LEAST_FOLLOWED = 20_000_000  # parameters of a model whose traffic is followed by default


def make_engine(
    runner: ModelRunner,
    config: EngineConfig,
    cache: PrefixCache | None = None,
    *,
    adapters: AdapterTable | None = None,
    pictures: PictureTable | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Engine:
    """`cache`: used instead of the cache that `config` names; it manages the runner's pages.
    `adapters`, `pictures`: those that its requests may have. `clock`: of the scheduler, in seconds.
    Raises InvalidRequest for an extension that cannot be opened."""
    if cache is None:
        cache = _make_cache(runner, config)
    shares = TenantShares(config.tenant_weights)
    scheduler = Scheduler(
        cache,
        policy=config.schedule_policy,
        chunked_prefill_size=config.chunked_prefill_size,
        max_running_requests=config.max_running_requests,
        max_overtake=config.max_overtake,
        max_wait_s=config.max_wait_s,
        admission=make_admission(config.admission),
        shares=shares,
        clock=clock,
    )
    scheduler.plug_in(BeamSearches())  # gives up pages before hints do
    scheduler.plug_in(KeptScores())
    engine = Engine(runner, cache, scheduler, overlap=config.overlap)
    try:
        _extend(engine, config, adapters, pictures)
        if adapters is not None:
            memory = parse_bytes(config.adapter_memory, "adapter_memory")
            read = partial(read_again, runner)
            engine.extend(AdapterExtension(engine, adapters, read, memory))
        if pictures is not None:
            itemsize = runner.info.dtype.itemsize
            engine.extend(PictureExtension(engine, runner.pictures, itemsize, shares.times))
    except BaseException:
        engine.close()
        raise
    return engine


def _make_cache(runner: ModelRunner, config: EngineConfig) -> PrefixCache:
    """Returns the cache that `config.cache` names: a `RadixCache` for "radix" and "off", which
    reuses nothing, or a `HashBlockCache` for "hash"."""
    num_pages, num_states, windows = runner.num_pages, runner.num_states, runner.windows
    if config.cache == "hash":
        if num_states:
            raise InvalidRequest(
                'cache="hash" keeps no states of recurrent layers; this model needs cache="radix" '
                'or "off"'
            )
        return HashBlockCache(
            num_pages,
            config.page_size,
            hash_algorithm=config.hash_algorithm,
            freeze_garbage=True,
        )
    layers: RecurrentLayers | WindowedLayers | None = None
    if num_states:
        layers = RecurrentLayers(num_states, config.checkpoint_interval, runner.info.state_tokens)
    elif windows is not None:
        layers = WindowedLayers(num_pages, config.page_size, windows)
    return RadixCache(
        num_pages,
        config.page_size,
        config.eviction,
        reuse=config.cache != "off",
        layers=layers,
        max_lease_share=config.max_lease_share,
        freeze_garbage=True,
    )


def _extend(
    engine: Engine,
    config: EngineConfig,
    adapters: AdapterTable | None,
    pictures: PictureTable | None,
) -> None:
    limits = HintLimits(config.hint_seconds, config.max_hint_seconds, config.max_hint_share)
    engine.extend(HintExtension(engine, limits))
    if _is_followed(config, engine.runner):  # before extensions that hold requests back
        each, has_blocks = engine.runner.info.kv_bytes_per_token, config.cache == "hash"
        engine.extend(AdviceExtension(engine.cache, each, has_blocks=has_blocks))
        engine.extend(WorthExtension(engine.prefill_cost, engine.stats))
    main: KVConnector | None = None
    if config.otlp_traces_endpoint is not None:
        _send_spans(
            engine,
            config.otlp_traces_endpoint,
            lambda request_id: None if main is None else main.tier_of(request_id),
        )
    if config.trace is not None:
        engine.extend(TraceRecorder(config.trace, config.trace_hash_block))
    if config.kv_store is not None or config.host_cache_memory is not None:
        as_stored = None if pictures is None else pictures.as_stored
        main = open_connector(engine, config, as_stored=as_stored)
        engine.extend(main)
    engine.extend(SavedCaches(engine, config, main))
    most = most_drafts(config.max_draft_tokens, engine.runner)
    engine.extend(DraftExtension(engine, most))
    engine.extend(WeightEpochs(engine))
    if config.kv_events is not None:
        _publish_events(engine, config, config.kv_events, adapters)


def _is_followed(config: EngineConfig, runner: ModelRunner) -> bool:
    if config.cache == "off":
        return False
    if config.advice is None:
        return runner.info.num_parameters >= _LEAST_FOLLOWED
    return config.advice


def _send_spans(engine: Engine, endpoint: str, tier_of: Callable[[str], str | None]) -> None:
    try:
        from radixserve.spans.extension import SpanExtension
    except ImportError as error:
        raise InvalidRequest(
            f'otlp_traces_endpoint needs more packages ({error}): pip install "radixserve[otel]"'
        ) from None
    path = engine.runner.model_path
    model = engine.runner.info.architecture if path is None else path.name
    engine.extend(SpanExtension(endpoint, model, tier_of))


def _publish_events(
    engine: Engine, config: EngineConfig, endpoints: str, adapters: AdapterTable | None
) -> None:
    try:
        from radixserve.kv_events.publisher import KVEventPublisher
    except ImportError as error:
        raise InvalidRequest(
            f'kv_events needs more packages ({error}): pip install "radixserve[kv-events]"'
        ) from None
    publisher = KVEventPublisher(
        engine.open_events(),
        *endpoints.split(","),
        topic=config.kv_events_topic,
        block_size=config.kv_events_block_size,
        adapters=adapters,
    )
    engine.extend(publisher)
