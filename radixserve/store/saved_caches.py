"""`SavedCaches`: what `Runtime.save_cache` and `load_cache` ask of an engine."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from radixserve.config import EngineConfig
from radixserve.engine.extension import EngineExtension
from radixserve.engine.messages import EngineMessage
from radixserve.store import messages
from radixserve.store.connector import KVConnector, open_connector
from radixserve.store.daemon_executor import DaemonExecutor, within
from radixserve.store.limits import LIMITS

if TYPE_CHECKING:
    from radixserve.engine.engine import Engine

_UNBOUNDED = 1 << 62  # bytes: no file is removed from a folder of `save_cache`


class SavedCaches(EngineExtension):
    """Opens folders, which need not be the engine's kv_store, and answers messages about them. A
    thread opens and lists them."""

    name = "saved_caches"

    def __init__(self, engine: Engine, config: EngineConfig, main: KVConnector | None) -> None:
        """`main`: the connector to the engine's own kv_store."""
        self._engine = engine
        self._config = config
        self._open: dict[str, KVConnector] = {}
        if main is not None and config.kv_store is not None:
            self._open[config.kv_store] = main
        self._thread: DaemonExecutor | None = None

    def answer(self, message: EngineMessage[Any], answer: Any) -> Any:
        match message:
            case messages.OpenStore(folder):
                return None if folder in self._open else self._submit(self._open_folder, folder)
            case messages.ListStored(folder):
                prefixes = self._connector(folder).prefixes
                return self._submit(lambda: list(prefixes.paths()))
            case messages.FindStored(token_ids, namespace, folder) if folder:
                prefixes = self._connector(folder).prefixes
                return self._submit(lambda: prefixes.match(token_ids, namespace).length)
            case messages.FindStored():
                return 0 if answer is None else answer  # without a kv_store
            case messages.SavePrefix(folder, namespace, tokens):
                saved = self._connector(folder).saver.save_run(tokens, namespace)
                return 0 if saved is None else within(LIMITS.bulk_s, saved)
            case messages.LoadPrefix(folder, namespace, tokens):
                loaded: Future[int | None] = Future()
                self._connector(folder).loader.load_free(tokens, namespace, loaded.set_result)
                return loaded
        return answer

    def _submit(self, function: Any, *args: Any) -> Future[Any]:
        if self._thread is None:
            self._thread = DaemonExecutor("radixserve-store-folders")
        return within(LIMITS.bulk_s, self._thread.submit(function, *args))

    def _open_folder(self, folder: str) -> None:
        """Open a folder; called in its thread."""
        config = replace(
            self._config,
            kv_store=folder,
            kv_store_size=_UNBOUNDED,
            host_cache_memory=None,
        )
        self._open[folder] = open_connector(self._engine, config, is_main=False)

    def _connector(self, folder: str) -> KVConnector:
        """The connector to a folder that was opened, from now on an extension of the engine."""
        connector = self._open[folder]
        if connector.is_closed:
            raise OSError(f"the store {folder} has failed and was ended, see the log")
        if connector not in self._engine.extensions.live:
            self._engine.extend(connector)
        return connector

    def on_epoch(self, weights: str) -> None:  # noqa: ARG002
        """Connectors that are not extensions yet are opened anew."""
        live = self._engine.extensions.live
        self._open = {name: each for name, each in self._open.items() if each in live}

    def close(self, timeout_s: float) -> None:  # noqa: ARG002
        if self._thread is not None:
            self._thread.shutdown(0.0)
