"""`ClusterRuntime`: a Runtime whose engines are replicas in other processes."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from radixserve.api.runtime import Runtime
from radixserve.config import EngineConfig
from radixserve.engine.output_notifier import OutputNotifier
from radixserve.fleet.cluster_client import ClusterClient

START_TIMEOUT_S = 600.0


class ClusterRuntime(Runtime):
    """A Runtime over several replicas. A request runs on the replica where it costs least, so its
    largest size is that of a single replica.

    Dumps of the tree and previews of evictions show a single replica.
    """

    def __init__(
        self, client: ClusterClient, config: EngineConfig, close: Callable[[], object]
    ) -> None:
        """`config`: that of each replica. `close` is called when the Runtime is closed. Raises
        TimeoutError if no replica reports within START_TIMEOUT_S."""
        self.config = config
        self._use(client.facts(START_TIMEOUT_S), client, OutputNotifier())
        self._finalizer = weakref.finalize(self, _close, client, close)


def _close(client: ClusterClient, close: Callable[[], object]) -> None:
    if not client.is_forked:
        client.close()
        close()
