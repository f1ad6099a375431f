"""`extend`: the extensions that an engine's settings name."""

from __future__ import annotations

from radixserve.drafts.extension import DraftExtension, num_draft_tokens
from radixserve.engine.engine import Engine
from radixserve.engine.trace_recorder import TraceRecorder
from radixserve.errors import InvalidRequest
from radixserve.store.connector import open_connector
from radixserve.store.saved_caches import SavedCaches


def extend(engine: Engine) -> None:
    """Plug in the K/V store, the KV events, the trace and the drafts that `engine.config` names.
    Raises InvalidRequest for one that cannot be opened."""
    config, main = engine.config, None
    try:
        if config.trace is not None:
            engine.extend(TraceRecorder(config.trace, config.trace_hash_block))
        if config.kv_store is not None or config.host_cache_memory is not None:
            main = open_connector(engine, config)
            engine.extend(main)
        engine.extend(SavedCaches(engine, main))
        engine.extend(DraftExtension(engine, num_draft_tokens(engine)))
        if config.kv_events is not None:
            _publish_events(engine, config.kv_events)
    except BaseException:
        engine.close()
        raise


def _publish_events(engine: Engine, endpoints: str) -> None:
    try:
        from radixserve.kv_events.publisher import KVEventPublisher
    except ImportError as error:
        raise InvalidRequest(
            f'kv_events needs more packages ({error}): pip install "radixserve[kv-events]"'
        ) from None
    config = engine.config
    publisher = KVEventPublisher(
        engine.open_events(),
        *endpoints.split(","),
        topic=config.kv_events_topic,
        block_size=config.kv_events_block_size,
    )
    engine.extend(publisher)
