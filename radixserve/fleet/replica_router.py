"""`ReplicaRouter`: feeds the reports of replicas to a `TreeRouter`, which makes the choice."""

from __future__ import annotations

import numpy as np

from radixserve.arrays import IntArray
from radixserve.cache import EventSnapshot
from radixserve.fleet.replica import ReplicaReport
from radixserve.fleet.tree_router import TreeRouter
from radixserve.request import Request


class ReplicaRouter:
    """Chooses the replica of a request by what the replicas have reported. Owned by one thread.

    A replica is known by its name from `add` to `remove`. `tree_router.py` has the costs.
    """

    def __init__(self) -> None:
        self._router = TreeRouter()
        self._replicas: set[str] = set()
        self._num_output: dict[str, int] = {}  # output tokens so far, by request id

    def add(self, replica: str) -> None:
        self._router.add(replica)
        self._replicas.add(replica)

    def remove(self, replica: str) -> None:
        if replica in self._replicas:
            self._replicas.remove(replica)
            self._router.remove(replica)
            self._num_output = {
                request_id: num_output
                for request_id, num_output in self._num_output.items()
                if self._router.of_request(request_id)
            }

    def update(self, replica: str, report: ReplicaReport) -> None:
        """Take in a replica's outputs, and its cache events: what it has stored and evicted."""
        for output in report.outputs:
            if output.token_ids and output.request_id in self._num_output:
                self._router.start(output.request_id)
                self._num_output[output.request_id] += len(output.token_ids)
        for events in report.events:
            if isinstance(events, EventSnapshot):
                self._router.restart(replica, events)
            else:
                self._router.take(replica, events)
        for request_id in report.settled:
            self._router.end(request_id, self._num_output.pop(request_id, None))

    def needs_snapshot(self, replica: str) -> bool:
        """Whether cache events of the replica were missed, or none has arrived yet."""
        return self._router.index.needs_snapshot(replica)

    def choose(self, request: Request) -> str | None:
        """Choose the replica that runs the request; None without replicas.

        The request counts as the replica's load until a report says that it has settled.
        """
        params = request.params
        replica = self._router.choose(
            request.request_id,
            request.token_ids.astype(np.int32, copy=False).tobytes(),
            params.namespace,
            max_output=params.max_tokens,
            session=request.session,
        )
        if replica is not None:
            self._num_output[request.request_id] = 0
        return replica

    def best(self, token_ids: IntArray, namespace: str) -> str | None:
        """The replica that has cached most of the tokens; None without replicas."""
        return self._router.best(token_ids.astype(np.int32, copy=False).tobytes(), namespace)

    def of_session(self, session: str) -> str | None:
        """The replica on which a session ran last; None if it is unknown."""
        return self._router.of_session(session)

    def close_session(self, session: str) -> None:
        self._router.close_session(session)
