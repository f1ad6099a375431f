"""`ReplicaRequestRouter`: delivers Ray Serve's calls to the replica that they name.

It does not choose: `tree_router.py` does.
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from radixserve.fleet import frontends


class ReplicaRequestRouter(RequestRouter):
    """Sends each call to the replica that it names, and notifies the frontends when the replicas
    change."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        names = [replica.replica_id.unique_id for replica in replicas]
        frontends.note(self._deployment_id.app_name, names)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The named replica. If it does not exist any more, all of them: any one refuses the
        call."""
        name = pending_request.args[0] if pending_request is not None else ""
        named = [replica for replica in candidate_replicas if replica.replica_id.unique_id == name]
        return [named or candidate_replicas]
